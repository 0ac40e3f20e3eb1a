"""``fuse`` and ``unfuse``: the search through a model's modules, from the inside out.

    >>> model, report = fuse(model)
    >>> print(report)
    >>> unfuse(model)

A *host* is a module whose own code calls products.  Its ``forward`` is traced; where that is not possible the
methods that it calls are, such as ``_ff_block`` of ``nn.TransformerEncoderLayer``.  A submodule that returns
what a product gives, and whose result the host goes on computing with element by element (``x + self.mlp(x)``), is
traced with its host.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx, nn

from .functions import NotTraceableError
from .graph_search import Mode, Traced, trace_method
from .inspection import helpers_of_forward
from .patterns import chosen_patterns
from .products import features, has_hooks, is_called_plainly, obstacle, product_kind
from .regions import Region, find_regions, grow, is_product
from .report import Fused, Left, Report
from .rewrite import restore, rewrite
from .steps import Given, references


class Fusion(NamedTuple):
    """A converted model, and what was done."""

    model: nn.Module
    report: Report


def fuse(model: nn.Module, *, inplace: bool = False, patterns: Iterable[str] | None = None) -> Fusion:
    """Fuses what follows the linear layers of a model to their products.

        >>> fused, report = gemm_ops.fuse(model)                            # a copy
        >>> gemm_ops.fuse(model, inplace=True, patterns=["activation", "gate"])

    Parameters, state dict, submodules and classes stay what they are; see :mod:`gemm_ops.conversion` for what changes
    and when a fused call computes unfused.  A model that is fused already is fused anew.

    Args:
        model: any module.
        inplace: whether to change the model itself, not a deep copy.
        patterns: which to fuse, of "activation", "residual", "scale", "gate", "elementwise"; None: all.

    Returns:
        The model and the report, which prints as a table.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse takes an nn.Module, got {type(model).__name__}")
    chosen = chosen_patterns(patterns)
    model = model if inplace else _copied(model)
    unfuse(model)
    return Fusion(model, _Conversion(model, chosen).run())


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # copying runs anybody's code
        reason = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the model cannot be copied ({reason}); inplace=True fuses the model itself") from error


def unfuse(model: nn.Module) -> nn.Module:
    """Takes off, in place, what :func:`fuse` did: every method is its class's again.  Returns the model.

    >>> gemm_ops.unfuse(model)
    """
    for module in model.modules():
        restore(module)
    return model


@dataclass
class _Found:
    """What is known of a method that was traced."""

    traced: Traced
    regions: dict[Mode, list[Region]]
    reasons: dict[str, str]
    partly: set[str] = field(default_factory=set)  # the products with a reason for one call and a region of another
    covers: list[nn.Module] = field(default_factory=list)  # the hosts that are traced with it

    @property
    def size(self) -> int:
        """How many steps are fused."""
        return sum(len(region.steps) for region in next(iter(self.regions.values())))


class _Conversion:
    def __init__(self, model: nn.Module, chosen: frozenset[str]) -> None:
        self.chosen = chosen
        self.modules = list(model.named_modules())
        self.found: dict[tuple[nn.Module, str], _Found] = {}  # by host and method, the inner ones first
        self.untraced: dict[nn.Module, str] = {}

    def run(self) -> Report:
        for _, host in reversed(self.modules):
            if product_kind(host) is None and not isinstance(host, nn.ModuleList | nn.ModuleDict):
                self._search(host)
        report = self._report()
        for (host, method), found in self.found.items():
            if any(found.regions.values()):
                rewrite(host, method, found.traced, found.regions)
        return report

    def _search(self, host: nn.Module) -> None:
        """Finds the matches in a host's code."""
        inner = list(_inner(host))
        products = [path for path, module in inner if product_kind(module) is not None]
        opened = {path: self.found[module, "forward"] for path, module in inner if self._is_open(module)}
        if not products and not opened:
            return
        try:
            found = self._look(host, "forward", ())
            scales, wider = self._scales(host, found, opened)
            inlined = self._worth_inlining(host, wider, opened)
            if inlined or scales:
                found = self._inline(host, found, {path: opened[path] for path in inlined}, scales)
            self.found[host, "forward"] = found
            return
        except NotTraceableError as error:
            self.untraced[host] = f"{type(host).__name__}.forward is not traced: {error}"
        for method in helpers_of_forward(host, {path.partition(".")[0] for path in products}):
            try:
                self.found[host, method] = self._look(host, method, ())
            except NotTraceableError:
                continue

    def _look(self, host: nn.Module, method: str, inlined: Sequence[str]) -> _Found:
        traced = trace_method(host, method, inlined)
        regions: dict[Mode, list[Region]] = {}
        reasons: dict[str, str] = {}
        partly: set[str] = set()
        for mode, graph in traced.graphs.items():
            regions[mode], others = find_regions(graph, host, self.chosen)
            reasons |= others
            partly |= {str(region.product.target) for region in regions[mode]} & set(others)
        return _Found(traced, regions, reasons, partly)

    def _is_open(self, module: nn.Module) -> bool:
        """Whether a submodule returns what a product gives, and can be traced with its host."""
        found = self.found.get((module, "forward"))
        if found is None or has_hooks(module) or not is_called_plainly(module):
            return False
        if any(parameter.role in ("opaque", "rest") for parameter in found.traced.parameters):
            return False
        return all(_ends_open(graph, module, found.regions[mode]) for mode, graph in found.traced.graphs.items())

    def _scales(self, host: nn.Module, found: _Found, opened: dict[str, _Found]) -> tuple[list[str], _Found]:
        """Modules with parameters that follow a product or what returns one, as layer scales do; the host with them."""
        scales = []
        for node in next(iter(found.traced.graphs.values())).nodes:
            before = node.args[0] if node.op == "call_module" and node.args else None
            if not isinstance(before, fx.Node) or not (before.target in opened or is_product(before, host)):
                continue
            path, module = str(node.target), host.get_submodule(str(node.target))
            own = product_kind(module) is None and not type(module).__module__.startswith("torch.")  # PyTorch has none
            if own and module._parameters and not module._modules and not has_hooks(module) and path not in scales:
                scales.append(path)
        if scales:
            with contextlib.suppress(NotTraceableError):
                return scales, self._look(host, "forward", scales)
        return [], found

    def _worth_inlining(self, host: nn.Module, found: _Found, opened: dict[str, _Found]) -> list[str]:
        """The submodules whose result the host goes on computing with."""
        worth = []
        graph = next(iter(found.traced.graphs.values()))
        for node in graph.nodes:
            if node.op == "call_module" and node.target in opened and node.target not in worth:
                region, _ = grow(graph, node, host, self.chosen, {})
                if region is not None:
                    worth.append(str(node.target))
        return worth

    def _inline(self, host: nn.Module, found: _Found, opened: dict[str, _Found], scales: list[str]) -> _Found:
        """The host with submodules traced too, where that fuses more."""
        paths = [*opened, *scales]
        paths += [f"{path}.{inner}" for path, child in opened.items() for inner in child.traced.inlined]
        try:
            larger = self._look(host, "forward", paths)
        except NotTraceableError:
            return found
        if larger.size <= found.size + sum(child.size for child in opened.values()):
            return found
        larger.covers = [host.get_submodule(path) for path in paths]
        return larger

    def _report(self) -> Report:
        names = {module: name for name, module in self.modules}
        covered = {module for found in self.found.values() for module in found.covers}
        fused: list[Fused] = []
        left: list[Left] = []
        seen: set[nn.Module] = set()
        # the order of the model, not of the search
        for (host, method), found in reversed(self.found.items()):
            if method == "forward" and host in covered:
                continue
            where = f"{names[host]}.{method}".lstrip(".")
            targets: dict[tuple[str, tuple[str, ...]], Region] = {}
            calls: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
            for regions in found.regions.values():
                targets |= {_key(region): region for region in regions}
                calls |= collections.Counter(map(_key, regions))  # the most of any mode
            for (target, labels), region in targets.items():
                product = host.get_submodule(target)
                path = names.get(product, _join(names[host], target))  # one for a layer that several hosts share
                note, epilogue = _note(found, region), ", ".join(_call_text(region))
                number = calls[target, labels]
                fused.append(Fused(path, region.pattern, epilogue, *features(product), where, note, number))
                seen.add(product)
            for target, reason in found.reasons.items():
                product = host.get_submodule(target)
                if any(target == path for path, _ in targets):
                    if target not in found.partly:
                        continue
                    reason = f"in another call {reason}"
                path = names.get(product, _join(names[host], target))
                left.append(Left(path, _kind(product), *features(product), reason))
                seen.add(product)
        for name, module in self.modules:
            if product_kind(module) is not None and module not in seen:
                left.append(Left(name, _kind(module), *features(module), self._why_unseen(name, module)))
        order = {name: position for position, (name, _) in enumerate(self.modules)}
        last = len(order)
        return Report(
            tuple(sorted(fused, key=lambda each: order.get(each.path, last))),
            tuple(sorted(left, key=lambda each: order.get(each.path, last))),
        )

    def _why_unseen(self, name: str, product: nn.Module) -> str:
        """Why no graph has a product: the nearest module around it whose code is not traced."""
        if reason := obstacle(product):
            return reason
        by_name = dict(self.modules)
        while name:
            name = name.rpartition(".")[0]
            if (around := by_name.get(name)) in self.untraced:
                return self.untraced[around]
        return "no code that was traced calls it"


def _inner(host: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The submodules that a host calls by itself: its own, and those in its lists and dictionaries."""
    for name, module in host.named_children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{path}", inner) for path, inner in _inner(module))
        else:
            yield name, module


def _ends_open(graph: fx.Graph, host: nn.Module, regions: Sequence[Region]) -> bool:
    """Whether a graph returns what a product or a fused call gives, dropout aside."""
    node = next(iter(reversed(graph.nodes))).args[0]
    tips = {region.nodes[-1] for region in regions}
    while isinstance(node, fx.Node):
        if node in tips or is_product(node, host):
            return True
        module = host.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(module, nn.Dropout | nn.Identity) and getattr(node.target, "__name__", "") != "dropout":
            return False
        node = node.args[0] if node.args else None
    return False


def _note(found: _Found, region: Region) -> str:
    """In which modes, and in which calls, a region is fused; "" for all."""
    call = (region.product.target, region.labels)
    modes = [
        mode for mode, own in found.regions.items() if call in [(each.product.target, each.labels) for each in own]
    ]
    training, grad = {mode[0] for mode in modes}, {mode[1] for mode in modes}
    words = {
        "in evaluation mode": region.in_evaluation or training == {False},
        "in training mode": training == {True},
        "with gradients": grad == {True},
        "without gradients": grad == {False},
    }
    # such as the states of an encoder, which a decoder's layers may be given or not
    absent = [each.name for each in found.traced.parameters if each.role == "fixed" and each.default is None]
    return ", ".join([*(word for word, holds in words.items() if holds), *(f"without {name}" for name in absent)])


def _key(region: Region) -> tuple[str, tuple[str, ...]]:
    """What calls that are reported as one have in common."""
    return str(region.product.target), region.labels


def _call_text(region: Region) -> Iterable[str]:
    """The steps in words: "act", "mul(gate)"."""
    for step in region.steps:
        given = [region.names[ref.index] for ref in references(step) if isinstance(ref, Given)]
        yield f"{step.label}({', '.join(given)})" if given else step.label


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def _kind(product: nn.Module) -> str:
    return product_kind(product) or type(product).__name__

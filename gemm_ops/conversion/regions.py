"""Matches in a graph: from a product as far as what follows is elementwise and nobody else reads what is between.

    >>> region, reason = grow(graph, product_node, host, chosen, taken=frozenset())
    >>> region.labels
    ('act', 'mul')

A region grows along the graph's order.  A node that reads it joins if the epilogue with that node traces; a *cut* is a
node after which nothing before it has other users, so that the call may end there.  The region ends at the last cut;
the earlier ones are kept, because a call may have to stop at one of them (dropout in training, an operand of a shape
that does not fit).

The call stands where the last of its nodes was.  What writes in place between the product and there ends the region;
a submodule may do so if its code, or that of a part of it, does something in place (see ``writing``).  So does what may
draw random numbers, once dropout has joined (see ``drawing``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from epilogues import Epilogue, EpilogueError

from .drawing import node_may_draw, step_may_draw
from .graph_search import call_with_rest
from .patterns import NAMES, Traits, classify
from .products import obstacle, product_kind
from .steps import Given, Step, Value, build_epilogue, operands_read, references, stand_in, step_obstacle
from .writing import may_write, out_of_place, writes

#: Where a region ends at the latest.
MOST_STEPS = 48


@dataclass(frozen=True)
class Region:
    """One match.

    Attributes:
        product: the node of the product.
        nodes: what is fused to it, in order; the last one's value is the call's.
        steps: the same as data.
        cuts: after how many steps a call may end, ascending; the last is all of them.
        operands: the nodes that the steps read.
        names: what the epilogue calls them.
        modules: the paths of the modules that the steps call.
        in_evaluation: whether it is elementwise in evaluation mode only, as dropout is.
    """

    product: fx.Node
    nodes: tuple[fx.Node, ...]
    steps: tuple[Step, ...]
    cuts: tuple[int, ...]
    operands: tuple[fx.Node, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    in_evaluation: bool

    @property
    def pattern(self) -> str:
        """The patterns of the steps, "activation + gate"; those that do nothing have none."""
        return " + ".join(name for name in NAMES if any(step.pattern == name for step in self.steps))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(step.label for step in self.steps)


def is_product(node: fx.Node, host: nn.Module) -> bool:
    """Whether a node calls a product."""
    return node.op == "call_module" and product_kind(host.get_submodule(str(node.target))) is not None


def find_regions(graph: fx.Graph, host: nn.Module, chosen: Collection[str]) -> tuple[list[Region], dict[str, str]]:
    """The matches in a graph, none of them in another's way, and by path why other products have none."""
    products = [node for node in graph.nodes if is_product(node, host)]
    regions: list[Region] = []
    while True:
        taken = {node: region for region in regions for node in region.nodes}
        done = {region.product for region in regions}
        grown = {node: grow(graph, node, host, chosen, taken) for node in products if node not in done}
        found = [region for region, _ in grown.values() if region is not None]
        if not found:
            return regions, {str(node.target): reason for node, (_, reason) in grown.items()}
        # of two that want the same nodes the longer one: the activated half of a gate, not the half that it multiplies
        regions.append(max(found, key=lambda region: len(region.steps)))


class _Growth:
    """A region while it grows."""

    def __init__(self, product: fx.Node, host: nn.Module) -> None:
        self.host = host
        self.product = product
        self.module = host.get_submodule(str(product.target))
        self.inside: dict[fx.Node, int] = {product: 0}
        self.steps: list[Step] = []
        self.operands: list[fx.Node] = []
        self.names: list[str] = []
        self.modules: list[str] = []
        self.cuts: list[int] = []
        self.draws = False  # whether a step may draw random numbers, in training
        self.in_evaluation = MOST_STEPS + 1  # the first step that is elementwise in evaluation only, as dropout is
        self.tree = self._epilogue([]).tree

    def _epilogue(self, steps: list[Step], training: bool | None = None) -> Epilogue:
        modules = [self.host.get_submodule(path) for path in self.modules]
        if training is not None:
            modules = [stand_in(module, training=training) for module in modules]
        unknown = [inspect.Parameter.empty] * len(self.names)
        has_bias = self.module._parameters.get("bias") is not None
        return build_epilogue(steps, self.names, unknown, modules, has_bias=has_bias)

    def step_of(self, node: fx.Node) -> Step:
        """The node as a step, its operands and module added to the region's.

        Raises:
            EpilogueError: if it cannot be one.
        """
        way = node.op.removeprefix("call_")
        target: Any = node.target
        kwargs, in_place = dict(node.kwargs), False
        label = str(node.target) if way == "method" else str(getattr(node.target, "__name__", node.target))
        if way == "module":
            label, target = str(node.target), self._module_number(node)
        elif way not in ("function", "method"):
            raise EpilogueError(f"a node {node.op}")
        elif writes(node.target, kwargs, node.args):
            if not self._is_last_reader(node, node.args[0] if node.args else None):
                raise EpilogueError("which writes in place into a value that is read elsewhere")
            found = out_of_place(node.target, kwargs, node.args)
            if found is None:
                raise EpilogueError("which writes in place")
            (target, kwargs), in_place = found, True
            label = str(getattr(target, "__name__", target))
        read = [arg for arg in node.all_input_nodes if arg not in self.inside]
        traits = Traits(
            label.strip("_"),
            tuple("parameter" if arg.op == "get_attr" else "value" for arg in read),
            any(isinstance(arg, int | float) for arg in (*node.args, *node.kwargs.values())),
            len(node.all_input_nodes) - len(read),
        )
        pattern = classify(traits)
        for arg in read:
            if arg not in self.operands:
                self.operands.append(arg)
                taken = sum(name.rstrip("0123456789_") == pattern.operand for name in self.names)
                self.names.append(f"{pattern.operand}_{taken + 1}" if taken else pattern.operand)
        return Step(way, target, self._plain(node.args), self._plain(kwargs), label, pattern.name, in_place)

    def _is_last_reader(self, node: fx.Node, written: Any) -> bool:
        """Whether a node may write into a value: one within, and none within, which may be the same, is read later."""
        users = {user for value in self.inside for user in value.users}
        return written in self.inside and not any(node < user for user in users)

    def _module_number(self, node: fx.Node) -> int:
        path = str(node.target)
        module = self.host.get_submodule(path)
        name = type(module).__name__
        if reason := step_obstacle(module):
            raise EpilogueError(reason)
        if may_write(module) and not all(self._is_last_reader(node, arg) for arg in node.all_input_nodes):
            raise EpilogueError(f"a {name}, which writes in place into a value that is read elsewhere")
        if path not in self.modules:
            self.modules.append(path)
        return self.modules.index(path)

    def _plain(self, value: Any) -> Any:
        """A node's arguments as plain tuples, lists and dictionaries of references, which pickle and copy."""
        if isinstance(value, fx.Node):
            return Value(self.inside[value]) if value in self.inside else Given(self.operands.index(value))
        if isinstance(value, slice):
            return slice(self._plain(value.start), self._plain(value.stop), self._plain(value.step))
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        return tuple(map(self._plain, value)) if isinstance(value, tuple) else value

    def add(self, node: fx.Node, chosen: Collection[str]) -> None:
        """Lets a node join.

        Raises:
            EpilogueError: if it cannot.
        """
        step = self.step_of(node)
        steps = [*self.steps, step]
        try:
            tree = self._epilogue(steps).tree
        except EpilogueError:
            if not self.modules:
                raise
            tree = self._epilogue(steps, training=False).tree
            self.in_evaluation = min(self.in_evaluation, len(steps))
        if node.op == "call_module" and not self.draws:
            self.draws = step_may_draw(self.host.get_submodule(str(node.target)))
        if tree == self.tree:  # dropout, nn.Identity
            step = replace(step, pattern="")
        self.steps = [*self.steps, step]
        self.inside[node] = len(self.steps)
        outer = [other for other in self.inside if other is not node]
        closed = all(user in self.inside for other in outer for user in other.users)
        if closed and tree != self.tree:
            self._cut(chosen)
        self.tree = tree

    def _cut(self, chosen: Collection[str]) -> None:
        """Ends the steps since the last cut here, if they are of the patterns asked for."""
        start = self.cuts[-1] if self.cuts else 0
        latest = self.steps[start:]
        if sum(bool(step.pattern) for step in latest) > 1:
            # an activation that is written out, in which 0.5 * x is no scale
            plain = [step.pattern == "scale" and not _operands(step) for step in latest]
            latest = [
                replace(step, pattern="activation") if within else step
                for step, within in zip(latest, plain, strict=True)
            ]
        for step in latest:
            if step.pattern and step.pattern not in chosen:
                raise EpilogueError(f"which is of the pattern {step.pattern!r}, not asked for")
        self.steps = [*self.steps[:start], *latest]
        self.cuts.append(len(self.steps))

    def region(self) -> Region | None:
        if not self.cuts:
            return None
        count = self.cuts[-1]
        steps = tuple(self.steps[:count])
        read = operands_read(steps)
        return Region(
            self.product,
            tuple(list(self.inside)[1 : count + 1]),
            steps,
            tuple(self.cuts),
            tuple(self.operands[:read]),
            tuple(self.names[:read]),
            tuple(self.modules),
            self.in_evaluation <= count,
        )


def _operands(step: Step) -> list[int]:
    return [ref.index for ref in references(step) if isinstance(ref, Given)]


def grow(
    graph: fx.Graph, product: fx.Node, host: nn.Module, chosen: Collection[str], taken: dict[fx.Node, Region]
) -> tuple[Region | None, str]:
    """The region of a product, or of a submodule that returns what one gives; or None and why.

    Args:
        chosen: the patterns to look for.
        taken: nodes of other regions.
    """
    if is_product(product, host):
        if reason := obstacle(host.get_submodule(str(product.target))):
            return None, reason
        if len(product.args) != 1 or product.kwargs:
            return None, "it is called with other arguments than one input"
    growth, reason = _Growth(product, host), ""
    nodes = list(graph.nodes)
    for node in nodes[nodes.index(product) + 1 :]:
        if len(growth.steps) == MOST_STEPS:
            break
        reads = any(arg in growth.inside for arg in node.all_input_nodes)
        if node.op == "output":
            reason = "its result is what the method returns" if reads else reason
            break
        if not reads:
            if _may_write(node, host):
                reason = f"{node.name}, computed before its result is used, writes in place"
                break
            if growth.draws and node_may_draw(node, called_path(node), host):
                reason = f"{node.name}, computed before its result is used, may draw random numbers, as dropout does"
                break
            continue
        if node in taken:
            owner = taken[node].product.target
            reason = f"its result is an operand of the fused call of {owner}"
            break
        try:
            growth.add(node, chosen)
        except EpilogueError as error:
            reason = f"its result goes into {_called(node)}: {_in_words(str(error).splitlines()[0])}"
            break
    found = growth.region()
    if found is None and not reason:
        reason = "nothing uses its result" if not product.users else "its result is used several times"
    if found is None and reason.startswith("its result goes into") and len(product.users) > 1 and growth.steps:
        reason = f"its result is used several times, and {reason.removeprefix('its result ')}"
    return found, reason


def _in_words(sentence: str) -> str:
    """The epilogue language's sentences that speak of epilogues, for readers of a model."""
    if sentence.startswith("expected a condition"):
        return "its condition or mask is a tensor, and an epilogue takes conditions computed from numbers (x > 0)"
    if "no output depends on" in sentence:
        return "it computes nothing with the values that it is given"
    if found := re.fullmatch(r"epilogue \w+: returned an? (\w+).*; expected .*", sentence):
        return f"it makes a {found[1]}, which is no tensor"
    return re.sub(r"^epilogue \w+: ", "", sentence)


def _called(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def called_path(node: fx.Node) -> str:
    """The path of the submodule that a node calls, with the method's ``**kwargs`` too; "" for none."""
    if node.target is call_with_rest:
        node = node.all_input_nodes[0]
        return str(node.target)
    return str(node.target) if node.op == "call_module" else ""


def _may_write(node: fx.Node, host: nn.Module) -> bool:
    if path := called_path(node):
        return may_write(host.get_submodule(path))
    return node.op in ("call_function", "call_method") and writes(node.target, dict(node.kwargs), node.args)

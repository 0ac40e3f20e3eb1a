"""Rewritten methods: code made of a graph, in the place of a method of one module, as long as the graph stands.

    >>> rewrite(host, "forward", traced, regions)       # host.forward is now a Rewritten
    >>> restore(host)                                   # and is the class's again

Contract
--------
* The module keeps its class, parameters, submodules and state dict; only its instance attribute of the method's name is
  set.  Submodules are untouched: whoever calls one directly, or another place that shares it, gets what it was.
* A call whose arguments, modes or attributes are not those of the trace runs the method of the class, as do calls with
  the symbols of another tracer.
* Copies and pickles keep rewritten methods: they are source text and the functions it calls, by name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from .graph_search import Mode, Traced
from .inspection import SIMPLE, read_structure
from .products import has_hooks
from .regions import Region
from .sites import FusedCall


class Code:
    """A generated function, by its source."""

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self.__setstate__({"source": source, "names": dict(names)})

    def __getstate__(self) -> dict[str, Any]:
        named = {
            name: (value.__name__,) if isinstance(value, ModuleType) else value for name, value in self.names.items()
        }
        return {"source": self.source, "names": named}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.source: str = state["source"]
        self.names: dict[str, Any] = {
            name: importlib.import_module(*value) if isinstance(value, tuple) else value
            for name, value in state["names"].items()
        }
        space = dict(self.names)
        exec(compile(self.source, "<gemm_ops.conversion>", "exec"), space)
        self.function = space["forward"]


class Rewritten:
    """What stands in a module's ``__dict__`` for one of its methods.

    Attributes:
        host: the module.
        method: the method's name.
        codes: by mode; see :class:`gemm_ops.conversion.graph_search.Traced`.
    """

    def __init__(self, host: nn.Module, method: str, codes: dict[Mode, Code], traced: Traced) -> None:
        self.host, self.method, self.codes = host, method, codes
        self.parameters, self.guards = traced.parameters, traced.guards
        self.structure = read_structure(host)
        self.inlined = tuple(
            (tuple(path.split(".")), type(part).forward, read_structure(part))
            for path, part in ((path, host.get_submodule(path)) for path in traced.inlined)
        )

    @property
    def original(self) -> MethodType:
        """The method of the class, bound to the module."""
        return MethodType(getattr(type(self.host), self.method), self.host)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        code, given = self._code(), None
        if code is not None:
            given = self._bind(args, kwargs)
        if code is None or given is None or not self._stands():
            return getattr(type(self.host), self.method)(self.host, *args, **kwargs)
        return code.function(self.host, *given)

    def _code(self) -> Code | None:
        for (training, grad), code in self.codes.items():
            if training not in (None, self.host.training) or grad not in (None, torch.is_grad_enabled()):
                continue
            return code
        return None

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """What the code takes for these arguments; None if they are not for it."""
        rest, given, position, takes_rest = dict(kwargs), [], 0, False
        for parameter in self.parameters:
            if parameter.role == "rest":
                takes_rest = True
                given.append(rest)
                continue
            if parameter.positional and position < len(args):
                value = args[position]
                position += 1
                if parameter.name in rest:
                    return None
            elif parameter.name in rest:
                value = rest.pop(parameter.name)
            elif parameter.role == "tensor":
                return None
            else:
                value = parameter.default
            if parameter.role == "tensor" and not isinstance(value, Tensor):
                return None
            if parameter.role == "fixed":
                if not _is_same(value, parameter.default):
                    return None
            else:
                given.append(value)
        return given if position == len(args) and (takes_rest or not rest) else None

    def _stands(self) -> bool:
        """Whether nothing that the trace read has changed."""
        if read_structure(self.host) != self.structure:
            return False
        for path, forward, structure in self.inlined:
            part = _at(self.host, path)
            replaced = part is None or type(part).forward is not forward or has_hooks(part)
            if replaced or part.training != self.host.training or not _own_forward(part):
                return False
            if read_structure(part) != structure:
                return False
        for guard in self.guards:
            owner = _at(self.host, guard.path)
            if owner is None or not _is_same(getattr(owner, guard.name, owner), guard.value):
                return False
        return True


def _own_forward(part: nn.Module) -> bool:
    replaced = part.__dict__.get("forward")
    return replaced is None or type(replaced) is Rewritten


def _at(host: nn.Module, path: Sequence[str]) -> Any:
    """The submodule at a path; None if there is none any more."""
    found: Any = host
    for name in path:
        found = found._modules.get(name) if found is not None else None
    return found


def _is_same(value: Any, expected: Any) -> bool:
    if value is expected:
        return True
    return type(value) is type(expected) and type(value) in SIMPLE and value == expected


def rewrite(host: nn.Module, method: str, traced: Traced, regions: Mapping[Mode, Sequence[Region]]) -> None:
    """Puts code with fused calls in the place of a method.

    Args:
        regions: the matches in each of the graphs; the graphs are changed.
    """
    codes = {mode: _code(graph, host, regions[mode]) for mode, graph in traced.graphs.items()}
    host.__dict__[method] = Rewritten(host, method, codes, traced)


def _code(graph: fx.Graph, host: nn.Module, regions: Sequence[Region]) -> Code:
    for number, region in enumerate(regions, start=1):
        last, product = region.nodes[-1], region.product
        call = FusedCall(number, host, str(product.target), region.modules, region.steps, region.cuts, region.names)
        with graph.inserting_before(last):
            fused = graph.call_function(call, (product.args[0], *region.operands))
        last.replace_all_uses_with(fused)
        for node in (*reversed(region.nodes), product):
            graph.erase_node(node)
    made = graph.python_code("self")
    return Code(made.src, {name: value for name, value in made.globals.items() if name != "__builtins__"})


def restore(host: nn.Module) -> int:
    """Takes rewritten methods off a module; how many they were."""
    rewritten = [name for name, value in host.__dict__.items() if type(value) is Rewritten]
    for name in rewritten:
        del host.__dict__[name]
    return len(rewritten)

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
from dataclasses import dataclass
from types import CodeType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..autocast import autocast_dtype
from .functions import ClassFunctions
from .graph_search import Mode, Traced
from .inspection import read_structure
from .products import has_hooks, is_called_plainly
from .reads import PARTS, found
from .regions import Region, called_path
from .sites import FusedCall
from .values import BY_PARTS, Presence, is_same
from .writing import may_write


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

    def __init__(
        self,
        host: nn.Module,
        method: str,
        codes: dict[Mode, Code],
        traced: Traced,
        products: Sequence[str] = (),
        crossed: Sequence[str] = (),
    ) -> None:
        self.host, self.method, self.codes = host, method, codes
        #: the submodules that a fused call stands after and whose products it takes over from before
        self.crossed = tuple(tuple(path.split(".")) for path in crossed)
        #: dtypes that neither the arguments nor the weights of the products at these paths may have
        self.never, self.products = traced.never, tuple(tuple(path.split(".")) for path in products)
        self.parameters = traced.parameters
        self.parts = tuple(_part(host, path, method, traced) for path in ("", *traced.inlined))
        traced_paths = {part.path for part in self.parts}
        #: plain values of modules whose code is not in the graph
        self.values = tuple(
            (guard.path, guard.name, guard.value, guard.owner)
            for guard in traced.guards
            if guard.path not in traced_paths or guard.owner is not None
        )
        self._prepare()

    def _prepare(self) -> None:
        """What makes calls fast: the only code, how many arguments are all tensors, and what was seen to stand."""
        self._only = self.codes.get((None, None))
        roles = [parameter.role for parameter in self.parameters]
        tensors = sum(role == "tensor" for role in roles)
        required = any(each.required and each.role == "opaque" for each in self.parameters)
        simple = not required and "rest" not in roles and roles[:tensors] == ["tensor"] * tensors
        self._tensors = tensors if simple and all(each.positional for each in self.parameters[:tensors]) else -1
        self._defaults = [each.default for each in self.parameters if each.role == "opaque"]
        self._seen: list[_Seen] = []
        self._harmless: dict[tuple[str, ...], list[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    @property
    def original(self) -> MethodType:
        """The method of the class, bound to the module."""
        return MethodType(getattr(type(self.host), self.method), self.host)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __code__(self) -> CodeType:
        # torch.export asks where a forward was written
        return self.original.__func__.__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        # what torch.jit.script asks a forward for; to whoever else asks it is as if there were none
        raise AttributeError("fused code cannot be compiled by torch.jit.script: call gemm_ops.unfuse(model) before")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        code = self._only if self._only is not None else self._code()
        given: Any = None
        if code is not None:
            if not kwargs and len(args) == self._tensors and all([isinstance(arg, Tensor) for arg in args]):
                given = (*args, *self._defaults)
            else:
                given = self._bind(args, kwargs)
        if code is None or given is None or not self._stands() or (self.never and self._has_other_dtype(given)):
            return getattr(type(self.host), self.method)(self.host, *args, **kwargs)
        return code.function(self.host, *given)

    def _code(self) -> Code | None:
        for (training, grad), code in self.codes.items():
            if training not in (None, self.host.training) or grad not in (None, torch.is_grad_enabled()):
                continue
            return code
        return None

    def _is_harmless(self, module: Any, path: tuple[str, ...]) -> bool:
        """Whether a submodule that is crossed still does not write into what it is given."""
        if type(module) is nn.Linear:  # what nearly every one is
            return not has_hooks(module)  # which may write, and see in which order layers are called
        if module is None:
            return False
        state = [(part, getattr(part, "inplace", False)) for part in module.modules()]
        if self._harmless.get(path) != state:
            if may_write(module):
                return False
            self._harmless[path] = state
        return True

    def _has_other_dtype(self, given: Sequence[Any]) -> bool:
        """Whether there is a sign of a dtype that the graph takes values not to have."""
        tensors = [value for value in given if isinstance(value, Tensor)]
        for path in self.products:
            weight = getattr(_at(self.host, path), "weight", None)
            tensors += [weight] if isinstance(weight, Tensor) else []
        return any(each.dtype in self.never or autocast_dtype(each.device.type) in self.never for each in tensors)

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
            elif parameter.required:
                return None
            else:
                value = parameter.default
            if parameter.role == "tensor" and not isinstance(value, Tensor):
                return None
            if parameter.role == "fixed":
                if not is_same(value, parameter.default):
                    return None
            else:
                given.append(value)
        return given if position == len(args) and (takes_rest or not rest) else None

    def _stands(self) -> bool:
        """Whether nothing that the trace read has changed."""
        host, in_graph = self.host, torch.compiler.is_dynamo_compiling()
        if not in_graph and torch.jit.is_tracing():  # whose graph would have what a choice computes
            return False
        seen = self._seen if not in_graph else None
        for number, part in enumerate(self.parts):
            module = _at(host, part.path)
            if module is None or not (number == 0 or part.is_called(module, host, in_graph)):
                return False
            if not seen or not seen[number].holds(module):
                if read_structure(module) != part.structure:
                    return False
                seen = None
            for name, value in part.guards:
                held = getattr(module, name, Presence.ABSENT) if name != PARTS else found(module, name)
                if (type(value) in BY_PARTS or held is not value) and not is_same(held, value):
                    return False
            for name in part.methods:
                if in_graph:
                    getattr(module, name)  # whose it is the compiler guards on where it is read
                if name in module.__dict__ and type(module.__dict__[name]) is not Rewritten:
                    return False
            if not in_graph and not part.functions.are_of(type(module)):  # which the compiler reads as it compiles
                return False
        for path, name, value, owner in self.values:
            module = _at(host, path) if owner is None else owner
            if module is None or not is_same(found(module, name), value):
                return False
        # the compiler's code is of the modules as they are when it compiles
        if not in_graph and not all([self._is_harmless(_at(host, path), path) for path in self.crossed]):
            return False
        if seen is None and not in_graph:
            self._seen = [_Seen.of(_at(host, part.path)) for part in self.parts]
        return True


@dataclass(frozen=True)
class _Part:
    """A module whose code a trace is of: the host, the first, or one that is traced with it.

    Attributes:
        path: in the host.
        forward: its class's.
        structure: what it has, by :func:`read_structure`.
        guards: the plain values that the trace read, by name.
        methods: what the trace ran of its class.
        functions: the same as functions, and the method that was traced.
    """

    path: tuple[str, ...]
    forward: Any
    structure: Any
    guards: tuple[tuple[str, Any], ...]
    methods: tuple[str, ...]
    functions: ClassFunctions

    def is_called(self, module: nn.Module, host: nn.Module, in_graph: bool) -> bool:
        """Whether calling the module runs the forward that was traced, in the host's mode, and nothing else."""
        if in_graph:
            module.forward  # noqa: B018 - whose it is the compiler guards on where it is read
        replaced = module.__dict__.get("forward")
        return (
            type(module).forward is self.forward
            and (replaced is None or type(replaced) is Rewritten)
            and module.training == host.training
            and not has_hooks(module)
            and (in_graph or is_called_plainly(module))
        )


@dataclass(frozen=True)
class _Seen:
    """What a module had when its structure was last read, to be compared fast: the same objects, as a rule."""

    module: nn.Module
    modules: dict[str, nn.Module | None]
    tensors: tuple[tuple[str, bool], ...]
    lists: tuple[_Seen, ...]

    @classmethod
    def of(cls, module: nn.Module) -> _Seen:
        modules = dict(module._modules)
        lists = [cls.of(part) for part in modules.values() if isinstance(part, nn.ModuleList | nn.ModuleDict)]
        return cls(module, modules, _tensors(module), tuple(lists))

    def holds(self, module: nn.Module) -> bool:
        if module is not self.module or module._modules != self.modules:
            return False
        if (self.tensors or module._parameters or module._buffers) and _tensors(module) != self.tensors:
            return False
        return not self.lists or all([each.holds(each.module) for each in self.lists])


def _tensors(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    held = (*module._parameters.items(), *module._buffers.items())
    return tuple([(name, value is None) for name, value in held])


def _at(host: nn.Module, path: Sequence[str]) -> Any:
    """The submodule at a path; None if there is none any more."""
    found: Any = host
    for name in path:
        found = found._modules.get(name) if found is not None else None
    return found


def _part(host: nn.Module, path: str, method: str, traced: Traced) -> _Part:
    module, names = host.get_submodule(path), tuple(path.split(".")) if path else ()
    guards = tuple((guard.name, guard.value) for guard in traced.guards if guard.path == names and guard.owner is None)
    methods = traced.methods.get(path, ())
    functions = ClassFunctions(type(module), {*methods, "forward" if path else method})
    return _Part(names, type(module).forward, read_structure(module), guards, methods, functions)


def rewrite(host: nn.Module, method: str, traced: Traced, regions: Mapping[Mode, Sequence[Region]]) -> None:
    """Puts code with fused calls in the place of a method.

    Args:
        regions: the matches in each of the graphs; the graphs are changed.
    """
    found = list(regions.values())
    crossed = {path for mode, each in regions.items() for path in _crossed(traced.graphs[mode], each, host)}
    codes = {mode: _code(graph, host, regions[mode]) for mode, graph in traced.graphs.items()}
    products = sorted({str(region.product.target) for each in found for region in each})
    host.__dict__[method] = Rewritten(host, method, codes, traced, products, sorted(crossed))


def _crossed(graph: fx.Graph, regions: Sequence[Region], host: nn.Module) -> set[str]:
    """The paths of the submodules that the graph calls between a region's product and its last node."""
    nodes = list(graph.nodes)
    found: set[str] = set()
    for region in regions:
        between = nodes[nodes.index(region.product) + 1 : nodes.index(region.nodes[-1])]
        found |= {path for node in between if node not in region.nodes and (path := called_path(node))}
    return found


def _code(graph: fx.Graph, host: nn.Module, regions: Sequence[Region]) -> Code:
    made: dict[fx.Node, fx.Node] = {}  # what one call gives another reads
    for number, region in enumerate(regions, start=1):
        last, product = region.nodes[-1], region.product
        call = FusedCall(number, host, str(product.target), region.modules, region.steps, region.cuts, region.names)
        with graph.inserting_before(last):
            operands = [made.get(operand, operand) for operand in region.operands]
            fused = made[last] = graph.call_function(call, (product.args[0], *operands))
        last.replace_all_uses_with(fused)
        for node in (*reversed(region.nodes), product):
            graph.erase_node(node)
    text = graph.python_code("self")
    return Code(text.src, {name: value for name, value in text.globals.items() if name != "__builtins__"})


def restore(host: nn.Module) -> int:
    """Takes rewritten methods off a module; how many they were."""
    rewritten = [name for name, value in host.__dict__.items() if type(value) is Rewritten]
    for name in rewritten:
        del host.__dict__[name]
    return len(rewritten)

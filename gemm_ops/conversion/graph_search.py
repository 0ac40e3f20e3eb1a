"""Graphs of methods: torch.fx, with the submodules as leaves and the conditions under which a graph stands.

    >>> traced = trace_method(mlp, "forward", inlined=())
    >>> traced.graphs[mlp.training].nodes

Contract
--------
* Submodules are leaves, which run as they are, with their hooks and flags, but those in ``inlined``.
* A method that reads ``training``, or whether gradients are recorded, is traced in every mode; where that makes no
  difference there is one graph.
* Nothing of the model is changed: a tensor that is no parameter, buffer or attribute refuses the trace, which would put
  it into the module.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from epilogues.source import shortened

from .functions import NotTraceableError
from .inspection import REST, Parameter, read_code, read_methods, read_parameters
from .products import is_called_plainly
from .reads import Guard, Reads
from .steps import step_obstacle
from .undisturbed import undisturbed

#: Whether the module trains, and whether gradients are recorded; None where the method does not ask.
Mode = tuple[bool | None, bool | None]


@dataclass(frozen=True)
class Traced:
    """The graphs of one method, and when they stand for it.

    Attributes:
        graphs: by mode; every mode that the method tells apart.
        parameters: the method's.
        guards: the plain values that the trace read.
        inlined: the paths of the submodules whose forward is in the graphs.
        methods: by such a path, "" for the module, what the trace ran of its class.
        never: dtypes that the graphs take values within not to have, see :func:`expect_other`.
    """

    graphs: dict[Mode, fx.Graph]
    parameters: tuple[Parameter, ...]
    guards: tuple[Guard, ...]
    inlined: tuple[str, ...]
    methods: dict[str, tuple[str, ...]] = field(default_factory=dict)
    never: tuple[torch.dtype, ...] = ()


def trace_method(host: nn.Module, method: str, inlined: Sequence[str] = ()) -> Traced:
    """The graphs of a method.

    Args:
        inlined: the paths of submodules to trace too.

    Raises:
        NotTraceableError: if it has none, and why.
    """
    if isinstance(host, torch.jit.ScriptModule):
        raise NotTraceableError("it is compiled by torch.jit")
    parts = {"": host, **{path: host.get_submodule(path) for path in inlined}}
    leaves_not = frozenset(part for path, part in parts.items() if path)
    parameters = read_parameters(host, method, leaves_not)
    methods: dict[str, tuple[str, ...]] = {}
    functions: set[FunctionType] = set()
    asks_training = asks_grad = False
    for path, part in parts.items():
        if "forward" in part.__dict__ and not hasattr(part.__dict__["forward"], "original"):
            raise NotTraceableError("its forward was replaced on the instance")
        reading = read_code(part, "forward" if path else method)
        asks_training |= "training" in reading.attributes
        asks_grad |= reading.reads_grad_mode
        methods[path] = read_methods(part, reading)
        functions |= set(reading.functions)
    graphs: dict[Mode, fx.Graph] = {}
    never: set[torch.dtype] = set()
    reads = Reads(host)
    for mode in itertools.product(_either(asks_training), _either(asks_grad)):
        with _in_mode(parts.values(), mode), undisturbed(host.modules(), functions):
            graphs[mode] = _trace(host, _Tracer(method, leaves_not, parameters, reads))
        never |= {node.args[1] for node in graphs[mode].nodes if node.target is expect_other}
    guards = tuple(reads.guards(parts.values(), of_mode=asks_training))
    return Traced(_without_doubles(graphs), parameters, guards, tuple(inlined), methods, tuple(never))


def _either(asked: bool) -> tuple[bool | None, ...]:
    return (False, True) if asked else (None,)


def _without_doubles(graphs: dict[Mode, fx.Graph]) -> dict[Mode, fx.Graph]:
    """One graph where all are the same."""
    sources = {graph.python_code("self").src for graph in graphs.values()}
    return {(None, None): next(iter(graphs.values()))} if len(sources) == 1 else graphs


@contextlib.contextmanager
def _in_mode(parts: Collection[nn.Module], mode: Mode) -> Iterator[None]:
    before = [(part, part.training) for part in parts]
    training, grad = mode
    try:
        for part in parts:
            part.training = part.training if training is None else training
        with torch.set_grad_enabled(grad is not False):
            yield
    finally:
        for part, was in before:
            part.training = was


def _trace(host: nn.Module, tracer: _Tracer) -> fx.Graph:
    try:
        return _join_rest(tracer.trace(host))
    except NotTraceableError:
        raise
    except Exception as error:  # user code met symbols: anything may come of it
        if "does not support item assignment" in str(error):
            raise NotTraceableError("its code assigns to a part of a tensor, as in x[0] = y") from error
        sentence = next(iter(str(error).strip().splitlines()), "").partition(". ")[0]
        raise NotTraceableError(f"{type(error).__name__}: {shortened(sentence, 120)}") from error


class _Tracer(fx.Tracer):
    """Traces a method of a module, its arguments by their roles."""

    proxy_buffer_attributes = True

    def __init__(
        self, method: str, inlined: frozenset[nn.Module], parameters: tuple[Parameter, ...], reads: Reads
    ) -> None:
        super().__init__()
        self.traced_func_name = method
        self._inlined = inlined
        self._parameters = parameters
        self._reads = reads
        self._grad_mode = torch.is_grad_enabled()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._inlined

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module that is none of the host's, such as a library's activation, is a function if it holds nothing."""
        with self._reads.paused():
            is_part = m is self.root or any(m is part for part in self.root.modules())
            self._check_called(m, is_part)
        return super().call_module(m, forward, args, kwargs) if is_part else forward(*args, **kwargs)

    def _check_called(self, m: nn.Module, is_part: bool) -> None:
        name = type(m).__name__
        if not is_called_plainly(m):  # what it does around its forward is in the graph by now, and would run twice
            raise NotTraceableError(f"its code calls a {name}, whose class has a __call__ of its own")
        if is_part:
            return
        if reason := step_obstacle(m):
            raise NotTraceableError(f"its code calls a module that is no part of it: {reason}")
        reading = read_code(m, "forward")
        if "training" in reading.attributes or reading.reads_grad_mode:
            raise NotTraceableError(f"its code calls a {name} that is no part of it and may train otherwise")

    def _symbol(self, module: nn.Module, name: str) -> Any:
        """What stands for a tensor that is a plain attribute; torch.fx has symbols of parameters and buffers only."""
        for path, part in self.root.named_modules():
            if part is module:
                return self.create_proxy("get_attr", f"{path}.{name}".lstrip("."), (), {})
        raise NotTraceableError(f"its code reads the tensor {name} of a {type(module).__name__} that is no part of it")

    def path_of_module(self, mod: nn.Module) -> str:
        with self._reads.paused():
            return super().path_of_module(mod)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        with self._reads.paused():
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """What code branches on: only whether a value is in half precision, which it is taken not to be."""
        node = obj.node
        asked, dtype = node.args if node.target is operator.eq and len(node.args) == 2 else (None, None)
        if dtype is not torch.float16 or not isinstance(asked, fx.Node) or asked.args[1:] != ("dtype",):
            return super().to_bool(obj)
        value = asked.args[0]
        assert isinstance(value, fx.Node)
        if value.op == "get_attr":  # a parameter, whose dtype is a matter of its own
            return super().to_bool(obj)
        self.create_proxy("call_function", expect_other, (self.proxy(value), dtype), {})
        for unused in (node, asked):
            if not unused.users:
                self.graph.erase_node(unused)
        return False

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        args: list[Any] = [self.root]
        keywords: dict[str, Any] = {}
        for parameter in self._parameters:
            if parameter.role == "fixed":
                continue
            proxy = self.create_proxy("placeholder", parameter.name, (), {})
            if parameter.role == "tensor" and parameter.positional:
                args.append(proxy)
            else:
                keywords[parameter.name] = proxy

        def run(*given: Any) -> Any:
            self._reads.stand_in = self._symbol
            with self._reads.recorded():
                return root_fn(*given, **keywords)

        return run, args

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() != self._grad_mode:
            # within the forward of an autograd.Function too, whose backward a graph of its operations would not have
            raise NotTraceableError("its code computes without gradients, or in a torch.autograd.Function")
        with self._reads.paused():
            return super().create_proxy(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not self._is_in_module(a):
            raise NotTraceableError("its code makes or closes over a tensor that is no attribute of the module")
        return super().create_arg(a)

    def _is_in_module(self, tensor: Tensor) -> bool:
        held = itertools.chain(self.root.parameters(), self.root.buffers(), self.tensor_attrs)
        return any(tensor is own for own in held)


class _Proxy(fx.Proxy):
    """A symbol that records ``x += y`` as what writes in place; torch.fx's own makes a sum of it."""


def _recorded(operation: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return update


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(_Proxy, f"__{_name}__", _recorded(getattr(operator, _name)))


def expect_other(value: Any, dtype: torch.dtype) -> None:
    """What a graph has where code asks for a dtype that the call's arguments and weights gave no sign of.

    Transformers' encoders clamp their results in half precision.
    """
    if value.dtype == dtype:
        raise RuntimeError(
            f"a value has become {dtype} within code that gemm_ops.fuse traced for others: call gemm_ops.unfuse(model)"
        )


def call_with_rest(module: nn.Module, rest: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The call of a submodule that hands the method's ``**kwargs`` on."""
    return module(*args, **kwargs, **rest)


def _join_rest(graph: fx.Graph) -> fx.Graph:
    """Calls that hand ``**kwargs`` on, written so that they do."""
    for node in list(graph.nodes):
        if REST not in node.kwargs:
            continue
        if node.op != "call_module":
            raise NotTraceableError("it hands its **kwargs on to what is no submodule")
        kwargs = dict(node.kwargs)
        rest = kwargs.pop(REST)
        with graph.inserting_before(node):
            module = graph.create_node("get_attr", node.target)
            joined = graph.call_function(call_with_rest, (module, rest, *node.args), kwargs)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
    return graph

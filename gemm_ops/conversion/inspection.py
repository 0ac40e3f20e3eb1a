"""What a method's code says before it is traced: its parameters, the flags that it reads, what rules a trace out.

    >>> read_parameters(block, "forward", inlined=frozenset())
    (Parameter(name='hidden_states', role='tensor', ...), Parameter(name='cache', role='opaque', ...), ...)

Contract
--------
A trace sees one way through a method.  It stands for the method where nothing that the way depended on has changed:

* A parameter without a default is a tensor; other arguments are not for the trace.
* A parameter with a default that the method does nothing with but hand on to a submodule (``cache=cache``,
  ``**kwargs``) is opaque: anything may be given.  That is read from the source.
* Any other parameter is fixed at its default: a call that gives another value is not for the trace.
* Attributes of plain values and functions that the code names (``self.norm_first``, ``self.activation``) are remembered
  with the trace, and what the module has got of submodules and parameters.
* What depends on the types of values, writes attributes, prints, draws random numbers or enters a context (a ``with``
  statement) is not traced, as symbols have other types, code is traced once, and a graph has no contexts.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from torch import nn


class NotTraceableError(Exception):
    """A method that is not traced; says why."""


#: Values that are compared before a trace stands for a method; others, such as a configuration, should not change.
SIMPLE = (bool, int, float, str, type(None))

_GUARDED = (*SIMPLE, FunctionType, BuiltinFunctionType)

#: What the parameter for a method's ``**kwargs`` is called in traces.
REST = "gemm_ops_rest"

_REFUSED_GLOBALS = frozenset(
    {"isinstance", "issubclass", "type", "print", "input", "open", "random"}
    | {"locals", "globals", "vars", "setattr", "delattr", "exec", "eval"}
)
#: State that a trace would take for granted, random numbers that it would draw once, and memory that it would not save.
_REFUSED_NAMES = frozenset(
    {"is_autocast_enabled", "is_inference_mode_enabled", "get_autocast_dtype", "checkpoint"}
    | {"rand", "randn", "randint", "randperm", "random", "uniform", "normal"}
)
#: Methods that change a list, a dictionary or a set.
_CHANGING = frozenset(
    {"append", "extend", "insert", "pop", "clear", "remove", "setdefault", "update", "appendleft", "popleft", "discard"}
)
#: How Python's versions from 3.10 on enter a context.
_WITH = frozenset({"SETUP_WITH", "BEFORE_WITH", "SETUP_ASYNC_WITH", "BEFORE_ASYNC_WITH"})


@dataclass(frozen=True)
class Parameter:
    """One parameter of a traced method.

    Attributes:
        role: "tensor", "opaque", "fixed", or "rest" (the method's ``**kwargs``, handed on).
        default: of an opaque or fixed one.
        positional: whether it may be given by position.
    """

    name: str
    role: str
    default: Any = None
    positional: bool = True


@dataclass(frozen=True)
class Reading:
    """What a method's code reads.

    Attributes:
        attributes: the names of all attributes.
        reads_grad_mode: whether it asks if gradients are recorded.
    """

    attributes: frozenset[str]
    reads_grad_mode: bool


def method_of(module: nn.Module, name: str) -> FunctionType:
    """The function that a class has for a method.

    Raises:
        NotTraceableError: if it is no plain function.
    """
    function = inspect.getattr_static(type(module), name, None)
    if not isinstance(function, FunctionType):
        raise NotTraceableError(f"{type(module).__name__}.{name} is no plain function")
    return function


def read_code(module: nn.Module, name: str) -> Reading:
    """What the method reads, with what it wraps and the methods and helpers that it calls.

    Raises:
        NotTraceableError: if it does something that a trace would not.
    """
    attributes: set[str] = set()
    for function in _functions(module, method_of(module, name)):
        if changed := _changed_container(function):
            raise NotTraceableError(f"its code changes {changed}")
        for code in _codes(function.__code__):
            instructions = list(dis.get_instructions(code))
            for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
                what, operation = instruction.argval, instruction.opname
                if operation in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
                    raise NotTraceableError(f"its code writes {what}")
                of_self = following is not None and following.argval == "self"  # which is no symbol
                if operation in ("LOAD_GLOBAL", "LOAD_NAME") and what in _REFUSED_GLOBALS and not of_self:
                    raise NotTraceableError(f"its code calls {what}")
                if what in _REFUSED_NAMES and operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"):
                    raise NotTraceableError(f"its code calls {what}")
                if operation in _WITH or what == "__enter__":
                    raise NotTraceableError("its code has a with statement")
                if operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"):
                    attributes.add(what)
    return Reading(frozenset(attributes), "is_grad_enabled" in attributes)


def read_guards(module: nn.Module, reading: Reading) -> dict[str, Any]:
    """The plain values and functions among the attributes that the code reads, but ``training``, by name."""
    named = sorted(reading.attributes - {"training"})
    return {name: value for name in named if isinstance(value := getattr(module, name, module), _GUARDED)}


def read_structure(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    """The names of what a module has, and whether it is None: a trace goes through lists, and by what is absent."""
    held = [(name, value is None) for name, value in module._parameters.items()]
    held += [(name, value is None) for name, value in module._buffers.items()]
    for name, part in module._modules.items():
        held.append((name, part is None))
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            held += read_structure(part)
    return tuple(held)


def helpers_of_forward(module: nn.Module, names: Collection[str]) -> list[str]:
    """The methods of the class that ``forward`` calls, itself or through others, and that mention one of the names.

    No other methods: a trace runs them, and only of what ``forward`` calls is it known that it does no harm.
    """
    waiting, seen, found = ["forward"], {"forward"}, []
    while waiting:
        name = waiting.pop()
        function = inspect.getattr_static(type(module), name, None)
        if not isinstance(function, FunctionType) or function is getattr(nn.Module, name, None):
            continue
        mentioned = {other for code in _codes(inspect.unwrap(function).__code__) for other in code.co_names}
        if name != "forward" and name not in module.__dict__ and mentioned & set(names):
            found.append(name)
        waiting += sorted(mentioned - seen)
        seen |= mentioned
    return sorted(found)


def _functions(module: nn.Module, first: FunctionType) -> Iterator[FunctionType]:
    """The function, what it wraps, and the module's methods and the helpers beside them that it calls."""
    waiting, seen = [first], set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        yield function
        cells = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        waiting += [value for value in cells if isinstance(value, FunctionType)]
        home = str(function.__module__).partition(".")[0]
        for name in {name for code in _codes(function.__code__) for name in code.co_names}:
            for place in (inspect.getattr_static(type(module), name, None), function.__globals__.get(name)):
                if not isinstance(place, FunctionType) or getattr(nn.Module, name, None) is place:
                    continue
                # of other packages, PyTorch's first of all, the functions are taken to be what tensors go through
                if home != "torch" and str(place.__module__).partition(".")[0] == home:
                    waiting.append(place)


@functools.lru_cache(maxsize=1024)
def _changed_container(function: FunctionType) -> str | None:
    """The list or dictionary of its module that a function writes into: ``self.seen.append(x)``; None for none."""
    for node in ast.walk(_source_tree(function)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            written: list[ast.expr] = [target.value for target in targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            written = [node.func.value]
        else:
            continue
        for held in written:
            root: ast.expr = held
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not held and isinstance(root, ast.Name) and root.id == "self":
                return ast.unparse(held)
    return None


@functools.lru_cache(maxsize=1024)
def _source_tree(function: FunctionType) -> ast.AST:
    """A function's source, parsed; nothing where there is none."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def read_parameters(module: nn.Module, name: str, inlined: frozenset[nn.Module]) -> tuple[Parameter, ...]:
    """The method's parameters without ``self``, in order; see the module's contract.

    Args:
        inlined: the submodules that are traced too, so that handing a value on to them is no end of it.

    Raises:
        NotTraceableError: for ``*args``.
    """
    function = method_of(module, name)
    handed_on = _handed_on(module, function, inlined)
    found = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        positional = parameter.kind is not parameter.KEYWORD_ONLY
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise NotTraceableError(f"it takes any number of arguments, *{parameter.name}")
        if parameter.kind is parameter.VAR_KEYWORD:
            if parameter.name in handed_on:
                found.append(Parameter(REST, "rest", positional=False))
        elif parameter.default is parameter.empty:
            found.append(Parameter(parameter.name, "tensor", positional=positional))
        else:
            role = "opaque" if parameter.name in handed_on else "fixed"
            found.append(Parameter(parameter.name, role, parameter.default, positional))
    return tuple(found)


def _handed_on(module: nn.Module, function: FunctionType, inlined: frozenset[nn.Module]) -> set[str]:
    """The names that appear in the function's source only as arguments of calls of submodules."""
    tree = _source_tree(inspect.unwrap(function))  # nothing is known where there is no source
    arguments: set[ast.AST] = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        target = call.func
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            called = getattr(module, target.attr, None)
            # what the module has not got is not called: an optional part, such as cross-attention
            if called is None or (isinstance(called, nn.Module) and called not in inlined):
                arguments |= {*call.args, *(keyword.value for keyword in call.keywords)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    elsewhere = {node.id for node in names if node not in arguments}
    return {node.id for node in names} - elsewhere

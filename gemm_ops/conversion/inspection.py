"""What a method's code says before it is traced: its parameters, the flags that it reads, what rules a trace out.

    >>> read_parameters(block, "forward", inlined=frozenset())
    (Parameter(name='hidden_states', role='tensor', ...), Parameter(name='cache', role='opaque', ...), ...)

Contract
--------
A trace sees one way through a method.  It stands for the method where nothing that the way depended on has changed:

* A parameter without a default is a tensor; other arguments are not for the trace.
* A parameter with a default, or after the first, that the method does nothing with but hand on to a submodule
  (``cache=cache``, ``**kwargs``) is opaque: anything may be given.  That is read from the source.
* Any other parameter is fixed at its default: a call that gives another value is not for the trace.
* What it reads of modules (``self.norm_first``, ``self.drop.training``) is remembered with the trace (see ``reads``),
  what the module has got of submodules and parameters, and that methods are the class's.
* What depends on the types or the identity of values, catches exceptions, writes attributes or containers, prints,
  draws random numbers, reads parameters but by name, or enters a context (a ``with`` statement) is not traced: symbols
  have other types and every attribute, code is traced once, and a graph has no contexts.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from .functions import NotTraceableError, Reached, codes_of, functions_of, is_wrapped, method_of, source_tree
from .writing import changed_container

#: What the parameter for a method's ``**kwargs`` is called in traces.
REST = "gemm_ops_rest"

_REFUSED_GLOBALS = frozenset(
    {"isinstance", "issubclass", "type", "print", "input", "open", "random", "id", "hash", "dir"}
    | {"locals", "globals", "vars", "setattr", "delattr", "exec", "eval", "getattr", "hasattr", "callable"}
)
#: State that a trace would take for granted, random numbers that it would draw once, memory that it would not save, and
#: questions that symbols answer otherwise than tensors.
_REFUSED_NAMES = frozenset(
    {"is_autocast_enabled", "is_inference_mode_enabled", "get_autocast_dtype", "checkpoint"}
    | {"get_default_dtype", "get_default_device", "get_num_threads", "get_num_interop_threads", "initial_seed"}
    | {"are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled", "get_rng_state"}
    | {"get_float32_matmul_precision", "is_anomaly_enabled", "current_stream", "current_device", "backends"}
    | {"environ", "getenv"}
    | {"rand", "randn", "randint", "randperm", "random", "uniform", "normal"}
    | {"is_tensor", "is_tensor_like", "__class__", "__dict__", "has_torch_function", "has_torch_function_unary"}
    | {"has_torch_function_variadic", "singledispatch"}
    | {"parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "_parameters", "_buffers"}
)
#: Modules of Python whose functions give something else at every call.
_CHANGING_MODULES = frozenset({"time", "datetime", "random", "secrets", "uuid"})
#: How Python's versions from 3.10 on enter a context, and catch an exception.
_WITH = frozenset({"SETUP_WITH", "BEFORE_WITH", "SETUP_ASYNC_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL"})
_TRY = frozenset({"SETUP_FINALLY", "PUSH_EXC_INFO"})
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"})


@dataclass(frozen=True)
class Parameter:
    """One parameter of a traced method.

    Attributes:
        role: "tensor", "opaque", "fixed", or "rest" (the method's ``**kwargs``, handed on).
        default: of an opaque or fixed one.
        positional: whether it may be given by position.
        required: whether it has no default.
    """

    name: str
    role: str
    default: Any = None
    positional: bool = True
    required: bool = False


@dataclass(frozen=True)
class Reading:
    """What a method's code reads.

    Attributes:
        attributes: the names of all attributes.
        chains: attributes of attributes of the module, ``("drop", "training")``.
        functions: the functions that were read.
        reads_grad_mode: whether it asks if gradients are recorded.
    """

    attributes: frozenset[str]
    chains: frozenset[tuple[str, ...]]
    functions: tuple[FunctionType, ...]
    reads_grad_mode: bool


def read_code(module: nn.Module, name: str) -> Reading:
    """What the method reads, with what it wraps and the methods and helpers that it calls.

    Raises:
        NotTraceableError: if it does something that a trace would not.
    """
    attributes: set[str] = set()
    chains: set[tuple[str, ...]] = set()
    reached = list(functions_of(module, method_of(module, name)))
    for function, selves in reached:
        if is_wrapped(function) and function.__globals__.get("__name__") == "torch.utils._contextlib":
            raise NotTraceableError(
                "it has a decorator that enters a context (@torch.no_grad()), which a graph has not"
            )
        if changed := changed_container(function, selves):
            raise NotTraceableError(f"its code changes {changed}")
        _read_function(Reached(function, selves), attributes, chains)
    for chain in chains:
        _check_chain(module, chain)
    functions = tuple(function for function, _ in reached)
    asks_grad = "is_grad_enabled" in attributes
    return Reading(frozenset(attributes), frozenset(chains), functions, asks_grad)


def _read_function(reached: Reached, attributes: set[str], chains: set[tuple[str, ...]]) -> None:
    """Reads one function; adds to the sets, which are those of :class:`Reading`."""
    function, selves = reached
    for code in codes_of(function.__code__):
        instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PRECALL")]
        for position, instruction in enumerate(instructions):
            what, operation = instruction.argval, instruction.opname
            following = instructions[position + 1 : position + 3]
            if operation in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
                raise NotTraceableError(f"its code writes {what}")
            if operation in ("STORE_DEREF", "DELETE_DEREF") and what in function.__code__.co_freevars:
                raise NotTraceableError(f"its code writes {what}, a variable outside it")
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                by_name = what in ("getattr", "hasattr")
                if what in _REFUSED_GLOBALS and not _is_no_symbol(function, following, selves, by_name):
                    raise NotTraceableError(f"its code calls {what}")
                if by_name:  # such as training, by names that are written out
                    attributes |= {text for text in code.co_consts if isinstance(text, str)}
                place = function.__globals__.get(what)
                home = place.__name__ if isinstance(place, ModuleType) else getattr(place, "__module__", None)
                if home in _CHANGING_MODULES:
                    raise NotTraceableError(f"its code calls {what}, which gives something else at every call")
            if (
                what in _REFUSED_NAMES
                and operation in _READS
                and (what != "__class__" or not _chain(instructions, position, selves, _packed(function)))
            ):
                raise NotTraceableError(f"its code {_in_words(what)}")
            if operation in _WITH or what == "__enter__":
                raise NotTraceableError("its code has a with statement")
            if operation in _TRY and _takes_values(code):
                # a helper that is given nothing has no symbols to try
                raise NotTraceableError("its code has a try statement, and symbols raise other exceptions")
            if operation.startswith("MATCH_"):
                raise NotTraceableError("its code has a match statement, and symbols have other types")
            if operation == "IS_OP" and not _is_of_constants(function, instructions[max(position - 2, 0) : position]):
                raise NotTraceableError("its code asks whether two values are the same object, with is")
            if operation in _READS:
                attributes.add(what)
            if operation in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = _chain(instructions, position, selves)
                if len(chain) > 1:
                    chains.add(chain)
                if what == "training" and not chain:
                    raise NotTraceableError("its code asks whether another module trains")


def _in_words(name: str) -> str:
    if name in ("parameters", "named_parameters", "buffers", "named_buffers", "_parameters", "_buffers"):
        return f"reads its {name.strip('_')}, whose dtypes and devices a trace would not ask again"
    if name in ("backends", "environ"):
        return f"reads {'torch' if name == 'backends' else 'os'}.{name}, which may change"
    return f"asks for {name}" if name.startswith("__") else f"calls {name}"


def _is_no_symbol(
    function: FunctionType, following: Sequence[dis.Instruction], selves: frozenset[str], takes_parts: bool
) -> bool:
    """Whether what a function is called with first is the module, or a package: not what a trace has symbols of."""
    for instruction in following:
        if instruction.opname == "PUSH_NULL":
            continue
        if instruction.opname == "LOAD_GLOBAL":
            return isinstance(function.__globals__.get(instruction.argval), ModuleType)
        named = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        # what the module holds may be of another type later
        return named[0] in selves and (takes_parts or following[-1].opname not in ("LOAD_ATTR", "LOAD_METHOD"))
    return False


def _is_of_constants(function: FunctionType, before: Sequence[dis.Instruction]) -> bool:
    """Whether ``is`` compares with what no symbol stands for: None, or an object from outside the function."""
    if before[-1].opname == "LOAD_CONST":
        return True
    outside = before[-1].opname == "LOAD_GLOBAL" or before[-1].argval in function.__code__.co_freevars
    return outside and before[0].argval not in ("dtype", "device", "layout")


def _takes_values(code: CodeType) -> bool:
    packed = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return bool(code.co_argcount or code.co_kwonlyargcount or code.co_freevars or packed)


def _packed(function: FunctionType) -> str:
    """The name of a wrapper's ``*args``, the first of which is the module; "" for none."""
    code = function.__code__
    has = code.co_flags & inspect.CO_VARARGS and not code.co_argcount and is_wrapped(function)
    return code.co_varnames[code.co_kwonlyargcount] if has else ""


def _chain(
    instructions: Sequence[dis.Instruction], position: int, selves: frozenset[str], packed: str = ""
) -> tuple[str, ...]:
    """The attributes, from the module's own on, that the one read there is of; none if it is not the module's."""
    found: list[str] = []
    while instructions[position].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        found.insert(0, instructions[position].argval)
        position -= 1
    if (
        packed
        and position > 1
        and (instructions[position - 2].argval, instructions[position - 1].argval) == (packed, 0)
    ):
        return tuple(found)
    named = instructions[position].argval
    named = named[-1] if isinstance(named, tuple) and named else named  # two loads in one, from Python 3.13 on
    of_self = instructions[position].opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and named in selves
    return tuple(found) if of_self and position >= 0 else ()


def _owner(module: nn.Module, chain: tuple[str, ...]) -> nn.Module | None:
    """The submodule that the last attribute is read of; None if it is none."""
    found: nn.Module | None = module
    for name in chain[:-1]:
        found = found._modules.get(name) if found is not None else None
    return found


def _check_chain(module: nn.Module, chain: tuple[str, ...]) -> None:
    owner = _owner(module, chain)
    if owner is None:
        if chain[-1] == "training":
            raise NotTraceableError("its code asks whether another module trains")
        return
    place = inspect.getattr_static(type(owner), chain[-1], None)
    own = getattr(nn.Module, chain[-1], None) is place or type(owner).__module__.startswith("torch.")
    if isinstance(place, FunctionType | property) and not own:
        raise NotTraceableError(f"its code calls {'.'.join(chain)}, a method of a submodule")


def read_methods(module: nn.Module, reading: Reading) -> tuple[str, ...]:
    """The names among the attributes that are functions of the class: the instance should have none in their place."""
    kinds = (FunctionType, staticmethod, classmethod, property)
    places = {name: inspect.getattr_static(type(module), name, None) for name in reading.attributes - {"forward"}}
    found = [name for name, place in places.items() if isinstance(place, kinds)]
    return tuple(sorted(name for name in found if getattr(nn.Module, name, None) is not places[name]))


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
        mentioned = {other for code in codes_of(inspect.unwrap(function).__code__) for other in code.co_names}
        if name != "forward" and name not in module.__dict__ and mentioned & set(names):
            found.append(name)
        waiting += sorted(mentioned - seen)
        seen |= mentioned
    return sorted(found)


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
            # the first is what a method computes with; another may be None, such as a mask
            is_opaque = found and parameter.name in handed_on and parameter.kind is not parameter.POSITIONAL_ONLY
            role = "opaque" if is_opaque else "tensor"
            found.append(Parameter(parameter.name, role, positional=positional, required=True))
        else:
            role = "opaque" if parameter.name in handed_on else "fixed"
            found.append(Parameter(parameter.name, role, parameter.default, positional))
    return tuple(found)


def _handed_on(module: nn.Module, function: FunctionType, inlined: frozenset[nn.Module]) -> set[str]:
    """The names that appear in the function's source only as arguments of calls of submodules."""
    tree = source_tree(inspect.unwrap(function))
    if tree is None:
        return set()
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

"""An epilogue's parameters: the accumulator first, then the operands and how each spreads over it.

    >>> @epilogue
    ... def scale_and_add(acc, scale: Row, offset: Column, alpha: Scalar, residual: Aux[torch.float32]):
    ...     return (acc * scale + offset) * alpha + residual

Contract
--------
* The first parameter is the accumulator, whatever its name; an operand kind as its annotation is refused.
* Every other parameter is an operand; its annotation says its kind.  ``Row[torch.float32]`` also fixes the
  dtype of the tensor that may be given; a number is rounded to it.  No annotation: the kind is told from the
  shape at the call.
* Annotations may be strings (``from __future__ import annotations``): they are evaluated with the
  function's globals and closure, and where that fails are matched by their last dotted name (``"ep.Row"``).
* No defaults, ``*args``, ``**kwargs`` or positional-only parameters: operands are given by name.
* What a ``functools.partial`` binds by keyword is no operand.
* Of an ``nn.Module`` the parameters are those of its ``forward``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional as F

from .dtypes import dtype_name
from .errors import DtypeError, EpilogueError
from .source import explain, function_location, plain_function, short
from .tree import Kind

if TYPE_CHECKING:
    # To a type checker an annotated operand is the symbolic value that the function's body computes with.
    from .symbol import Symbol as _Base
else:
    _Base = object

#: Names that operands cannot have: keywords of matmul, linear, FusedLinear and Epilogue.reference.
RESERVED_NAMES = frozenset(
    {"a", "b", "x", "weight", "epilogue", "out", "input", "self"} | {"compute_dtype", "keep_casts", "out_dtype"}
)
#: What such an operand may be called instead.
_OTHER_NAMES = {"a": "alpha", "b": "bias", "x": "residual", "input": "residual", "out": "residual", "weight": "scale"}


def reserved_hint(name: str) -> str:
    """What to do about a reserved name."""
    other = _OTHER_NAMES.get(name, f"{name}_operand")
    return f"rename it, for example to {other!r}; reserved are {', '.join(sorted(RESERVED_NAMES))}"


class OperandAnnotation(_Base):
    """Base of :class:`Row`, :class:`Column`, :class:`Scalar` and :class:`Aux`; never instantiated."""

    kind: ClassVar[Kind]
    operand_dtype: ClassVar[str | None] = None

    def __class_getitem__(cls, dtype: torch.dtype | str) -> type[OperandAnnotation]:
        name = dtype_name(dtype)
        return type(f"{cls.__name__}[{name}]", (cls,), {"operand_dtype": name, "__doc__": cls.__doc__})


class Row(OperandAnnotation):
    """An operand of length N: element (i, j) of the accumulator meets entry j.  A bias is one."""

    kind = Kind.ROW


class Column(OperandAnnotation):
    """An operand of length M: element (i, j) of the accumulator meets entry i.  A per-row scale is one."""

    kind = Kind.COLUMN


class Scalar(OperandAnnotation):
    """One value for all elements: a Python number or a tensor of one element."""

    kind = Kind.SCALAR


class Aux(OperandAnnotation):
    """An auxiliary matrix of the accumulator's shape: element (i, j) meets entry (i, j)."""

    kind = Kind.AUX


_BY_NAME: dict[str, type[OperandAnnotation]] = {kind.__name__: kind for kind in (Row, Column, Scalar, Aux)}
_SPELLING = re.compile(r"(?:\w+\.)*(?P<kind>Row|Column|Scalar|Aux)(?:\[['\"]?(?:\w+\.)*(?P<dtype>\w+)['\"]?\])?")


class Parameter:
    """One operand parameter: its name, kind, dtype (None: any), and whether it is keyword-only."""

    def __init__(self, name: str, annotation: type[OperandAnnotation] | None, keyword_only: bool) -> None:
        self.name = name
        self.kind = Kind.AUTO if annotation is None else annotation.kind
        self.dtype = None if annotation is None else annotation.operand_dtype
        self.keyword_only = keyword_only


def read_parameters(function: Callable[..., Any], name: str) -> tuple[Parameter, ...]:
    """The operand parameters of an epilogue function, in order.

    Raises:
        EpilogueError: if the function's signature is not one an epilogue can have.
        DtypeError: if an annotation fixes a dtype that operands cannot have.
    """

    def refuse(message: str, instead: str) -> EpilogueError:
        return EpilogueError(explain(f"epilogue {name}: {message}", function_location(function), instead=instead))

    signed = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        if inspect.ismethoddescriptor(function):
            raise TypeError("such as torch.Tensor.relu, of which some Python versions know the parameters")
        parameters = list(inspect.signature(signed).parameters.values())
    except (TypeError, ValueError):
        raise refuse(f"{function!r} does not tell its parameters", _wrap(function)) from None
    if isinstance(function, functools.partial):
        # what is bound is no operand, though a call could still give another
        parameters = [parameter for parameter in parameters if parameter.name not in function.keywords]
    if _is_unbound(function, parameters):
        raise refuse(
            f"{function.__qualname__} is a method of no object: its first parameter is self, not the accumulator",
            f"bind it to an object: epilogue(made.{function.__name__}), or decorate a function outside of the class",
        )
    if not parameters:
        raise refuse("expected a first parameter, the accumulator", f"write def {name}(acc, ...)")
    found = []
    for index, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise refuse(
                f"parameter {stars}{parameter.name} stands for any number of operands",
                "name each operand as a parameter of its own",
            )
        if parameter.default is not parameter.empty:
            raise refuse(
                f"parameter {parameter.name} has a default ({short(parameter.default)}); operands have none",
                _wrap(function)
                if _is_library(function)
                else "write the number in the body, or give it with each call as a Scalar operand; "
                f"if the function is not yours to change, {_wrap(function)}",
            )
        if index == 0:
            if parameter.kind is parameter.KEYWORD_ONLY:
                raise refuse("the first parameter, the accumulator, is keyword-only", "remove the *")
            if _is_kind(_resolve_first(parameter.annotation, signed)):
                raise refuse(
                    f"the first parameter is the accumulator, and {parameter.name} is annotated as an operand "
                    f"({_spelled(parameter.annotation)})",
                    f"put the accumulator before it: def {name}(acc, {parameter.name}: ...)",
                )
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise refuse(f"operand {parameter.name} is positional-only; operands are given by name", "remove the /")
        if parameter.name in RESERVED_NAMES:
            raise refuse(
                f"operand {parameter.name!r} has a name that the functions taking operands use themselves",
                reserved_hint(parameter.name),
            )
        try:
            annotation = _resolve(parameter.annotation, signed)
        except DtypeError as error:
            raise DtypeError(
                explain(f"epilogue {name}: operand {parameter.name}: {error}", function_location(function))
            ) from None
        if annotation is not None and not _is_kind(annotation):
            why = annotation.why if isinstance(annotation, _Unresolved) else ""
            raise refuse(
                f"operand {parameter.name} is annotated {short(parameter.annotation)}"
                f"{why}; expected Row, Column, Scalar, Aux or nothing",
                f"write {parameter.name}: Row (length N), Column (length M), Scalar or Aux (M x N)",
            )
        found.append(Parameter(parameter.name, annotation, parameter.kind is parameter.KEYWORD_ONLY))
    return tuple(found)


def _is_unbound(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a function is written in a class as a method, and has no object."""
    within = str(getattr(function, "__qualname__", "")).rpartition(".")[0]
    in_class = within != "" and not within.endswith("<locals>")
    return inspect.isfunction(function) and in_class and bool(parameters) and parameters[0].name == "self"


def _is_kind(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OperandAnnotation) and hasattr(annotation, "kind")


def _spelled(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _is_library(function: Callable[..., Any]) -> bool:
    """Whether the function is compiled, PyTorch's or this package's, and so not the user's to change."""
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return package in ("torch", "epilogues") or not hasattr(plain_function(function), "__code__")


def _wrap(function: Callable[..., Any]) -> str:
    """The advice to call a function within one of the accumulator alone."""
    from . import functions
    from .builders import ACTIVATIONS

    name = str(getattr(function, "__name__", "f"))
    places = (("F.", F), ("torch.", torch), ("acc.", torch.Tensor), ("ep.", functions))
    found = next((prefix for prefix, place in places if getattr(place, name, None) is function), None)
    activation = found is not None and name in ACTIVATIONS
    arguments = [] if found == "acc." else ["acc"]
    arguments += [] if activation else ["..."]
    called = f"wrap it: lambda acc: {found or ''}{name}({', '.join(arguments)})"
    return f'{called}, or use epilogues.builders.activation("{name}")' if activation else called


def _resolve_first(annotation: Any, function: Callable[..., Any]) -> Any:
    """The object that the accumulator's annotation names; it may name anything."""
    try:
        return _resolve(annotation, function)
    except DtypeError:
        return Row  # of a dtype that it cannot have


def _resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    """The object an annotation names; None for no annotation."""
    if annotation is inspect.Parameter.empty:
        return None
    for _ in range(3):  # an annotation in quotes, under `from __future__ import annotations`, is quoted twice
        if not isinstance(annotation, str):
            break
        annotation = _evaluate(annotation, function)
    return annotation


def _evaluate(text: str, function: Callable[..., Any]) -> Any:
    plain = plain_function(function)
    code, cells = getattr(plain, "__code__", None), getattr(plain, "__closure__", None)
    closure: dict[str, Any] = {}
    for variable, cell in zip(code.co_freevars if code else (), cells or (), strict=True):
        try:
            closure[variable] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    try:
        return eval(text, getattr(plain, "__globals__", {}), closure)
    except DtypeError:
        raise
    except Exception as error:  # evaluating what the user wrote may raise anything
        match = _SPELLING.fullmatch(text.strip().strip("'\""))
        if match is None:
            return _Unresolved(f"{type(error).__name__}: {error}")
        annotation = _BY_NAME[match["kind"]]
        if match["dtype"] is None:
            return annotation
        dtype = getattr(torch, match["dtype"], match["dtype"])
        return annotation.__class_getitem__(dtype)


class _Unresolved:
    """A string annotation that could not be evaluated."""

    def __init__(self, error: str) -> None:
        self.why = (
            f", which could not be evaluated ({error}: annotations that are text, as all are under "
            "`from __future__ import annotations`, see the module's names and those that the body uses)"
        )

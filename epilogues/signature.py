"""An epilogue's parameters: the accumulator first, then the operands and how each spreads over it.

    >>> @epilogue
    ... def scale_and_add(acc, scale: Row, offset: Column, alpha: Scalar, residual: Aux[torch.float32]):
    ...     return (acc * scale + offset) * alpha + residual

Contract
--------
* The first parameter is the accumulator, whatever its name and annotation.
* Every other parameter is an operand; its annotation says its kind.  ``Row[torch.float32]`` also fixes the
  dtype of the tensor that may be given.  No annotation: the kind is told from the shape at the call.
* Annotations may be strings (``from __future__ import annotations``): they are evaluated with the
  function's globals and closure, and where that fails are matched by their last dotted name (``"ep.Row"``).
* No defaults, ``*args``, ``**kwargs`` or positional-only parameters: operands are given by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .dtypes import dtype_name
from .errors import DtypeError, EpilogueError
from .source import explain, function_location
from .tree import Kind

if TYPE_CHECKING:
    # To a type checker an annotated operand is the symbolic value that the function's body computes with.
    from .tracing import Symbol as _Base
else:
    _Base = object

#: Names that operands cannot have: keywords of matmul, linear, FusedLinear and Epilogue.reference.
RESERVED_NAMES = frozenset(
    {"a", "b", "x", "weight", "epilogue", "out", "input", "self"} | {"compute_dtype", "keep_casts", "out_dtype"}
)


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
_SPELLING = re.compile(r"(?:\w+\.)*(?P<kind>Row|Column|Scalar|Aux)(?:\[(?:\w+\.)*(?P<dtype>\w+)\])?")


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

    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise refuse(f"expected a Python function of the accumulator, got {function!r}", "decorate a def") from None
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
                f"parameter {parameter.name} has a default ({parameter.default!r}); operands have none",
                "write the number in the body, or give it with each call as a Scalar operand",
            )
        if index == 0:
            if parameter.kind is parameter.KEYWORD_ONLY:
                raise refuse("the first parameter, the accumulator, is keyword-only", "remove the *")
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise refuse(f"operand {parameter.name} is positional-only; operands are given by name", "remove the /")
        if parameter.name in RESERVED_NAMES:
            raise refuse(
                f"operand {parameter.name!r} has a name that the functions taking operands use themselves",
                f"choose another name; reserved are {', '.join(sorted(RESERVED_NAMES))}",
            )
        try:
            annotation = _resolve(parameter.annotation, function)
        except DtypeError as error:
            raise DtypeError(
                explain(f"epilogue {name}: operand {parameter.name}: {error}", function_location(function))
            ) from None
        if annotation is not None and not (
            isinstance(annotation, type) and issubclass(annotation, OperandAnnotation) and hasattr(annotation, "kind")
        ):
            raise refuse(
                f"operand {parameter.name} is annotated {parameter.annotation!r}; "
                "expected Row, Column, Scalar, Aux or nothing",
                f"write {parameter.name}: Row (length N), Column (length M), Scalar or Aux (M x N)",
            )
        found.append(Parameter(parameter.name, annotation, parameter.kind is parameter.KEYWORD_ONLY))
    return tuple(found)


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
    plain = inspect.unwrap(function)
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
    except Exception:  # evaluating what the user wrote may raise anything
        match = _SPELLING.fullmatch(text.strip().strip("'\""))
        if match is None:
            return _Unresolved(text)
        annotation = _BY_NAME[match["kind"]]
        if match["dtype"] is None:
            return annotation
        dtype = getattr(torch, match["dtype"], match["dtype"])
        return annotation.__class_getitem__(dtype)


class _Unresolved:
    """A string annotation that names nothing we know."""

    def __init__(self, text: str) -> None:
        self.text = text

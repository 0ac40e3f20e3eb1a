"""How operands spread over the accumulator: shapes to kinds, without any tensor.

    >>> from epilogues.operand_shapes import bind_kind
    >>> from epilogues.tree import Kind, Operand
    >>> bind_kind(Operand("bias", Kind.AUTO, 0), (4096,), m_shape=(128,), n=4096)
    <Kind.ROW: 'row'>

The accumulator has shape ``(*m_shape, n)``: ``m_shape`` are the leading dimensions, such as (batch,
sequence), and M is their product.  What each kind accepts:

========  ==============================================================================
Row       (N,), or (1, N), (1, 1, N), ... with no more dimensions than the accumulator
Column    m_shape or (*m_shape, 1): one entry for each row of the accumulator
Scalar    a number (an int, a float, or another real number), or a tensor of one element of any shape
Aux       (*m_shape, N), the accumulator's own shape
========  ==============================================================================

An operand without annotation (AUTO) is the one of these that its shape says, and is refused where the shape
says two different ones: a vector when M == N, or a tensor shaped like m_shape whose last size is N too.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import BroadcastError, EpilogueError
from .source import short
from .tree import EpilogueTree, Kind, Operand

Shape = tuple[int, ...]


def is_number(value: object) -> bool:
    """Whether a value is a number of the language: a real one, of numpy's too, that is no truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def operand_number(operand: Operand, given: Any) -> float:
    """The number given for an operand that is given no tensor.

    Raises:
        EpilogueError: if it is none, or too large for a float.
    """
    if not is_number(given):
        raise _neither(operand, given)
    try:
        return float(given)
    except OverflowError:
        raise EpilogueError(f"operand {operand.name}: the integer given is too large for a float") from None


def _neither(operand: Operand, given: Any) -> EpilogueError:
    kind = type(given).__name__
    got = f"{kind} {short(given)}" if isinstance(given, str | bool | complex | None) else kind
    holds_numbers = isinstance(given, list | tuple) or hasattr(given, "__array__")
    hint = f"; make it a tensor: torch.as_tensor({operand.name})" if holds_numbers else ""
    return EpilogueError(f"operand {operand.name}: expected a tensor, an int or a float, got {got}{hint}")


def bind_kind(operand: Operand, shape_or_number: Sequence[int] | float, m_shape: Shape, n: int) -> Kind:
    """The kind of an operand, given the shape of its tensor, or its Python number.

    Raises:
        BroadcastError: if the shape is not one of its kind, or, not annotated, is ambiguous or none at all.
        EpilogueError: if it is neither a shape nor a number.
    """
    m_shape = tuple(m_shape)
    if is_number(shape_or_number):
        if operand.kind in (Kind.SCALAR, Kind.AUTO):
            return Kind.SCALAR
        raise BroadcastError(
            f"operand {operand.name} ({_title(operand.kind)}): expected a tensor of "
            f"{_expected(operand.kind, m_shape, n)}, got the number {shape_or_number!r}; "
            "a number can be given to a Scalar operand"
        )
    if not isinstance(shape_or_number, tuple | list):
        raise _neither(operand, shape_or_number)
    shape = tuple(shape_or_number)
    if operand.kind is Kind.AUTO:
        return _tell_kind(operand, shape, m_shape, n)
    if not fits(operand.kind, shape, m_shape, n):
        raise BroadcastError(
            f"operand {operand.name} ({_title(operand.kind)}): expected {_expected(operand.kind, m_shape, n)} "
            f"for an accumulator of shape {(*m_shape, n)}, got {shape}"
        )
    return operand.kind


def fits(kind: Kind, shape: Shape, m_shape: Shape, n: int) -> bool:
    """Whether a tensor of that shape can be an operand of that kind."""
    if kind is Kind.ROW:
        return 1 <= len(shape) <= len(m_shape) + 1 and shape[-1] == n and set(shape[:-1]) <= {1}
    if kind is Kind.COLUMN:
        return shape in (m_shape, (*m_shape, 1))
    if kind is Kind.SCALAR:
        return math.prod(shape) == 1
    return shape == (*m_shape, n)


def _tell_kind(operand: Operand, shape: Shape, m_shape: Shape, n: int) -> Kind:
    if fits(Kind.SCALAR, shape, m_shape, n):
        return Kind.SCALAR
    if len(shape) >= 2 and fits(Kind.AUX, shape, m_shape, n):
        return Kind.AUX  # where M or N is 1 this may be a row or a column too, of the same values
    if shape == m_shape and shape[-1] == n and n > 1:
        raise BroadcastError(
            f"operand {operand.name}: shape {shape} is ambiguous for an accumulator of shape "
            f"{(*m_shape, n)}: its last size is N as for a Row, and it is the shape of a Column; "
            f"annotate it as Row or Column ({operand.name}: Row)"
        )
    for kind in (Kind.ROW, Kind.COLUMN):
        if fits(kind, shape, m_shape, n):
            return kind
    kinds = (Kind.ROW, Kind.COLUMN, Kind.SCALAR, Kind.AUX)
    options = "; ".join(f"{_title(kind)}: {_expected(kind, m_shape, n).removeprefix('shape ')}" for kind in kinds)
    raise BroadcastError(
        f"operand {operand.name}: shape {shape} does not spread over an accumulator of shape "
        f"{(*m_shape, n)}; expected one of {options}"
    )


def spread_shape(kind: Kind, m_shape: Shape, n: int) -> Shape:
    """The shape to view a bound operand in, so that it broadcasts against the accumulator.

    It has the accumulator's number of dimensions, and the same elements in the same order as the operand,
    so that ``tensor.reshape`` never copies; a scalar has none, ``()``.
    """
    if kind is Kind.ROW:
        return (*(1 for _ in m_shape), n)
    if kind is Kind.COLUMN:
        return (*m_shape, 1)
    if kind is Kind.SCALAR:
        return ()
    if kind is Kind.AUX:
        return (*m_shape, n)
    raise EpilogueError("an operand of kind AUTO has no shape yet; bind_kind tells its kind")


def check_names(tree: EpilogueTree, given_names: Iterable[str]) -> None:
    """Checks that exactly the operands of the tree are given.

    Raises:
        EpilogueError: naming what is missing and what is unknown, and the operands expected.
    """
    expected = [operand.name for operand in tree.operands]
    given = list(given_names)
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if not missing and not unknown:
        return
    found = [f"missing operand {', '.join(missing)}"] if missing else []
    found += [f"unknown operand {', '.join(unknown)}"] if unknown else []
    listed = ", ".join(f"{op.name}: {_title(op.kind)}" for op in tree.operands) or "no operands"
    raise EpilogueError(f"{' and '.join(found)}; the epilogue takes ({listed}), each by its name")


def _title(kind: Kind) -> str:
    return "any kind" if kind is Kind.AUTO else kind.value.capitalize()


def _expected(kind: Kind, m_shape: Shape, n: int) -> str:
    if kind is Kind.ROW:
        return f"shape ({n},)"
    if kind is Kind.COLUMN:
        return f"shape {m_shape} or {(*m_shape, 1)}"
    if kind is Kind.SCALAR:
        return "a number or a tensor of one element"
    return f"shape {(*m_shape, n)}"

"""How operands spread over the accumulator: shapes to kinds, without any tensor.

    >>> from epilogues.operand_shapes import bind_kind
    >>> from epilogues.tree import Kind, Operand
    >>> bind_kind(Operand("bias", Kind.AUTO, 0), (4096,), m_shape=(128,), n=4096)
    <Kind.ROW: 'row'>

The accumulator has shape ``(*m_shape, n)``: ``m_shape`` are the leading dimensions, such as (batch, sequence),
of which the last is M and those before it are the batch.  Operands spread over it as PyTorch broadcasts, aligned
at the right; ``*b`` are sizes that broadcast against the batch, each of them 1 or that of the batch, the first
ones left out or not.  What each kind accepts:

========  ==============================================================================
Row       (N,) or (*b, 1, N): one entry for each column of the accumulator
Column    (*b, M, 1): one entry for each row; or m_shape itself, which is (M,) without batch
Scalar    a number (an int, a float, or another real number), or a tensor of one element of any shape
Aux       (*b, M, N): one entry for each element
========  ==============================================================================

None but a scalar has more dimensions than the accumulator.  Where there is only N (m_shape is empty), a row and an
aux are (N,) and a column is () or (1,).  A number for each batch, (B, 1, 1), is none of these: it is a column,
``x.expand(B, M, 1)``, which takes no memory.

An operand without annotation (AUTO) is the one of these that its shape says.  Where several kinds read the same
values (an extent is 1) it is the first of scalar, aux, row and column.  Where they do not, it is refused, and that is
where a shape is m_shape and its last size is N, as for a vector when M == N.
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
        _refuse_number_per_batch(operand, shape, m_shape)
        note = "" if operand.kind is Kind.SCALAR else _batch_note(m_shape)
        raise BroadcastError(
            f"operand {operand.name} ({_title(operand.kind)}): expected {_expected(operand.kind, m_shape, n)} "
            f"for an accumulator of shape {(*m_shape, n)}, got {shape}{note}"
        )
    return operand.kind


def fits(kind: Kind, shape: Shape, m_shape: Shape, n: int) -> bool:
    """Whether a tensor of that shape can be an operand of that kind."""
    return _spread(kind, tuple(shape), tuple(m_shape), n) is not None


def spread_shape(kind: Kind, shape: Shape, m_shape: Shape, n: int) -> Shape:
    """The shape to view a bound operand in, so that it broadcasts against the accumulator.

        >>> spread_shape(Kind.COLUMN, (2, 128), m_shape=(2, 128), n=4096)
        (2, 128, 1)
        >>> spread_shape(Kind.ROW, (4096,), m_shape=(2, 128), n=4096)
        (1, 1, 4096)

    It has the accumulator's number of dimensions, each of size 1 or the accumulator's, and the same elements in
    the same order as the operand: ``tensor.reshape`` only adds dimensions of size 1 and never copies.  A scalar
    has no dimensions, ``()``.

    Raises:
        EpilogueError: if the kind is AUTO, or the shape is not one of the kind; bind_kind tells both.
    """
    spread = None if kind is Kind.AUTO else _spread(kind, tuple(shape), tuple(m_shape), n)
    if spread is None:
        raise EpilogueError(f"shape {tuple(shape)} is not one that an operand ({_title(kind)}) is bound in")
    return spread


def repeated_dims(spread: Shape, accumulator: Shape) -> tuple[int, ...]:
    """The dimensions of the accumulator along which an operand, viewed in ``spread``, is repeated."""
    aligned = (1,) * (len(accumulator) - len(spread)) + spread
    return tuple(i for i, (own, size) in enumerate(zip(aligned, accumulator, strict=True)) if own != size)


def _spread(kind: Kind, shape: Shape, m_shape: Shape, n: int) -> Shape | None:
    """:func:`spread_shape`, or None where the shape is not one of the kind."""
    if kind is Kind.SCALAR:
        return () if math.prod(shape) == 1 else None
    if kind is Kind.COLUMN and shape == m_shape:
        return (*m_shape, 1)
    rows, columns, dims = shape[-2:-1], shape[-1:], len(m_shape) + 1
    if kind is Kind.ROW:
        fit = columns == (n,) and rows in ((), (1,))
    else:
        fit = columns == (1 if kind is Kind.COLUMN else n,) and rows == m_shape[-1:]
    if not fit or len(shape) > dims or not _broadcasts(shape[:-2], m_shape[:-1]):
        return None
    return (1,) * (dims - len(shape)) + shape


def _broadcasts(sizes: Shape, batch: Shape) -> bool:
    """Whether sizes broadcast against those of the batch, without making it larger."""
    if not sizes:
        return True
    aligned = zip(reversed(sizes), reversed(batch), strict=False)
    return len(sizes) <= len(batch) and all(own in (1, size) for own, size in aligned)


def _tell_kind(operand: Operand, shape: Shape, m_shape: Shape, n: int) -> Kind:
    elements = math.prod(shape)
    if elements == 1:
        return Kind.SCALAR
    kinds = (Kind.AUX, Kind.ROW, Kind.COLUMN) if m_shape else (Kind.ROW, Kind.COLUMN)
    found = next((kind for kind in kinds if fits(kind, shape, m_shape, n)), None)
    # all other shapes are aligned at the right whatever the kind; and no elements are no values to mix up
    if shape == m_shape and shape[-1] == n > 1 and elements > 0:
        raise _ambiguous(operand, shape, m_shape, n, found)
    if found is not None:
        return found
    _refuse_number_per_batch(operand, shape, m_shape)
    listed = (Kind.ROW, Kind.COLUMN, Kind.SCALAR, Kind.AUX)
    options = "; ".join(f"{_title(kind)}: {_expected(kind, m_shape, n).removeprefix('shape ')}" for kind in listed)
    raise BroadcastError(
        f"operand {operand.name}: shape {shape} does not spread over an accumulator of shape "
        f"{(*m_shape, n)}; expected one of {options}{_batch_note(m_shape)}"
    )


def _ambiguous(operand: Operand, shape: Shape, m_shape: Shape, n: int, found: Kind | None) -> BroadcastError:
    """The error for m_shape, a Column, whose last size is N; ``found`` is what else it is, or Column."""
    name = operand.name
    if found is None or found is Kind.COLUMN:
        other = "its last size is N as for a Row"
        advice = f"annotate it as Column ({name}: Column), or give a Row for each batch as {(*shape[:-1], 1, n)}"
    else:
        other = f"it is the shape of {'an' if found is Kind.AUX else 'a'} {_title(found)}"
        advice = f"annotate it as {_title(found)} or Column ({name}: {_title(found)})"
    return BroadcastError(
        f"operand {name}: shape {shape} is ambiguous for an accumulator of shape {(*m_shape, n)}: {other}, and it is "
        f"the shape of a Column, {m_shape} for {(*m_shape, 1)}; {advice}"
    )


def _refuse_number_per_batch(operand: Operand, shape: Shape, m_shape: Shape) -> None:
    """Says of (B, 1, 1), which PyTorch would broadcast, how to give it."""
    if len(shape) > 2 and shape[-2:] == (1, 1) and math.prod(shape) != 1 and _broadcasts(shape[:-2], m_shape[:-1]):
        expanded = ", ".join(map(str, (*shape[:-2], m_shape[-1], 1)))
        raise BroadcastError(
            f"operand {operand.name} ({_title(operand.kind)}): shape {shape} is a number per batch: "
            f"give it as a Column, {operand.name}.expand({expanded})"
        )


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
        return f"shape ({n},) or {(*m_shape[:-1], 1, n)}" if len(m_shape) > 1 else f"shape ({n},)"
    if kind is Kind.COLUMN:
        return f"shape {m_shape} or {(*m_shape, 1)}"
    if kind is Kind.SCALAR:
        return "a number or a tensor of one element"
    return f"shape {(*m_shape, n)}"


def _batch_note(m_shape: Shape) -> str:
    """What may be said of batch dimensions after the shapes expected; nothing where there are none."""
    return "; sizes before the last two may be 1, and the first ones left out" if len(m_shape) > 1 else ""

"""What there is to know of the tensors of a call: hashable, and enough to plan it.

>>> a = view_of(x, lead=x.stride()[:-1], k=x.stride(-1))
>>> Request((128,), 4096, 1024, a, b, operands, outputs)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from epilogues.tree import Kind

#: Extents that kernels count in 32 bits.
INT_MAX = 2**31 - 1
#: What TMA and 16-byte vector accesses need of a pointer and of strides.
ACCESS_BYTES = 16


@dataclass(frozen=True)
class View:
    """Where one tensor lies.  Strides are in elements.

    Attributes:
        lead: strides along the leading dimensions of the output, (batch dimensions, M); 0 where the tensor is repeated.
        k, n: strides along K and N; 0 for a tensor without that dimension.
        size: bytes of an element.
        offset: its address modulo 16.
    """

    lead: tuple[int, ...]
    k: int = 0
    n: int = 0
    size: int = 2
    offset: int = 0


@dataclass(frozen=True)
class OperandView:
    """An operand: its kind, and where its tensor lies; None for a number."""

    kind: Kind
    view: View | None


@dataclass(frozen=True)
class OutputView:
    """An output.

    Attributes:
        view: where it lies.
        padding: whether what follows its rows, up to the next 16 bytes, may be overwritten.
    """

    view: View
    padding: bool = False


@dataclass(frozen=True)
class Request:
    """All of a call that its addressing depends on.

    Attributes:
        extents: of the leading dimensions of the output, (batch dimensions, M).
        n, k: extents.
        a, b: the matrices; b has strides of 0 along M.
        operands: in the tree's order.
        outputs: the main one first.
    """

    extents: tuple[int, ...]
    n: int
    k: int
    a: View
    b: View
    operands: tuple[OperandView, ...]
    outputs: tuple[OutputView, ...]


def pitch_of(columns: int, size: int) -> int:
    """Elements from row to row of rows that begin at multiples of 16 bytes."""
    return -(-columns * size // ACCESS_BYTES) * ACCESS_BYTES // size


def address_of(tensor: Tensor) -> int:
    """Where the tensor begins; 0 for one without memory (fake, or inside vmap), which no kernel will see."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def stands_for_others(tensor: Tensor) -> bool:
    """Whether a tensor tells PyTorch's dispatcher itself what operations do, as a DTensor or a fake tensor does."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def has_memory(tensor: Tensor) -> bool:
    """Whether there is anything to address; not of fake tensors and DTensors, nor of those inside vmap."""
    if stands_for_others(tensor):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def view_of(tensor: Tensor, lead: tuple[int, ...], *, k: int = 0, n: int = 0) -> View:
    """The view of a tensor whose strides along the call's dimensions are these."""
    return View(lead, k, n, tensor.element_size(), address_of(tensor) % ACCESS_BYTES)


def strides_along(tensor: Tensor, dims: int, count: int) -> tuple[int, ...]:
    """The strides of the first ``dims`` dimensions of a tensor, as the last of ``count``; 0 where it is repeated."""
    strides = tuple(
        0 if extent == 1 else stride for extent, stride in zip(tensor.shape[:dims], tensor.stride()[:dims], strict=True)
    )
    return (0,) * (count - dims) + strides


def read_request(
    extents: tuple[int, ...],
    n: int,
    k: int,
    a: Tensor,
    b: Tensor,
    operands: Sequence[tuple[Kind, Tensor | None]],
    outputs: Sequence[OutputView],
) -> Request:
    """What the addressing of a call depends on.

    Args:
        extents: (batch dimensions, M).
        a: (..., M, K), or (K,).
        b: (..., K, N).
        operands: kind and tensor of each, with the output's number of dimensions; None for a number.
        outputs: see :func:`new_view` and :func:`view_of`.
    """
    count = len(extents)
    if a.ndim == 1:
        a = a[None]
    lead_b = strides_along(b, b.ndim - 2, count - 1)
    found = []
    for kind, tensor in operands:
        if tensor is None:
            found.append(OperandView(kind, None))
        elif kind is Kind.SCALAR:
            found.append(OperandView(kind, view_of(tensor, (0,) * count)))
        else:
            lead = strides_along(tensor, tensor.ndim - 1, tensor.ndim - 1)
            lead += (0,) * (count - len(lead))  # the M of 1 that a vector a has not
            step = tensor.stride(-1) if kind is not Kind.COLUMN else 0
            found.append(OperandView(kind, view_of(tensor, lead, n=step)))
    return Request(
        extents,
        n,
        k,
        view_of(a, strides_along(a, a.ndim - 1, count), k=a.stride(-1)),
        view_of(b, (*lead_b, 0), k=b.stride(-2), n=b.stride(-1)),
        tuple(found),
        tuple(outputs),
    )


def new_view(extents: tuple[int, ...], n: int, size: int, *, padded: bool) -> OutputView:
    """The view of an output that will be allocated, which PyTorch's allocator aligns more than is needed."""
    step = pitch_of(n, size) if padded else n
    lead: list[int] = []
    for extent in reversed(extents):
        lead.append(0 if extent == 1 else step)
        step *= extent
    return OutputView(View(tuple(reversed(lead)), n=1, size=size), padding=padded)


def given_view(tensor: Tensor, extents: tuple[int, ...]) -> OutputView:
    """The view of an output that the caller gives."""
    lead = strides_along(tensor, tensor.ndim - 1, tensor.ndim - 1)
    return OutputView(view_of(tensor, lead + (0,) * (len(extents) - len(lead)), n=tensor.stride(-1)))

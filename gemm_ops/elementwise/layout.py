"""Where the tensors of an elementwise call lie, as one kernel walks through them.

    >>> x, out = TensorView((4096, 1), 2), TensorView((4096, 1), 2)
    >>> bias = TensorView((0, 1), 2)
    >>> layout = plan_layout((8, 4096), [x, bias], [out])
    >>> layout.outer, layout.columns, [tensor.access for tensor in layout.inputs]
    ((8,), 4096, ['pieces', 'pieces'])
    >>> plan_layout((8, 4096), [x], [out]).outer            # nothing keeps the rows apart: one long row
    ()

Contract: a function of the shape, the strides and the addresses modulo 32.  No tensor is read, no device is needed.
Every element of the shape is visited once; a dimension of extent 1 has no say, whatever its strides.  Strides of 0 are
broadcasts.  What the kernel cannot walk through is said in words, not raised.

Which dimension is innermost is the main output's choice, the one that is written in longest runs: a problem all of
whose tensors are transposed is then contiguous again.  A tensor that runs another way is reached element by element;
where it runs along the next dimension, neighbouring threads take neighbouring rows: together they reach 32 bytes.

Short rows that follow each other without a gap are walked through as one long row, although an input (a bias, a column)
begins anew in each of them: that input is reached element by element and wraps around at the end of a row.  Its
elements are few and cached; what is large is reached in whole pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..addressing.collapse import Dim, dims_of, merge
from ..addressing.views import address_of
from ..runtime.abi import MAX_OUTPUTS
from .arguments import MAX_INPUTS, MAX_OUTER

#: Bytes of a vector access.
ACCESS_BYTES = 16
#: What addresses are taken modulo: the longest piece, eight elements of four bytes.
PHASE_BYTES = 32

#: Rows that are walked through together for the sake of a transposed tensor: 32 bytes of two-byte elements, the least
#: that memory moves.  As ``kTileRows`` in ``cuda/elementwise_walk.cuh``.
TILE_ROWS = 16

#: Rows up to this length go as one long row where they are not aligned.  Measured on an H200, bias + GELU + residual
#: in bf16, microseconds as one long row and row by row: 65536 x 10 2.8 and 4.6, 16384 x 100 4.3 and 6.3, 16384 x 250
#: 7.3 and 10.7, 4096 x 1001 7.4 and 9.4, 8192 x 8191 98.1 and 96.8.
WRAP_UP_TO = 4096

#: A tensor of fewer pieces than this is cut into pieces of 8 bytes.  Measured on an H200 in bf16, microseconds with
#: pieces of 16, 8 and 4 bytes: bias + GELU + residual at 256 x 512 1.68, 1.58 and 1.63, at 512 x 512 1.71, 1.65 and
#: 1.77; ReLU 1.41, 1.38 and 1.46, and 1.47, 1.50 and 1.71.
FEWEST_THREADS = 2**15

#: How a tensor is reached along the innermost dimension.
PIECES = "pieces"  # one element after another, aligned wherever a piece of the main output begins: vector accesses
SHIFTED = "shifted"  # one element after another from anywhere: vector accesses, shifted into place where not aligned
REPEATED = "repeated"  # one element for all columns
STRIDED = "strided"  # element by element
WRAPPED = "wrapped"  # element by element, from the begin again at the end of each of the rows that make a long one
SCALAR = "scalar"  # one element for the whole call, or a number


@dataclass(frozen=True)
class TensorView:
    """A tensor of the call.

    Attributes:
        strides: in elements, along the dimensions of the output; 0 where the tensor is repeated.
        size: bytes of an element.
        offset: its address modulo 32.
    """

    strides: tuple[int, ...]
    size: int
    offset: int = 0


def view_of(tensor: Tensor, shape: Sequence[int]) -> TensorView:
    """The view of a tensor that spreads to a shape as PyTorch broadcasts it."""
    return TensorView(tensor.expand(*shape).stride(), tensor.element_size(), address_of(tensor) % PHASE_BYTES)


@dataclass(frozen=True)
class Placement:
    """How the kernel reaches a tensor.

    Attributes:
        access: "pieces", "shifted", "repeated", "strided", "wrapped" or "scalar"; see the constants of this module.
        strides: in bytes, along the outer dimensions; of a wrapped one, from row to row.
        column_stride: in bytes, along the innermost dimension.
        bytes: from the tensor's first byte to its last.
    """

    access: str
    strides: tuple[int, ...] = ()
    column_stride: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Layout:
    """The dimensions after merging, and every tensor along them.

    Attributes:
        outer: extents of the outer dimensions, outermost first.
        columns: extent of the innermost one.
        width: elements of a piece, which is a thread's unit of work.
        pieces_per_row: how many pieces a row has, or the most that any row may have.  Pieces begin where the main
            output's address is a multiple of their length, so the first and the last of a row may be partial.
        tiled: whether neighbouring threads take neighbouring rows, and not neighbouring pieces of one row.
        whole: whether every piece is whole: rows begin where pieces do and end where pieces do.
        wrap: length of the rows that make the long one, where an input is wrapped; else 0.
        inputs: x and the operands, in the order given.
        outputs: the main one first.
    """

    outer: tuple[int, ...]
    columns: int
    width: int
    pieces_per_row: int
    tiled: bool
    whole: bool
    wrap: int
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


def plan_layout(
    shape: Sequence[int], inputs: Sequence[TensorView | None], outputs: Sequence[TensorView]
) -> Layout | str:
    """The layout of a call, or why there is none.

    Args:
        shape: of the outputs.
        inputs: x and the operands; None for a number.
        outputs: the main one first.
    """
    if 0 in shape:
        return "the shape has no elements: there is nothing to launch"
    if len(inputs) > MAX_INPUTS or len(outputs) > MAX_OUTPUTS:
        return f"a kernel takes at most {MAX_INPUTS} inputs and {MAX_OUTPUTS} outputs"
    tensors = [*outputs, *(view for view in inputs if view is not None)]
    for view in tensors:
        if view.offset % view.size:
            return f"a tensor starts {view.offset % view.size} bytes into an element of {view.size}"
    dims = dims_of(shape, [view.strides for view in tensors])  # the main output's stride comes first
    if any(stride == 0 for dim in dims for stride in dim.strides[: len(outputs)]):
        return "an output is repeated along a dimension: several elements would be written to one place"
    # sorted() is stable: where the main output does not tell two dimensions apart, they keep their order
    dims = merge(sorted(dims, key=lambda dim: -dim.strides[0]))
    if len(dims) > MAX_OUTER + 1:
        return (
            f"{len(dims)} dimensions are left after merging those that all tensors go through in even steps; "
            f"kernels walk through {MAX_OUTER + 1}"
        )
    # of a single element the outputs are written as rows of one, and inputs read as what all elements share
    *outer, inner = dims or [Dim(1, tuple(int(i < len(outputs)) for i in range(len(tensors))))]
    wrapped = _wrapped(outer, inner, tensors, len(outputs))
    wrap = inner.extent if wrapped else 0
    if wrapped:
        rows = outer.pop()
        strides = tuple(0 if place in wrapped else stride for place, stride in enumerate(inner.strides))
        short, inner = inner, Dim(rows.extent * inner.extent, strides)
    accesses = [WRAPPED if i in wrapped else _access(outer, inner, i, tensors) for i in range(len(tensors))]
    sizes = [tensors[place].size for place, access in enumerate(accesses) if access in (PIECES, SHIFTED)]
    width = _width(min(sizes, default=4), math.prod(shape))
    first, step = _phases(outer, tensors[0], width) if accesses[0] == PIECES else (0, width)
    most = width - step + first % step
    placements = [
        _place(access, view, [rows], short, i) if access == WRAPPED else _place(access, view, outer, inner, i)
        for i, (access, view) in enumerate(zip(accesses, tensors, strict=True))
    ]
    given = iter(placements[len(outputs) :])
    tiled = bool(outer) and any(_is_turned(placement) for placement in placements) and outer[-1].extent >= TILE_ROWS
    return Layout(
        outer=tuple(dim.extent for dim in outer),
        columns=inner.extent,
        width=width,
        pieces_per_row=-(-(most + inner.extent) // width),
        tiled=tiled,
        whole=not tiled and first == 0 and step == width and inner.extent % width == 0,
        wrap=wrap,
        inputs=tuple(Placement(SCALAR) if view is None else next(given) for view in inputs),
        outputs=tuple(placements[: len(outputs)]),
    )


def _width(size: int, elements: int) -> int:
    """Elements of a piece: 16 bytes of the smallest, or half of that where it would leave too few threads."""
    width = ACCESS_BYTES // size
    return width // 2 if elements < FEWEST_THREADS * width else width


def _wrapped(outer: Sequence[Dim], inner: Dim, tensors: Sequence[TensorView], outputs: int) -> set[int]:
    """The inputs that begin anew in each row, where rows go as one long row all the same."""
    if len(outer) != 1 or inner.extent > WRAP_UP_TO or inner.extent * tensors[0].size % ACCESS_BYTES == 0:
        return set()
    steps = list(zip(outer[0].strides, inner.strides, strict=True))
    anew = {i for i, (step, stride) in enumerate(steps) if step != inner.extent * stride}
    goes_on = all(i in anew or stride == 1 or not step for i, (step, stride) in enumerate(steps))
    turned = any(0 < steps[i][0] < steps[i][1] for i in anew)
    return anew if goes_on and not turned and min(anew) >= outputs else set()


def _access(outer: Sequence[Dim], inner: Dim, place: int, tensors: Sequence[TensorView]) -> str:
    if not any(dim.strides[place] for dim in (*outer, inner)):
        return SCALAR
    stride = inner.strides[place]
    if stride != 1:
        return REPEATED if stride == 0 else STRIDED
    main = tensors[0] if inner.strides[0] == 1 else None
    return PIECES if _goes_along(outer, place, tensors[place], main) else SHIFTED


def _goes_along(outer: Sequence[Dim], place: int, view: TensorView, main: TensorView | None) -> bool:
    """Whether a tensor's address is a multiple of 16 bytes in every row where the main output's pieces begin.

    Args:
        main: None where the main output is not written in pieces: those begin where the rows do.
    """
    before = 0 if main is None else main.offset // main.size  # elements, modulo a piece
    steps = [dim.strides[place] - (0 if main is None else dim.strides[0]) for dim in outer]
    distances = [view.offset - before * view.size, *(step * view.size for step in steps)]
    return not any(distance % ACCESS_BYTES for distance in distances)


def _phases(outer: Sequence[Dim], main: TensorView, width: int) -> tuple[int, int]:
    """By how many elements the main output's first row begins after a multiple of the width; and a step.

    The numbers of any two rows differ by a multiple of the step, which divides the width.
    """
    return main.offset // main.size % width, math.gcd(width, *(dim.strides[0] for dim in outer))


def _is_turned(placement: Placement) -> bool:
    """Whether the tensor's elements are closer to each other along the last of the outer dimensions."""
    return 0 < placement.strides[-1] < placement.column_stride


def _place(access: str, view: TensorView, outer: Sequence[Dim], inner: Dim, place: int) -> Placement:
    reach = sum((dim.extent - 1) * dim.strides[place] for dim in (*outer, inner)) + 1
    return Placement(
        access,
        tuple(dim.strides[place] * view.size for dim in outer),
        inner.strides[place] * view.size,
        reach * view.size,
    )

"""What the families' rules share: dimensions merged, copies made until nothing changes.

A copy has strides of its own, which may let dimensions merge that did not before; so what has to be copied is decided
again until nothing changes.  A column operand that keeps the others' dimensions from merging is copied: it is small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from epilogues.tree import Kind

from ..kernels.access import Access
from .collapse import Dims, collapse
from .placement import Addressing, Placement
from .views import ACCESS_BYTES, Request, View, pitch_of


class Key(NamedTuple):
    """A tensor of the call."""

    role: str  # "a", "b", "operand" or "output"
    position: int = 0


A, B = Key("a"), Key("b")


@dataclass(frozen=True)
class Copy:
    """A tensor to copy: "padded" or "contiguous" or "back", why, and the copy's layout."""

    tensor: Key
    kind: str
    why: str
    layout: str = "row"


@dataclass(frozen=True)
class Strides:
    """Those of one tensor along the merged dimensions."""

    m: int
    batch: int
    loops: tuple[int, ...]


@dataclass(frozen=True)
class Sides:
    """A matrix from one of its two sides: ``outer`` vectors of ``inner`` elements that follow each other."""

    layout: str
    outer: int
    inner: int
    leading: int  # elements from vector to vector; of a single one, what suits


class Rules:
    """The rules of a family for one request; subclasses say what has to be copied, and how the rest is reached."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.copies: dict[Key, Copy] = {}
        self.views: dict[Key, View] = {A: request.a, B: request.b}
        for index, operand in enumerate(request.operands):
            if operand.view is not None:
                self.views[Key("operand", index)] = operand.view
        for index, output in enumerate(request.outputs):
            self.views[Key("output", index)] = output.view
        self.order: list[Key] = []
        self.dims = self._merge()

    def address(self) -> Addressing | str:
        """The addressing, or why the family cannot take the request, in words."""
        while (copy := self.find_copy()) is not None:
            assert copy.tensor not in self.copies, f"a copy of {copy.tensor} is not reached either: {copy.why}"
            self._copy(copy)
            self.dims = self._merge()
        return self.finish()

    def find_copy(self) -> Copy | None:
        """The next tensor that has to be copied."""
        raise NotImplementedError

    def finish(self) -> Addressing | str:
        """The addressing, with nothing left to copy."""
        raise NotImplementedError

    # Questions.

    def kind(self, tensor: Key) -> Kind | None:
        """Of an operand."""
        return self.request.operands[tensor.position].kind if tensor.role == "operand" else None

    def is_matrix(self, tensor: Key) -> bool:
        """Whether it is one of the epilogue's: an auxiliary operand or an output."""
        return tensor.role == "output" or self.kind(tensor) is Kind.AUX

    def strides(self, tensor: Key) -> Strides:
        """Along the merged dimensions."""
        place = self.order.index(tensor)
        dims = self.dims
        return Strides(dims.m.strides[place], dims.batch.strides[place], tuple(d.strides[place] for d in dims.loops))

    def used(self, tensor: Key) -> list[int]:
        """The strides along merged dimensions that move at all; M's first, if there is an M."""
        strides = self.strides(tensor)
        moving = [strides.m] if self.dims.m.extent > 1 else []
        moving += [strides.batch] if self.dims.batch.extent > 1 else []
        return moving + list(strides.loops)

    def around(self, tensor: Key) -> list[int]:
        """The same without M's: from one problem to the next."""
        return self.used(tensor)[self.dims.m.extent > 1 :]

    def sides(self, tensor: Key) -> list[Sides]:
        """The sides from which A or B is contiguous, rows first; none where neither stride is 1."""
        view, request = self.views[tensor], self.request
        if tensor == A:
            rows, columns, row_stride, column_stride = self.dims.m.extent, request.k, self.strides(A).m, view.k
        else:
            rows, columns, row_stride, column_stride = request.k, request.n, view.k, view.n
        found = []
        for layout, outer, inner, outer_stride, inner_stride in (
            ("row", rows, columns, row_stride, column_stride),
            ("column", columns, rows, column_stride, row_stride),
        ):
            if inner == 1 or inner_stride == 1:
                found.append(Sides(layout, outer, inner, outer_stride if outer > 1 else pitch_of(inner, view.size)))
        return found

    def no_side(self, tensor: Key) -> str:
        """Why A or B is not contiguous from any side."""
        view = self.views[tensor]
        pair = (self.strides(A).m, view.k) if tensor == A else (view.k, view.n)
        return f"neither of its strides {pair} is 1"

    def off(self, tensor: Key, leading: int) -> str:
        """Why a matrix does not lie in multiples of 16 bytes; "" if it does."""
        view = self.views[tensor]
        if leading * view.size % ACCESS_BYTES:
            return f"its leading dimension of {leading} elements is not a multiple of {ACCESS_BYTES} bytes"
        if view.offset:
            return f"it starts {view.offset} bytes after a multiple of {ACCESS_BYTES} bytes"
        if any(stride * view.size % ACCESS_BYTES for stride in self.around(tensor)):
            return f"its batch dimensions are not multiples of {ACCESS_BYTES} bytes apart"
        return ""

    def scattered(self) -> Copy | None:
        """A row or a column operand whose entries do not follow each other."""
        for index, operand in enumerate(self.request.operands):
            tensor = Key("operand", index)
            if operand.view is None or operand.kind not in (Kind.ROW, Kind.COLUMN) or tensor in self.copies:
                continue
            row = operand.kind is Kind.ROW
            extent, step = (
                (self.request.n, self.views[tensor].n) if row else (self.dims.m.extent, self.strides(tensor).m)
            )
            if extent > 1 and step != 1:
                return Copy(tensor, "contiguous", f"its entries are {step} elements apart")
        return None

    # Answers.

    def place(self, tensor: Key, way: str, *, why: str = "", **more: Any) -> Placement:
        """The placement of a tensor that is reached in a way; of a copy, ``why`` is what it was made for."""
        strides = self.strides(tensor)
        copy = self.copies.get(tensor)
        kind, why = ("", why) if copy is None else (copy.kind, copy.why)
        size = self.views[tensor].size
        found = Placement(way, kind, why, size=size, leading=strides.m, batch=strides.batch, loops=strides.loops)
        return dataclasses.replace(found, **more)

    def addressing(
        self,
        a: Placement,
        b: Placement,
        operands: tuple[Placement, ...],
        outputs: tuple[Placement, ...],
        access: Access,
    ) -> Addressing:
        """All of it, along the merged dimensions."""
        dims = self.dims
        loops = tuple(dim.extent for dim in dims.loops)
        n, k = self.request.n, self.request.k
        return Addressing(dims.m.extent, n, k, dims.batch.extent, loops, a, b, operands, outputs, access)

    def operands(self, matrix: Callable[[Key], Placement]) -> tuple[Placement, ...]:
        """The placements of the operands, given that of an auxiliary matrix."""
        found = []
        for index, operand in enumerate(self.request.operands):
            tensor = Key("operand", index)
            if operand.view is None:
                found.append(Placement("number"))
            elif operand.kind is Kind.AUX:
                found.append(matrix(tensor))
            elif operand.kind is Kind.SCALAR:
                found.append(Placement("scalar", loops=(0,) * len(self.dims.loops)))
            else:
                found.append(self.place(tensor, operand.kind.value))
        return tuple(found)

    def outputs(self, matrix: Callable[[Key], Placement]) -> tuple[Placement, ...]:
        """The placements of the outputs."""
        return tuple(matrix(Key("output", index)) for index in range(len(self.request.outputs)))

    # Dimensions.

    def _merge(self) -> Dims:
        with_columns, without = self._collapse(columns=True), self._collapse(columns=False)
        if with_columns.count > without.count:
            for tensor in list(self.views):
                if self.kind(tensor) is Kind.COLUMN and tensor not in self.copies:
                    self._copy(Copy(tensor, "contiguous", "it repeats where the other tensors go on"))
        return self._collapse(columns=True)

    def _collapse(self, *, columns: bool) -> Dims:
        left_out = (Kind.ROW, Kind.SCALAR) if columns else (Kind.ROW, Kind.SCALAR, Kind.COLUMN)
        own = [tensor for tensor in self.views if tensor != B and self.kind(tensor) not in left_out]
        shared = [B, *(tensor for tensor in self.views if self.kind(tensor) is Kind.ROW)]
        self.order = own + shared
        leads = [self.views[tensor].lead for tensor in self.order]
        return collapse(self.request.extents, leads[: len(own)], leads[len(own) :])

    def _copy(self, copy: Copy) -> None:
        """Puts the view of the copy that :mod:`gemm_ops.copies` makes in the place of a tensor's own."""
        self.copies[copy.tensor] = copy
        view, extents = self.views[copy.tensor], self.request.extents
        if copy.tensor in (A, B):
            self.views[copy.tensor] = self._padded(copy)
        elif self.kind(copy.tensor) is Kind.ROW:
            self.views[copy.tensor] = View(packed(view.lead, extents, self.request.n), n=1, size=view.size)
        elif self.kind(copy.tensor) is Kind.COLUMN:
            self.views[copy.tensor] = View(packed((1,) * len(extents), extents, 1), size=view.size)
        else:
            # repeated rows are written out: only batch dimensions may repeat
            lead = (*view.lead[:-1], 1)
            self.views[copy.tensor] = View(packed(lead, extents, self.request.n), n=1, size=view.size)

    def _padded(self, copy: Copy) -> View:
        view, request = self.views[copy.tensor], self.request
        rows, columns = (request.extents[-1], request.k) if copy.tensor == A else (request.k, request.n)
        outer, inner = (rows, columns) if copy.layout == "row" else (columns, rows)
        pitch = pitch_of(inner, view.size)
        batch = packed(view.lead[:-1], request.extents[:-1], outer * pitch)
        row, column = (pitch, 1) if copy.layout == "row" else (1, pitch)
        if copy.tensor == A:
            return View((*batch, row), k=column, size=view.size)
        return View((*batch, 0), k=row, n=column, size=view.size)


def packed(lead: Sequence[int], extents: Sequence[int], inner: int) -> tuple[int, ...]:
    """Strides of a contiguous copy along the dimensions in which a tensor is not repeated; 0 along the others.

    Args:
        lead: the tensor's own strides.
        inner: how many elements one entry of the last dimension has.
    """
    strides: list[int] = []
    step = inner
    for stride, extent in zip(reversed(lead), reversed(extents), strict=True):
        repeated = extent == 1 or not stride
        strides.append(0 if repeated else step)
        step *= 1 if repeated else extent
    return tuple(reversed(strides))

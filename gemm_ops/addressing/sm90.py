"""SM90 kernels: TMA for A and B; for the other matrices TMA, or registers where TMA does not take them.

TMA wants pointer and strides in multiples of 16 bytes and does not care about extents: it fills with zeros what it
reads beyond a matrix.  It writes whole 16 bytes, though: seen on an H200, at N = 257 it overwrites the 7 elements after
each row (and whatever lies behind the last), so an output's rows have to be multiples of 16 bytes themselves, unless
what follows them is padding.

Rows of an odd pitch cannot be taken as eight interleaved matrices, each of every eighth row and so of an aligned pitch:
they start at different distances from a multiple of 16 bytes, and TMA takes coordinates along a row in multiples of
16 bytes only (a load from anywhere else is an illegal instruction on an H200).
"""

from __future__ import annotations

from ..kernels.access import STRIDED, UNALIGNED, WHOLE, Access
from .placement import Addressing, Placement
from .rules import A, B, Copy, Key, Rules, Sides
from .views import ACCESS_BYTES, pitch_of


class Sm90Rules(Rules):
    """See the module's first page."""

    def find_copy(self) -> Copy | None:
        for tensor in (A, B):
            sides = self.sides(tensor)
            if any(not self._refused(tensor, side) for side in sides):
                continue
            if not sides:
                return Copy(tensor, "contiguous", self.no_side(tensor))
            # the copy is of the call's own M, which need not be the merged one
            layout = sides[0].layout if tensor == B or self.request.extents[-1] > 1 else "row"
            return Copy(tensor, "padded", self._refused(tensor, sides[0]), layout)
        return self.scattered()

    def _refused(self, tensor: Key, side: Sides) -> str:
        """Why TMA does not take A or B from a side; "" if it does."""
        if side.outer > 1 and not side.leading:
            return "its rows are repeated" if side.layout == "row" else "its columns are repeated"
        return self.off(tensor, side.leading)

    def finish(self) -> Addressing | str:
        operands, outputs = self.operands(self._matrix), self.outputs(self._matrix)
        access = Access(_codes(operands), _codes(outputs), batched=self.dims.batch.extent > 1)
        return self.addressing(self._main(A), self._main(B), operands, outputs, access)

    def _main(self, tensor: Key) -> Placement:
        side = next(side for side in self.sides(tensor) if not self._refused(tensor, side))
        return self.place(tensor, "tma", layout=side.layout, leading=side.leading)

    def _matrix(self, tensor: Key) -> Placement:
        view, n, m = self.views[tensor], self.request.n, self.dims.m.extent
        if n > 1 and view.n != 1:
            why = f"its columns are {view.n} elements apart"
            return self.place(tensor, "strided", why=why, column=view.n)
        leading = self.strides(tensor).m
        row_bytes = n * view.size
        if m == 1:
            leading = pitch_of(n, view.size)
        why = self.off(tensor, leading)
        if m > 1 and not leading:
            why = "its rows are repeated"
        if tensor.role == "output" and row_bytes % ACCESS_BYTES and not self.request.outputs[tensor.position].padding:
            why = why or f"its rows of N={n} elements are not a multiple of {ACCESS_BYTES} bytes"
        if why:
            return self.place(tensor, "unaligned", why=why)
        return self.place(tensor, "tma", leading=leading)


def _codes(placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """How a kernel has the placements compiled in; () if all are the usual one."""
    codes = tuple({"unaligned": UNALIGNED, "strided": STRIDED}.get(placement.way, WHOLE) for placement in placements)
    return codes if any(codes) else ()

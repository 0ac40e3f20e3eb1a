"""SM80 kernels: vectors as wide as the contiguous extent, the pointer and the strides allow.

``cp.async`` loads vectors of A and B that are predicated by their first element, so that the contiguous extent has to
be whole vectors.  One width serves all of the epilogue's accesses.
"""

from __future__ import annotations

from ..kernels.access import WHOLE, Access
from .placement import Addressing, Placement
from .rules import A, B, Copy, Key, Rules, Sides
from .views import ACCESS_BYTES

_WIDTHS = (8, 2, 1)
_MOST_GRID_LAYERS = 65535  # the problems of a batch are counted in the grid's last extent


class Sm80Rules(Rules):
    """See the module's first page."""

    def find_copy(self) -> Copy | None:
        for tensor in (A, B):
            if not self.sides(tensor):
                return Copy(tensor, "contiguous", self.no_side(tensor))
        for tensor, view in self.views.items():
            if self.is_matrix(tensor) and self.request.n > 1 and view.n != 1:
                kind = "back" if tensor.role == "output" else "contiguous"
                return Copy(tensor, kind, f"its columns are {view.n} elements apart")
        return self.scattered()

    def finish(self) -> Addressing | str:
        batch = self.dims.batch.extent
        if batch > _MOST_GRID_LAYERS:
            return f"a batch of {batch} is larger than {_MOST_GRID_LAYERS}"
        width, why = self._epilogue()

        def matrix(tensor: Key) -> Placement:
            shown = width or ACCESS_BYTES // self.views[tensor].size
            return self.place(tensor, "vector", width=shown, why=why)

        operands, outputs = self.operands(matrix), self.outputs(matrix)
        a, b = self._main(A), self._main(B)
        codes = tuple(width if placement.way == "vector" else WHOLE for placement in operands) if width else ()
        access = Access(codes, (width,) * len(outputs) if width else (), a.width, b.width, batch > 1)
        return self.addressing(a, b, operands, outputs, access)

    def _main(self, tensor: Key) -> Placement:
        width, side = max(
            ((self._width(tensor, side), side) for side in self.sides(tensor)), key=lambda found: found[0]
        )
        why = "" if width == _WIDTHS[0] else f"extents, strides or address allow no more than {width * 2} bytes"
        return self.place(tensor, "vector", layout=side.layout, leading=side.leading, width=width, why=why)

    def _width(self, tensor: Key, side: Sides) -> int:
        """Elements of the widest vectors in which A or B can be loaded from a side."""
        view = self.views[tensor]
        counted = (side.inner, side.leading, *self.around(tensor))
        return next(
            width
            for width in _WIDTHS
            if all(value % width == 0 for value in counted) and view.offset % (width * view.size) == 0
        )

    def _epilogue(self) -> tuple[int, str]:
        """Elements per access of the epilogue, WHOLE for 16 bytes of D, and why it is not; "" if it is."""
        why = ""
        for width in (WHOLE, 2):
            refused = next(filter(None, (self._refused(tensor, width) for tensor in self.views)), "")
            if not refused:
                return width, why
            why = why or refused
        return 1, why

    def _refused(self, tensor: Key, width: int) -> str:
        """What keeps the epilogue from accesses of so many elements of an operand or output; "" if nothing does."""
        if not self.is_matrix(tensor) and self.kind(tensor) is None:
            return ""
        view, n = self.views[tensor], self.request.n
        bytes = min(width * view.size, ACCESS_BYTES) if width else ACCESS_BYTES
        name = f"an {tensor.role}"
        if tensor.role == "output" and n * view.size % bytes:
            return f"{name} has rows of N={n} elements, which are not a multiple of {bytes} bytes"
        if not self.is_matrix(tensor) and not view.n:
            return ""  # a column: one entry for a row
        if view.offset % bytes:
            return f"{name} starts {view.offset} bytes after a multiple of {ACCESS_BYTES} bytes"
        if any(stride * view.size % bytes for stride in self.used(tensor)):
            return f"{name} has rows or batch dimensions that are not a multiple of {bytes} bytes apart"
        return ""

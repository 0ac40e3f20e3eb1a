"""Kernels for few rows: A and B in 16 bytes at a time along K, everything else element by element.

What has to be copied for that is better multiplied by SM90 kernels, so nothing is.  On the other hand no other matrix
has to be anything: few rows are stored, and loaded, at any stride.
"""

from __future__ import annotations

import dataclasses

from ..kernels.access import Access
from .placement import Addressing, Placement
from .rules import A, B, Key, Sides
from .sm90 import Sm90Rules


class SkinnyRules(Sm90Rules):
    """See the module's first page."""

    def finish(self) -> Addressing | str:
        for tensor, layout in ((A, "row"), (B, "column")):
            if tensor in self.copies:
                return f"{tensor.role} would be copied: {self.copies[tensor].why}"
            if not self._side(tensor, layout):
                return f"{tensor.role} is not contiguous along K"
        operands, outputs = self.operands(self._matrix), self.outputs(self._matrix)
        access = Access(batched=self.dims.batch.extent > 1)
        a, b = (
            self.place(tensor, "vector", layout=layout, width=8, leading=self._side(tensor, layout)[0].leading)
            for tensor, layout in ((A, "row"), (B, "column"))
        )
        return self.addressing(a, b, operands, outputs, access)

    def _matrix(self, tensor: Key) -> Placement:
        return dataclasses.replace(super()._matrix(tensor), way="elements", why="")

    def _side(self, tensor: Key, layout: str) -> list[Sides]:
        return [side for side in self.sides(tensor) if side.layout == layout and not self._refused(tensor, side)]

"""Output buffers that tell what a kernel wrote outside its output, and what it did not write inside.

    >>> guarded = GuardedOutput.allocate(33, 65, torch.bfloat16, "cpu", "padded")
    >>> guarded.view.shape, guarded.view.stride()
    ((33, 65), (80, 1))
    >>> guarded.faults()
    ['2145 of 2145 elements were never written, the first at row 0, column 0']

The buffer is larger than the output.  What lies around the output holds one bit pattern (a finite number),
the output itself another (a NaN with a payload that no arithmetic produces).  Both are compared as integers,
so a kernel that writes -0.0, or a NaN, is seen as well.

There are two layouts, because they lead to different kernels and different ways to go wrong:

* "contiguous": row stride N, as a fresh ``torch.empty`` has it, with guards before the first and after the
  last element.  Where N is not a multiple of the vector width, rows are misaligned.
* "padded": row stride ``round_up(N, 8) + 8``, so that rows are aligned whatever N is, with guards between
  rows and a guard row before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: the layouts, the natural one first
LAYOUTS = ("contiguous", "padded")

# Repeated to the width of the element.  As bfloat16 or float32 the poison is a quiet NaN, as float16 too.
_POISON = {2: 0x7FE5, 4: 0x7FE5A5A5}
_GUARD = {2: 0x5AA5, 4: 0x5AA55AA5}
_INTEGERS = {2: torch.int16, 4: torch.int32}

# 512 bytes of 16-bit elements: the output starts as well aligned as the allocation itself.
_GUARD_ELEMENTS = 256


@dataclass(frozen=True)
class GuardedOutput:
    """An (M, N) output inside a guarded buffer.

    Attributes:
        layout: one of :data:`LAYOUTS`.
        buffer: one-dimensional, holds guards and output.
        view: the output, a view of the buffer.
        start: the element of the buffer at which the output starts.
    """

    layout: str
    buffer: Tensor
    view: Tensor
    start: int

    @classmethod
    def allocate(
        cls, m: int, n: int, dtype: torch.dtype, device: str | torch.device, layout: str, *, fill: bool = True
    ) -> GuardedOutput:
        """A poisoned (M, N) output with its guards in place; without ``fill`` the memory is left as it is."""
        stride = n if layout == "contiguous" else (n + 7) // 8 * 8 + 8
        start = _GUARD_ELEMENTS if layout == "contiguous" else stride
        total = start + m * stride + max(start, stride)
        buffer = torch.empty(total, dtype=dtype, device=device)
        view = buffer.as_strided((m, n), (stride, 1), start)
        if fill:
            size = dtype.itemsize
            bits = buffer.view(_INTEGERS[size])
            bits.fill_(_GUARD[size])
            bits.as_strided((m, n), (stride, 1), start).fill_(_POISON[size])
        return cls(layout, buffer, view, start)

    def faults(self) -> list[str]:
        """What a kernel that has run did wrong; empty if every element of the output and no other was
        written.
        """
        size = self.buffer.element_size()
        bits = self.buffer.view(_INTEGERS[size])
        (m, n), stride = self.view.shape, self.view.stride(0)
        output = bits.as_strided((m, n), (stride, 1), self.start)
        poisoned = output == _POISON[size]
        left = int(poisoned.sum())
        faults = []
        if left:
            row, column = (int(index) for index in poisoned.nonzero()[0])
            faults.append(f"{left} of {m * n} elements were never written, the first at row {row}, column {column}")
        written = bits != _GUARD[size]
        written.as_strided((m, n), (stride, 1), self.start).fill_(False)
        outside = int(written.sum())
        if outside:
            first = int(written.nonzero()[0]) - self.start
            faults.append(f"{outside} elements outside the output written, the first {self._where(first)}")
        return faults

    def _where(self, position: int) -> str:
        """A position of the buffer, counted in elements from the output's first, in words."""
        (m, n), stride = self.view.shape, self.view.stride(0)
        if position < 0:
            return f"{-position} elements before the first"
        if self.layout == "contiguous" or position // stride >= m:
            last = (m - 1) * stride + n - 1 if m and n else -1
            return f"{position - last} elements after the last"
        row, column = divmod(position, stride)
        return f"in row {row}, {column - n + 1} elements after its end"

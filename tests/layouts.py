"""Tensors that lie in memory in every way that strides allow, and guarded outputs of any strides.

>>> a = lay_out((3, 16, 33), "off")
>>> guarded = GuardedBuffer((3, 16, 33), "transposed", torch.bfloat16, "cuda")
>>> gemm_ops.matmul(a, b, out=guarded.view); guarded.check()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MATRIX_WAYS = (
    "contiguous",
    "transposed",
    "padded",
    "off",
    "every second",
    "transposed padded",
    "every second row",
    "one row",
    "one column",
)
BATCH_WAYS = ("batch last", "batch inside", "one matrix")
#: ways for outputs: no two elements are one in memory
OUTPUT_WAYS = tuple(way for way in MATRIX_WAYS + BATCH_WAYS if not way.startswith("one"))


def lay_out(shape: tuple[int, ...], how: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """A random tensor of a shape that lies in memory in one of the ways."""
    *lead, rows, columns = shape
    wide, high = -(-columns // 8) * 8 + 8, -(-rows // 8) * 8 + 8

    def make(*extents: int) -> Tensor:
        return torch.randn(extents, device=device).to(dtype)

    made: dict[str, Callable[[], Tensor]] = {
        "contiguous": lambda: make(*shape),
        "transposed": lambda: make(*lead, columns, rows).transpose(-1, -2),
        "padded": lambda: make(*lead, rows, wide)[..., :columns],
        "off": lambda: make(*lead, rows, wide)[..., 3 : 3 + columns],
        "every second": lambda: make(*lead, rows, 2 * columns)[..., ::2],
        "transposed padded": lambda: make(*lead, columns, high)[..., :rows].transpose(-1, -2),
        "every second row": lambda: make(*lead, 2 * rows, columns)[..., ::2, :],
        "one row": lambda: make(*lead, 1, columns).expand(*shape),
        "one column": lambda: make(*lead, rows, 1).expand(*shape),
    }
    if lead:
        made["batch last"] = lambda: make(rows, columns, *lead).permute(*range(2, 2 + len(lead)), 0, 1)
        made["batch inside"] = lambda: make(rows, *lead, columns).permute(*range(1, 1 + len(lead)), 0, -1)
        made["one matrix"] = lambda: make(*(1 for _ in lead), rows, columns).expand(*shape)
    return made[how]()


class GuardedBuffer:
    """An output that lies in one of the ways, poisoned, in the middle of memory that holds a pattern."""

    GUARD = 512  # elements before and after

    def __init__(self, shape: tuple[int, ...], how: str, dtype: torch.dtype, device: str) -> None:
        example = lay_out(shape, how, dtype)
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, example.stride(), strict=True)) + 1
        integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        self.pattern = {2: 0x5A5A, 4: 0x5A5A5A5A}[dtype.itemsize]
        self.buffer = torch.full((reach + 2 * self.GUARD,), self.pattern, dtype=integer, device=device)
        # as misaligned as the example is within its own memory
        start = self.GUARD + example.storage_offset()
        self.view = self.buffer.view(dtype).as_strided(shape, example.stride(), start)
        self.view.fill_(float("nan"))
        inside = torch.zeros_like(self.buffer, dtype=torch.bool)
        inside.as_strided(shape, example.stride(), start).fill_(True)
        self.outside = ~inside

    def check(self) -> None:
        """Fails if anything around the output was written."""
        changed = (self.buffer[self.outside] != self.pattern).sum().item()
        assert changed == 0, f"{changed} elements outside of the output were written"

"""What is decided for each tensor of a call, as data and in words.

>>> placement.copy, placement.why
('padded', 'its leading dimension of 4093 elements is not a multiple of 16 bytes')
>>> describe(placement, "x")
'x: copied into padded rows first, as its leading dimension of 4093 elements is not a multiple of 16 bytes'
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.access import Access

#: way -> what a kernel does, in words
WAYS = {
    "tma": "by TMA, as it is",
    "vector": "in vectors of {width} elements, as it is",
    "unaligned": "between memory and registers at its own alignment",
    "strided": "element by element, with both strides",
    "elements": "element by element, as it is",
    "row": "an entry for each column, as it is",
    "column": "an entry for each row, as it is",
    "scalar": "one element, as it is",
    "number": "a number, by value",
}


@dataclass(frozen=True)
class Placement:
    """How one tensor reaches the kernel.  Strides are in elements, those of the copy where one is made.

    Attributes:
        way: one of :data:`WAYS`.
        copy: "" for none; "padded" into rows of a multiple of 16 bytes; "contiguous"; "back" of an output that the
            kernel writes elsewhere.
        why: what keeps it from a better way, in words; "" if nothing does.
        layout: of A and B: "row" or "column".
        width: elements per access.
        size: bytes of an element.
        leading: stride from row to row ("column": from column to column).
        column: stride from column to column of a "strided" matrix.
        batch: stride from problem to problem.
        loops: strides along the loops around the launch.
    """

    way: str
    copy: str = ""
    why: str = ""
    layout: str = "row"
    width: int = 0
    size: int = 0
    leading: int = 0
    column: int = 1
    batch: int = 0
    loops: tuple[int, ...] = ()


@dataclass(frozen=True)
class Addressing:
    """How a call is laid out for a kernel.

    Attributes:
        m, n, k: extents of one problem.
        batch: problems of a launch.
        loops: extents of the loops around launches; () for a single one.
        a, b, operands, outputs: a placement each.
        access: what of it is compiled into the kernel.
    """

    m: int
    n: int
    k: int
    batch: int
    loops: tuple[int, ...]
    a: Placement
    b: Placement
    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    access: Access

    @property
    def copies(self) -> bool:
        """Whether some tensor is copied."""
        return any(placement.copy for placement in (self.a, self.b, *self.operands, *self.outputs))


def describe(placement: Placement, name: str) -> str:
    """The decision for a tensor in one sentence."""
    way = WAYS[placement.way].format(width=placement.width)
    reason = f", as {placement.why}" if placement.why else ""
    if placement.copy == "padded":
        return f"{name}: copied into padded rows first{reason}"
    if placement.copy == "contiguous":
        return f"{name}: made contiguous first{reason}"
    if placement.copy == "back":
        return f"{name}: computed contiguous, then copied into place{reason}"
    return f"{name}: {way}{reason}"

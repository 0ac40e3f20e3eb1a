"""Which problems, and which epilogues, one measured result is for.

    >>> problem_class(request, "bf16", Target((9, 0), 132, "NVIDIA H200"))
    ProblemClass(device='NVIDIA H200', element='bf16', layouts='row/column', access='aligned', m=4096, ...)
    >>> tree_class(tree)
    'row, aux bf16 -> bf16, 8 to 15 instructions'

Contract: problems of one class have the same candidates, which read and write the same bytes in the same way: device,
dtype, extents, batch, from which side A and B are read, and how what is not aligned reaches a kernel.  How far strides
go beyond the extents, and where pointers are beyond their alignment, is not in it.

Epilogues of one class may be different trees.  A kernel's time depends on its epilogue by three things, those of the
wave model: the bytes that it moves, the shared memory that it takes from the mainloop's stages, and the arithmetic.
Auxiliary matrices and outputs decide the first two, so their number and dtypes are told apart.  Rows and columns are a
few kilobytes, so only whether there are such; numbers cost nothing.  Arithmetic is hidden behind the products or adds a
few per cent, so instructions count by powers of two: GELU after a bias or after a scale is one class, and GELU and ReLU
are two.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass

from epilogues.analysis import fast_instructions, instructions_per_element
from epilogues.dtypes import DTYPES
from epilogues.tree import EpilogueTree, Kind

from ..addressing import Addressing, Placement, Request, address
from ..addressing.views import ACCESS_BYTES
from ..kernels.families import families_for, general_families
from ..kernels.selection import Target

ALIGNED = "aligned"

_PART = r"(?:a|b|loads|stores) (?:by [1-9]\d?|[a-z]+)"
_ACCESS = re.compile(rf"{_PART}(?:, {_PART})*", re.ASCII)
_DTYPE = "|".join(DTYPES)
_READ = rf"(?:row|column|(?:[1-9]\d? )?aux (?:{_DTYPE}))"
_TREE = re.compile(
    rf"(?:{_READ}(?:, {_READ})* )?-> (?:{_DTYPE})(?:\+(?:{_DTYPE}))*, "
    r"(?:[01]|[1-9]\d{0,8} to [1-9]\d{0,8}) instructions",
    re.ASCII,
)


@dataclass(frozen=True)
class ProblemClass:
    """A class of problems.

    Attributes:
        device: as the driver calls it.
        element: short dtype name of A and B.
        layouts: of A and of B, "row" or "column" each, such as "row/column" of ``F.linear``.
        access: "aligned", or what is not, in words: copies of A and B, matrices and outputs.
        m, n, k: extents of one product.
        batch: how many products a launch computes.
    """

    device: str
    element: str
    layouts: str
    access: str
    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def alike(self) -> ProblemClass:
        """What it has in common with problems of other extents."""
        return dataclasses.replace(self, m=0, n=0, k=0)

    @property
    def extents(self) -> str:
        """Its extents in words."""
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{batch}{self.m} x {self.n} x {self.k}"


def problem_class(request: Request, element: str, target: Target) -> ProblemClass | None:
    """The class of a problem; None of one that no family takes, or only in several launches.

    It is that of the first family that takes the problem, whichever backend is asked for; that of kernels for few rows,
    to which alignment is nothing, only where no other takes it.
    """
    general = general_families(target.capability)
    for family in dict.fromkeys((*general, *families_for(target.capability))):
        found = address(family, request)
        if isinstance(found, Addressing):
            if found.loops:
                return None
            layouts = f"{found.a.layout}/{found.b.layout}"
            extents = (found.m, found.n, found.k, found.batch)
            return ProblemClass(target.name, element, layouts, _access(found, request), *extents)
    return None


def _access(found: Addressing, request: Request) -> str:
    """What is not aligned, in words."""
    matrices = [
        placement
        for placement, operand in zip(found.operands, request.operands, strict=True)
        if operand.kind is Kind.AUX
    ]
    groups = {"a": [found.a], "b": [found.b], "loads": matrices, "stores": found.outputs}
    parts = [f"{name} {way}" for name, group in groups.items() for way in dict.fromkeys(map(_way, group)) if way]
    return ", ".join(parts) or ALIGNED


def _way(placement: Placement) -> str:
    """How a matrix reaches a kernel, in a word or two; "" for 16 bytes at a time, as it is."""
    if placement.copy:
        return placement.copy
    if placement.way == "vector":
        return "" if placement.width * placement.size >= ACCESS_BYTES else f"by {placement.width}"
    return "" if placement.way == "tma" else placement.way


def tree_class(tree: EpilogueTree) -> str:
    """The class of a resolved tree, in words; see the module's first page."""
    kinds = [kind for kind in (Kind.ROW, Kind.COLUMN) if any(operand.kind is kind for operand in tree.operands)]
    matrices = Counter(str(operand.dtype) for operand in tree.operands if operand.kind is Kind.AUX)
    read = [kind.value for kind in kinds]
    read += [f"{count} aux {dtype}" if count > 1 else f"aux {dtype}" for dtype, count in sorted(matrices.items())]
    written = "+".join(str(store.dtype) for store in tree.outputs)
    bucket = _bucket(instructions_per_element(tree, fast_instructions))
    return f"{', '.join(read)}{' ' if read else ''}-> {written}, {bucket} instructions"


def is_access(text: str) -> bool:
    """Whether a text is one of :attr:`ProblemClass.access`."""
    return text == ALIGNED or _ACCESS.fullmatch(text) is not None


def is_tree_class(text: str) -> bool:
    """Whether a text is one of :func:`tree_class`."""
    return _TREE.fullmatch(text) is not None


def matrices_of(tree: str) -> str:
    """Of a class of epilogues what decides bytes and shared memory: its matrices, those read and those written.

    >>> matrices_of("row, aux bf16 -> bf16, 8 to 15 instructions")
    'aux bf16 -> bf16'
    """
    read, _, written = tree.partition("-> ")
    kept = [part for part in read.strip().split(", ") if part not in ("", Kind.ROW.value, Kind.COLUMN.value)]
    return f"{', '.join(kept)} -> {written.partition(', ')[0]}".strip()


def instructions_of(tree: str) -> int:
    """The least instructions of an epilogue of a class."""
    return int(tree.rpartition(", ")[2].split()[0])


def _bucket(instructions: int) -> str:
    """The power of two at or below a number, and the last before the next."""
    if instructions < 2:
        return str(instructions)
    least = 1 << (instructions.bit_length() - 1)
    return f"{least} to {2 * least - 1}"

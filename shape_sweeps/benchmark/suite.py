"""What the benchmark measures: shapes in groups, epilogues, peers.

    >>> [str(problem) for problem in problems(parse_shapes(["suite-decode"]), ["bias_gelu"])][0]
    '1x4096x4096 bias_gelu'

Shapes and epilogues are those of the suite (:mod:`shape_sweeps.shapes`, :mod:`shape_sweeps.catalogue`), in bfloat16.  A
shape that is not of the suite belongs to the group that it is like (:func:`group_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import epilogues as ep

from ..catalogue import FORMULAS
from ..errors import InputError
from ..shapes import SUITE_DECODE, SUITE_LARGE, SUITE_MEDIUM, SUITE_MISALIGNED, Shape, split_list

LARGE, MEDIUM, DECODE, MISALIGNED = "large", "medium", "decode", "misaligned"

#: name -> the suite's shapes
GROUPS: dict[str, tuple[Shape, ...]] = {
    LARGE: SUITE_LARGE,
    MEDIUM: SUITE_MEDIUM,
    DECODE: SUITE_DECODE,
    MISALIGNED: SUITE_MISALIGNED,
}
#: the groups whose rows begin at multiples of 16 bytes
ALIGNED = (LARGE, MEDIUM, DECODE)

#: The same in small, for a machine without a GPU: what is measured there is that the command works.
SMALL_GROUPS: dict[str, tuple[Shape, ...]] = {
    LARGE: (Shape(256, 256, 256),),
    MEDIUM: (Shape(64, 256, 256), Shape(97, 192, 128)),
    DECODE: (Shape(1, 256, 256), Shape(16, 256, 256)),
    MISALIGNED: (Shape(65, 193, 127), Shape(64, 129, 255)),
}

_OF_SUITE = {shape: group for groups in (SMALL_GROUPS, GROUPS) for group, shapes in groups.items() for shape in shapes}
_DECODE_ROWS = 128
_LARGE_WORK = 5e10  # multiply-adds

#: The contender whose times are "ours", and its peers by name; see :mod:`.contenders`.
FUSED = "fused"
EAGER, COMPILE, CUBLASLT, MM, ROUNDED_MM = "eager", "compile", "cublaslt", "mm", "rounded-mm"
PEERS: dict[str, str] = {
    EAGER: "PyTorch as people write it: F.linear and the operations that follow",
    COMPILE: "torch.compile(mode='max-autotune-no-cudagraphs') of that; takes half a minute or more each to compile",
    CUBLASLT: "cuBLASLt's own fused kernel, torch._addmm_activation, where it has the epilogue",
    MM: "torch.mm into a preallocated output: the product alone",
    ROUNDED_MM: "of misaligned shapes, torch.mm with all extents rounded up to multiples of 8",
}
#: the peers that compute the epilogue and may fuse it
FUSED_PEERS = (COMPILE, CUBLASLT)


@dataclass(frozen=True)
class Problem:
    """One shape with one epilogue, and the group of shapes it counts to."""

    shape: Shape
    epilogue: str
    group: str

    def __str__(self) -> str:
        return f"{self.shape} {self.epilogue}"


def group_of(shape: Shape) -> str:
    """The group of a shape: the suite's, else misaligned if rows of 16-bit elements do not begin at multiples of 16
    bytes, decode up to 128 rows, and large from 5e10 multiply-adds on.
    """
    if shape in _OF_SUITE:
        return _OF_SUITE[shape]
    if shape.n % 8 or shape.k % 8:
        return MISALIGNED
    if shape.m <= _DECODE_ROWS:
        return DECODE
    return LARGE if shape.m * shape.n * shape.k >= _LARGE_WORK else MEDIUM


def problems(shapes: Iterable[Shape], epilogues: Sequence[str]) -> tuple[Problem, ...]:
    """Every shape with every epilogue, group by group; the epilogue varies fastest."""
    ordered = sorted(dict.fromkeys(shapes), key=lambda shape: list(GROUPS).index(group_of(shape)))
    return tuple(Problem(shape, epilogue, group_of(shape)) for shape in ordered for epilogue in epilogues)


def rounded_up(shape: Shape) -> Shape:
    """The shape with all extents rounded up to multiples of 8."""
    m, n, k = (-(-extent // 8) * 8 for extent in (shape.m, shape.n, shape.k))
    return Shape(m, n, k)


def has_matrix_operand(epilogue: str) -> bool:
    """Whether an epilogue of the suite reads an auxiliary matrix."""
    return ep.Kind.AUX in ep.builders.SUITE[epilogue]().operands.values()


def parse_groups(values: Iterable[str], where: str = "--group") -> tuple[str, ...]:
    """Names of groups from comma-separated lists.

    Raises:
        InputError: for another name.
    """
    return _parse_names(values, tuple(GROUPS), where, "group")


def parse_epilogues(values: Iterable[str], where: str = "--epilogues") -> tuple[str, ...]:
    """Names of the suite's epilogues from comma-separated lists.

    Raises:
        InputError: for another name: of an epilogue of one's own there are no peers.
    """
    return _parse_names(values, tuple(FORMULAS), where, "epilogue of the suite")


def parse_peers(values: Iterable[str], where: str = "--peers") -> tuple[str, ...]:
    """Names of peers from comma-separated lists; "all", and "no-compile" for all but that one, and so on.

    Raises:
        InputError: for another name.
    """
    items = split_list(values, where)
    left_out = {item.removeprefix("no-") for item in items if item.startswith("no-")}
    named = [item for item in items if not item.startswith("no-")]
    if not named or "all" in named:
        named = [*PEERS, *(item for item in named if item != "all")]
    chosen = _parse_names([*named, *left_out], tuple(PEERS), where, "peer", also="all, or no-NAME to leave one out")
    return tuple(name for name in PEERS if name in chosen and name not in left_out)


def _parse_names(
    values: Iterable[str], known: tuple[str, ...], where: str, what: str, also: str = ""
) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for item in split_list(values, where):
        if item == "all":
            found.update(dict.fromkeys(known))
        elif item not in known:
            expected = ", ".join(known) + (f", {also}" if also else ", or all")
            raise InputError(f"{where}: unknown {what} {item!r}: expected {expected}")
        else:
            found[item] = None
    return tuple(found)

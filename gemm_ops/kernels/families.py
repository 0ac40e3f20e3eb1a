"""Which problems a kernel family takes, and which configuration it takes for one.

    >>> refusal("sm90", problem, facts, outputs)          # "" if the family takes it
    >>> choose_config("sm90", problem, tree, multiprocessors=132).name
    'sm90_cooperative_128x256x64_2x1'

What a family takes follows from how it reads memory.  SM90 kernels read and write whole matrices through TMA,
which wants pointers and leading dimensions in multiples of 16 bytes and does not care about extents.  SM80
kernels move vectors of 16 bytes that they predicate by their first element only, so that the contiguous extents
must be whole vectors too.

The choice among a family's configurations is a wave model: tiles are computed in waves of one tile per
multiprocessor, and a wave costs its tile's area over the configuration's rate, on top of its startup.
"""

from __future__ import annotations

from collections.abc import Sequence

from epilogues.tree import EpilogueTree, Kind

from ..operands import OperandFacts
from ..problem import ACCESS_BYTES, Matrix, Problem
from .config import SM80_CONFIGS, SM90_CONFIGS, KernelConfig

CONFIGS = {"sm90": SM90_CONFIGS, "sm80": SM80_CONFIGS}

_INT_MAX = 2**31 - 1
_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# Shared memory a block may use on compute capability 9.0, less what CUTLASS needs for barriers.
_SM90_SHARED_BYTES = 232448 - 1024


def families_for(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """The families that run on a device, best first."""
    if compute_capability == (9, 0):
        return ("sm90", "sm80")
    return ("sm80",) if compute_capability >= (8, 0) else ()


def arch_of(family: str, compute_capability: tuple[int, int]) -> str:
    """The target of nvcc: wgmma and TMA need the architecture-specific "90a"."""
    major, minor = compute_capability
    return "90a" if family == "sm90" else f"{major}{minor}"


def refusal(
    family: str, problem: Problem, operands: Sequence[OperandFacts], outputs: Sequence[tuple[Matrix, str]]
) -> str:
    """Why a family cannot take a problem, in words; "" if it can.

    Args:
        outputs: layout and short dtype name of each output.
    """
    if problem.a is None or problem.b is None:
        return "b has batch dimensions"
    if max(problem.m, problem.n, problem.k) > _INT_MAX:
        return "an extent is larger than 2^31 - 1"
    matrices = [("a", problem.a), ("b", problem.b)]
    matrices += [(f"operand {operand.name!r}", operand.matrix) for operand in operands if operand.matrix]
    matrices += [(f"output {index}", matrix) for index, (matrix, _) in enumerate(outputs)]
    for index, (name, matrix) in enumerate(matrices):
        if matrix.misalignment:
            return f"{name}: {matrix.misalignment}"
        if index > 1 and matrix.layout != "row":
            return f"{name}: its rows are not contiguous"
    for index, (_, dtype) in enumerate(outputs):
        if problem.n * _BYTES[dtype] % ACCESS_BYTES:
            # A TMA store writes whole 16 bytes: seen on an H200, at N = 257 it overwrites the 7 elements after each
            # row (and whatever lies behind the last).  Vector stores of SM80 kernels would do the same.
            return f"output {index}: its rows of N={problem.n} elements are not a multiple of {ACCESS_BYTES} bytes"
    return _sm80_refusal(problem, operands) if family == "sm80" else ""


def _sm80_refusal(problem: Problem, operands: Sequence[OperandFacts]) -> str:
    assert problem.a is not None and problem.b is not None
    per_access = ACCESS_BYTES // 2  # A and B have 16-bit elements
    for name, matrix, row_extent, column_extent in (
        ("a", problem.a, problem.k, problem.m),
        ("b", problem.b, problem.n, problem.k),
    ):
        extent = row_extent if matrix.layout == "row" else column_extent
        if extent % per_access:
            return f"{name}: its contiguous extent {extent} is not a multiple of {per_access} elements"
    for operand in operands:
        if operand.kind is Kind.ROW and not operand.aligned:
            return f"operand {operand.name!r}: it does not start at a multiple of {ACCESS_BYTES} bytes"
    return ""


def choose_config(family: str, problem: Problem, tree: EpilogueTree, multiprocessors: int) -> KernelConfig | None:
    """The configuration that the wave model likes best; None if the tree's matrices fit beside no tile."""
    if family == "sm80":
        large, small = SM80_CONFIGS
        return large if _tiles(large, problem) >= multiprocessors else small
    fitting = [config for config in SM90_CONFIGS if sm90_stages(config, tree) >= 3]
    if not fitting:
        fitting = [config for config in SM90_CONFIGS if sm90_stages(config, tree) >= 2]
    best = min(fitting, key=lambda config: _cost(config, problem, multiprocessors), default=None)
    return None if best is None else best.for_rows(problem.m)


def _tiles(config: KernelConfig, problem: Problem) -> int:
    """Tiles of the output, whole clusters counted."""
    rows, columns = -(-problem.m // config.tile[0]), -(-problem.n // config.tile[1])
    return -(-rows // config.cluster[0]) * config.cluster[0] * -(-columns // config.cluster[1]) * config.cluster[1]


def _cost(config: KernelConfig, problem: Problem, multiprocessors: int) -> float:
    waves = -(-_tiles(config, problem) // multiprocessors)
    return config.startup + waves * config.tile[0] * config.tile[1] / config.rate


def sm90_stages(config: KernelConfig, tree: EpilogueTree) -> int:
    """How many mainloop stages have room beside the epilogue's buffers in shared memory.

    Mirrors the collective builders: loads of auxiliary matrices keep four epilogue tiles in flight, stores two.
    """
    rows, columns, depth = config.tile
    epilogue_tile = min(128 if config.schedule == "cooperative" else 64, rows) * 32
    epilogue = 0
    for operand in tree.operands:
        size = _BYTES[str(operand.dtype)]
        if operand.kind is Kind.AUX:
            epilogue += 4 * epilogue_tile * size
        elif operand.kind is Kind.ROW:
            epilogue += columns * size
    epilogue += sum(2 * epilogue_tile * _BYTES[str(store.dtype)] for store in tree.outputs)
    return (_SM90_SHARED_BYTES - epilogue) // ((rows + columns) * depth * 2)

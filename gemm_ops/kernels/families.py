"""Which families run on a device, and which configuration a family takes for a problem.

    >>> choose_config("sm90", addressing, tree, multiprocessors=132).name
    'sm90_cooperative_128x256x64_2x1'

==========  ======================  ==================================================================================
family      compute capability      what for
==========  ======================  ==================================================================================
"skinny"    8.0 and newer           up to 16 rows: as fast as the weight can be read (``cuda/skinny.cuh``)
"sm90"      9.0                     everything: TMA, wgmma, CUTLASS 3.x
"sm80"      8.0 and newer           everything: cp.async, mma.sync, CUTLASS 2.x
==========  ======================  ==================================================================================

Those for everything are :func:`general_families`.  How a family reaches the tensors is the subject of
:mod:`gemm_ops.addressing`.

The choice among the configurations of SM90 is the one that :mod:`gemm_ops.kernels.waves` expects to be fastest.
"""

from __future__ import annotations

import dataclasses
import math

from epilogues.tree import EpilogueTree, Kind

from ..addressing import Addressing
from .access import ALIGNED, UNALIGNED, WHOLE, Access
from .config import SKINNY_CONFIGS, SM80_CONFIGS, SM90_CONFIGS, KernelConfig
from .waves import choose_raster, expected_time, tiles

CONFIGS = {"skinny": SKINNY_CONFIGS, "sm90": SM90_CONFIGS, "sm80": SM80_CONFIGS}

#: Stages of SM80 kernels whose A or B goes through registers.
UNALIGNED_STAGES = 2
#: Columns that ``cuda/unaligned_pieces.cuh`` takes at a time: those of an epilogue tile.
_PIECE_COLUMNS = 32
#: Rows up to which skinny kernels are asked.
_FEW_ROWS = 16

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# Shared memory a block may use on compute capability 9.0, less what CUTLASS needs for barriers.
_SM90_SHARED_BYTES = 232448 - 1024


def families_for(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """The families that run on a device, best first."""
    if compute_capability == (9, 0):
        return ("skinny", "sm90", "sm80")
    return ("skinny", "sm80") if compute_capability >= (8, 0) else ()


def general_families(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """Those of :func:`families_for` that are for any extents, best first: not the kernels for few rows."""
    return tuple(family for family in families_for(compute_capability) if family != "skinny")


def arch_of(family: str, compute_capability: tuple[int, int]) -> str:
    """The target of nvcc: wgmma and TMA need the architecture-specific "90a"."""
    major, minor = compute_capability
    return "90a" if family == "sm90" else f"{major}{minor}"


def choose_config(family: str, problem: Addressing, tree: EpilogueTree, multiprocessors: int) -> KernelConfig | str:
    """The configuration that is expected to be fastest; why the family has none, in words, if it has none."""
    if family == "skinny":
        few = [config for config in SKINNY_CONFIGS if takes(config, tree, problem)]
        none = f"it has {problem.m} rows, and skinny kernels are for {_FEW_ROWS} at the most"
        return min(few, key=lambda config: expected_time(config, 1, problem, tree, multiprocessors), default=none)
    if family == "sm80":
        large, small = SM80_CONFIGS
        config = large if tiles(large, problem) >= multiprocessors else small
        if min(problem.access.a, problem.access.b) < 2:
            # cp.async moves at least 4 bytes; what moves less goes through registers
            config = dataclasses.replace(config, stages=UNALIGNED_STAGES)
        return config
    fitting = [config for config in SM90_CONFIGS if takes(config, tree, problem, stages=3)]
    if not fitting:
        fitting = [config for config in SM90_CONFIGS if takes(config, tree, problem)]
    rasters = {config: choose_raster(config, problem, multiprocessors) for config in fitting}
    best = min(
        fitting,
        key=lambda config: expected_time(config, rasters[config], problem, tree, multiprocessors),
        default=None,
    )
    if best is None:
        return "the epilogue's auxiliary matrices leave no room in shared memory"
    return dataclasses.replace(best, swizzle=rasters[best])


def takes(config: KernelConfig, tree: EpilogueTree, problem: Addressing, *, stages: int = 2) -> bool:
    """Whether a configuration is for a problem, and can compute the tree with so many stages (SM90)."""
    if config.family != "sm90":
        return config.family == "sm80" or problem.m <= min(config.tile[0], _FEW_ROWS)
    access = problem.access
    ways = (*access.operands, *access.outputs)
    if config.swapped and any(ways):
        return False
    if UNALIGNED in ways and config.tile[1] % _PIECE_COLUMNS:
        return False
    return sm90_stages(config, tree, access) >= stages


def sm90_stages(config: KernelConfig, tree: EpilogueTree, access: Access = ALIGNED) -> int:
    """How many mainloop stages have room beside the epilogue's buffers in shared memory.

    Mirrors the collective builders: loads of auxiliary matrices keep four epilogue tiles in flight, stores two.  Those
    at their own alignment are staged, 16 rows for each warp (``cuda/unaligned_pieces.cuh``).
    """
    columns, rows, depth = config.tile
    if not config.swapped:
        rows, columns = columns, rows
    epilogue_tile = min(128 if config.schedule == "cooperative" else 64, rows) * math.gcd(32, columns)
    warps = 8 if config.schedule == "cooperative" else 4
    epilogue = 0

    def buffers(way: int, tiles: int, size: int) -> int:
        if way == WHOLE:
            return tiles * epilogue_tile * size
        return warps * 16 * (40 * size + 16 | 16) if way > 0 else 0

    for operand in tree.operands:
        size = _BYTES[str(operand.dtype)]
        if operand.kind is Kind.AUX:
            epilogue += buffers(access.operand(operand.position), 4, size)
        elif operand.kind is (Kind.COLUMN if config.swapped else Kind.ROW):
            epilogue += columns * size
    epilogue += sum(buffers(access.output(i), 2, _BYTES[str(store.dtype)]) for i, store in enumerate(tree.outputs))
    return (_SM90_SHARED_BYTES - epilogue) // ((rows + columns) * depth * 2)

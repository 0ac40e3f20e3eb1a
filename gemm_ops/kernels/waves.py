"""How long a configuration takes for a problem: a model of waves of tiles, fitted to measurements.

    >>> swizzle = choose_raster(config, problem, multiprocessors=132)
    >>> expected_time(config, swizzle, problem, tree, multiprocessors=132)
    146.2

A wave is one tile for each multiprocessor.  A tile's products take as long as its area and their depth; its epilogue
comes on top where all warps compute one tile, and pingpong warp groups hide it behind the other's products, if these
take long enough.

*The raster.*  CUTLASS's persistent scheduler goes over the tiles in bands of ``swizzle`` clusters, for reuse in the L2
cache, and rounds their numbers up to whole bands along both M and N.  The tiles that this adds are computed like any
other, of nothing but padding, and more slowly than any other: bands of eight took 3.6 times as long at 12608x768x3072,
whose six columns of tiles were made sixteen.  So bands are as wide as they can be without one wave more.

*Loads.*  Rows of A and B that are no multiple of a cache line come more slowly, and small tiles need more of them for a
product.  Where there are few rows in all, tiles take longer the more of them lies outside of the matrix.

Fitted on an H200 to 280 times of eight configurations over 33 shapes, of transformers and of the suite (bias + GELU,
tanh and erf, the latter with the pre-activation stored too, bias + residual, SiLU gate), and since to those of 22 over
34 shapes of the suite and around it (bias + tanh-GELU): what it chooses there is 1.0 % slower than the best of them
(geometric mean; 2.9 % without the loads), in the median as fast.  It is 17 % slower at 96x4096x4096, where three rows
of tiles of 32, which it takes for two waves, are faster than two of 64, and 5 % at 2048x5121x5120.  Of NVIDIA's
nvidia-matmul-heuristics (0.1.0.27, for CUTLASS 3 on an H200) the first that was timed at all is 2.0 % slower than the
best, 14 % at most, at the 20 shapes where one of its first 24 was; there this model's choice is 0.6 % slower, and 5 %
at most.
"""

from __future__ import annotations

import math

from epilogues.analysis import fast_instructions, instructions_per_element
from epilogues.tree import EpilogueTree, Kind

from ..addressing import Addressing
from .config import KernelConfig

# Of skinny kernels: microseconds of a launch, and of what a warp does when its depth is not shared; bytes that a
# multiprocessor reads in a microsecond, and how many less for fewer stages.  Fitted to 1x4096x4096, 1x11008x4096,
# 1x4096x11008, 16x4096x11008 and 1x1024x1024.
_SKINNY_LAUNCH, _SKINNY_WARP = 2.6, 4.8
_SKINNY_RATE, _SKINNY_STAGE = 29_500, 9_600

#: The area that paces are for.
_AREA = 128 * 128
#: Microseconds of a launch.
_LAUNCH = 1.4
#: Waves up to which the last one takes as long as any, however few its tiles: of many the others run faster for it.
_FEW_WAVES = 8

# Microseconds that the epilogue of 128 x 128 elements takes: by itself, for each instruction of an element, for a
# matrix among the operands, for an output beside the first.  A pingpong warp group works at it alone.
_HIDDEN = (2.1, 0.195, 3.2, 0.8)
_ADDED = (-0.35, 0.092, 1.2, 0.3)
#: Rows of 64 elements of A and B that a multiprocessor gets in a microsecond, and the bytes of a line of the cache: a
#: row that lies across two of them counts in full, one that fills a line for less.
_ROWS_PER_MICROSECOND, _LINE_BYTES, _WHOLE_LINE = 384, 128, 0.55
#: The share of a tile of 64 rows that may lie outside of the matrix before its loads take longer, where there are few.
_OUTSIDE, _FEW_TILES = 0.3, 2

#: Microseconds between one tile and the next of a cooperative kernel, which has nothing else to do then.
_BETWEEN = 0.5
_LEAST_ADDED = 0.2
# More where an output, or an operand too, goes between registers and memory: at 4096x50257x768 with bias + tanh-GELU.
_UNALIGNED = {"stores": (1.3, 0.56), "loads": (2.2, 0.9)}


def tiles(config: KernelConfig, problem: Addressing, swizzle: int = 1) -> int:
    """Tiles of the outputs of a batch, whole clusters and bands counted."""
    along_m = _rounded(-(-problem.m // config.tile[0]), config.cluster[0])
    along_n = _rounded(-(-problem.n // config.tile[1]), config.cluster[1])
    band = _band(min(along_m, along_n), swizzle)
    return _rounded(along_m, band * config.cluster[0]) * _rounded(along_n, band * config.cluster[1]) * problem.batch


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _band(tiles: int, swizzle: int) -> int:
    """What the scheduler makes of a swizzle where there are so many tiles along the shorter extent."""
    for band, least in ((8, 6), (4, 3), (2, 2)):
        if swizzle >= band and tiles >= least:
            return band
    return 1


def choose_raster(config: KernelConfig, problem: Addressing, multiprocessors: int) -> int:
    """The swizzle: the configuration's, or the widest one below that takes no wave more than none."""
    tall = config.swizzle_tall and problem.m > 32 * config.tile[0]
    swizzle = config.swizzle_tall if tall else config.swizzle
    least = -(-tiles(config, problem) // multiprocessors)
    while swizzle > 1 and -(-tiles(config, problem, swizzle) // multiprocessors) > least:
        swizzle //= 2
    return swizzle


def expected_time(
    config: KernelConfig, swizzle: int, problem: Addressing, tree: EpilogueTree, multiprocessors: int
) -> float:
    """Microseconds, about, on an H200; of use to compare configurations by.

    Args:
        tree: the epilogue, resolved.
    """
    if config.family == "skinny":
        return _reading_time(config, problem, multiprocessors)
    access = problem.access
    amounts = (
        1,
        instructions_per_element(tree, fast_instructions),
        sum(operand.kind is Kind.AUX for operand in tree.operands),
        len(tree.outputs) - 1,
    )
    hidden = sum(each * amount for each, amount in zip(_HIDDEN, amounts, strict=True))
    added = max(_LEAST_ADDED, sum(each * amount for each, amount in zip(_ADDED, amounts, strict=True)))
    if any(access.operands) or any(access.outputs):
        more = _UNALIGNED["loads" if any(access.operands) else "stores"]
        hidden, added = hidden + more[0], added + more[1]
    size = config.tile[0] * config.tile[1] / _AREA
    products = max(config.pace, _loading_pace(config, problem) / size) * problem.k / 64
    # smooth, as the two warp groups hinder each other where both take about as long
    if config.schedule == "pingpong":
        tile = size * (products**6 + hidden**6) ** (1 / 6)
    else:
        tile = size * (products + added) + _BETWEEN
    tile *= _outside(config, problem)
    exact = tiles(config, problem, swizzle) / multiprocessors
    whole = math.ceil(exact)
    waves = exact + (whole - exact) * min(1, _FEW_WAVES / whole)
    return _LAUNCH + config.startup * products + waves * tile


def _loading_pace(config: KernelConfig, problem: Addressing) -> float:
    """Microseconds in which a tile's rows of A and B, 64 elements deep, come from the L2 cache.

    What a cluster shares comes once.  Where a row of K elements is no multiple of a cache line it lies across one more:
    pingpong tiles of 128 x 128 took 256 us at 4088x4104x4088, and 205 at 4096x4096x4096.
    """
    rows = 0.0
    for placement, along_k, count, shared in (
        (problem.a, "row", config.tile[0], config.cluster[1]),
        (problem.b, "column", config.tile[1], config.cluster[0]),
    ):
        whole = placement.layout != along_k or placement.leading * placement.size % _LINE_BYTES == 0
        rows += count / shared * (_WHOLE_LINE if whole else 1)
    return rows / _ROWS_PER_MICROSECOND


def _outside(config: KernelConfig, problem: Addressing) -> float:
    """How much longer tiles take of which a part lies outside of the matrix, where there are few along M."""
    along_m = -(-problem.m // config.tile[0])
    if along_m > _FEW_TILES:
        return 1.0
    outside = along_m - problem.m / config.tile[0]
    return 1 + max(0.0, outside - _OUTSIDE) * min(1.0, config.tile[0] / 64)


def _reading_time(config: KernelConfig, problem: Addressing, multiprocessors: int) -> float:
    """Of a skinny kernel: what reading the weight takes, which all multiprocessors share in whole tiles."""
    blocks = -(-problem.n // config.tile[1]) * -(-problem.m // config.tile[0]) * problem.batch
    # blocks do not wait for each other: the fewer multiprocessors have one more, the faster they read that
    each = (blocks / multiprocessors + -(-blocks // multiprocessors)) / 2
    rate = _SKINNY_RATE - _SKINNY_STAGE / config.stages
    return _SKINNY_LAUNCH + _SKINNY_WARP / config.split_k + each * config.tile[1] * problem.k * 2 / rate

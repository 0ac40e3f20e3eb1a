"""Kernel configurations: how a family cuts a GEMM into tiles.

    >>> SM90_CONFIGS[0].tile
    (128, 256, 64)

Extents are in elements, (M, N, K).  The tables are fixed.  SM90 stages are not listed: the mainloop takes as many
as the shared memory that the epilogue leaves has room for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """One way to run a GEMM.

    Attributes:
        family: "sm90" (TMA, warp specialised, wgmma) or "sm80" (cp.async, mma.sync).
        tile: what one thread block computes per step.
        cluster: thread blocks that share loads by multicast (SM90).
        schedule: "pingpong" (two consumer warp groups, a tile each) or "cooperative" (one tile together); SM90.
        warp: what one warp computes (SM80).
        stages: depth of the load pipeline (SM80).
        swizzle: how many tiles wide the raster over the output is, for L2 reuse; an argument of SM90 kernels, a
            part of SM80 ones.
        swizzle_tall: the raster instead where the output is more than 32 tiles tall; 0 for none.
        rate: products per unit of time, relative to the other configurations of the family.
        startup: what a launch costs on top, as area of output: a pipeline that only pays off over several tiles.
    """

    family: str
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    schedule: str = ""
    warp: tuple[int, int, int] = (0, 0, 0)
    stages: int = 0
    swizzle: int = 1
    swizzle_tall: int = 0
    rate: float = 1.0
    startup: int = 0

    @property
    def compiled(self) -> tuple[object, ...]:
        """What of the configuration is compiled in: the part of it that a kernel's identity has."""
        if self.family == "sm90":
            return (self.family, self.tile, self.cluster, self.schedule)
        return (self.family, self.tile, self.warp, self.stages, self.swizzle)

    def for_rows(self, m: int) -> KernelConfig:
        """The configuration with the raster that suits an output of M rows."""
        if self.swizzle_tall and m > 32 * self.tile[0]:
            return dataclasses.replace(self, swizzle=self.swizzle_tall)
        return self

    @property
    def name(self) -> str:
        """A name that says what the configuration is, such as ``sm90_pingpong_128x128x64_1x2``."""
        tile = "x".join(map(str, self.tile))
        if self.family == "sm90":
            return f"sm90_{self.schedule}_{tile}_{self.cluster[0]}x{self.cluster[1]}"
        return f"sm80_{tile}_{self.stages}stages"


# Measured on an H200 with bias + tanh-gelu in bf16, over bare torch.mm of the same extents.  Pingpong 128x128 hides its
# epilogues behind the next tile's products where there are several tiles for each multiprocessor: 0.96 to 0.98 at
# 4096x4096x4096, 0.92 at 4096x11008x4096, 0.97 at 8192x14336x4096, 0.96 at 8192x8192x8192 (cooperative 128x256: 1.07,
# 1.05, 1.10, 1.00).  The cooperative 128x256 wins where there are few, 1.07 at 1024x4096x4096, or where K is small and
# epilogues bound the time; 128x192 fills one wave at 1000x3000x2000 (1.09); 64x64 is for small M (1.02 at
# 128x4096x4096), 64x32 for smaller (1.11 at 64x4096x4096, 64x64: 1.22).  The rates fit the measured ratios of 128x128
# to 128x256 and 128x192 on eight shapes within 8 %.
# The raster matters for the large pingpong tiles: with 32 of them along M (4096x11008) one tile wide is best, 0.92
# against 0.98 for four; with 64 eight are, 0.94 against 0.99 for one at 8191x8191x8191.
# Odd extents, with padded A and B and the output stored from registers, over torch.mm of the extents rounded up to
# multiples of 8, in CUDA graphs: pingpong 128x128 in clusters of 2x1 gets 1.01 at 4095x4097x4093 and 1.07 at
# 2048x5121x5120 (1x2: 1.10 and 1.28, whole clusters that the odd number of tiles does not fill); 128x192 1.19 at
# 1000x3001x2000; 64x96 in clusters of 2x1 1.37 at 513x1025x2049 (1x1: 1.43; 128x64: 1.39 and more); 64x32 1.18 at
# 64x4097x4095 (64x64: 1.21; clusters: 1.34 and more); 128x256 and pingpong 128x128 1.35 at 4096x50257x768.
SM90_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("sm90", (128, 256, 64), (2, 1), "cooperative", swizzle=2, rate=0.99),
    KernelConfig("sm90", (128, 128, 64), (1, 2), "pingpong", swizzle_tall=8, rate=1.105, startup=8192),
    KernelConfig("sm90", (128, 128, 64), (2, 1), "pingpong", swizzle_tall=8, rate=1.1, startup=8192),
    KernelConfig("sm90", (128, 192, 64), (2, 1), "cooperative", swizzle=2, rate=0.94),
    KernelConfig("sm90", (128, 128, 64), (2, 1), "cooperative", rate=0.82),
    KernelConfig("sm90", (64, 64, 128), (1, 1), "pingpong", rate=0.55),
    KernelConfig("sm90", (64, 96, 128), (1, 1), "pingpong", rate=0.6),
    KernelConfig("sm90", (64, 96, 128), (2, 1), "pingpong", rate=0.62),
    KernelConfig("sm90", (64, 32, 128), (1, 1), "pingpong", rate=0.29),
)

SM80_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("sm80", (128, 128, 32), warp=(64, 64, 32), stages=4, swizzle=8),
    KernelConfig("sm80", (64, 64, 64), warp=(32, 32, 64), stages=4, swizzle=8),
)

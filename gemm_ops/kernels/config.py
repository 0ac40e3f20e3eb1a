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
        rate: area of output per unit of time, relative to the other configurations of the family.
        startup: what a launch costs on top, in the same area: a pipeline that only pays off over several tiles.
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


# Measured on an H200 with bias + tanh-gelu in bf16, 18 configurations and four swizzles on eight shapes, times over
# bare torch.mm: the cooperative 128x256 gets 1.06 at 4096x4096x4096 and 1.07 at 1024x4096x4096; pingpong wins where
# there are many tiles to hide epilogues behind (1.03 at 4096x11008x4096, 1.02 at 8192x14336x4096) and loses where
# there are few; 128x192 fills one wave at 1000x3000x2000 (1.09); 64x64 is for small M (1.02 at 128x4096x4096).
# The raster matters for the large pingpong tiles: with 32 of them along M (4096x11008) one tile wide is best, 1.03
# against 1.06 for four; with 64 (8192x14336) eight are, 1.02 against 1.10 for one.
# Odd extents, with the padded A and B and the output stored from registers, over torch.mm of the extents rounded up to
# multiples of 8: pingpong 128x128 in clusters of 2x1 gets 1.01 at 4095x4097x4093, 0.99 at 2048x5121x5120 (1x2: 1.10,
# 1.17, whole clusters that the odd number of tiles does not fill) and 0.96 at 8191x8191x8191; 64x96 0.69 at
# 513x1025x2049 (64x64: 0.79).  On these shapes and six configurations the wave model's choice costs 0.9 % on average.
SM90_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("sm90", (128, 256, 64), (2, 1), "cooperative", swizzle=2, rate=0.97),
    KernelConfig("sm90", (128, 128, 64), (1, 2), "pingpong", swizzle_tall=8, rate=0.97, startup=8192),
    KernelConfig("sm90", (128, 128, 64), (2, 1), "pingpong", rate=0.965, startup=8192),
    KernelConfig("sm90", (128, 192, 64), (2, 1), "cooperative", swizzle=2, rate=0.9),
    KernelConfig("sm90", (128, 128, 64), (2, 1), "cooperative", rate=0.8),
    KernelConfig("sm90", (64, 64, 128), (1, 1), "pingpong", rate=0.55),
    KernelConfig("sm90", (64, 96, 128), (1, 1), "pingpong", rate=0.6),
)

SM80_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("sm80", (128, 128, 32), warp=(64, 64, 32), stages=4, swizzle=8),
    KernelConfig("sm80", (64, 64, 64), warp=(32, 32, 64), stages=4, swizzle=8),
)

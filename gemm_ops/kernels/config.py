"""Kernel configurations: how a family cuts a GEMM into tiles.

    >>> SM90_CONFIGS[0].tile
    (128, 256, 64)

Extents are in elements, (M, N, K).  The tables are fixed.  SM90 stages are not listed: the mainloop takes as many
as the shared memory that the epilogue leaves has room for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """One way to run a GEMM.

    Attributes:
        family: "sm90" (TMA, warp specialised, wgmma), "sm80" (cp.async, mma.sync) or "skinny" (few rows; mma.sync
            straight from memory).
        tile: what one thread block computes per step.
        cluster: thread blocks that share loads by multicast (SM90).
        schedule: "pingpong" (two consumer warp groups, a tile each) or "cooperative" (one tile together); SM90.
        warp: what one warp computes (SM80).
        stages: depth of the load pipeline (SM80), or how many times 64 elements of K a warp loads ahead (skinny).
        split_k: how many warps share a tile's depth between them (skinny).
        swizzle: how many tiles wide the raster over the output is, for L2 reuse; an argument of SM90 kernels, a
            part of SM80 ones.
            Of an SM90 configuration in the table it is the widest; see :mod:`gemm_ops.kernels.waves`.
        swizzle_tall: the same where the output is more than 32 tiles tall; 0 for no difference.
        pace: microseconds in which an H200's multiprocessor multiplies 128 x 128 elements at a depth of 64 (SM90).
        startup: what a launch costs on top, in products of 128 x 128 elements: until both warp groups are at work.
        swapped: whether the kernel computes the output's transpose, (Bᵀ · Aᵀ)ᵀ: wgmma takes 64 rows or more and any
            multiple of 8 columns, so that tiles of few rows, or of 160, are those of the transpose (SM90).  Tile
            and cluster are of the output as it is.
    """

    family: str
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    schedule: str = ""
    warp: tuple[int, int, int] = (0, 0, 0)
    stages: int = 0
    swizzle: int = 1
    swizzle_tall: int = 0
    pace: float = 0.4
    startup: float = 0.0
    swapped: bool = False
    split_k: int = 1

    @property
    def compiled(self) -> tuple[object, ...]:
        """What of the configuration is compiled in: the part of it that a kernel's identity has."""
        if self.family == "sm90":
            return (self.family, self.tile, self.cluster, self.schedule, self.swapped)
        if self.family == "skinny":
            return (self.family, self.tile, self.stages, self.split_k)
        return (self.family, self.tile, self.warp, self.stages, self.swizzle)

    @property
    def name(self) -> str:
        """A name that says what the configuration is, such as ``sm90_pingpong_128x128x64_1x2``."""
        tile = "x".join(map(str, self.tile))
        if self.family == "sm90":
            swapped = "_swapped" if self.swapped else ""
            return f"sm90_{self.schedule}_{tile}_{self.cluster[0]}x{self.cluster[1]}{swapped}"
        if self.family == "skinny":
            return f"skinny_{self.tile[0]}x{self.tile[1]}_{self.split_k}warps_{self.stages}stages"
        return f"sm80_{tile}_{self.stages}stages"


# Measured on an H200 with bias + tanh-GELU in bf16, over bare torch.mm of the same extents.  Pingpong 128x128 hides its
# epilogues behind the next tile's products: 0.96 to 0.99 at 8192x8192x8192, 8192x14336x4096 and 4096x4096x4096, 0.91 at
# 4096x11008x4096, 1.07 at 12608x3072x768.  The cooperative 128x256 wins where there are few tiles (1.07 at
# 1024x4096x4096) or where K is small and a heavy epilogue (erf-GELU) takes longer than the products; 128x192 fills one
# wave at 1000x3000x2000 (1.09); 64x64 is for small M (1.02 at 128x4096x4096), 64x32 for smaller (1.11 at 64x4096x4096,
# 64x64: 1.22).  64x256, 64x192 and 256x128 were never the best of 33 shapes by more than 1 %.
# The raster matters for the large pingpong tiles: with 32 of them along M (4096x11008) one tile wide is best, 0.92
# against 0.98 for four; with 64 eight are, 0.94 against 0.99 for one at 8191x8191x8191.
# Odd extents, with padded A and B and the output stored from registers, over torch.mm of the extents rounded up to
# multiples of 8, in CUDA graphs: pingpong 128x128 in clusters of 2x1 gets 1.01 at 4095x4097x4093 and 1.07 at
# 2048x5121x5120 (1x2: 1.10 and 1.28, whole clusters that the odd number of tiles does not fill); 128x192 1.19 at
# 1000x3001x2000; 64x96 in clusters of 2x1 1.37 at 513x1025x2049 (1x1: 1.43; 128x64: 1.39 and more); 64x32 1.18 at
# 64x4097x4095 (64x64: 1.21; clusters: 1.34 and more); 128x256 and pingpong 128x128 1.35 at 4096x50257x768.
# Other widths fill whole waves where those do not (eager PyTorch in brackets): 160 columns, pingpong, 57.9 us at
# 3000x5000x1000 (70.7; 62.6 for the best of the others); 208 columns 225.5 at 4088x4104x4088 (238; 250).  With 160 rows
# and 64 columns, which only the transpose can have, 11.2 at 777x1544x1032 (12.7; 13.3).  For few rows transposes of 32
# and 64 rows: 11.9 at 64x4096x4096 (13.6; 12.6), 13.2 at 128x4096x4096 (15.9; 13.7); in clusters of
# 2x1 11.7 and 13.3, and 6 % less where they follow one another in a graph (cuda/dependent_launch.cuh).  Widths of 96,
# 112, 176 and 224, 160 of all warps together, and 64x160 and 64x224 as they are were never the best by more than 1 %;
# 152 columns, which cuBLAS takes at 3000x5000, CUTLASS's epilogue does not divide.
# Where the time of 12608x3072x768 goes (pingpong 128x128, ncu, cycles of a multiprocessor, so clocks have no part in
# it): identity 126,000, bias + SiLU 145,000, tanh-GELU 151,000, two outputs 164,000, erf-GELU 168,000, torch.mm
# 138,000.  Of a tile's 14,000 cycles in a warp group identity's epilogue is 4,500: 8 times some 300 from a write to
# shared memory to where TMA may read it (fence.proxy.async is a MEMBAR.ALL.CTA and a fence, then a barrier of the
# group; cuBLAS's kernel has no barrier there, each of its warps stores for itself).  SiLU's is 6,600, no longer
# hidden behind the 7,000 of the other group's products.  Stored from registers instead (quads exchange pairs by
# shuffles, 16 bytes to a thread, no barrier): 0.98 for SiLU and tanh-GELU there, 0.97 for erf-GELU, but 1.02 to 1.03
# for identity, residual and per-row and per-column scales, 1.03 for two outputs; 1.00 to 1.01 at 4096x4096x4096.  At
# the power limit SiLU and both GELUs 0.92 to 0.94.  A raster of 8 columns takes 148 us there for 86.
SM90_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("sm90", (128, 256, 64), (2, 1), "cooperative", swizzle=2, pace=0.41),
    KernelConfig("sm90", (128, 128, 64), (1, 2), "pingpong", swizzle_tall=8, pace=0.406, startup=0.15),
    KernelConfig("sm90", (128, 128, 64), (2, 1), "pingpong", swizzle_tall=8, pace=0.407, startup=0.15),
    KernelConfig("sm90", (128, 192, 64), (2, 1), "cooperative", swizzle=2, pace=0.408),
    KernelConfig("sm90", (128, 128, 64), (2, 1), "cooperative", pace=0.408),
    KernelConfig("sm90", (64, 64, 128), (1, 1), "pingpong", pace=0.81),
    KernelConfig("sm90", (64, 96, 128), (1, 1), "pingpong", pace=0.744),
    KernelConfig("sm90", (64, 96, 128), (2, 1), "pingpong", pace=0.72),
    KernelConfig("sm90", (64, 32, 128), (1, 1), "pingpong", pace=1.54),
    KernelConfig("sm90", (128, 160, 64), (2, 1), "pingpong", swizzle_tall=8, pace=0.408, startup=0.15),
    KernelConfig("sm90", (128, 208, 64), (2, 1), "cooperative", swizzle=2, pace=0.439),
    KernelConfig("sm90", (160, 64, 64), (1, 2), "pingpong", pace=0.6, swapped=True),
    KernelConfig("sm90", (32, 64, 128), (2, 1), "pingpong", pace=1.31, swapped=True),
    KernelConfig("sm90", (64, 64, 128), (2, 1), "pingpong", pace=0.74, swapped=True),
)

SM80_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("sm80", (128, 128, 32), warp=(64, 64, 32), stages=4, swizzle=8),
    KernelConfig("sm80", (64, 64, 64), warp=(32, 32, 64), stages=4, swizzle=8),
)

# The same in graphs that go over weights which the L2 cache does not hold (torch.mm and eager PyTorch in brackets):
# 12.1 us at 1x4096x4096 (13.3, 15.3), 12.5 at 16x4096x4096 (13.7, 15.9), 3.4 at 1x1024x1024 (7.6, 9.1), 27.4 at
# 16x4096x11008 (29.0, 31.3), but 27.5 at 1x11008x4096 (24.9, 27.5), whose 688 tiles are 2.6 waves.  More stages or more
# warps, which spill registers or wait for each other more, are slower, and so are tiles of 32 columns; 32 rows take
# 15.5 at 32x4096x4096 (14.0, 13.6): those are for SM90 kernels.  Four warps with four stages are as fast by themselves,
# and 0.89 of torch.mm in a graph of nothing else, where eight with two are 0.81.
SKINNY_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("skinny", (8, 16, 64), stages=2, split_k=8),
    KernelConfig("skinny", (16, 16, 64), stages=2, split_k=8),
)

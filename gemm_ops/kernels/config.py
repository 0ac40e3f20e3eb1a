"""Kernel configurations: how a family cuts a GEMM into tiles.

    >>> SM90_CONFIGS[0].tile
    (128, 128, 64)

Extents are in elements, (M, N, K).  The tables are fixed; they were picked from measurements on an H200 (a few
dozen configurations per shape).  SM90 stages are not listed: the mainloop takes as many as the shared memory
that the epilogue leaves has room for.
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
    """

    family: str
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    schedule: str = ""
    warp: tuple[int, int, int] = (0, 0, 0)
    stages: int = 0
    swizzle: int = 1

    @property
    def compiled(self) -> KernelConfig:
        """What of the configuration is compiled in."""
        return dataclasses.replace(self, swizzle=0) if self.family == "sm90" else self

    @property
    def name(self) -> str:
        """A name that says what the configuration is, such as ``sm90_pingpong_128x128x64_1x2``."""
        tile = "x".join(map(str, self.tile))
        if self.family == "sm90":
            return f"sm90_{self.schedule}_{tile}_{self.cluster[0]}x{self.cluster[1]}"
        return f"sm80_{tile}_{self.stages}stages"


def _sm90(schedule: str, tile: tuple[int, int, int], cluster: tuple[int, int], swizzle: int) -> KernelConfig:
    return KernelConfig("sm90", tile, cluster, schedule, swizzle=swizzle)


SM90_CONFIGS: tuple[KernelConfig, ...] = (
    _sm90("pingpong", (128, 128, 64), (1, 2), 4),
    _sm90("cooperative", (128, 192, 64), (2, 1), 1),
    _sm90("cooperative", (128, 256, 64), (2, 1), 1),
    _sm90("pingpong", (64, 64, 128), (1, 1), 1),
)

SM80_CONFIGS: tuple[KernelConfig, ...] = (
    KernelConfig("sm80", (128, 128, 32), warp=(64, 64, 32), stages=4, swizzle=8),
    KernelConfig("sm80", (64, 64, 64), warp=(32, 32, 64), stages=4, swizzle=8),
)

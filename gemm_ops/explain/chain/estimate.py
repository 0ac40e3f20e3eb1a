"""How long a chain takes, kernel by kernel and as one kernel, and what bounds the one.

    >>> times = estimate_chain_times(traffic, 8192 * 8192, instructions=14, special_calls=2, device=find_device("h200"))
    >>> times.eager.expected, times.fused.expected                 # seconds
    (0.000226..., 0.0000962...)
    >>> times.bound, times.speedup
    ('memory', 2.35...)

A kernel takes its launch, and then the longer of two: its bytes at what kernels attain of the bandwidth, and its
arithmetic.  The constants are those of :mod:`gemm_ops.explain.estimate`.  Where inputs and outputs together fit in the
L2 cache, the bytes are taken to come from there and to stay there, as they do between operations that follow each
other.  Where they do not, all kernels are taken to go to memory, those of eager PyTorch that are small enough too: what
they read first is as cold as what the one kernel reads.

Arithmetic is the longer of two again, which work side by side: the instructions of all operations, by the operation
table, and the calls of the special function unit, which does 16 in a clock of a multiprocessor.  The table's exact
functions have the unit's time in their instructions; of its fast ones many in a row are bound by the unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epilogues.analysis import ChainTraffic, Roofline, place_on_roofline

from ..devices import Device
from ..estimate import (
    KERNEL_SECONDS,
    Time,
    arithmetic_seconds,
    attained_bandwidth,
    eager_times,
    elementwise_time,
    fits_l2,
    share_saved,
    special_cost,
    sum_of,
)


@dataclass(frozen=True)
class ChainTimes:
    """Seconds of both ways, and what the one kernel's are made of.

    Attributes:
        eager: of eager PyTorch's kernels together.  The limit of a time is its bytes at the memory's full bandwidth.
        fused: of the one kernel.
        moving: what the one kernel's bytes take, at what it attains of the bandwidth of memory or of the L2 cache.
        computing: what its arithmetic takes.
        work: the arithmetic of one element, in float32 additions that take as long.
        in_l2: whether inputs and outputs together fit in the L2 cache.
        roofline: that work per byte; its ridge is where moving and computing take equally long.
    """

    eager: Time
    fused: Time
    moving: float
    computing: float
    work: int
    in_l2: bool
    roofline: Roofline

    @property
    def saved(self) -> float:
        """Seconds expected to be saved."""
        return self.eager.expected - self.fused.expected

    @property
    def saved_share(self) -> float:
        """The same as a share of eager PyTorch's; never negative."""
        return max(0.0, share_saved(self.eager.expected, self.fused.expected))

    @property
    def speedup(self) -> float:
        """How many times as fast the one kernel is expected to be; 1 where nothing is computed."""
        return self.eager.expected / self.fused.expected if self.fused.expected else 1.0

    @property
    def bound(self) -> Literal["compute", "memory"]:
        """What the one kernel spends its time on, besides its launch."""
        return self.roofline.bound

    @property
    def launch_dominates(self) -> bool:
        """Whether the launch takes at least as long as everything else."""
        return max(self.moving, self.computing) <= KERNEL_SECONDS


def work_of(instructions: int, special_calls: int, device: Device) -> int:
    """The arithmetic of one element, in float32 additions that take as long."""
    return max(instructions, special_cost(device) * special_calls)


def estimate_chain_times(
    traffic: ChainTraffic, elements: int, *, instructions: int, special_calls: int, device: Device
) -> ChainTimes:
    """The times of a chain on a device; see the module's first page.

    Args:
        traffic: bytes moved.
        elements: of each output.
        instructions: that the one kernel executes for one element.
        special_calls: of the special function unit, for one element.
        device: whose figures to use.
    """
    work = work_of(instructions, special_calls, device)
    computing = arithmetic_seconds(work * elements, device)
    bandwidth = attained_bandwidth(traffic.fused_bytes, device)
    in_l2 = fits_l2(traffic.fused_bytes, device)
    return ChainTimes(
        eager=sum_of(eager_times(traffic.eager, device, cold=not in_l2)),
        fused=elementwise_time(traffic.fused_bytes, computing, device),
        moving=traffic.fused_bytes / bandwidth,
        computing=computing,
        work=work,
        in_l2=in_l2,
        roofline=place_on_roofline(
            operations=work * elements,
            bytes=traffic.fused_bytes,
            peak=1 / arithmetic_seconds(1, device),
            bandwidth=bandwidth,
        ),
    )

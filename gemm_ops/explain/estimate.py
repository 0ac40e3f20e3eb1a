"""How long a computation takes: the roofline, and what to expect of real kernels.

    >>> times = estimate_times(traffic, m, n, k, "bf16", find_device("h200"), instructions=20, family="sm90")
    >>> times.fused.limit, times.fused.expected                    # seconds
    (0.000138..., 0.000194...)

The *limit* is the roofline: no kernel is faster.  The *expectation* adds what every kernel loses, by the constants
below, read off the measurements of GEMMs and activations on an H200 in ``shared/facts.md``; on other devices the same
shares are assumed.  It is good for a decision, not for a benchmark: the comparison script measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epilogues.analysis import Cost, EagerOperation, Roofline, Traffic, place_on_roofline
from epilogues.dtypes import torch_dtype
from epilogues.tree import Apply, Cast, EpilogueTree, Kind

from ..addressing import Addressing
from ..lowering.stages import split_stages
from .devices import Device

#: Share of the peak that large GEMMs reach: 186 us for 4096x4096x4096 in bfloat16, where the peak would allow 139.
ATTAINED_PEAK = 0.75
#: How fast an SM80 kernel is on compute capability 9, as a share of cuBLAS, which uses wgmma: 0.49 measured on an H200
#: with bias + tanh-gelu at 4096 and 8192 cubed.
MMA_SYNC_SHARE = 0.49
#: Operations per second of cuBLAS with 16-bit matrices and an odd N or K on compute capability 9: 130 TFLOP/s measured.
MISALIGNED_RATE = 130e12
#: Share of the bandwidth that a kernel reaches: 4.3 TB/s measured of 4.8.
ATTAINED_BANDWIDTH = 0.9
#: What a GEMM takes on top, filling and draining its pipeline: 12 us for 777x1544x1032, whose arithmetic takes 3.
GEMM_SECONDS = 7e-6
#: What an elementwise kernel takes however little it moves: the gap between F.linear and F.linear + F.gelu of 16 rows.
KERNEL_SECONDS = 3e-6
#: float32 additions that a multiprocessor does per clock, by compute capability, and special functions (NVIDIA's CUDA
#: C++ programming guide, throughput of native arithmetic instructions).
FP32_PER_CLOCK = {(8, 0): 64}
FP32_PER_CLOCK_ELSE = 128
SPECIAL_PER_CLOCK = 16
#: How much faster the L2 cache is than memory, for kernels whose tensors fit in it.
L2_SPEEDUP = 2.0

# What a repeated call takes of the CPU, measured on the H200's machine: F.linear 14 us, F.linear and F.gelu 21, a fused
# call 28.  Kernels that are done before the next is launched wait for the CPU, unless a CUDA graph launches them.
HOST_LINEAR_SECONDS = 14e-6
HOST_FUNCTION_SECONDS = 7e-6
HOST_FUSED_SECONDS = 28e-6
#: A repeated call of ``gemm_ops.apply`` with three tensors, on the same machine: 29 us, where ``torch.add`` took 8 and
#: bias + GELU + residual in eager PyTorch 26.
HOST_CHAIN_SECONDS = 29e-6


@dataclass(frozen=True)
class Time:
    """Seconds of one way to compute something: the roofline's limit, and what to expect."""

    limit: float
    expected: float


@dataclass(frozen=True)
class Times:
    """The three ways, as :class:`epilogues.analysis.Traffic` has them, and the GEMM's place on the roofline.

    Attributes:
        gemm_expected: seconds of the eager computation's GEMM alone.
        fused_arithmetic: seconds of the fused kernel's elementwise arithmetic.
        copies: seconds of copies into padded rows before the fused kernel.
        gemm_is_misaligned: whether the eager GEMM runs in cuBLAS' slow kernel for an odd N or K.
    """

    eager: Time
    compiled: Time
    fused: Time
    gemm: Roofline
    fused_roofline: Roofline
    gemm_expected: float
    fused_arithmetic: float
    copies: float = 0.0
    gemm_is_misaligned: bool = False

    @property
    def saved_share(self) -> float:
        """Expected saving over eager PyTorch, as a share of its time; never negative."""
        return max(0.0, share_saved(self.eager.expected, self.fused.expected))

    @property
    def saved_share_compiled(self) -> float:
        """The same over ``torch.compile``; negative where that is expected to be faster."""
        return share_saved(self.compiled.expected, self.fused.expected)


def estimate_times(
    traffic: Traffic,
    m: int,
    n: int,
    k: int,
    element: str,
    device: Device,
    *,
    instructions: int,
    family: str,
) -> Times:
    """The times of a problem on a device; see the module's first page.

    Args:
        traffic: bytes moved.
        m, n, k: extents.
        element: short dtype name of the matrices.
        device: whose figures to use.
        instructions: that the fused kernel executes for one element besides the product.
        family: of the fused kernel.
    """
    operations = 2.0 * m * n * k
    peak = device.peak(element)

    def gemm(bytes: int, share: float = 1.0) -> tuple[Roofline, Time]:
        place = place_on_roofline(operations=operations, bytes=bytes, peak=peak, bandwidth=device.bandwidth)
        if not operations and not bytes:
            return place, Time(0.0, 0.0)
        busy = max(
            operations / (ATTAINED_PEAK * share * peak),
            bytes / (ATTAINED_BANDWIDTH * device.bandwidth),
        )
        return place, Time(place.seconds, GEMM_SECONDS + busy)

    misaligned = element != "f32" and bool(n % 2 or k % 2) and device.capability[0] == 9 and operations > 0
    gemm_place, gemm_time = gemm(
        traffic.gemm.bytes, min(1.0, MISALIGNED_RATE / (ATTAINED_PEAK * peak)) if misaligned else 1.0
    )
    older = uses_older_instructions(family, device)
    fused_place, fused_time = gemm(traffic.fused_bytes - sum(traffic.copied), MMA_SYNC_SHARE if older else 1.0)
    arithmetic = arithmetic_seconds(instructions * m * n, device)
    copies = sum_of([elementwise_time(bytes, 0.0, device) for bytes in traffic.copied])
    computing = arithmetic_seconds(traffic.tail_instructions * m * n, device)
    tail = [elementwise_time(traffic.tail, computing, device)] if traffic.elementwise else []
    return Times(
        eager=sum_of([gemm_time, *eager_times(traffic.elementwise, device)]),
        compiled=sum_of([gemm_time, *tail]),
        fused=Time(fused_time.limit + copies.limit, fused_time.expected + arithmetic + copies.expected),
        gemm=gemm_place,
        fused_roofline=fused_place,
        gemm_expected=gemm_time.expected,
        fused_arithmetic=arithmetic,
        copies=copies.expected,
        gemm_is_misaligned=misaligned,
    )


def copied_bytes(addressing: Addressing, element: str, operands: Mapping[str, tuple[Kind, str]]) -> tuple[int, ...]:
    """What each copy of a call moves, read and written; copies of rows and columns do not count."""
    m, n, k, size = addressing.m, addressing.n, addressing.k, torch_dtype(element).itemsize
    problems = addressing.batch * math.prod(addressing.loops)
    moved = [2 * m * k * size * problems] if addressing.a.copy else []
    moved += [2 * k * n * size] if addressing.b.copy else []
    for placement, (kind, dtype) in zip(addressing.operands, operands.values(), strict=True):
        if placement.copy and kind is Kind.AUX:
            moved.append(2 * m * n * torch_dtype(dtype).itemsize * problems)
    return tuple(moved)


def uses_older_instructions(family: str, device: Device) -> bool:
    """Whether a family's kernels do not use the matrix instructions that a device's peak rate is of."""
    return family == "sm80" and device.capability[0] in (9, 10)


def instructions_of(tree: EpilogueTree, cost: Cost) -> int:
    """What a fused kernel of a resolved tree executes for one element of all outputs, a cast being one.

    What outputs share is counted as often as it is computed: see :mod:`gemm_ops.lowering.stages`.
    """
    total = 0
    for stage in split_stages(tree):
        total += sum(cost(node.operation) for node in stage.body if isinstance(node, Apply))
        total += sum(isinstance(node, Cast) for node in stage.body)
    return total


def arithmetic_seconds(instructions: int, device: Device) -> float:
    """What so many instructions take if nothing hides them.

    Nothing does in a fused kernel: 6.5 us for tanh-gelu on 4096 x 4096, where 6 were measured.  A device executes half
    as many instructions as float32 operations, as it counts a multiply-add as two.
    """
    return instructions / (device.peak32 / 2)


def host_seconds(traffic: Traffic) -> tuple[float, float]:
    """What the CPU takes to launch the eager computation, and the fused one."""
    return HOST_LINEAR_SECONDS + HOST_FUNCTION_SECONDS * len(traffic.elementwise), HOST_FUSED_SECONDS


def fits_l2(bytes: int, device: Device) -> bool:
    """Whether what a kernel reads and writes stays in the L2 cache."""
    return bytes <= device.l2


def attained_bandwidth(bytes: int, device: Device, *, cold: bool = False) -> float:
    """Bytes per second of an elementwise kernel that moves so many: from memory, or from the L2 cache if they fit."""
    return device.bandwidth * ATTAINED_BANDWIDTH * (1.0 if cold or not fits_l2(bytes, device) else L2_SPEEDUP)


def elementwise_time(bytes: int, computing: float, device: Device, *, cold: bool = False) -> Time:
    """A kernel that loads, computes and stores at once: the slower of the two decides.

    Args:
        bytes: that it moves.
        computing: seconds of its arithmetic.
        device: whose figures to use.
        cold: whether they come from memory even if they fit in the L2 cache.
    """
    if not bytes:
        return Time(0.0, 0.0)
    busy = max(bytes / attained_bandwidth(bytes, device, cold=cold), computing)
    return Time(bytes / device.bandwidth, KERNEL_SECONDS + busy)


def eager_times(kernels: Sequence[EagerOperation], device: Device, *, cold: bool = False) -> list[Time]:
    """The elementwise kernels of eager PyTorch."""
    computing = [arithmetic_seconds(kernel.instructions * kernel.elements, device) for kernel in kernels]
    return [
        elementwise_time(kernel.bytes, seconds, device, cold=cold)
        for kernel, seconds in zip(kernels, computing, strict=True)
    ]


def special_cost(device: Device) -> int:
    """How many float32 additions take as long as one call of the special function unit, which works beside them."""
    return FP32_PER_CLOCK.get(device.capability, FP32_PER_CLOCK_ELSE) // SPECIAL_PER_CLOCK


def sum_of(times: Sequence[Time]) -> Time:
    return Time(sum(time.limit for time in times), sum(time.expected for time in times))


def share_saved(slower: float, faster: float) -> float:
    return 1 - faster / slower if slower else 0.0

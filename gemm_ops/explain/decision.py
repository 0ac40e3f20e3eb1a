"""Whether to fuse, and why, in words.

    >>> decision = decide_fusion(facts)
    >>> decision.choice, decision.headline
    ('fuse', 'FUSE: expected to take 29% less GPU time than eager PyTorch (274 us -> 194 us)')

Five choices:

* "fuse": a kernel takes the problem and saves at least :data:`WORTH_SHARE` of eager PyTorch's time;
* "marginal": it saves less, or only where the GPU does not wait for the CPU;
* "nothing to fuse": ``F.linear`` or ``torch.addmm`` computes all of it in one kernel;
* "not possible": no kernel takes the problem;
* "empty": an extent is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epilogues.analysis import Traffic

from ..tuner.advice import BY_OPERATIONS, CUBLAS_ALONE, TWO_PASSES
from .coverage import Coverage
from .devices import Device
from .estimate import KERNEL_SECONDS, L2_SPEEDUP, Times, fits_l2, host_seconds, uses_older_instructions
from .kernel import KernelChoice
from .registers import RegisterUse
from .units import count, in_bytes, in_mebibytes, in_share, in_time

#: Below this share of the time a saving is within what two GEMM kernels of one problem differ by.
WORTH_SHARE = 0.05
#: Below this one the estimate alone does not settle it.
SURE_SHARE = 0.10

#: What is said where another way was measured to be faster than the kernel.
_UNFUSED = {
    TWO_PASSES: "FASTER IN TWO PASSES: cuBLAS, then one kernel for the epilogue",
    CUBLAS_ALONE: "FASTER UNFUSED: cuBLAS computes all of it with the product",
    BY_OPERATIONS: "FASTER UNFUSED: PyTorch, operation by operation",
}

Choice = Literal["fuse", "marginal", "nothing to fuse", "not possible", "empty"]


@dataclass(frozen=True)
class Facts:
    """What the decision rests on."""

    m: int
    n: int
    k: int
    traffic: Traffic
    times: Times
    kernel: KernelChoice
    coverage: Coverage
    registers: RegisterUse | None
    device: Device


@dataclass(frozen=True)
class FusionDecision:
    """The decision.

    Attributes:
        choice: one of the module's five.
        headline: the decision in one line.
        reasons: why, a sentence or two each, the weightiest first.
    """

    choice: Choice
    headline: str
    reasons: tuple[str, ...]

    @property
    def fuse(self) -> bool:
        """Whether to fuse."""
        return self.choice == "fuse"


def decide_fusion(facts: Facts) -> FusionDecision:
    """The decision for one problem; see the module's first page."""
    times, traffic = facts.times, facts.traffic
    if 0 in (facts.m, facts.n, facts.k):
        what = "the output has no elements" if 0 in (facts.m, facts.n) else "K is 0, so the product is zero everywhere"
        return FusionDecision("empty", f"NOTHING TO FUSE: {what}", ("PyTorch computes such a call.",))
    if not traffic.elementwise:
        return FusionDecision(
            "nothing to fuse",
            f"NOTHING TO FUSE: {facts.coverage.cublaslt} computes all of it in one kernel",
            ("There is no elementwise operation after it whose traffic could be saved.", *_measured_alone(facts)),
        )
    if facts.coverage.complete and not facts.coverage.remaining:
        return FusionDecision(
            "nothing to fuse",
            f"NOTHING TO FUSE: {facts.coverage.cublaslt} computes all of it in one kernel",
            _measured_alone(facts),
        )
    saving = f"{in_share(times.saved_share)} less GPU time than eager PyTorch"
    change = f"({in_time(times.eager.expected)} -> {in_time(times.fused.expected)})"
    if facts.kernel.spec is None:
        reasons = [
            f"A kernel that took it would need {saving} {change}. As it is, PyTorch computes the product, and one "
            "kernel the epilogue where a standalone one takes it: explain(m, n) says what comes of that."
        ]
        return FusionDecision("not possible", f"CANNOT BE FUSED: {facts.kernel.refusal}", tuple(reasons))
    reasons = _reasons(facts)
    if facts.kernel.way in _UNFUSED:
        reasons.insert(0, f"The default backend does so: {facts.kernel.reason}. The estimates are of the fused kernel.")
        return FusionDecision("marginal", _UNFUSED[facts.kernel.way], tuple(reasons))
    if facts.kernel.reason:
        reasons.append(f"The kernel is the one that tuning found fastest; {facts.kernel.reason}.")
    if not times.saved_share:
        headline = f"NOT WORTH FUSING: expected to take no less GPU time than eager PyTorch {change}"
        return FusionDecision("marginal", headline, tuple(reasons))
    if times.saved_share < WORTH_SHARE:
        reasons.append(
            "Two GEMM kernels for one problem differ by as much: fuse it for what else it brings, not for speed."
        )
        return FusionDecision("marginal", f"HARDLY WORTH FUSING: expected to take {saving} {change}", tuple(reasons))
    if _waits_for_host(facts):
        headline = f"FUSE IN CUDA GRAPHS ONLY: {saving} {change}, but more of the CPU's"
        return FusionDecision("marginal", headline, tuple(reasons))
    if times.saved_share < SURE_SHARE:
        reasons.append("That is close to what GEMM kernels differ by: measure it with the comparison script first.")
    return FusionDecision("fuse", f"FUSE: expected to take {saving} {change}", tuple(reasons))


def _measured_alone(facts: Facts) -> tuple[str, ...]:
    """What the default backend does by measurement: leaves all of it to cuBLAS, or takes the kernel nevertheless."""
    if not facts.kernel.reason:
        return ()
    if facts.kernel.way == CUBLAS_ALONE:
        return (f"The default backend does so: {facts.kernel.reason}.",)
    return (f"The default backend takes what tuning found fastest; {facts.kernel.reason}.",)


def _waits_for_host(facts: Facts) -> bool:
    """Whether calls launched one by one are no faster fused, because the GPU waits for the CPU."""
    eager_host, fused_host = host_seconds(facts.traffic)
    eager, fused = facts.times.eager.expected, facts.times.fused.expected
    return max(fused, fused_host) >= max(eager, eager_host) * (1 - WORTH_SHARE)


def _reasons(facts: Facts) -> list[str]:
    times, traffic, device = facts.times, facts.traffic, facts.device
    kernels = len(traffic.elementwise)
    which = "each of which reads and writes" if kernels > 1 else "which reads and writes"
    reasons = [
        f"{_fused_kernels(traffic)} {in_bytes(traffic.fused_bytes)} instead of {in_bytes(traffic.unfused_bytes)}: "
        f"eager PyTorch runs {count(kernels, 'kernel')} after the GEMM, {which} whole matrices (the product has "
        f"{in_bytes(traffic.product_bytes)})."
    ]
    reasons.append(_gemm_reason(facts))
    if _waits_for_host(facts):
        eager_host, fused_host = host_seconds(traffic)
        reasons.append(
            f"The CPU takes about {in_time(fused_host)} to launch the fused call and {in_time(eager_host)} for eager "
            "PyTorch: launched one by one, fused calls are no faster, as the GPU waits. In a CUDA graph, or where the "
            "GPU is behind anyway, the GPU's time counts."
        )
    if all(fits_l2(kernel.bytes, device) for kernel in traffic.elementwise):
        launches = kernels * KERNEL_SECONDS
        gain = times.eager.expected - times.fused.expected
        where = f"What each of them reads and writes fits in the L2 cache ({in_mebibytes(device.l2)})"
        if launches >= gain / 2:
            each = f"about {in_time(KERNEL_SECONDS)}" + (" each" if kernels > 1 else "")
            reasons.append(f"{where}, so there is little memory traffic to save: fewer kernels are, {each}.")
        else:
            reasons.append(f"{where}, which is taken to be {L2_SPEEDUP:g} times as fast as memory.")
    if facts.coverage.complete:
        reasons.append(f"PyTorch alone can fuse this one, by cuBLASLt: {facts.coverage.cublaslt}.")
    elif kernels > 1:
        share = times.saved_share_compiled
        change = f"{in_share(abs(share))} {'less' if share >= 0 else 'MORE'} GPU time"
        reasons.append(
            f"Against torch.compile, which makes one kernel of the {kernels}, {change} "
            f"({in_time(times.compiled.expected)} -> {in_time(times.fused.expected)})."
        )
    if facts.registers is not None and facts.registers.warns:
        reasons.append(
            f"Warning: about {facts.registers.needed} registers a thread are needed and there are "
            f"{facts.registers.budget}; values will spill to memory, which may cost more than fusing saves."
        )
    return reasons


def _fused_kernels(traffic: Traffic) -> str:
    if not traffic.copied:
        return "One kernel moves"
    return f"One kernel, and {count(len(traffic.copied), 'copy')} into padded rows before it, move"


def _gemm_reason(facts: Facts) -> str:
    """What the GEMM takes, and what is added to it unfused and fused."""
    times = facts.times
    bound = "arithmetic" if times.gemm.bound == "compute" else "memory traffic"
    fused_gemm = times.fused.expected - times.fused_arithmetic
    eager = f"eager PyTorch's elementwise kernels add {in_time(times.eager.expected - times.gemm_expected)} to it"
    fused = f"the fused kernel {in_time(times.fused_arithmetic)} of arithmetic"
    spec = facts.kernel.spec
    if spec is not None and uses_older_instructions(spec.config.family, facts.device):
        slower = f"{in_time(fused_gemm)} in a kernel of the {spec.config.family} family, whose mma.sync is slower"
        return f"The GEMM takes about {in_time(times.gemm_expected)} in PyTorch and {slower}; {eager}, {fused}."
    if times.copies:
        fused += f" and {in_time(times.copies)} for copies into padded rows"
        fused_gemm -= times.copies
    if times.gemm_is_misaligned:
        slow = f"The GEMM takes about {in_time(times.gemm_expected)} in PyTorch, as cuBLAS has a slow kernel for an odd"
        return f"{slow} N or K, and {in_time(fused_gemm)} in the fused kernel; {eager}, {fused}."
    if (traffic := fused_gemm - times.gemm_expected) > 0.01 * times.fused.expected:
        fused += f" and {in_time(traffic)} for the bytes of the epilogue"
    return (
        f"The GEMM is limited by {bound} and takes about {in_time(times.gemm_expected)} either way; {eager}, {fused}."
    )

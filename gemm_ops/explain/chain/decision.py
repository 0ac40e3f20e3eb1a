"""Whether to run a chain as one kernel, and why, in words.

    >>> decision = decide_chain(facts)
    >>> decision.choice, decision.headline
    ('fuse', 'FUSE: one kernel in place of 3, expected to take 58% less GPU time than eager PyTorch (226 us -> ...)')

Four of the choices that :mod:`gemm_ops.explain.decision` has:

* "fuse": two or more kernels of eager PyTorch become one;
* "nothing to fuse": eager PyTorch runs one, or none;
* "not possible": no kernel takes the chain;
* "empty": an extent is 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from epilogues.analysis import (
    ChainTraffic,
    applied_cost,
    fast_instructions,
    fast_special_calls,
    instructions_per_element,
)
from epilogues.tree import Accumulator, EpilogueTree, Kind

from ...lowering.functors import variant_of
from ..decision import FusionDecision
from ..devices import Device
from ..estimate import (
    HOST_CHAIN_SECONDS,
    HOST_FUNCTION_SECONDS,
    KERNEL_SECONDS,
    L2_SPEEDUP,
    SPECIAL_PER_CLOCK,
    fits_l2,
    special_cost,
)
from ..units import count, in_bytes, in_mebibytes, in_number, in_share, in_time
from .estimate import ChainTimes, work_of
from .kernel import ChainKernel, ChainRegisters

#: Below this share of its bytes no narrower dtype is advised.
_WORTH_SHARE = 0.05


@dataclass(frozen=True)
class ChainFacts:
    """What the decision rests on.

    Attributes:
        m, n: extents.
        element: short dtype name of the tensor.
        tree: as the kernel computes it.
        traffic, times, special_calls, kernel, registers, device: as :class:`.report.ChainReport` has them.
    """

    m: int
    n: int
    element: str
    tree: EpilogueTree
    traffic: ChainTraffic
    times: ChainTimes
    special_calls: int
    kernel: ChainKernel
    registers: ChainRegisters | None
    device: Device


def decide_chain(facts: ChainFacts) -> FusionDecision:
    """The decision for one tensor; see the module's first page."""
    if 0 in (facts.m, facts.n):
        headline = "NOTHING TO FUSE: the result has no elements"
        return FusionDecision("empty", headline, ("PyTorch computes such a call.",))
    kernels, times = facts.traffic.eager, facts.times
    if len(kernels) < 2:
        return _no_gain(facts)
    saving = (
        f"{in_share(times.saved_share)} less GPU time than eager PyTorch "
        f"({in_time(times.eager.expected)} -> {in_time(times.fused.expected)})"
    )
    if facts.kernel.spec is None:
        reason = f"One kernel that took it would need {saving}. As it is, PyTorch computes it operation by operation."
        return FusionDecision("not possible", f"CANNOT BE FUSED: {facts.kernel.refusal}", (reason,))
    reasons = [_bytes(facts), _launches(facts), _cache(facts)]
    if times.launch_dominates:
        reasons.append(
            f"The launch dominates: a kernel takes about {in_time(KERNEL_SECONDS)} however little it does, and this "
            f"one {in_time(max(times.moving, times.computing))} besides. What counts is the number of kernels, 1 "
            f"instead of {len(kernels)}, and neither bytes nor arithmetic."
        )
    reasons += _host(facts)
    reasons.append(bound_words(facts))
    reasons += _narrower(facts)
    reasons += _faster_functions(facts)
    if (use := facts.registers) is not None and use.warns:
        reasons.append(
            f"Warning: about {use.needed} registers a thread are needed and there are {use.budget}; values may spill "
            "to memory, which no figure here counts."
        )
    reasons.append(
        "torch.compile makes one kernel of it too, which moves as many bytes: the gain is over eager PyTorch, and "
        "little GPU time is to be gained over torch.compile."
    )
    return FusionDecision(
        "fuse", f"FUSE: one kernel in place of {len(kernels)}, expected to take {saving}", tuple(reasons)
    )


def _no_gain(facts: ChainFacts) -> FusionDecision:
    kernels = facts.traffic.eager
    if not kernels:
        headline = "NO GAIN: eager PyTorch computes nothing, what it returns is there already"
        return FusionDecision("nothing to fuse", headline, ("One kernel of ours would copy it.",))
    headline = f"NO GAIN: this is one operation of PyTorch, {kernels[0].name}: there is nothing to fuse"
    reasons = (
        f"PyTorch's own kernel does as well: it moves {in_bytes(kernels[0].bytes)}, and one of ours "
        f"{in_bytes(facts.traffic.fused_bytes)}; there is no intermediate result that need not be written and read.",
        bound_words(facts),
    )
    return FusionDecision("nothing to fuse", headline, reasons)


def _bytes(facts: ChainFacts) -> str:
    traffic, kernels = facts.traffic, facts.traffic.eager
    return (
        f"One kernel moves {in_bytes(traffic.fused_bytes)} instead of {in_bytes(traffic.unfused_bytes)}: eager PyTorch "
        f"runs {count(len(kernels), 'kernel')}, each of which reads its inputs and writes its result."
    )


def _launches(facts: ChainFacts) -> str:
    times, spared = facts.times, len(facts.traffic.eager) - 1
    each = f", about {in_time(KERNEL_SECONDS)} each" if spared > 1 else ""
    return (
        f"It is expected to be {in_number(times.speedup)} times as fast. Of the {in_time(times.saved)} that it saves, "
        f"{in_time(spared * KERNEL_SECONDS)} are for {count(spared, 'launch')} less{each}."
    )


def _cache(facts: ChainFacts) -> str:
    times = facts.times
    together = f"Inputs and outputs together, {in_bytes(facts.traffic.fused_bytes)},"
    cache = f"the L2 cache ({in_mebibytes(facts.device.l2)})"
    if not times.in_l2:
        return f"{together} do not fit in {cache}: they come from memory and go to memory."
    served = (
        f"{together} fit in {cache}: between operations that follow each other they are served from there, which is "
        f"taken to be {L2_SPEEDUP:g} times as fast as memory"
    )
    if not all(fits_l2(kernel.bytes, facts.device) for kernel in facts.traffic.eager):
        return f"{served}. What eager PyTorch holds in between does not fit, so that it goes to memory all the same."
    launches = (len(facts.traffic.eager) - 1) * KERNEL_SECONDS
    if launches >= times.saved / 2:
        return f"{served}. What is saved is mostly launches, and little is to be gained beyond them."
    return f"{served}. So less is to be gained than by bytes that come from memory."


def _host(facts: ChainFacts) -> list[str]:
    times, eager_host = facts.times, HOST_FUNCTION_SECONDS * len(facts.traffic.eager)
    if times.fused.expected >= HOST_CHAIN_SECONDS or times.eager.expected >= eager_host:
        return []
    return [
        f"The CPU takes about {in_time(HOST_CHAIN_SECONDS)} to launch the one kernel and {in_time(eager_host)} for "
        "eager PyTorch's: launched one by one, both wait for it, and these are the times that count. In a CUDA graph, "
        "or where the GPU is behind anyway, the GPU's are."
    ]


def bound_words(facts: ChainFacts) -> str:
    """What bounds the one kernel, and what therefore will not make it faster."""
    times, place = facts.times, facts.times.roofline
    where = "the L2 cache's bandwidth" if times.in_l2 else "memory bandwidth"
    special = special_cost(facts.device) * facts.special_calls
    work = f"arithmetic that takes as long as {count(times.work, 'addition')}"
    if special and special == times.work:
        calls = count(facts.special_calls, "call")
        work += f" ({calls} of the special function unit, which does {SPECIAL_PER_CLOCK} in a clock)"
    figures = (
        f"an element has {in_number(facts.traffic.fused_bytes / (facts.m * facts.n))} bytes and {work}, "
        f"{in_number(place.intensity)} per byte, and the device balances at {in_number(place.ridge)}"
    )
    begin = "Besides its launch the kernel is bound" if times.launch_dominates else "The kernel is bound"
    if times.bound == "memory":
        less = "" if times.launch_dominates else "; only moving fewer bytes will"
        return f"{begin} by {where}: {figures}. Tuning the computation will not make it faster{less}."
    by = "the special function unit" if special == times.work else "arithmetic"
    return f"{begin} by {by}: {figures}. Fewer or cheaper operations make it faster; moving fewer bytes does not."


def _narrower(facts: ChainFacts) -> list[str]:
    """What 16 bits in place of 32 would save, where bytes decide."""
    if facts.times.bound != "memory" or facts.times.launch_dominates:
        return []
    wide = ["x"] if facts.element == "f32" and any(isinstance(node, Accumulator) for node in facts.tree.nodes) else []
    wide += [op.name for op in facts.tree.operands if op.kind is Kind.AUX and op.dtype == "f32"]
    wide += [f"output {store.name}" for store in facts.tree.outputs if store.dtype == "f32"]
    fewer = 2 * facts.m * facts.n * len(wide)
    if fewer < _WORTH_SHARE * facts.traffic.fused_bytes:
        return []
    which = ", ".join(wide[:-1]) + (" and " if len(wide) > 1 else "") + wide[-1]
    total = in_bytes(facts.traffic.fused_bytes - fewer)
    return [f"Where the values allow it: with 16 bits in place of float32 for {which}, one kernel would move {total}."]


def _faster_functions(facts: ChainFacts) -> list[str]:
    """What the fast device functions would save, where arithmetic decides and float32 outputs rule them out."""
    if facts.times.bound != "compute" or variant_of(facts.tree) != "exact":
        return []
    narrow = tuple(dataclasses.replace(store, dtype="bf16") for store in facts.tree.outputs)
    tree = dataclasses.replace(facts.tree, outputs=narrow)
    work = work_of(
        instructions_per_element(tree, fast_instructions), applied_cost(tree, fast_special_calls), facts.device
    )
    if work >= facts.times.work:
        return []
    return [
        "Float32 outputs need the exact device functions; the faster ones, which are exact enough where every output "
        f"has 16 bits, would take as long as {count(work, 'addition')} in place of {facts.times.work}."
    ]

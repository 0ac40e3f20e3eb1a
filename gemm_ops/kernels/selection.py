"""Which kernel computes a problem on a device, by rules alone; the device need not be there.

    >>> selection = select_kernel(tree, problem, operands, outputs, target=Target((9, 0), 132))
    >>> selection.spec.config.name, selection.reason
    ('sm90_cooperative_128x256x64_2x1', '')

Contract: families are asked in order, the first that takes the problem and has a configuration for it is chosen.
``reason`` has why those before it do not, or why none does, family by family.  Nothing is built, and CUTLASS is not
imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epilogues.tree import EpilogueTree

from ..operands import OperandFacts
from ..problem import Matrix, Problem
from ..runtime.abi import MAX_OPERANDS, MAX_OUTPUTS
from .families import arch_of, choose_config, families_for, refusal
from .spec import KernelSpec


@dataclass(frozen=True)
class Target:
    """What matters of a device: its compute capability, and how many multiprocessors it has."""

    capability: tuple[int, int]
    multiprocessors: int


@dataclass(frozen=True)
class Selection:
    """The kernel, or why there is none.

    Attributes:
        spec: the kernel; None if no family takes the problem.
        reason: why none does, in words; if one does, why the families asked before it do not.
    """

    spec: KernelSpec | None
    reason: str = ""


def problem_refusal(problem: Problem, operands: int, outputs: int) -> str:
    """Why no kernel of any family takes a problem, in words; "" if one might."""
    if problem.element not in ("f16", "bf16"):
        return f"the kernels take float16 and bfloat16 matrices, not {str(problem.dtype).removeprefix('torch.')}"
    if 0 in (problem.m, problem.n, problem.k):
        return "an extent is 0, so there is nothing to multiply"
    if operands > MAX_OPERANDS or outputs > MAX_OUTPUTS:
        return f"a kernel has at most {MAX_OPERANDS} operands and {MAX_OUTPUTS} outputs"
    return ""


def select_kernel(
    tree: EpilogueTree,
    problem: Problem,
    operands: Sequence[OperandFacts],
    outputs: Sequence[tuple[Matrix, str]],
    *,
    target: Target,
    families: Sequence[str] | None = None,
) -> Selection:
    """The kernel for a problem that :func:`problem_refusal` has nothing against.

    Args:
        tree: resolved.
        outputs: layout and short dtype name of each output.
        families: the families to ask, in order; None: all that run on the device, best first.
    """
    available = families_for(target.capability)
    if families is not None:
        available = tuple(family for family in families if family in available)
    if not available:
        return Selection(None, f"no kernel family runs on compute capability {'.'.join(map(str, target.capability))}")
    reasons: list[str] = []
    for family in available:
        reason = refusal(family, problem, operands, outputs)
        if not reason:
            config = choose_config(family, problem, tree, target.multiprocessors)
            if config is not None:
                assert problem.a is not None and problem.b is not None and problem.element is not None
                layouts = str(problem.a.layout), str(problem.b.layout)
                spec = KernelSpec(tree, config, problem.element, *layouts, arch_of(family, target.capability))
                return Selection(spec, "; ".join(reasons))
            reason = "the epilogue's auxiliary matrices leave no room in shared memory"
        if reason not in reasons:
            reasons.append(reason)
    return Selection(None, "; ".join(reasons))

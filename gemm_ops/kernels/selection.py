"""Which kernel computes a problem on a device, by rules alone; the device need not be there.

    >>> selection = select_kernel(tree, "bf16", request, target=Target((9, 0), 132))
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

from ..addressing import Addressing, Request, address
from ..problem import Problem
from ..runtime.abi import MAX_OPERANDS, MAX_OUTPUTS
from .config import KernelConfig
from .families import arch_of, choose_config, families_for, general_families
from .spec import KernelSpec


@dataclass(frozen=True)
class Target:
    """What matters of a device: its compute capability, how many multiprocessors it has, and whose results count.

    ``name`` is the driver's, such as "NVIDIA H200"; "" where it is not known, and nothing measured counts.  The rules
    here do not look at it.
    """

    capability: tuple[int, int]
    multiprocessors: int
    name: str = ""


@dataclass(frozen=True)
class Selection:
    """The kernel, or why there is none.

    Attributes:
        spec: the kernel; None if no family takes the problem.
        addressing: how the tensors reach it; None without one.
        reason: why none does, in words; if one does, why the families asked before it do not.
    """

    spec: KernelSpec | None
    addressing: Addressing | None = None
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
    element: str,
    request: Request,
    *,
    target: Target,
    families: Sequence[str] | None = None,
) -> Selection:
    """The kernel for a problem that :func:`problem_refusal` has nothing against.

    Args:
        tree: resolved.
        element: short dtype name of A and B.
        request: the tensors.
        families: the families to ask, in order; None: all that run on the device, best first.
    """
    available = families_for(target.capability)
    if families is not None:
        available = tuple(family for family in families if family in available)
    if not available:
        capability = ".".join(map(str, target.capability))
        return Selection(None, None, f"no kernel family runs on compute capability {capability}")
    reasons: list[str] = []
    for family in available:
        found = address(family, request)
        if isinstance(found, Addressing):
            config = choose_config(family, found, tree, target.multiprocessors)
            if isinstance(config, KernelConfig):
                arch = arch_of(family, target.capability)
                spec = KernelSpec(tree, config, element, found.a.layout, found.b.layout, arch, found.access)
                return Selection(spec, found, "; ".join(reasons))
            found = config
        # few problems are for the other families: that one is not says nothing of the family that takes it
        tells = families is not None or family in general_families(target.capability)
        if tells and found not in reasons:
            reasons.append(found)
    return Selection(None, None, "; ".join(reasons))

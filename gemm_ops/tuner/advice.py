"""What a call is to do: what was measured fastest, else what the rules say.

    >>> advice = advise(call.tree, "bf16", call.request, selection, target, alone=False)
    >>> advice.way, advice.reason
    ('fused', "measured: 12.8 us, the model's choice 14.1, cuBLAS and one kernel 13.9 (2026-11-30, NVIDIA H200)")

Contract: :mod:`gemm_ops.dispatch`, :mod:`gemm_ops.foreseen` and :mod:`gemm_ops.explain` all ask here, with a device
that need not be there.  Results of exactly the class come first, then near ones, then those of other epilogues
(:mod:`.near`), then the wave model's kernel.  Names that are in no pool any more are passed over, and so is what the
call cannot be computed by: of a class of epilogues cuBLAS alone computes some.  A backend asked for by name gets its
own fastest kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from epilogues.tree import EpilogueTree

from ..addressing import Addressing, Request
from ..kernels.candidates import Candidate, find_candidate
from ..kernels.selection import Selection, Target
from ..kernels.spec import KernelSpec
from ..kernels.waves import expected_time
from ..printable import printable
from . import known
from .classes import ProblemClass, problem_class, tree_class
from .context import way_of_tuning
from .near import TRUSTED, TRUSTED_OF_EPILOGUE, has_as_many_waves, like_results, near_results, pytorch_is_as_near
from .records import BY_OPERATIONS, CUBLAS_ALONE, TWO_PASSES, UNFUSED, Measured

FUSED = "fused"

__all__ = ["BY_OPERATIONS", "CUBLAS_ALONE", "FUSED", "TWO_PASSES", "Advice", "advise"]


@dataclass(frozen=True)
class Advice:
    """What a call is to do.

    Attributes:
        way: :data:`FUSED`, :data:`TWO_PASSES`, :data:`CUBLAS_ALONE` or :data:`BY_OPERATIONS`.
        spec: the fused kernel, to be taken too where the way is gone for another reason.
        addressing: how the tensors reach it.
        reason: why, with the numbers; "" for the wave model's choice.
    """

    way: str
    spec: KernelSpec
    addressing: Addressing
    reason: str = ""


def advise(
    tree: EpilogueTree,
    element: str,
    request: Request,
    selection: Selection,
    target: Target,
    *,
    alone: bool,
    forced: str = "auto",
) -> Advice:
    """What a call is to do that some family takes.

    Args:
        tree: resolved.
        element: short dtype name of A and B.
        request: the tensors.
        selection: what the rules chose, with a kernel.
        target: the device; nothing measured counts without its name.
        alone: whether cuBLAS computes the epilogue with the product (:func:`gemm_ops.two_passes.find_alone`), so that
            there are no two passes.
        forced: a family, or "auto".

    Raises:
        ValueError: for a value of ``GEMM_OPS_TUNE`` that means nothing.
    """
    spec, addressing = selection.spec, selection.addressing
    assert spec is not None and addressing is not None
    if way_of_tuning() != "off" and target.name:
        asker = _Asker(tree, element, request, selection, target, alone, forced)
        if (found := asker.by_results()) is not None:
            return found
    return Advice(FUSED, spec, addressing)


@dataclass(frozen=True)
class _Asker:
    tree: EpilogueTree
    element: str
    request: Request
    selection: Selection
    target: Target
    alone: bool
    forced: str

    def by_results(self) -> Advice | None:
        """What results say; None if there are none."""
        results = known.all_of(self.target.name)
        problem = problem_class(self.request, self.element, self.target) if results else None
        if problem is None:
            return None
        tree = tree_class(self.tree)
        exact = known.find(problem, tree)
        if exact is not None and (found := self._follow(exact, "measured")) is not None:
            return found
        for near in near_results(problem, tree, results.values()):
            said = f"measured at {near.problem.extents}"
            if (found := self._follow(near, said, asked=problem)) is not None:
                return found
        for like in like_results(problem, tree, results.values()):
            if (found := self._of_another_epilogue(like)) is not None:
                return found
        return None

    def _of_another_epilogue(self, measured: Measured) -> Advice | None:
        """The fused kernel that was fastest with another epilogue; None if none is to be trusted."""
        fused = (self._find(name) for name in measured.order if name not in UNFUSED)
        candidate = next((each for each in fused if each is not None), None)
        if candidate is None or candidate.expected > TRUSTED_OF_EPILOGUE * self._expected_of_the_model():
            return None
        # its own times would be others
        reason = (
            f"measured fastest with {printable(measured.example) or 'another epilogue'} "
            f"({measured.date[:10]}, {self.target.name})"
        )
        return Advice(FUSED, candidate.spec, candidate.addressing, reason)

    def _follow(self, whole: Measured, said: str, asked: ProblemClass | None = None) -> Advice | None:
        """What one result says; None if it says nothing that counts here.

        Args:
            asked: the class of the problem where it is not the measured one.
        """
        measured = whole.without(TWO_PASSES if self.alone else CUBLAS_ALONE)
        if measured is None:
            return None
        unfused = ""
        for name in measured.order:
            if name in UNFUSED:
                unfused = unfused or name
                continue
            candidate = self._find(name)
            if candidate is None:
                continue
            if asked is not None and not self._is_trusted(candidate, measured.problem):
                return None
            if not unfused or self.forced != "auto":
                return Advice(FUSED, candidate.spec, candidate.addressing, f"{said}: {measured.describe(name)}")
            if asked is not None and not pytorch_is_as_near(asked, measured.problem):
                return None
            return Advice(unfused, candidate.spec, candidate.addressing, f"{said}: {measured.describe(unfused)}")
        if unfused and self.forced == "auto" and asked is None:  # its fused kernels are gone
            assert self.selection.spec is not None and self.selection.addressing is not None
            reason = f"{said}: {measured.describe(unfused)}"
            return Advice(unfused, self.selection.spec, self.selection.addressing, reason)
        return None

    def _find(self, name: str) -> Candidate | None:
        family = None if self.forced == "auto" else self.forced
        return find_candidate(name, self.tree, self.element, self.request, self.target, family)

    def _is_trusted(self, candidate: Candidate, measured: ProblemClass) -> bool:
        """Whether a kernel of a near result is as good here; see :mod:`.near`."""
        if not has_as_many_waves(candidate, measured, self.target.multiprocessors):
            return False
        return candidate.expected <= TRUSTED * self._expected_of_the_model()

    def _expected_of_the_model(self) -> float:
        spec, addressing = self.selection.spec, self.selection.addressing
        assert spec is not None and addressing is not None
        return expected_time(spec.config, spec.config.swizzle, addressing, self.tree, self.target.multiprocessors)

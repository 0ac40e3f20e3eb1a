"""What a sweep found, as plain data that reports are made from.

    >>> record.status, record.reason
    ('failed', "D, padded: 1 elements outside the output written, ...")
    >>> record.to_json()["errors"]["error"]
    0.00166

One :class:`CaseRecord` per case, in the order of the cases, and one :class:`Sweep` around them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from .cases import Case
from .compare import Comparison, worst
from .timing import Timing

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Route:
    """Which way a call with one output layout goes.

    Attributes:
        backend: "skinny", "sm90", "sm80", "cublas" or "reference"; None if a forced backend refuses the call.
        kernel: the kernel configuration's name, if there is a fused kernel.
        reason: why this one, or why it is refused.
        spec: what ``gemm_ops.build_kernels`` takes; not reported.
    """

    backend: str | None
    kernel: str | None
    reason: str
    spec: Any = None


@dataclass
class CaseRecord:
    """One case and what became of it.

    Attributes:
        case: the case.
        status: "passed", "failed" or "skipped".
        reason: why it failed or was skipped, in one line; empty if it passed.
        routes: output layout -> route.
        comparisons: one for each output in each layout that ran.
        unfused: where the unfused computation comes from.
        timing: None if the case was not timed.
        seconds: wall time of the case.
    """

    case: Case
    status: str = SKIPPED
    reason: str = ""
    routes: dict[str, Route] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    unfused: str = ""
    timing: Timing | None = None
    seconds: float = 0.0

    @property
    def worst(self) -> Comparison | None:
        """The comparison nearest to its limit, or furthest beyond it."""
        return worst(self.comparisons)

    @property
    def route(self) -> Route | None:
        """The route of the natural output layout."""
        return next(iter(self.routes.values()), None)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON data; :mod:`shape_sweeps.export` documents the keys."""
        return {
            "id": self.case.id,
            "case": asdict(self.case),
            "status": self.status,
            "reason": self.reason,
            "reproducer": self.case.reproducer(),
            "routes": {
                layout: {"backend": route.backend, "kernel": route.kernel, "reason": route.reason}
                for layout, route in self.routes.items()
            },
            "unfused": self.unfused,
            "errors": None if self.worst is None else _finite(asdict(self.worst)),
            "comparisons": [_finite(asdict(comparison)) for comparison in self.comparisons],
            "timing": None if self.timing is None else _timing_json(self.timing),
            "seconds": round(self.seconds, 4),
        }


@dataclass
class Sweep:
    """A finished or interrupted sweep.

    Attributes:
        records: one per case that was reached, in order.
        planned: how many cases there were to run.
        interrupted: whether the user stopped it.
        skipped_by_time_limit: how many cases were skipped because time was up.
        notes: lines a reader should see: why kernels could not be built, which cases could not be timed.
    """

    records: list[CaseRecord]
    planned: int
    interrupted: bool = False
    skipped_by_time_limit: int = 0
    notes: list[str] = field(default_factory=list)

    def count(self, status: str) -> int:
        return sum(record.status == status for record in self.records)

    @property
    def failures(self) -> list[CaseRecord]:
        return [record for record in self.records if record.status == FAILED]


def _timing_json(timing: Timing) -> dict[str, Any]:
    return {
        "rounds": timing.rounds,
        "input_sets": timing.sets,
        "contenders": {name: asdict(sample) for name, sample in timing.samples.items()},
        "speedup_over_eager": timing.ratio("eager", "fused"),
        "speedup_over_mm": timing.ratio("mm", "fused"),
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }

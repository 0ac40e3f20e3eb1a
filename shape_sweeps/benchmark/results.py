"""What a run of the benchmark found, as plain data: what tables, targets and pictures are made from.

    >>> entry.ratio("eager", "fused")                       # speed-up of the fused call over eager PyTorch
    1.21
    >>> Results.from_json(results.to_json()) == results
    True

Times compare within a series of rounds only, so that every contender has a time in each series that it took part in.
The JSON document is in :mod:`.document`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..timing import Sample
from .suite import EAGER, FUSED, FUSED_PEERS, MISALIGNED, MM, ROUNDED_MM, Problem

MEASURED, FAILED, SKIPPED = "measured", "failed", "skipped"

#: The two series of rounds of a problem: among products alone, and among everything that computes the epilogue.
AMONG_PRODUCTS, AMONG_PEERS = "products", "peers"


@dataclass
class Contestant:
    """One contender of one problem.

    Attributes:
        times: series of rounds -> time of one call there.
        how: how it is timed, as :mod:`shape_sweeps.graph_timing` has it; "" if it is not.
        error: relative to float64 (Frobenius), of the output with the largest; None if it was not computed.
        reason: why it has no times, or why they are not those of a graph.
    """

    times: dict[str, Sample] = field(default_factory=dict)
    how: str = ""
    error: float | None = None
    reason: str = ""


@dataclass
class Entry:
    """One problem and what became of it.

    Attributes:
        problem: the problem.
        status: :data:`MEASURED`; :data:`FAILED` if our result is wrong or was not computed; :data:`SKIPPED` if it does
            not fit in memory.
        reason: why, of the last two.
        backend, kernel, why: what our call uses, as ``gemm_ops.backend_for`` has it.
        copies: how many copies of the inputs the calls walk through.
        cold: whether these keep the inputs out of the L2 cache.
        contestants: by name, ours first.
        rounds: of each series.
        seconds: wall time of the entry.
    """

    problem: Problem
    status: str = SKIPPED
    reason: str = ""
    backend: str = ""
    kernel: str = ""
    why: str = ""
    copies: int = 1
    cold: bool = False
    contestants: dict[str, Contestant] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def time_us(self, name: str) -> float | None:
        """Median time of one call, among the products where there is one."""
        times = self.contestants[name].times if name in self.contestants else {}
        sample = times.get(AMONG_PRODUCTS) or times.get(AMONG_PEERS)
        return None if sample is None else sample.median_us

    def ratio(self, over: str, under: str) -> float | None:
        """Time of one contender over another's in a series that both took part in; None if there is none, or if our
        result is wrong, whose time is of no interest.
        """
        if self.status != MEASURED or over not in self.contestants or under not in self.contestants:
            return None
        first, second = self.contestants[over].times, self.contestants[under].times
        for series in (AMONG_PRODUCTS, AMONG_PEERS):
            if series in first and series in second:
                return first[series].median_us / second[series].median_us
        return None

    @property
    def over_mm(self) -> float | None:
        """Our time over that of the bare product."""
        return self.ratio(FUSED, MM)

    @property
    def over_rounded_mm(self) -> float | None:
        """Our time over that of the bare product of rounded-up extents."""
        return self.ratio(FUSED, ROUNDED_MM)

    @property
    def over_product(self) -> float | None:
        """Our time over that of the product that one would wish to be as fast as: of the shape, rounded up where it is
        misaligned.
        """
        return self.over_rounded_mm if self.problem.group == MISALIGNED else self.over_mm

    @property
    def speedup_over_eager(self) -> float | None:
        """Eager PyTorch's time over ours."""
        return self.ratio(EAGER, FUSED)

    @property
    def speedup_over_fused_peer(self) -> float | None:
        """The time of the fastest peer that may fuse, over ours."""
        found = [ratio for peer in FUSED_PEERS if (ratio := self.ratio(peer, FUSED)) is not None]
        return min(found, default=None)


#: what an entry is asked for
Quantity = Callable[[Entry], "float | None"]


@dataclass
class Results:
    """A run, finished or not.

    Attributes:
        environment: device, versions and time; :func:`shape_sweeps.environment.describe` and, for CUDA, driver,
            clocks and l2_bytes.
        command: the arguments that were given.
        settings: cache ("cold" or "warm"), rounds, seconds_per_case, peers, seed, overlap ("on" or "off").
        entries: one per problem that was reached, in order.
        planned: how many problems there were.
        interrupted: whether it was ended before all were reached.
        host: contender -> microseconds of the host per call.
        host_reason: why there are none.
        notes: lines a reader should see.
    """

    environment: dict[str, Any]
    command: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    planned: int = 0
    interrupted: bool = False
    host: dict[str, float] = field(default_factory=dict)
    host_reason: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return str(self.environment.get("device", "")).startswith("cuda")

    def count(self, status: str) -> int:
        return sum(entry.status == status for entry in self.entries)

    @property
    def failures(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.status == FAILED]


def values_of(entries: Iterable[Entry], quantity: Quantity) -> list[float]:
    """A quantity of the entries that have it."""
    return [value for entry in entries if (value := quantity(entry)) is not None]


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None

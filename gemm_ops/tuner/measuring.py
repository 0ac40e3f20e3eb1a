"""Interleaved rounds of many contenders, of which the slow ones leave early.

    >>> rounds = measure_in_rounds(["a", "b"], stopwatch, seconds=2.0)
    >>> rounds.us["a"], rounds.count, rounds.last
    (12.8, 31, ('a', 'b'))

Contract: clock rates and power limits change from second to second, so all contenders take turns, in alternating
order, and compared with each other round by round.  After some rounds (:data:`STEPS`) those that are too slow to win
leave.  Rounds end when the seconds are used up; the first :data:`LEAST_ROUNDS` always run.  The clock and the stopwatch
are the caller's.

The first rounds are the fastest, before the device is warm: by a tenth on an H200 at 4096x4096x4096.  So a time is the
median of the contender that is fastest in the end, times the median of the ratios to it in the same rounds; who left
early would look too fast by its own median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

#: After so many rounds, who is so much slower than the fastest leaves.
STEPS = ((3, 1.15), (9, 1.05))
LEAST_ROUNDS = 3
#: Beyond which medians change no more.
MOST_ROUNDS = 101


class Stopwatch(Protocol):
    """Times contenders that it knows by name."""

    def time(self, name: str) -> float:
        """Microseconds of one call, now."""
        ...


@dataclass(frozen=True)
class Rounds:
    """What came of it.

    Attributes:
        us: name -> its time, in microseconds.
        count: rounds of those that were in until the end.
        last: these, in the order given.
    """

    us: dict[str, float]
    count: int
    last: tuple[str, ...]


def measure_in_rounds(
    names: Sequence[str], stopwatch: Stopwatch, seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> Rounds:
    """Times all contenders, at least one; see the module's first page."""
    times: dict[str, list[float]] = {name: [] for name in names}
    alive, count, began = list(names), 0, clock()
    while count < LEAST_ROUNDS or (count < MOST_ROUNDS and clock() - began < seconds):
        for name in alive if count % 2 == 0 else reversed(alive):
            times[name].append(stopwatch.time(name))
        count += 1
        for after, slower in STEPS:
            if count == after:
                medians = {name: statistics.median(times[name]) for name in alive}
                limit = min(medians.values()) * slower
                alive = [name for name in alive if medians[name] <= limit]
    fastest = times[min(alive, key=lambda name: statistics.median(times[name]))]
    unit = statistics.median(fastest)
    us = {
        name: unit * statistics.median(time / other for time, other in zip(found, fastest, strict=False))
        for name, found in times.items()
    }
    return Rounds(us, count, tuple(alive))

"""The targets by which the kernels are judged, as data, and whether a run meets them.

    >>> for outcome in judge(results):
    ...     print(outcome.verdict, outcome.target.name, outcome.text)
    met aligned: time over torch.mm 0.98 <= 1.00, largest 1.07 <= 1.10

A target is a quantity of the entries that it is about, a way to take their values together, and a limit; a value at the
limit meets it.  It is judged by the entries that were measured: :attr:`Outcome.measured` says how many of those that
the whole suite has.  All are about a GPU; of a run on a CPU none is measured.

Ratios of times are medians over rounds of one series.  "Auxiliary matrices" are operands of the size of the output:
``residual`` and ``gate`` read one, and move more memory than the product alone.  ``train_gelu`` reads none, stores two
outputs, and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..catalogue import FORMULAS
from .results import Entry, Quantity, Results, geomean, values_of
from .suite import ALIGNED, DECODE, GROUPS, MISALIGNED, has_matrix_operand

MET, MISSED, NOT_MEASURED = "met", "MISSED", "not measured"

#: The host's times that are compared, in :attr:`Results.host`: the slower of ours is to be as fast as PyTorch's.
HOST_PEER, HOST_OURS = "F.linear", ("FusedLinear", "FusedLinear, GELU")


@dataclass(frozen=True)
class Limit:
    """One condition of a target.

    Attributes:
        what: what is limited, in a word or two.
        combine: values of the entries -> one number, None of nothing.
        most: whether the limit is the largest allowed value, or the least.
        value: the limit.
    """

    what: str
    combine: Callable[[list[float]], float | None]
    most: bool
    value: float

    def met_by(self, value: float) -> bool:
        return value <= self.value if self.most else value >= self.value

    def describe(self, value: float) -> str:
        """The value against the limit, with digits enough to tell them apart."""
        sign = {(True, True): "<=", (True, False): ">", (False, True): ">=", (False, False): "<"}
        digits = next((d for d in (2, 3, 4) if self.met_by(round(value, d)) == self.met_by(value)), 6)
        return f"{self.what} {value:.{digits}f} {sign[self.most, self.met_by(value)]} {self.value:.2f}".strip()


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        name: what it is about.
        groups: the groups of shapes.
        epilogues: the epilogues.
        quantity: what is asked of each entry; None of the target on the host's time.
        limits: all of them have to be met.
    """

    name: str
    groups: tuple[str, ...]
    epilogues: tuple[str, ...]
    quantity: Quantity | None
    limits: tuple[Limit, ...]

    def concerns(self, entry: Entry) -> bool:
        return entry.problem.group in self.groups and entry.problem.epilogue in self.epilogues

    @property
    def entries_of_suite(self) -> int:
        """How many problems of the suite it is about."""
        return sum(len(GROUPS[group]) for group in self.groups) * len(self.epilogues)


@dataclass(frozen=True)
class Outcome:
    """What came of a target.

    Attributes:
        target: the target.
        verdict: :data:`MET`, :data:`MISSED` or :data:`NOT_MEASURED`.
        values: one for each limit; empty if nothing was measured.
        measured: how many entries have the quantity.
        text: the numbers against the limits, or why there are none.
    """

    target: Target
    verdict: str
    values: tuple[float, ...]
    measured: int
    text: str


def _most(what: str, combine: Callable[[list[float]], float | None], value: float) -> Limit:
    return Limit(what, combine, True, value)


def _least(what: str, combine: Callable[[list[float]], float | None], value: float) -> Limit:
    return Limit(what, combine, False, value)


def _largest(values: list[float]) -> float | None:
    return max(values, default=None)


def _smallest(values: list[float]) -> float | None:
    return min(values, default=None)


_ALL = tuple(FORMULAS)
_WITHOUT_MATRICES = tuple(name for name in FORMULAS if not has_matrix_operand(name))

TARGETS: tuple[Target, ...] = (
    Target(
        "aligned: time over torch.mm, epilogues without auxiliary matrices",
        *(ALIGNED, _WITHOUT_MATRICES, lambda entry: entry.over_mm),
        (_most("geomean", geomean, 1.00), _most("largest", _largest, 1.10)),
    ),
    Target(
        "aligned: speed-up over eager PyTorch",
        *(ALIGNED, _ALL, lambda entry: entry.speedup_over_eager),
        (_least("geomean", geomean, 1.30),),
    ),
    Target(
        "aligned: speed-up over the best fused peer that runs",
        *(ALIGNED, _ALL, lambda entry: entry.speedup_over_fused_peer),
        (_least("geomean", geomean, 1.05),),
    ),
    Target(
        "decode: time over torch.mm, bias_gelu",
        *((DECODE,), ("bias_gelu",), lambda entry: entry.over_mm),
        (_most("geomean", geomean, 0.90),),
    ),
    Target(
        "misaligned: speed-up over eager PyTorch",
        *((MISALIGNED,), _ALL, lambda entry: entry.speedup_over_eager),
        (_least("geomean", geomean, 4.0),),
    ),
    Target(
        "misaligned: time over torch.mm of extents rounded up to multiples of 8",
        *((MISALIGNED,), _ALL, lambda entry: entry.over_rounded_mm),
        (_most("geomean", geomean, 1.30),),
    ),
    Target(
        "never slower: speed-up over eager PyTorch of what FusedLinear picks",
        *(tuple(GROUPS), _ALL, lambda entry: entry.speedup_over_eager),
        (_least("least", _smallest, 0.98),),
    ),
    Target(
        "host time of an eager FusedLinear call over that of F.linear",
        *((), (), None),
        (_most("", _largest, 1.00),),
    ),
)


def judge(results: Results) -> tuple[Outcome, ...]:
    """The outcome of every target, in their order."""
    return tuple(_judge(target, results) for target in TARGETS)


def _judge(target: Target, results: Results) -> Outcome:
    if not results.on_gpu:
        return _not_measured(target, "needs a CUDA device")
    if target.quantity is None:
        peer, ours = results.host.get(HOST_PEER), [results.host.get(name) for name in HOST_OURS]
        times = [time for time in ours if time is not None]
        if peer is None or len(times) < len(ours):
            return _not_measured(target, results.host_reason or "the host's time was not taken")
        text = f"({max(times):.1f} us, {peer:.1f} us)"
        return _verdict(target, [time / peer for time in times], len(times), text)
    concerned = [entry for entry in results.entries if target.concerns(entry)]
    values = values_of(concerned, target.quantity)
    if not values:
        return _not_measured(target, _why_none(concerned))
    size = target.entries_of_suite
    # shapes of the user's own count to a group as well, so that there may be more than the suite has
    share = f"of {len(values)} entries" if len(values) >= size else f"of {len(values)} of the suite's {size} entries"
    return _verdict(target, values, len(values), f"({share})")


def _verdict(target: Target, values: list[float], measured: int, share: str) -> Outcome:
    found = [(limit, value) for limit in target.limits if (value := limit.combine(values)) is not None]
    verdict = MET if all(limit.met_by(value) for limit, value in found) else MISSED
    text = ", ".join(limit.describe(value) for limit, value in found)
    return Outcome(target, verdict, tuple(value for _, value in found), measured, f"{text} {share}")


def _not_measured(target: Target, reason: str) -> Outcome:
    return Outcome(target, NOT_MEASURED, (), 0, reason)


def _why_none(concerned: Iterable[Entry]) -> str:
    return "the peer was not measured" if list(concerned) else "none of its shapes and epilogues was measured"

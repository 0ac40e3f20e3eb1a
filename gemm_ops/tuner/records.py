"""What was measured of one class of problems, and how it is written down.

    >>> measured.best, measured.us[measured.best]
    ('sm90_pingpong_128x128x64_1x2 swizzle 4', 192.1)
    >>> read_records(text)[0] == measured
    True

Contract: a file is JSON of one device, made to be read by people too::

    {
     "format": 1,
     "device": "NVIDIA H200",
     "results": [
      {
       "problem": "4096 x 11008 x 4096, bf16, row/column, aligned",
       "epilogue": "row -> bf16, 16 to 31 instructions",
       "example": "bias_gelu",
       "best": "sm90_pingpong_128x128x64_1x2 swizzle 1",
       "model": "sm90_pingpong_128x128x64_2x1 swizzle 1",
       "us": {"sm90_pingpong_128x128x64_1x2 swizzle 1": 500.2, "two passes": 627.0, ...},
       "dropped": {"sm90_...": "wrong: 12 rows of D differ from PyTorch's"},
       "rounds": 31, "date": "2026-11-30 22:15:00", "versions": {"torch": "2.11.0", ...}
      }
     ]
    }

Times are microseconds of the GPU, medians over rounds in which all took turns (:mod:`.measuring`); what was dropped
early as slow has fewer rounds than the rest.  Names of kernels are those of
:func:`gemm_ops.kernels.candidates.name_of`; one that is in the pool no more is passed over by whoever reads the result.
A file of another format is refused as a whole, and a result that does not make sense alone; so is one of a date that
is to come, which would count before all that is measured until then.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..kernels.candidates import is_kernel
from ..printable import printable
from .classes import ProblemClass, is_access, is_tree_class

FORMAT = 1
#: Names of what is no fused kernel.
TWO_PASSES, CUBLAS_ALONE, BY_OPERATIONS = "two passes", "cuBLAS alone", "by operations"
UNFUSED = (TWO_PASSES, CUBLAS_ALONE, BY_OPERATIONS)
#: The same in words.
IN_WORDS = {TWO_PASSES: "cuBLAS and one kernel", CUBLAS_ALONE: "cuBLAS alone", BY_OPERATIONS: "PyTorch by operations"}
#: Why a kernel was not measured that was not built, for want of time or because none is to be; another time it may be.
NOT_BUILT = "not built"
#: A fused kernel is taken up to so much of an unfused way's time.  It is one launch where those are several, but cuBLAS
#: alone is what PyTorch would do anyhow: that has to be beaten by more than clocks and temperature move the two.
FUSED_MARGIN = {TWO_PASSES: 1.01, BY_OPERATIONS: 1.01, CUBLAS_ALONE: 0.98}

_EXTENTS = ("m", "n", "k", "batch")
_MOST_DIGITS = 19
_LONGEST_NAME = 100  # of a device; drivers have up to 40 characters
_MOST_MICROSECONDS = 1e12
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.ASCII)
#: How dates are written, all of UTC.
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
#: Clocks differ, and some tell the local time for UTC.
_EARLY = datetime.timedelta(days=1)
_PROBLEM = re.compile(
    r"(?:(?P<batch>\d+) of )?(?P<m>\d+) x (?P<n>\d+) x (?P<k>\d+), (?P<element>bf16|f16), "
    r"(?P<layouts>(?:row|column)/(?:row|column)), (?P<access>.+)",
    re.ASCII,
)


class RecordError(ValueError):
    """A file, or a result in it, that is not what it should be."""


@dataclass(frozen=True)
class Measured:
    """The result of one class of problems with one class of epilogues.

    Attributes:
        problem: the class of the problem.
        tree: the class of the epilogue.
        us: name -> microseconds.
        best: of those that were in the last rounds; see :func:`pick_best`.
        model: what the rules chose; "" where no fused kernel was among the candidates.
        dropped: name -> why it was not measured, in words.
        rounds: of those that were measured longest.
        date: such as "2026-11-30 22:15:00", in UTC.
        versions: of what it was measured with.
        example: the name of an epilogue of the class.
    """

    problem: ProblemClass
    tree: str
    us: Mapping[str, float]
    best: str
    model: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 0
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    example: str = ""

    @property
    def key(self) -> tuple[ProblemClass, str]:
        """What it is found by."""
        return self.problem, self.tree

    @property
    def is_whole(self) -> bool:
        """Whether every candidate was measured, or cannot be; else another run would find more."""
        return NOT_BUILT not in self.dropped.values()

    @property
    def strangers(self) -> tuple[str, ...]:
        """The names of kernels that this version has not, for no problem: what is said of them counts for nothing."""
        return tuple(name for name in self.us if name not in UNFUSED and not is_kernel(name))

    @property
    def order(self) -> tuple[str, ...]:
        """The names, the best first, then by time: what to take where those before are in no pool any more."""
        others = sorted((name for name in self.us if name != self.best), key=self.us.__getitem__)
        return (self.best, *others)

    def without(self, name: str) -> Measured | None:
        """The result for a call that has not this way to be computed; None if nothing of it is left."""
        if name not in self.us:
            return self
        us = {each: time for each, time in self.us.items() if each != name}
        if not us:
            return None
        return dataclasses.replace(self, us=us, best=pick_best(us) if self.best == name else self.best)

    def describe(self, taken: str) -> str:
        """The numbers in words, as the reason of what is taken."""
        parts = [f"{self.us[taken]:.1f} us"]
        fused = [name for name in self.order if name not in UNFUSED]
        if taken in UNFUSED and fused:
            parts.append(f"the best fused kernel {self.us[fused[0]]:.1f}")
        if self.model and self.model != taken and self.model in self.us:
            parts.append(f"the model's choice {self.us[self.model]:.1f}")
        parts += [f"{IN_WORDS[name]} {self.us[name]:.1f}" for name in UNFUSED if name in self.us and name != taken]
        return f"{', '.join(parts)} ({self.date[:10]}, {printable(self.problem.device)})"


def pick_best(us: Mapping[str, float]) -> str:
    """The fastest fused kernel, if :data:`FUSED_MARGIN` allows it beside every unfused way; else the fastest of those.

    Args:
        us: name -> time, of at least one.
    """
    unfused = [name for name in us if name in UNFUSED]
    fused = min((name for name in us if name not in UNFUSED), key=us.__getitem__, default=None)
    if fused is not None and all(us[fused] <= us[name] * FUSED_MARGIN[name] for name in unfused):
        return fused
    return min(unfused, key=us.__getitem__)


def write_records(device: str, records: Iterable[Measured]) -> str:
    """A file's text, in the order of the problems; all of one device."""
    ordered = sorted(records, key=lambda each: (each.tree, dataclasses.astuple(each.problem)))
    return json.dumps({"format": FORMAT, "device": device, "results": list(map(_to_json, ordered))}, indent=1) + "\n"


def _to_json(record: Measured) -> dict[str, Any]:
    problem = record.problem
    return {
        "problem": f"{problem.extents}, {problem.element}, {problem.layouts}, {problem.access}",
        "epilogue": record.tree,
        "example": record.example,
        "best": record.best,
        "model": record.model,
        "us": {name: round(record.us[name], 3) for name in record.order},
        "dropped": dict(record.dropped),
        "rounds": record.rounds,
        "date": record.date,
        "versions": dict(record.versions),
    }


def utc_now() -> datetime.datetime:
    """What this machine's clock says, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)


def read_records(text: str, now: datetime.datetime | None = None) -> tuple[tuple[Measured, ...], tuple[str, ...]]:
    """The results in a file's text, and what is wrong with those that are none, in words.

    Args:
        text: the file's.
        now: in UTC; a result of more than a day later is none.  By default, results may have any date.

    Raises:
        RecordError: if the file as a whole is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else None
        raise RecordError(f"not of format {FORMAT}" + (f" but {given!r}" if given is not None else ""))
    device, results = _read_device(found.get("device")), found.get("results")
    if not isinstance(results, list):
        raise RecordError("no list of results")
    good, faults = [], []
    for place, entry in enumerate(results):
        try:
            good.append(_from_json(device, entry, now))
        except RecordError as error:
            faults.append(f"result {place + 1}: {error}")
    return tuple(good), tuple(faults)


def _read_device(name: object) -> str:
    """The name of a device: files are named after it, and people read it."""
    if not isinstance(name, str) or not name:
        raise RecordError("no device")
    if len(name) > _LONGEST_NAME:
        raise RecordError(f"the name of the device is {len(name)} characters long: {name[:_LONGEST_NAME]!r} ...")
    if not name.isprintable() or not re.search("[a-zA-Z0-9]", name):
        raise RecordError(f"{name!r} is no name of a device")
    return name


def _from_json(device: str, entry: object, now: datetime.datetime | None) -> Measured:
    if not isinstance(entry, dict):
        raise RecordError("no object")
    match = _PROBLEM.fullmatch(str(entry.get("problem")))
    if match is None or not is_access(match["access"]):
        raise RecordError(f"no problem: {entry.get('problem')!r}")
    if not is_tree_class(str(entry.get("epilogue"))):
        raise RecordError(f"no class of epilogues: {entry.get('epilogue')!r}")
    if any(len(match[name] or "") > _MOST_DIGITS for name in _EXTENTS):
        raise RecordError("an extent is too large")
    extents = {name: int(match[name] or 1) for name in _EXTENTS}
    if 0 in extents.values():
        raise RecordError(f"an extent is 0: {entry['problem']}")
    problem = ProblemClass(device, match["element"], match["layouts"], match["access"], **extents)
    times = entry.get("us")
    if not isinstance(times, dict) or not times or not all(map(_is_time, times.values())):
        raise RecordError(f"no times of {entry['problem']}")
    if not isinstance(entry.get("best"), str) or entry["best"] not in times:
        raise RecordError(f"the best of {entry['problem']} has no time")
    if fault := _fault_of_date(entry.get("date"), now):
        raise RecordError(f"the date of {entry['problem']} {fault}")
    texts = {name: str(entry.get(name, "")) for name in ("model", "date", "example")}
    dicts = {name: _texts(entry.get(name)) for name in ("dropped", "versions")}
    rounds = entry.get("rounds")
    us = {str(name): float(time) for name, time in times.items()}
    rounds = rounds if isinstance(rounds, int) else 0
    return Measured(problem, str(entry.get("epilogue")), us, entry["best"], rounds=rounds, **texts, **dicts)  # type: ignore[arg-type]


def _fault_of_date(given: object, now: datetime.datetime | None) -> str:
    """What is wrong with a date, in words: results are told by it, of two of a class the newer one counts."""
    try:
        if not isinstance(given, str) or not _DATE.fullmatch(given):  # strptime takes other spellings, too
            raise ValueError(given)
        date = datetime.datetime.strptime(given, DATE_FORMAT)
    except ValueError:  # such as a month 13
        return f"is not such as 2026-11-30 22:15:00: {given!r}"
    if now is not None and date - now > _EARLY:
        return f"is to come: {given}, while this machine's clock says {now:{DATE_FORMAT}} (UTC)"
    return ""


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST_MICROSECONDS


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}

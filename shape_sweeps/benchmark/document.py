"""A run of the benchmark as a JSON document, and back.

    >>> from_json(to_json(results), "--replay run.json") == results
    True

The document::

    schema        "shape-sweeps-benchmark/1"; the number goes up when a key changes its meaning or goes away
    environment   as in the document of a sweep (shape_sweeps.export); for CUDA also driver, l2_bytes, and clocks (a
                  sentence)
    command       the arguments that were given
    settings      dtype, cache ("cold": copies of the inputs that the L2 cache does not hold; "warm": the same tensors
                  at each call), rounds, seconds_per_case, peers, seed, overlap ("on": launches of ours overlap; "off")
    summary       planned, measured, failed, skipped (numbers of entries), interrupted (true or false)
    notes         lines that concern the whole run
    host          null, or contender -> microseconds of the host per call
    host_reason   why host is null
    entries       one object per shape and epilogue that was reached:
      m, n, k, group ("large", "medium", "decode", "misaligned"), epilogue
      status ("measured", "failed", "skipped"), reason, seconds
      backend, kernel, why   what FusedLinear picks by itself
      copies, cold  how many copies of the inputs, and whether they keep these out of the L2 cache
      rounds        series of rounds -> how many: "products" (ours among bare products), "peers" (among all else)
      contestants   "fused" is ours; by name: how ("CUDA graph", "events around calls", "clock", ""), error (relative to
                    float64, Frobenius; null if not finite or not computed), reason (why not timed), times: series ->
                    median_us, iqr_us (interquartile range), calls (in a sample)
      ratios        over_mm, over_rounded_mm, speedup_over_eager, speedup_over_fused_peer; null where not measured
    geomeans      group -> epilogue, or "all" -> the same four
    targets       name, verdict ("met", "MISSED", "not measured"), values (one for each limit), measured (entries), text

ratios, geomeans and targets follow from the rest: they are not read back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import epilogues as ep

from ..errors import InputError
from ..shapes import Shape
from ..timing import Sample
from .contenders import DTYPE
from .fields import DamagedError, Field
from .results import FAILED, MEASURED, SKIPPED, Contestant, Entry, Quantity, Results, geomean, values_of
from .suite import GROUPS, Problem
from .targets import judge

SCHEMA = "shape-sweeps-benchmark/1"

#: what an entry is asked for, by its name in the document
QUANTITIES: dict[str, Quantity] = {
    "over_mm": lambda entry: entry.over_mm,
    "over_rounded_mm": lambda entry: entry.over_rounded_mm,
    "speedup_over_eager": lambda entry: entry.speedup_over_eager,
    "speedup_over_fused_peer": lambda entry: entry.speedup_over_fused_peer,
}


def to_json(results: Results) -> str:
    """The document described above."""
    document = {
        "schema": SCHEMA,
        "environment": results.environment,
        "command": results.command,
        "settings": {"dtype": DTYPE, **results.settings},
        "summary": {
            "planned": results.planned,
            **{status: results.count(status) for status in (MEASURED, FAILED, SKIPPED)},
            "interrupted": results.interrupted,
        },
        "notes": results.notes,
        "host": results.host or None,
        "host_reason": results.host_reason,
        "entries": [_entry_json(entry) for entry in results.entries],
        "geomeans": geomeans(results),
        "targets": [
            {
                "name": outcome.target.name,
                "verdict": outcome.verdict,
                "values": list(outcome.values),
                "measured": outcome.measured,
                "text": outcome.text,
            }
            for outcome in judge(results)
        ],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def geomeans(results: Results) -> dict[str, dict[str, dict[str, float | None]]]:
    """Group -> epilogue, or "all" -> the geometric mean of each quantity, None where nothing has it."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for group in GROUPS:
        entries = [entry for entry in results.entries if entry.problem.group == group]
        names = list(dict.fromkeys(entry.problem.epilogue for entry in entries))
        for name in (*names, *(["all"] if names else [])):
            chosen = [entry for entry in entries if name in ("all", entry.problem.epilogue)]
            means = {key: geomean(values_of(chosen, quantity)) for key, quantity in QUANTITIES.items()}
            found.setdefault(group, {})[name] = means
    return found


def _entry_json(entry: Entry) -> dict[str, Any]:
    problem = entry.problem
    return {
        **{"m": problem.shape.m, "n": problem.shape.n, "k": problem.shape.k},
        **{"group": problem.group, "epilogue": problem.epilogue},
        **{"status": entry.status, "reason": entry.reason, "seconds": entry.seconds},
        **{"backend": entry.backend, "kernel": entry.kernel, "why": entry.why},
        **{"copies": entry.copies, "cold": entry.cold, "rounds": entry.rounds},
        "contestants": {
            name: {
                "how": one.how,
                "error": one.error if one.error is not None and math.isfinite(one.error) else None,
                "reason": one.reason,
                "times": {
                    series: {"median_us": sample.median_us, "iqr_us": sample.iqr_us, "calls": sample.calls}
                    for series, sample in one.times.items()
                },
            }
            for name, one in entry.contestants.items()
        },
        "ratios": {key: quantity(entry) for key, quantity in QUANTITIES.items()},
    }


def from_json(text: str, where: str) -> Results:
    """The results that a document was made from.

    Args:
        text: the document.
        where: what an error begins with.

    Raises:
        InputError: if it is no such document, or of another version.
    """
    try:
        document = Field.of(text)
    except DamagedError as error:
        raise InputError(f"{where}: {error}") from error
    schema = document.value.get("schema") if isinstance(document.value, dict) else None
    if schema != SCHEMA:
        given = repr(schema)[:100] if isinstance(schema, (str, type(None))) else "something else"
        raise InputError(f"{where}: expected a document of schema {SCHEMA!r}, got {given}")
    try:
        return _results(document)
    except DamagedError as error:
        raise InputError(f"{where}: is damaged: {error}") from error


def _results(document: Field) -> Results:
    environment = {key: field.value for key, field in document["environment"].object().items()}
    entries: list[Entry] = []
    seen: set[Problem] = set()
    for found in document["entries"].list():
        entry = _entry(found)
        if entry.problem in seen:
            raise found.fault(f"{entry.problem} is there twice")
        seen.add(entry.problem)
        entries.append(entry)
    summary, host = document["summary"], document["host"]
    return Results(
        environment={**environment, "time": str(environment.get("time") or "")},
        command=[argument.text() for argument in document["command"].list()],
        settings={key: field.value for key, field in document["settings"].object().items() if key != "dtype"},
        entries=entries,
        planned=summary["planned"].whole(),
        interrupted=summary["interrupted"].truth(),
        host={} if host.value is None else {name: field.time() for name, field in host.object().items()},
        host_reason=document["host_reason"].text(),
        notes=[note.text() for note in document["notes"].list()],
    )


def _entry(found: Field) -> Entry:
    shape = Shape(*(found[extent].whole(1, "extent") for extent in "mnk"))
    return Entry(
        Problem(shape, found["epilogue"].one_of(ep.builders.SUITE), found["group"].one_of(GROUPS)),
        status=found["status"].one_of((MEASURED, FAILED, SKIPPED)),
        **{key: found[key].text() for key in ("reason", "backend", "kernel", "why")},
        copies=found["copies"].whole(),
        cold=found["cold"].truth(),
        contestants={name: _contestant(one) for name, one in found["contestants"].object().items()},
        rounds={series: rounds.whole() for series, rounds in found["rounds"].object().items()},
        seconds=found["seconds"].number(),
    )


def _contestant(found: Field) -> Contestant:
    error = found["error"]
    return Contestant(
        {series: _sample(times) for series, times in found["times"].object().items()},
        found["how"].text(),
        None if error.value is None else error.number(),
        found["reason"].text(),
    )


def _sample(found: Field) -> Sample:
    return Sample(found["median_us"].time(), found["iqr_us"].number(), found["calls"].whole(1))


def merge(runs: Sequence[Results]) -> Results:
    """Several runs as one; of a problem that several have, the last one's entry.

    Raises:
        InputError: if they are of different devices, versions of PyTorch or ways to use the cache.
    """
    first, *others = runs
    if not others:
        return first
    for run in others:
        if _conditions(run) != _conditions(first):
            raise InputError(
                "--replay: runs of different devices, versions of PyTorch or caches do not make one table:"
                f" {_conditions(first)}; {_conditions(run)}"
            )
    entries = {entry.problem: entry for run in runs for entry in run.entries}
    with_host = next((run for run in reversed(runs) if run.host), first)
    return replace(
        first,
        entries=sorted(entries.values(), key=lambda entry: list(GROUPS).index(entry.problem.group)),
        planned=len(entries),
        interrupted=False,
        host=with_host.host,
        host_reason=with_host.host_reason,
        notes=list(dict.fromkeys(note for run in runs for note in run.notes)),
    )


def _conditions(run: Results) -> str:
    cache = run.settings.get("cache")
    overlap = run.settings.get("overlap", "off")  # older files have no kernels that could
    return f"{run.environment.get('device_name')}, torch {run.environment.get('torch')}, {cache}, overlap {overlap}"

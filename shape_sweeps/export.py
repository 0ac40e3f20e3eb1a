"""A sweep as text: JSON, and CSV for spreadsheets.

The JSON document::

    schema        "shape-sweeps/1"; the number goes up when a key changes its meaning or goes away
    environment   device, device_name, torch, cuda, python, platform, threads, time (UTC), and for CUDA
                  capability, multiprocessors, memory_bytes
    command       the arguments that were given
    criterion     what a case must meet, as one sentence; shape_sweeps.compare derives it
    summary       planned, passed, failed, skipped, skipped_by_time_limit (numbers of cases; the last are among the
                  skipped), interrupted (true or false)
    notes         lines that concern the whole sweep
    cases         one object per case that was reached:
      id, status ("passed", "failed", "skipped"), reason, reproducer (a command line), seconds
      case          m, n, k, dtype, epilogue, operation, seed, backend, device
      routes        per output layout ("contiguous", "padded"): backend (null if refused), kernel, reason
      unfused       what the unfused computation is
      comparisons   one per output and layout: output, layout, dtype; error, unfused_error, error_limit
                    (Frobenius, relative to the float64 truth); max_error, unfused_max_error,
                    max_error_limit (absolute); faults (list of sentences)
      errors        the comparison that is nearest to its limit, or null
      timing        null, or rounds, input_sets, contenders (fused, eager, mm, linear: median_us, iqr_us,
                    calls per sample), speedup_over_eager, speedup_over_mm

Errors that are not finite are null.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from .compare import CRITERION
from .records import FAILED, PASSED, SKIPPED, CaseRecord, Sweep

SCHEMA = "shape-sweeps/1"

CSV_COLUMNS = (
    *("status", "m", "n", "k", "dtype", "epilogue", "operation", "device", "seed"),
    *("backend", "kernel", "error", "unfused_error", "error_limit", "max_error", "max_error_limit"),
    *("fused_us", "eager_us", "mm_us", "linear_us", "speedup_over_eager", "speedup_over_mm"),
    *("reason", "reproducer"),
)


def to_json(sweep: Sweep, environment: dict[str, Any], command: Sequence[str]) -> str:
    """The document described above."""
    document = {
        "schema": SCHEMA,
        "environment": environment,
        "command": list(command),
        "criterion": CRITERION,
        "summary": {
            "planned": sweep.planned,
            "passed": sweep.count(PASSED),
            "failed": sweep.count(FAILED),
            "skipped": sweep.count(SKIPPED),
            "skipped_by_time_limit": sweep.skipped_by_time_limit,
            "interrupted": sweep.interrupted,
        },
        "notes": sweep.notes,
        "cases": [record.to_json() for record in sweep.records],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def to_csv(sweep: Sweep) -> str:
    """One line per case, with the columns of :data:`CSV_COLUMNS`; errors are those nearest to their limit."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_row(record) for record in sweep.records)
    return text.getvalue()


def _csv_row(record: CaseRecord) -> dict[str, Any]:
    found = record.to_json()
    timing: dict[str, Any] = found["timing"] or {}
    times = {f"{name}_us": sample["median_us"] for name, sample in timing.get("contenders", {}).items()}
    route = record.route
    values: dict[str, Any] = {**found, **found["case"], **(found["errors"] or {}), **timing, **times}
    # the case's "backend" is what was asked for; here it is what was used
    values["backend"] = route.backend if route else None
    values["kernel"] = route.kernel if route else None
    return {column: values.get(column) for column in CSV_COLUMNS}

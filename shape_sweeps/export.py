"""A sweep as a file: JSON, and CSV for spreadsheets.

The JSON document::

    schema        "shape-sweeps/1"; the number goes up when a key changes its meaning or goes away
    environment   device, device_name, torch, cuda, python, platform, threads, time (UTC), and for CUDA
                  capability, multiprocessors, memory_bytes
    command       the arguments that were given
    criterion     what a case must meet, as one sentence; shape_sweeps.compare derives it
    summary       planned, passed, failed, skipped (numbers of cases), interrupted (true or false)
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
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compare import CRITERION
from .errors import InputError
from .records import FAILED, PASSED, SKIPPED, CaseRecord, Sweep

SCHEMA = "shape-sweeps/1"

#: "-" as a file name
STDOUT = "-"

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


def check_writable(path: str, where: str) -> None:
    """Finds out before a long sweep whether its result can be written after it.

    Raises:
        InputError: if not.
    """
    if path == STDOUT:
        return
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{where}: {path!r} is a folder")
    if not target.parent.is_dir():
        raise InputError(f"{where}: {path!r}: there is no folder {str(target.parent)!r}")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{where}: {path!r}: the folder {str(target.parent)!r} cannot be written to")


def write(path: str, text: str) -> None:
    """Writes a whole file or nothing: whoever reads it never sees a part.  "-" is standard output."""
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise

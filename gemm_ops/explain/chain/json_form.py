"""The report of a chain as JSON.

    >>> json.loads(to_json(report))["times"]["speedup"]
    2.35...

The form, version 1; what has the name of a key of :mod:`gemm_ops.explain.json_form` means the same, and k is null::

    version                   1
    epilogue                  name, tree, text
    problem                   m, n, k: null, dtype
    device                    name, bandwidth, peak: float32 additions per second, l2, multiprocessors, capability,
                              origin, note
    decision                  choice: fuse, nothing to fuse, not possible, empty; fuse, headline, reasons
    traffic                   eager: list of {name, read, written}; unfused, fused: bytes; saved, saved_share
    times                     eager, fused: {limit: bytes at the memory's full bandwidth, expected}; saved_share,
                              speedup; of the one kernel: launch, moving, computing: seconds; in_l2: whether inputs and
                              outputs fit in the L2 cache; launch_dominates; roofline: {intensity: additions per byte,
                              ridge, seconds, bound: compute or memory}
    instructions              for one element
    special_calls             of the special function unit, for one element
    work                      of one element, in float32 additions that take as long
    dtypes                    list of {text, dtype, conversion, file, line}
    kernel                    null, or {title, arch, key, built: true or false, inputs, outputs: how each tensor is
                              reached, a word of gemm_ops.elementwise.layout each}
    refusal                   why there is no kernel; ""
    registers                 null, or {live, live_at, needed, budget, blocks, warns}
    built                     null, or {registers, spilled, source}
    limitations               list of sentences
    script                    text of the comparison script
    source                    text of the kernel's C++; "" where source_note says why there is none
    source_note               ""

Where M or N is 0 (choice "empty") kernel is null and all bytes and seconds are 0.  Keys may be added within a version;
what is there keeps its meaning.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ..estimate import KERNEL_SECONDS
from ..json_form import built_data, decision_data, device_data, dtypes_data, eager_data, epilogue_data
from .report import ChainReport

VERSION = 1


def to_json(report: ChainReport) -> str:
    """The report as one JSON document; see the module's first page."""
    return json.dumps(to_data(report), indent=1, allow_nan=False)


def to_data(report: ChainReport) -> dict[str, Any]:
    """The same as Python data."""
    traffic, times = report.traffic, report.times
    return {
        "version": VERSION,
        "epilogue": epilogue_data(report),
        "problem": {"m": report.m, "n": report.n, "k": None, "dtype": report.dtype},
        "device": device_data(report, report.device.peak32 / 2),
        "decision": decision_data(report),
        "traffic": {
            "eager": eager_data(traffic),
            "unfused": traffic.unfused_bytes,
            "fused": traffic.fused_bytes,
            "saved": traffic.saved_bytes,
            "saved_share": traffic.saved_share,
        },
        "times": {
            "eager": dataclasses.asdict(times.eager),
            "fused": dataclasses.asdict(times.fused),
            "saved_share": times.saved_share,
            "speedup": times.speedup,
            "launch": KERNEL_SECONDS if traffic.fused_bytes else 0.0,
            "moving": times.moving,
            "computing": times.computing,
            "in_l2": times.in_l2,
            "launch_dominates": times.launch_dominates,
            "roofline": dataclasses.asdict(times.roofline),
        },
        "instructions": report.instructions,
        "special_calls": report.special_calls,
        "work": times.work,
        "dtypes": dtypes_data(report),
        "kernel": _kernel(report),
        "refusal": report.kernel.refusal,
        "registers": None
        if report.registers is None
        else {**dataclasses.asdict(report.registers), "warns": report.registers.warns},
        "built": built_data(report),
        "limitations": list(report.limitations),
        "script": report.script,
        "source": report.source,
        "source_note": report.source_note,
    }


def _kernel(report: ChainReport) -> dict[str, Any] | None:
    spec = report.kernel.spec
    if spec is None:
        return None
    return {
        "title": spec.title,
        "arch": spec.arch,
        "key": spec.key,
        "built": report.kernel.library is not None,
        "inputs": list(spec.inputs),
        "outputs": list(spec.outputs),
    }

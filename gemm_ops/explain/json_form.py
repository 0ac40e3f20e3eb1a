"""The report as JSON.

    >>> json.loads(to_json(report))["decision"]["choice"]
    'fuse'

The form, version 1.  Times are seconds, rates per second, sizes bytes, shares fractions of 1; dtypes are short names
(f32, f16, bf16, and bool for conditions)::

    version                   1
    epilogue                  name; tree: as EpilogueTree.to_json has it; text: as print(tree) has it
    problem                   m, n, k, dtype
    device                    name, bandwidth, peak, l2, multiprocessors, capability [major, minor], origin, note
    decision                  choice: fuse, marginal, nothing to fuse, not possible, empty; fuse: true or false;
                              headline; reasons: list of sentences
    traffic                   eager: list of {name, read, written}; unfused, compiled, fused: bytes; saved,
                              saved_share; tail: bytes of the elementwise part as one kernel
    times                     eager, compiled, fused: {limit, expected}; saved_share, saved_share_compiled;
                              gemm, fused_roofline: {intensity, ridge, seconds, bound: compute or memory};
                              gemm_expected: the eager GEMM alone
    instructions              for one element
    dtypes                    list of {text, dtype, conversion, file, line}; file and line null where not known
    kernel                    null, or {name, family, tile, cluster, arch, key, built: true or false, routes: how each
                              tensor reaches it, a sentence each, way: what the default backend takes, "fused" or
                              what was measured to be faster, reason: what was measured, or ""}
    refusal                   why there is no kernel; ""
    registers                 null, or {live, live_at, live_limit, carried, accumulators, fragment, needed, budget,
                              warns}
    built                     null, or {registers, spilled, source}
    coverage                  complete, cublaslt, remaining, compiled_extra, words: two sentences
    limitations               list of sentences
    script                    text of the comparison script
    source                    text of the kernel's C++; "" where source_note says why there is none
    source_note               ""

Where an extent is 0 (choice "empty") kernel is null, and traffic and times are what the formulas give for such extents:
no fused kernel runs, whatever "fused" says.  Where M or N is 0, all bytes and seconds are 0.

Keys may be added within a version; what is there keeps its meaning.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from epilogues.analysis import ChainTraffic, NodeDtype

from .report import CommonReport, Report
from .text import coverage_words

VERSION = 1


def to_json(report: Report) -> str:
    """The report as one JSON document; see the module's first page."""
    return json.dumps(to_data(report), indent=1, allow_nan=False)


def to_data(report: Report) -> dict[str, Any]:
    """The same as Python data."""
    traffic, times, device = report.traffic, report.times, report.device
    return {
        "version": VERSION,
        "epilogue": epilogue_data(report),
        "problem": {"m": report.m, "n": report.n, "k": report.k, "dtype": report.dtype},
        "device": device_data(report, device.peak(report.dtype)),
        "decision": decision_data(report),
        "traffic": {
            "eager": eager_data(traffic),
            "unfused": traffic.unfused_bytes,
            "compiled": traffic.compiled_bytes,
            "fused": traffic.fused_bytes,
            "saved": traffic.saved_bytes,
            "saved_share": traffic.saved_share,
            "tail": traffic.tail,
        },
        "times": {
            "eager": dataclasses.asdict(times.eager),
            "compiled": dataclasses.asdict(times.compiled),
            "fused": dataclasses.asdict(times.fused),
            "saved_share": times.saved_share,
            "saved_share_compiled": times.saved_share_compiled,
            "gemm": dataclasses.asdict(times.gemm),
            "fused_roofline": dataclasses.asdict(times.fused_roofline),
            "gemm_expected": times.gemm_expected,
        },
        "instructions": report.instructions,
        "dtypes": dtypes_data(report),
        "kernel": _kernel(report),
        "refusal": report.kernel.refusal,
        "registers": _registers(report),
        "built": built_data(report),
        "coverage": {
            "complete": report.coverage.complete,
            "cublaslt": report.coverage.cublaslt,
            "remaining": list(report.coverage.remaining),
            "compiled_extra": report.coverage.compiled_extra,
            "words": list(coverage_words(report)),
        },
        "limitations": list(report.limitations),
        "script": report.script,
        "source": report.source,
        "source_note": report.source_note,
    }


# What reports of GEMMs and of chains have in common.


def epilogue_data(report: CommonReport) -> dict[str, Any]:
    """The key epilogue."""
    return {"name": report.name, "tree": json.loads(report.tree.to_json()), "text": str(report.tree)}


def device_data(report: CommonReport, peak: float) -> dict[str, Any]:
    """The key device."""
    device = report.device
    return {
        "name": device.name,
        "bandwidth": device.bandwidth,
        "peak": peak,
        "l2": device.l2,
        "multiprocessors": device.multiprocessors,
        "capability": list(device.capability),
        "origin": device.origin,
        "note": report.device_note,
    }


def decision_data(report: CommonReport) -> dict[str, Any]:
    """The key decision."""
    decision = report.decision
    return {
        "choice": decision.choice,
        "fuse": decision.fuse,
        "headline": decision.headline,
        "reasons": list(decision.reasons),
    }


def eager_data(traffic: ChainTraffic) -> list[dict[str, Any]]:
    """Eager PyTorch's kernels."""
    return [{"name": op.name, "read": op.read, "written": op.written} for op in traffic.eager]


def built_data(report: CommonReport) -> dict[str, Any] | None:
    """The key built."""
    return None if report.built is None else dataclasses.asdict(report.built)


def dtypes_data(report: CommonReport) -> list[dict[str, Any]]:
    """The key dtypes."""
    return [_node(entry) for entry in report.dtypes]


def _node(entry: NodeDtype) -> dict[str, Any]:
    place = entry.location
    return {
        "text": entry.text,
        "dtype": entry.dtype,
        "conversion": entry.conversion,
        "file": None if place is None else place.file,
        "line": None if place is None else place.line,
    }


def _kernel(report: Report) -> dict[str, Any] | None:
    spec = report.kernel.spec
    if spec is None:
        return None
    return {
        "name": spec.config.name,
        "family": spec.config.family,
        "tile": list(spec.config.tile),
        "cluster": list(spec.config.cluster),
        "arch": spec.arch,
        "key": spec.key,
        "built": report.kernel.library is not None,
        "routes": list(report.kernel.routes),
        "way": report.kernel.way,
        "reason": report.kernel.reason,
    }


def _registers(report: Report) -> dict[str, Any] | None:
    use = report.registers
    if use is None:
        return None
    return {**dataclasses.asdict(use), "live_limit": use.live_limit, "warns": use.warns}

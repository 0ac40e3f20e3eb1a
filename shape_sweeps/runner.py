"""Runs a sweep: plan, build, then every case in turn.

    >>> sweep = run_sweep(cases, {"bias_gelu": epilogue})
    >>> sweep.count("passed"), sweep.count("failed"), sweep.count("skipped")
    (12, 0, 0)

1. plan: ask gemm_ops for every case which kernel it would use, for both output layouts.
2. build: all kernels that the plan names, in parallel, before anything runs.
3. run: per case, truth and unfused result once, the fused result into a guarded output of each layout, then
   times.

A case that goes wrong costs itself only: whatever it raises is its record's reason and the sweep goes on.
A backend that was forced and cannot take a problem makes a skipped case, not a failed one, and so do tensors
that do not fit in memory.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import epilogues as ep
import gemm_ops

from . import memory
from .cases import Case
from .compare import compare, compute_truth
from .eager import named_outputs, origin, unfused
from .errors import one_line
from .guards import LAYOUTS, GuardedOutput
from .inputs import Inputs, make_inputs, output_dtypes, placeholder_inputs
from .records import FAILED, PASSED, SKIPPED, CaseRecord, Route, Sweep
from .timing import Contender, Timing, input_sets, measure


class Observer:
    """Is told how a sweep gets on; this one does nothing."""

    def planned(self, records: Sequence[CaseRecord]) -> None:
        """The routes of all cases are known."""

    def building(self, kernels: int) -> None:
        """So many kernels are about to be built or found in the cache."""

    def built(self, seconds: float, cached: bool) -> None:
        """One kernel is there."""

    def running(self, record: CaseRecord) -> None:
        """A case begins.  What this raises ends the sweep."""

    def finished(self, record: CaseRecord) -> None:
        """A case has its result."""


def run_sweep(
    cases: Sequence[Case],
    epilogues: Mapping[str, ep.Epilogue],
    *,
    timing: bool = True,
    max_seconds: float | None = None,
    jobs: int | None = None,
    observer: Observer | None = None,
) -> Sweep:
    """Runs all cases.

    Args:
        cases: what to run, in this order.
        epilogues: name -> epilogue for every name that occurs in ``cases``.
        timing: whether to time as well as check.
        max_seconds: no case begins later than this after the start, building included; the rest is skipped.
        jobs: how many kernels to build at a time; None leaves it to gemm_ops.
        observer: is told how it gets on.

    An interrupt by the user (Ctrl-C) ends the sweep and returns what is there.
    """
    observer = observer or Observer()
    began = time.perf_counter()
    sweep = Sweep([], planned=len(cases))
    try:
        with torch.no_grad(), quiet_fallback():
            records = [_plan(case, epilogues[case.epilogue]) for case in cases]
            observer.planned(records)
            _build(records, jobs, observer, sweep)
            for record in records:
                late = max_seconds is not None and time.perf_counter() - began > max_seconds
                if late and not record.reason:
                    record.status, record.reason = SKIPPED, f"time limit of {max_seconds:g} s"
                    sweep.skipped_by_time_limit += 1
                elif not record.reason:
                    observer.running(record)
                    _run(record, epilogues[record.case.epilogue], timing, sweep)
                sweep.records.append(record)
                observer.finished(record)
    except KeyboardInterrupt:
        sweep.interrupted = True
    return sweep


def call_fused(inputs: Inputs, epilogue: ep.Epilogue, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The fused call, as a user makes it: output name -> (M, N) tensor, in ``out`` if that is given."""
    function = gemm_ops.linear if inputs.operation == "linear" else gemm_ops.matmul
    found = function(inputs.a, inputs.b, epilogue, out=_as_out(epilogue, out), **inputs.operands)
    return named_outputs(epilogue, found)


def _plan(case: Case, epilogue: ep.Epilogue) -> CaseRecord:
    """A record with its routes; with a reason already if the case cannot run."""
    record = CaseRecord(case, unfused=origin(case.epilogue))
    try:
        if too_large := memory.shortage(case, epilogue):
            record.status, record.reason = SKIPPED, too_large
            return record
        inputs = placeholder_inputs(case, epilogue)
        for layout in LAYOUTS:
            record.routes[layout] = _route(case, epilogue, inputs, layout)
    except Exception as error:  # a fault of this case, whatever it is, must not end the sweep
        record.status, record.reason = _verdict(error, case, epilogue)
        return record
    if all(route.backend is None for route in record.routes.values()):
        record.status, record.reason = SKIPPED, record.routes[LAYOUTS[0]].reason
    return record


def _route(case: Case, epilogue: ep.Epilogue, inputs: Inputs, layout: str) -> Route:
    guarded = _guarded_outputs(case, epilogue, layout, fill=False)
    out = _as_out(epilogue, {name: output.view for name, output in guarded.items()})
    try:
        with gemm_ops.use_backend(case.backend):
            decision = gemm_ops.backend_for(inputs.a, inputs.right, epilogue, out=out, **inputs.operands)
    except (gemm_ops.UnsupportedProblemError, ep.EpilogueError) as error:
        if case.backend == "auto":
            raise
        return Route(None, None, one_line(error))
    return Route(decision.backend, decision.kernel, one_line(decision.reason), decision.spec)


def _build(records: Sequence[CaseRecord], jobs: int | None, observer: Observer, sweep: Sweep) -> None:
    """Builds every kernel the plan names.

    Where one cannot be built, its cases fail when their turn comes, each with the error of its own kernel:
    gemm_ops does not try the same kernel twice.
    """
    routes = [route for record in records if not record.reason for route in record.routes.values()]
    specs = list(dict.fromkeys(route.spec for route in routes if route.spec is not None))
    if not specs:
        return
    observer.building(len(specs))

    def on_done(spec: Any, seconds: float, cached: bool) -> None:
        observer.built(seconds, cached)

    try:
        gemm_ops.build_kernels(specs, jobs=jobs, on_done=on_done)
    except Exception as error:  # anything at all may go wrong in a compiler and in what generates its input
        sweep.notes.append(f"building {len(specs)} kernels: {one_line(error)}")


def _run(record: CaseRecord, epilogue: ep.Epilogue, timing: bool, sweep: Sweep) -> None:
    began = time.perf_counter()
    faults: list[str] = []
    try:
        with gemm_ops.use_backend(record.case.backend):
            _check(record, epilogue, faults)
            if timing and record.routes[LAYOUTS[0]].backend is not None:
                _time(record, epilogue, sweep)
    except Exception as error:  # as in _plan
        record.status, reason = _verdict(error, record.case, epilogue)
        if faults:  # what was found counts, whatever happened then
            record.status = FAILED
        record.reason = "; ".join([*faults, reason])
    else:
        record.status, record.reason = (FAILED, "; ".join(faults)) if faults else (PASSED, "")
    record.seconds = time.perf_counter() - began


def _verdict(error: Exception, case: Case, epilogue: ep.Epilogue) -> tuple[str, str]:
    """Status and reason of a case that raised."""
    if memory.is_allocation_error(error):
        return SKIPPED, memory.out_of_memory(case, epilogue)
    return FAILED, one_line(error)


def _check(record: CaseRecord, epilogue: ep.Epilogue, faults: list[str]) -> None:
    """Fills in the comparisons, and adds everything that is wrong to ``faults``."""
    case = record.case
    inputs = make_inputs(case, epilogue)
    truth = compute_truth(inputs, epilogue)
    baseline = unfused(case.epilogue, epilogue)(inputs)
    for layout, route in record.routes.items():
        if route.backend is None:
            continue
        outputs = _guarded_outputs(case, epilogue, layout)
        call_fused(inputs, epilogue, out={name: output.view for name, output in outputs.items()})
        for name, output in outputs.items():
            comparison = compare(name, layout, output.view, baseline[name], truth[name])
            record.comparisons.append(comparison)
            # What was not written is not worth comparing: the poison would be reported as a wrong NaN too.
            found = output.faults() or list(comparison.faults)
            faults += [f"{name}, {layout}: {fault}" for fault in found]


def _time(record: CaseRecord, epilogue: ep.Epilogue, sweep: Sweep) -> None:
    """Fills in the times.  They take several sets of inputs: without memory for those, there are no times."""
    try:
        record.timing = _measure(record.case, epilogue)
    except Exception as error:
        if not memory.is_allocation_error(error):
            raise
        sweep.notes.append(f"{record.case.id}: not timed, several sets of its inputs do not fit in memory")


def _measure(case: Case, epilogue: ep.Epilogue) -> Timing:
    first = make_inputs(case, epilogue)
    count = input_sets(first.bytes, case.device)
    sets = [first] + [make_inputs(case, epilogue, repeat=index) for index in range(1, count)]
    product = torch.empty(case.m, case.n, dtype=case.torch_dtype, device=case.device)
    baseline = unfused(case.epilogue, epilogue)
    contenders: dict[str, Contender] = {
        "fused": lambda index: call_fused(sets[index], epilogue),
        "eager": lambda index: baseline(sets[index]),
        "mm": lambda index: torch.mm(sets[index].a, sets[index].right, out=product),
        "linear": lambda index: F.linear(sets[index].a, sets[index].right.t()),
    }
    return measure(contenders, sets=count, device=case.device)


def _guarded_outputs(case: Case, epilogue: ep.Epilogue, layout: str, *, fill: bool = True) -> dict[str, GuardedOutput]:
    return {
        name: GuardedOutput.allocate(case.m, case.n, dtype, case.device, layout, fill=fill)
        for name, dtype in output_dtypes(case, epilogue).items()
    }


def _as_out(epilogue: ep.Epilogue, out: dict[str, Tensor] | None) -> Tensor | dict[str, Tensor] | None:
    """gemm_ops takes and gives a single output as a tensor, several as a dict."""
    return out[epilogue.outputs[0]] if out is not None and len(out) == 1 else out


@contextlib.contextmanager
def quiet_fallback() -> Iterator[None]:
    """The report says once which cases the reference backend computes; a warning for each would drown it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gemm_ops.FallbackWarning)
        yield

"""Runs the benchmark: plan, build, the host's time, then every problem in turn.

    >>> results = run_benchmark(problems, Settings(peers=("eager", "mm")), device="cuda", observer=progress)
    >>> results.count("measured"), [outcome.verdict for outcome in judge(results)]

A problem is measured in two series of rounds: ours among bare products, and ours among everything that computes the
epilogue.  In one series slow contenders would favour the fast ones: eager PyTorch does little at a time at odd extents,
and clocks rise higher than a network of fused layers, or of products, would see (4095 x 4097 x 4093 on an H200:
``torch.mm`` of rounded-up extents takes 178 to 186 us there, 200 to 216 among its like).  The bare product of a
misaligned shape is slow itself, and takes part in the second.

What goes wrong costs a contender its place, and an entry its result if it is ours.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import gemm_ops
from gemm_ops.build.buildable import Buildable
from gemm_ops.runtime.dependent_launch import way_of_overlap

from .. import host_timing, memory
from ..errors import one_line
from ..graph_timing import Prepared, cache_bytes, copies_to_leave_cache, leaves_cache, prepare, sample_rounds
from ..runner import quiet_fallback
from ..timing import Sample, interquartile_range
from . import checks
from .contenders import Proposal, Setting, bytes_per_call, decide, make_contenders, make_setting
from .results import AMONG_PEERS, AMONG_PRODUCTS, FAILED, MEASURED, SKIPPED, Contestant, Entry, Results
from .suite import EAGER, FUSED, MISALIGNED, MM, PEERS, ROUNDED_MM, Problem

_SECONDS_PER_CASE = {"cuda": 2.0, "cpu": 0.2}


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        peers: names of :data:`.suite.PEERS`.
        warm: whether every call uses the same tensors, which may stay in the cache.
        rounds: of each series at most.
        seconds_per_case: for the rounds of one problem; five of each are made in any case.  None: 2 on CUDA, 0.2 on a
            CPU.
        max_seconds: no problem begins later than this after the start.
        seed: of the inputs.
    """

    peers: tuple[str, ...] = tuple(PEERS)
    warm: bool = False
    rounds: int = 15
    seconds_per_case: float | None = None
    max_seconds: float | None = None
    seed: int = 0


class Watcher:
    """Is told how a benchmark gets on; this one does nothing."""

    def planned(self, entries: Sequence[Entry]) -> None:
        """What every call uses is known."""

    def building(self, kernels: int) -> None:
        """So many kernels are about to be built or found in the cache."""

    def built(self, seconds: float, cached: bool) -> None:
        """One kernel is there."""

    def not_built(self, title: str) -> None:
        """One kernel could not be built."""

    def measuring_host(self) -> None:
        """The host's time is about to be taken."""

    def running(self, entry: Entry) -> None:
        """A problem begins.  What this raises ends the run."""

    def finished(self, entry: Entry) -> None:
        """A problem has its result."""


def run_benchmark(
    problems: Sequence[Problem],
    settings: Settings,
    *,
    device: str,
    jobs: int | None = None,
    build_only: bool = False,
    watcher: Watcher | None = None,
    results: Results | None = None,
) -> Results:
    """Measures all problems.

    Args:
        problems: what to measure, in this order.
        settings: how.
        device: "cpu", "cuda" or "cuda:INDEX".
        jobs: how many kernels to build at a time; None leaves it to gemm_ops.
        build_only: whether to end when the kernels are built.
        watcher: is told how it gets on.
        results: to be filled in; a new one if None.

    An interrupt by the user (Ctrl-C) ends the run and returns what is there.
    """
    watcher = watcher or Watcher()
    results = Results({"device": device}) if results is None else results
    results.planned = len(problems)
    results.settings = {
        "cache": "warm" if is_warm(settings, device) else "cold",
        "rounds": settings.rounds,
        "seconds_per_case": _seconds_per_case(settings, device),
        "peers": list(settings.peers),
        "seed": settings.seed,
        "overlap": way_of_overlap(),
    }
    began = time.perf_counter()
    try:
        with torch.no_grad(), quiet_fallback(), gemm_ops.building("wait"), _on(device):
            entries = [_plan(problem, device) for problem in problems]
            specs = [spec for _, spec in entries if spec is not None]
            watcher.planned([entry for entry, _ in entries])
            if torch.device(device).type == "cuda":
                specs += host_timing.linear_kernels(device)
            _build(specs, jobs, watcher, results)
            if build_only:
                return results
            _measure_host(device, watcher, results)
            for entry, _ in entries:
                if settings.max_seconds is not None and time.perf_counter() - began > settings.max_seconds:
                    results.notes.append(f"ended after {settings.max_seconds:g} s, as --max-seconds says")
                    break
                watcher.running(entry)
                if not entry.reason:
                    _measure(entry, settings, device)
                results.entries.append(entry)
                watcher.finished(entry)
    except KeyboardInterrupt:
        results.interrupted = True
        results.notes.append("interrupted")
    return results


def is_warm(settings: Settings, device: str) -> bool:
    """Whether every call uses the same tensors: as asked for, or on a CPU, whose caches are not known."""
    return settings.warm or cache_bytes(device) == 0


def _seconds_per_case(settings: Settings, device: str) -> float:
    if settings.seconds_per_case is not None:
        return settings.seconds_per_case
    return _SECONDS_PER_CASE[torch.device(device).type]


def _on(device: str) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def _plan(problem: Problem, device: str) -> tuple[Entry, Buildable | None]:
    """An entry with what its call uses; with a reason already if there is no telling."""
    entry = Entry(problem)
    try:
        decision = decide(problem, device)
    except Exception as error:  # a fault of this problem, whatever it is, must not end the run
        entry.status, entry.reason = _verdict(error)
        return entry, None
    entry.backend, entry.kernel, entry.why = decision.backend, decision.kernel or "", one_line(decision.reason)
    return entry, decision.spec


def _build(specs: Sequence[Buildable], jobs: int | None, watcher: Watcher, results: Results) -> None:
    """Builds every kernel; where one cannot be built, its entries fail when their turn comes."""
    unique = list({spec.key: spec for spec in specs}.values())
    if not unique:
        return
    watcher.building(len(unique))
    try:
        gemm_ops.build_kernels(
            unique,
            jobs=jobs,
            on_done=lambda spec, seconds, cached: watcher.built(seconds, cached),
            on_failed=lambda spec, error: watcher.not_built(spec.title),
        )
    except Exception as error:  # anything at all may go wrong in a compiler and in what generates its input
        results.notes.append(f"building {len(unique)} kernels: {one_line(error)}")


def _measure_host(device: str, watcher: Watcher, results: Results) -> None:
    if torch.device(device).type != "cuda":
        results.host_reason = "needs a CUDA device"
        return
    watcher.measuring_host()
    try:
        if os.environ.get("GEMM_OPS_NATIVE") == "0":
            results.notes.append("the host's time is that of calls through Python, as GEMM_OPS_NATIVE=0 says")
        else:
            host_timing.load_native()
        results.host = host_timing.host_times(host_timing.linear_contenders(device))
    except Exception as error:  # it costs the one target
        results.host_reason = one_line(error)


def _measure(entry: Entry, settings: Settings, device: str) -> None:
    """Fills in an entry."""
    began = time.perf_counter()
    try:
        _measure_series(entry, settings, device)
    except Exception as error:  # as in _plan
        entry.status, entry.reason = _verdict(error)
    entry.seconds = round(time.perf_counter() - began, 4)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # graphs have memory of their own, which no other can use


def _verdict(error: Exception) -> tuple[str, str]:
    if memory.is_allocation_error(error):
        return SKIPPED, "its tensors do not fit in memory"
    return FAILED, one_line(error)


def _measure_series(entry: Entry, settings: Settings, device: str) -> None:
    cache, size = cache_bytes(device), bytes_per_call(entry.problem)
    entry.copies = 1 if is_warm(settings, device) else copies_to_leave_cache(size, cache)
    entry.cold = leaves_cache(entry.copies, size, cache)
    setting = make_setting(entry.problem, copies=entry.copies, device=device, seed=settings.seed)
    # eager PyTorch is what ours is judged by, timed or not
    proposals = make_contenders(setting, dict.fromkeys((EAGER, *settings.peers)))
    prepared: dict[str, Prepared] = {}
    for name, proposal in proposals.items():
        entry.contestants[name] = Contestant(reason=proposal.reason)
        if proposal.call is None:
            continue
        try:
            prepared[name] = prepare(proposal.call, copies=entry.copies, device=device)
        except Exception as error:
            if name == FUSED:
                raise
            entry.contestants[name].reason = one_line(error)
            continue
        entry.contestants[name].how = prepared[name].how
        entry.contestants[name].reason = prepared[name].note
    faults = _check(entry, setting, proposals, prepared)
    if EAGER not in settings.peers:
        prepared.pop(EAGER, None)
        entry.contestants[EAGER].how, entry.contestants[EAGER].reason = "", "not timed: not asked for"
    _time(entry, prepared, settings.rounds, _seconds_per_case(settings, device))
    entry.status, entry.reason = (FAILED, "; ".join(faults)) if faults else (MEASURED, "")


def _check(
    entry: Entry, setting: Setting, proposals: Mapping[str, Proposal], prepared: Mapping[str, Prepared]
) -> list[str]:
    """Fills in the errors; gives what is wrong with ours."""
    truth = checks.truth_of(setting.copies[0], setting.epilogue)
    outputs = {}
    for name, one in prepared.items():
        found = checks.run_poisoned(one)
        if not proposals[name].is_product:
            outputs[name] = found
            entry.contestants[name].error = checks.error_of(found, truth)
            continue
        first = setting.copies[0]  # all copies have the same numbers
        x, weight = setting.rounded[0] if name == ROUNDED_MM else (first.a, first.b)
        entry.contestants[name].error = checks.product_error(found["product"], x, weight)
    if EAGER not in outputs:
        return [f"eager PyTorch, which it is judged by, failed: {entry.contestants[EAGER].reason}"]
    return checks.check_ours(outputs[FUSED], outputs[EAGER], truth)


def _time(entry: Entry, prepared: Mapping[str, Prepared], rounds: int, seconds: float) -> None:
    """Fills in the times of both series."""
    for series, names in _series(entry.problem, prepared).items():
        samplers = {name: prepared[name].sample for name in names}
        found = sample_rounds(samplers, rounds=rounds, seconds=seconds / 2)
        entry.rounds[series] = len(found[FUSED])
        for name, values in found.items():
            sample = Sample(statistics.median(values), interquartile_range(values), prepared[name].calls)
            entry.contestants[name].times[series] = sample


def _series(problem: Problem, prepared: Mapping[str, Prepared]) -> dict[str, list[str]]:
    """Series -> who takes part, ours first; those where ours would be alone are left out, unless both are."""
    products = {ROUNDED_MM} if problem.group == MISALIGNED else {MM}
    peers = [name for name in prepared if name not in (FUSED, *products)]
    found = {AMONG_PRODUCTS: [FUSED, *(name for name in prepared if name in products)], AMONG_PEERS: [FUSED, *peers]}
    return {series: names for series, names in found.items() if len(names) > 1} or {AMONG_PEERS: [FUSED]}

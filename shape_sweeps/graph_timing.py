"""The GPU's time of many contenders, each a CUDA graph of several calls, in interleaved rounds.

    >>> prepared = {name: prepare(call, copies=5, device="cuda") for name, call in contenders.items()}
    >>> samples = sample_rounds({name: one.sample for name, one in prepared.items()}, rounds=15, seconds=2.0)
    >>> statistics.median(samples["fused"]) / statistics.median(samples["mm"])

A graph takes the host out of what is measured: its kernels follow one another as they do where a whole model is
captured.  (:mod:`shape_sweeps.timing` times calls as they are launched one by one, for sweeps of any size.)

* copies: the calls of a graph walk through several copies of their tensors, in the same order in every graph, so that
  between two uses of a copy all others pass through the L2 cache.  :func:`copies_to_leave_cache` says how many it takes
  that a copy is not in the cache any more.  With one copy everything that fits stays in the cache.
* rounds: every round samples each contender once, in alternating order.  Before them each is sampled once for nothing:
  the first replay of a graph also uploads it.
* What cannot be captured (it waits for the device, say) is timed by events around a loop of calls, the device kept busy
  until the host has launched them; :attr:`Prepared.how` tells.  On a CPU it is the clock on the wall.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gemm_ops.tuner.replay import cache_bytes, copies_to_leave_cache, record, replay_us

from .errors import one_line
from .timing import Contender, calibrate, sample_cpu, sample_cuda

__all__ = [
    "CLOCK",
    "EVENTS",
    "GRAPH",
    "Prepared",
    "cache_bytes",
    "capture",
    "copies_to_leave_cache",
    "leaves_cache",
    "prepare",
    "replay_us",
    "sample_rounds",
]

GRAPH, EVENTS, CLOCK = "CUDA graph", "events around calls", "clock"

_WARM_UP_CALLS = 3
#: A graph is as long as this at least, if so many calls suffice: its launch takes some microseconds.
_GRAPH_US = 1000.0
_MAX_CALLS = 128
_LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready to be timed.

    Attributes:
        sample: takes one sample: microseconds of one call.
        run: makes at least one call, and returns the result of the last.  What a graph returns is the same memory every
            time.
        calls: in a sample.
        how: one of :data:`GRAPH`, :data:`EVENTS` and :data:`CLOCK`.
        note: why it is not a graph, where it could be one.
    """

    sample: Callable[[], float]
    run: Callable[[], object]
    calls: int
    how: str
    note: str = ""


def leaves_cache(copies: int, bytes_per_call: int, cache: int) -> bool:
    """Whether so many copies do, and the inputs of a call come from memory."""
    return cache > 0 and (copies - 1) * bytes_per_call >= cache


def prepare(contender: Contender, *, copies: int, device: str) -> Prepared:
    """Makes a contender ready; it is called with the numbers of copies 0 .. copies - 1 in turn.

    Raises:
        Exception: whatever the contender raises.
    """
    if torch.device(device).type != "cuda":
        calls, _ = calibrate(contender, copies, device)
        return Prepared(lambda: sample_cpu(contender, calls, copies) * 1e6, lambda: contender(0), calls, CLOCK)
    with torch.cuda.device(device):
        for index in range(copies):  # what it raises here it raises by itself, and not for being captured
            contender(index)
        try:
            return _prepare_graph(contender, copies)
        except RuntimeError as error:
            # the end of a capture that was broken off raises as well, in front of what broke it off
            cause = error.__context__ or error
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            torch.cuda.synchronize()
            note = f"it cannot be captured: {one_line(cause)}"
        calls, host_seconds = calibrate(contender, copies, device)
        return Prepared(
            lambda: sample_cuda(contender, calls, copies, device, host_seconds) * 1e6,
            lambda: contender(0),
            calls,
            EVENTS,
            note,
        )


def _prepare_graph(contender: Contender, copies: int) -> Prepared:
    """A graph whose calls use every copy equally often."""
    graph, result = capture(contender, copies, copies)
    replay_us(graph, copies)
    turns = max(1, min(math.ceil(_GRAPH_US / (copies * replay_us(graph, copies))), _MAX_CALLS // copies))
    calls = copies * turns
    if turns > 1:
        graph, result = capture(contender, calls, copies)

    def run() -> object:
        graph.replay()
        torch.cuda.synchronize()
        return result

    return Prepared(lambda: replay_us(graph, calls), run, calls, GRAPH)


def capture(contender: Contender, calls: int, copies: int = 1) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of several calls, after some outside of it; and the last call's result, which replays write anew.

    Raises:
        RuntimeError: if it cannot be captured.
    """
    before = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for call in range(max(_WARM_UP_CALLS, copies)):
            contender(call % copies)
    before.wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()  # what is destroyed while a graph is recorded may break that off
    torch.cuda.empty_cache()
    return record(lambda index: contender(index % copies), calls, stream=stream)


def sample_rounds(
    samplers: Mapping[str, Callable[[], float]], *, rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Samples of all contenders in interleaved rounds: by name, one of each round.

    Args:
        samplers: by name, what takes a sample.
        rounds: how many at most.
        seconds: no round begins later than this, from the fifth on.
    """
    for sample in samplers.values():
        sample()
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    began = time.perf_counter()
    for turn in itertools.count():
        if turn >= rounds or (turn >= _LEAST_ROUNDS and time.perf_counter() - began > seconds):
            return samples
        for name in list(samplers)[:: 1 if turn % 2 == 0 else -1]:
            samples[name].append(samplers[name]())
    raise AssertionError("rounds end")

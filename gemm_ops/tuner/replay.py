"""CUDA graphs of several calls: recorded, replayed and timed; and the copies that keep their tensors out of the cache.

    >>> graph, result = record(lambda index: a @ weights[index % len(weights)], calls=10, stream=torch.cuda.Stream())
    >>> replay_us(graph, calls=10)
    13.9

Contract: everything is of the current device.  It is the GPU's time that counts: a graph's kernels follow one another
as they do where a whole model is captured, and the host has no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

#: More copies than this are not made: of tensors so small the calls are a matter of launches.
MOST_COPIES = 64


def copies_to_leave_cache(bytes_per_call: int, cache: int) -> int:
    """How many copies of what a call reads to walk through, so that none is in a cache of so many bytes when it is its
    turn again: between two uses of one the others fill the cache twice.  At most 64; one if there is no cache.
    """
    if cache <= 0:
        return 1
    return min(1 + math.ceil(2 * cache / max(bytes_per_call, 1)), MOST_COPIES)


def cache_bytes(device: torch.device | str) -> int:
    """The L2 cache of a CUDA device, in bytes; 0 for a CPU, whose caches are not asked for."""
    if torch.device(device).type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def record(
    call: Callable[[int], object],
    calls: int,
    *,
    stream: torch.cuda.Stream,
    pool: Any = None,
    error_mode: str = "global",
) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of several calls, which get their numbers; and the last one's result, which replays write anew.

    Args:
        stream: to record on, which waits for nothing and has nothing left to do.
        pool: memory that graphs share which are not replayed at the same time; None: its own.
        error_mode: of ``torch.cuda.CUDAGraph.capture_begin``.

    Raises:
        Exception: whatever the call raises; mostly as the context of a RuntimeError, for the capture that it broke off.
    """
    graph = torch.cuda.CUDAGraph()
    result: object = None
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode=error_mode)
        try:
            for index in range(calls):
                result = call(index)
        finally:
            graph.capture_end()
    return graph, result


def replay_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of one of a graph's calls."""
    return elapsed_us(graph.replay) / calls


def elapsed_us(launch: Callable[[], object]) -> float:
    """Microseconds of the GPU between before and after what is launched on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3

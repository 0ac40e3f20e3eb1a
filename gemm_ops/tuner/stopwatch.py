"""Times contenders on a GPU: each is a CUDA graph of several calls, which read one copy of the weight after another.

    >>> stopwatch = CudaStopwatch(device, weights=copies_of_weight(b))
    >>> stopwatch.add("two passes", lambda b: plan.run(a, b, operands, {}))
    >>> stopwatch.time("two passes")
    13.9

Contract: it is the GPU's time that counts, and not the host's.  In a network a layer's weight comes from memory, as
the other layers' were read since; so there are as many copies as it takes (:mod:`.replay`).  x, which the layer before
has just written, and the outputs are the same at each call.  After each replay the device rests, so that it does not
run into its power limit, where kernels rank otherwise (on an H200 cuBLAS takes 177 us for 4096x4096x4096 and the best
of ours 194; in rounds without rests, at 670 W, 230 and 217).  Kernels that overlap with one of ours ahead of them do so
at every other call: the time is the mean of both.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..runtime.dependent_launch import without_overlap
from .contenders import copy_of
from .replay import cache_bytes, copies_to_leave_cache, elapsed_us, record, replay_us

#: What a graph should take at least, far above the resolution of events.
_GRAPH_MICROSECONDS = 1000.0
_MOST_CALLS = 64
#: Of the memory that is free, what copies may take.
_SHARE_OF_MEMORY = 8
_WARM_UPS = 2
#: How many times as long as it ran the device rests.
_REST = 3.0


def copies_of_weight(b: Tensor) -> tuple[Tensor, ...]:
    """The weight, and as many copies of it as leave the device's L2 cache; fewer where memory is short."""
    size = b.numel() * b.element_size()
    free, _ = torch.cuda.mem_get_info(b.device)
    count = min(copies_to_leave_cache(size, cache_bytes(b.device)), max(1, free // _SHARE_OF_MEMORY // size))
    return (b, *(copy_of(b) for _ in range(count - 1)))


class CudaStopwatch:
    """See the module's first page."""

    def __init__(self, device: torch.device, weights: Sequence[Tensor]) -> None:
        self.device = device
        self.weights = weights
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.calls: dict[str, int] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def add(self, name: str, call: Callable[[Tensor], object]) -> None:
        """Makes a contender ready.  What it raises, the graph's errors included, goes to the caller."""
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                calls = self._calls_of(call)

            def one(index: int) -> object:
                # in a network some follow a kernel of ours, and some do not
                with without_overlap() if index % 2 else contextlib.nullcontext():
                    return call(self.weights[index % len(self.weights)])

            graph, _ = record(
                one,
                calls,
                stream=self._stream,
                pool=self._pool,
                error_mode="thread_local",  # what other threads do meanwhile is none of this graph's business
            )
            torch.cuda.current_stream().wait_stream(self._stream)
            graph.replay()
        self.graphs[name], self.calls[name] = graph, calls

    def time(self, name: str) -> float:
        """Microseconds of one call, of one replay; then the device rests."""
        calls = self.calls[name]
        with torch.cuda.device(self.device):
            us = replay_us(self.graphs[name], calls)
        time.sleep(_REST * us * calls * 1e-6)
        return us

    def _calls_of(self, call: Callable[[Tensor], object]) -> int:
        """How many calls a graph has: enough to last, and all weights as often."""
        for _ in range(_WARM_UPS):
            call(self.weights[0])
        us = elapsed_us(lambda: call(self.weights[0]))
        wanted = math.ceil(_GRAPH_MICROSECONDS / max(us, 1.0))
        count = min(max(wanted, len(self.weights)), _MOST_CALLS)
        return max(count // len(self.weights), 1) * len(self.weights)

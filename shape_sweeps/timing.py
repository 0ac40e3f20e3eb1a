"""How long the fused call takes, and what it is up against, in one interleaved run.

    >>> timing = measure(contenders, sets=3, device="cuda")
    >>> timing.ratio("eager", "fused")        # speed-up of fused over eager
    1.21

Clock rates, power limits and neighbours change from second to second, so only ratios of times from the same
run mean anything.  Hence:

* rounds: every round samples every contender once, beginning with another one each time; the result is the
  median over rounds, with the interquartile range as its spread.
* samples: enough calls that a sample lasts a millisecond, far above the resolution of the clocks.
* GPU time: on CUDA the device is kept busy while the host enqueues the calls of a sample, so that events
  measure the kernels and not the host.
* input sets: contenders walk through several sets of inputs, so that what fits the L2 cache once does not
  come from it at each call.  Problems so small that all sets fit stay in the cache, as they do in use.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

#: A contender: called with the index of an input set, makes one call on it.
Contender = Callable[[int], object]

_SAMPLE_SECONDS = 1e-3
# A sample must not fill the queue of launches, which holds 1024: the host would wait for the device.
_MAX_CALLS = 64
_ROUNDS = {"cuda": 21, "cpu": 5}
#: seconds for the rounds of one case; the round under way is finished
_BUDGET_SECONDS = {"cuda": 2.0, "cpu": 0.25}
_HOST_CALLS = 7
_CYCLES_PER_SECOND = 2.5e9  # above the clock rate of any GPU: waiting longer than needed costs nothing else

_ROTATION_BYTES = 256 * 2**20
_MIN_SETS, _MAX_SETS = 3, 16


@dataclass(frozen=True)
class Sample:
    """Time of one call of one contender, in microseconds: median over rounds, interquartile range, and the
    number of calls per sample.
    """

    median_us: float
    iqr_us: float
    calls: int


@dataclass(frozen=True)
class Timing:
    """Times of all contenders in one interleaved run."""

    samples: Mapping[str, Sample]
    rounds: int
    sets: int

    def ratio(self, slower: str, faster: str) -> float:
        """Time of one contender over time of another; the speed-up of ``faster``, if it is above 1."""
        return self.samples[slower].median_us / self.samples[faster].median_us


def input_sets(bytes_per_call: int, device: str) -> int:
    """How many input sets to walk through: enough to exceed the L2 cache twice, at least 3, at most 16; one
    where a single set already is far beyond any cache.
    """
    if bytes_per_call >= _ROTATION_BYTES:
        return 1
    cache = 0
    if torch.device(device).type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(_MIN_SETS, math.ceil(2 * cache / max(bytes_per_call, 1))), _MAX_SETS)


def measure(contenders: Mapping[str, Contender], *, sets: int, device: str) -> Timing:
    """Times all contenders; each is called with set indices 0 .. sets - 1 in turn.

    Every contender is called for each set before anything is timed, so whatever it builds, loads or
    allocates on first use is not in the times.
    """
    kind = torch.device(device).type
    calls, host_seconds = {}, {}
    for name, contender in contenders.items():
        calls[name], host_seconds[name] = calibrate(contender, sets, device)

    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    began, rounds = time.perf_counter(), 0
    while rounds < _ROUNDS[kind] and (rounds == 0 or time.perf_counter() - began < _BUDGET_SECONDS[kind]):
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            seconds = _sample(contenders[name], calls[name], sets, device, host_seconds[name])
            times[name].append(seconds * 1e6)
        rounds += 1
    samples = {
        name: Sample(statistics.median(values), interquartile_range(values), calls[name])
        for name, values in times.items()
    }
    return Timing(samples, rounds, sets)


def calibrate(contender: Contender, sets: int, device: str) -> tuple[int, float]:
    """Calls per sample, and the seconds the host takes to make one call (0 on the CPU, where it waits)."""
    for index in range(sets):
        contender(index)
    host_seconds = 0.0
    if torch.device(device).type == "cuda":
        # The median, as one call may wait for the allocator; without waiting for the device in between.
        torch.cuda.synchronize(device)
        stamps = [time.perf_counter()]
        for _ in range(_HOST_CALLS):
            contender(0)
            stamps.append(time.perf_counter())
        host_seconds = statistics.median(after - before for before, after in itertools.pairwise(stamps))
        torch.cuda.synchronize(device)
    seconds = _sample(contender, 1, sets, device, host_seconds)
    calls = math.ceil(_SAMPLE_SECONDS / seconds) if seconds > 0 else _MAX_CALLS
    return min(max(calls, 1), _MAX_CALLS), host_seconds


def _sample(contender: Contender, calls: int, sets: int, device: str, host_seconds: float) -> float:
    if torch.device(device).type == "cuda":
        return sample_cuda(contender, calls, sets, device, host_seconds)
    return sample_cpu(contender, calls, sets)


def sample_cpu(contender: Contender, calls: int, sets: int) -> float:
    """Seconds of one call, by the clock on the wall."""
    began = time.perf_counter()
    for call in range(calls):
        contender(call % sets)
    return (time.perf_counter() - began) / calls


def sample_cuda(contender: Contender, calls: int, sets: int, device: str, host_seconds: float) -> float:
    """Seconds of one call, by events around all of them."""
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(host_seconds * calls * _CYCLES_PER_SECOND))
        start.record()
        for call in range(calls):
            contender(call % sets)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / calls


def interquartile_range(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower

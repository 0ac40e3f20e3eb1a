"""CUDA graphs in interleaved rounds: copies, order, what is checked; and on a GPU the graphs themselves."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gemm_ops.tuner import replay, stopwatch
from shape_sweeps import graph_timing, host_timing
from shape_sweeps.benchmark import checks, contenders, suite
from shape_sweeps.graph_timing import (
    CLOCK,
    EVENTS,
    GRAPH,
    Prepared,
    copies_to_leave_cache,
    leaves_cache,
    prepare,
    sample_rounds,
)
from shape_sweeps.shapes import SHAPE_SETS, Shape

H200_CACHE = 60 * 2**20
MIB = 2**20


@pytest.mark.parametrize(
    ("size", "free", "count"),
    [
        (400 * MIB, 10_000 * MIB, 2),  # one more, so that the other leaves
        (32 * MIB, 10_000 * MIB, 5),
        (MIB, 10_000 * MIB, 64),
        (32 * MIB, 512 * MIB, 2),  # memory is short: an eighth of it
        (400 * MIB, 512 * MIB, 1),
    ],
)
def test_tuning_copies_the_weight_as_benchmarks_do(
    size: int, free: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopwatch, "cache_bytes", lambda device: H200_CACHE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(stopwatch, "copy_of", lambda b: b)
    weight = torch.empty(size // 2, 1, dtype=torch.bfloat16, device="meta")
    assert len(stopwatch.copies_of_weight(weight)) == count


@pytest.mark.parametrize("cache", [H200_CACHE, 40 * MIB, 6 * MIB])
@pytest.mark.parametrize("size", [4 * MIB, 32 * MIB + 1, H200_CACHE, 400 * MIB])
def test_between_two_uses_of_a_copy_the_others_fill_the_cache_twice(size: int, cache: int) -> None:
    copies = copies_to_leave_cache(size, cache)
    assert (copies - 1) * size >= 2 * cache and leaves_cache(copies, size, cache)
    assert copies == 2 or (copies - 2) * size < 2 * cache  # and no more than it takes


def test_copies_of_tiny_tensors_are_limited_and_it_is_known_that_they_stay_in_the_cache() -> None:
    copies = copies_to_leave_cache(1000, H200_CACHE)
    assert copies == 64 and not leaves_cache(copies, 1000, H200_CACHE)
    assert copies_to_leave_cache(1000, 0) == 1 and not leaves_cache(1, 1000, 0)
    assert not leaves_cache(1, 400 * MIB, H200_CACHE)  # the same tensors each time


def test_every_entry_of_the_suite_is_cold_on_an_h200() -> None:
    for problem in suite.problems(SHAPE_SETS["suite"].shapes, list(suite.parse_epilogues(["all"]))):
        size = contenders.bytes_per_call(problem)
        assert leaves_cache(copies_to_leave_cache(size, H200_CACHE), size, H200_CACHE), problem


def test_rounds_alternate_and_the_first_sample_does_not_count() -> None:
    order: list[str] = []
    values = {"a": itertools.count(), "b": itertools.count(10)}

    def sampler(name: str) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return float(next(values[name]))

        return sample

    found = sample_rounds({name: sampler(name) for name in values}, rounds=4)
    assert order == ["a", "b", *("a", "b"), *("b", "a"), *("a", "b"), *("b", "a")]
    assert found == {"a": [1, 2, 3, 4], "b": [11, 12, 13, 14]}


@pytest.mark.parametrize(("rounds", "seconds", "made"), [(20, 0.0, 5), (3, 0.0, 3), (7, math.inf, 7)])
def test_a_budget_ends_the_rounds_from_the_fifth_on(rounds: int, seconds: float, made: int) -> None:
    assert len(sample_rounds({"a": lambda: 1.0}, rounds=rounds, seconds=seconds)["a"]) == made


@pytest.mark.parametrize(
    ("us", "copies", "calls"),
    [
        (10.0, 5, 100),  # a millisecond
        (10.0, 30, 120),  # all copies equally often
        (1.0, 5, 125),  # no more than 128 calls
        (8000.0, 2, 2),  # each copy once
        (1.0, 200, 200),
    ],
)
def test_a_graph_is_long_enough_and_uses_every_copy_equally(
    us: float, copies: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []

    def capture(contender: object, calls: int, copies: int) -> tuple[str, str]:
        captured.append(calls)
        return "graph", "result"

    monkeypatch.setattr(graph_timing, "capture", capture)
    monkeypatch.setattr(graph_timing, "replay_us", lambda graph, calls: us)
    assert graph_timing._prepare_graph(lambda index: None, copies).calls == calls == captured[-1]
    assert captured[0] == copies and calls % copies == 0


def test_on_a_cpu_the_clock_is_read() -> None:
    seen: set[int] = set()
    prepared = prepare(seen.add, copies=3, device="cpu")
    assert prepared.how == CLOCK and seen == {0, 1, 2} and 0 < prepared.sample() < 1e6


@pytest.mark.parametrize("fails", [False, True])
def test_a_recording_is_ended_and_its_stream_left_whatever_the_calls_do(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            done.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            done.append("end")
            if fails:
                raise RuntimeError("the capture is invalid")

    @contextlib.contextmanager
    def stream(chosen: object) -> Iterator[None]:
        done.append(chosen)
        try:
            yield
        finally:
            done.append("left")

    def call(index: int) -> int:
        done.append(index)
        if fails:
            raise ValueError("it waits")
        return index * 10

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    options: Any = {"stream": "side", "pool": "shared", "error_mode": "thread_local"}
    if fails:
        with pytest.raises(RuntimeError, match="invalid") as caught:
            replay.record(call, 3, **options)
        assert isinstance(caught.value.__context__, ValueError)
    else:
        assert replay.record(call, 3, **options)[1] == 20
    calls = [0] if fails else [0, 1, 2]
    assert done == ["side", ("begin", "shared", "thread_local"), *calls, "end", "left"]


class _NoDevice:
    """In the place of ``torch.cuda.device``."""

    def __init__(self, device: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...


@pytest.mark.parametrize("broken_off_by", [KeyboardInterrupt(), ValueError("it draws\nnumbers")])
def test_what_breaks_a_capture_off_is_told_and_an_interrupt_is_one(
    broken_off_by: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*_: object) -> None:
        try:
            raise broken_off_by
        finally:
            raise RuntimeError("the capture is invalid")  # as the end of one says then

    monkeypatch.setattr(graph_timing, "capture", capture)
    monkeypatch.setattr(graph_timing, "calibrate", lambda *_: (4, 0.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", _NoDevice)
    if isinstance(broken_off_by, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            prepare(lambda index: None, copies=1, device="cuda")
    else:
        prepared = prepare(lambda index: None, copies=1, device="cuda")
        assert (prepared.how, prepared.calls) == (EVENTS, 4)
        assert prepared.note == "it cannot be captured: ValueError: it draws numbers"


def _writes_all_but(missing: int) -> Callable[[], dict[str, torch.Tensor]]:
    memory = torch.zeros(8, 8, dtype=torch.bfloat16)

    def run() -> dict[str, torch.Tensor]:
        memory.view(-1)[: 64 - missing].fill_(1.0)
        return {"D": memory}

    return run


@pytest.mark.parametrize("missing", [0, 1])
def test_outputs_are_full_of_nan_before_the_run_that_is_checked(missing: int) -> None:
    prepared = Prepared(lambda: 1.0, _writes_all_but(missing), 1, GRAPH)
    outputs = checks.run_poisoned(prepared)
    assert int(outputs["D"].isnan().sum()) == missing
    ones = {"D": checks.Truth(torch.ones(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64), 0)}
    faults = checks.check_ours(outputs, {"D": torch.ones(8, 8, dtype=torch.bfloat16)}, ones)
    assert faults == (["D: 1 of 64 elements are not finite, or were never written"] if missing else [])
    assert math.isnan(checks.error_of(outputs, ones)) is bool(missing)


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 4095])
def test_the_first_and_the_last_rows_are_compared(rows: int) -> None:
    found = checks.checked_rows(rows).tolist()
    assert len(found) == len(set(found)) == min(rows, 256) and found[0] == 0 and found[-1] == rows - 1


@pytest.mark.parametrize("epilogue", list(suite.parse_epilogues(["all"])))
def test_rows_of_a_large_output_are_compared_with_their_own_operands(
    epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = suite.problems([Shape(40, 24, 16)], [epilogue])[0]
    setting = contenders.make_setting(problem, copies=1, device="cpu")
    inputs = setting.copies[0]
    whole = {name: truth.value for name, truth in checks.truth_of(inputs, setting.epilogue).items()}
    monkeypatch.setattr(checks, "ROWS", 8)
    part = {name: truth.value for name, truth in checks.truth_of(inputs, setting.epilogue).items()}
    rows = [*range(4), *range(36, 40)]
    assert {name: value[rows].shape for name, value in whole.items()} == {n: v.shape for n, v in part.items()}
    for name, value in part.items():
        torch.testing.assert_close(value, whole[name][rows])


# -- on a GPU ---------------------------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
def test_a_graph_writes_its_result_anew_and_takes_the_gpus_time() -> None:
    weights = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    prepared = prepare(lambda index: weights[0] @ weights[index], copies=3, device="cuda")
    assert prepared.how == GRAPH and prepared.calls % 3 == 0 and not prepared.note
    outputs = checks.run_poisoned(prepared)
    torch.testing.assert_close(outputs["product"], weights[0] @ weights[2])
    assert 5.0 < prepared.sample() < 1000.0


@pytest.mark.gpu
@on_gpu
def test_what_cannot_be_captured_is_timed_by_events_and_says_so() -> None:
    x = torch.randn(512, 512, device="cuda")

    def waits(index: int) -> torch.Tensor:
        return x * float(x[0, 0].item())

    prepared = prepare(waits, copies=1, device="cuda")
    assert prepared.how == EVENTS and "cannot be captured" in prepared.note and prepared.sample() > 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    again = prepare(lambda index: x + 1.0, copies=1, device="cuda")  # the next one can
    assert again.how == GRAPH and again.sample() > 0


@pytest.mark.gpu
@on_gpu
def test_a_cold_weight_takes_longer_to_read_than_a_warm_one() -> None:
    size = 24 * MIB
    cache = graph_timing.cache_bytes("cuda")
    if cache < 2 * size:
        pytest.skip("the tensor does not fit in this cache")
    copies = copies_to_leave_cache(size, cache)
    tensors = [torch.randn(size // 4, device="cuda") for _ in range(copies)]
    prepared = {
        "cold": prepare(lambda index: tensors[index].sum(), copies=copies, device="cuda"),
        "warm": prepare(lambda index: tensors[0].sum(), copies=1, device="cuda"),
    }
    found = sample_rounds({name: one.sample for name, one in prepared.items()}, rounds=7)
    assert sorted(found["cold"])[3] > 1.2 * sorted(found["warm"])[3]


@pytest.mark.gpu
@on_gpu
def test_the_hosts_time_is_of_every_contender() -> None:
    x = torch.randn(64, 64, device="cuda")
    times = host_timing.host_times({"add": lambda: x + 1.0, "two": lambda: (x + 1.0) * 2.0}, rounds=5)
    assert 0.5 < times["add"] < times["two"] < 1000.0

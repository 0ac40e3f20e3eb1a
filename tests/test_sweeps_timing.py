"""Timing: rounds, input sets and ratios, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from shape_sweeps.timing import Sample, Timing, input_sets, measure

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def test_ratios_are_speedups() -> None:
    timing = Timing({"eager": Sample(30.0, 1.0, 5), "fused": Sample(20.0, 1.0, 5)}, rounds=3, sets=2)
    assert timing.ratio("eager", "fused") == 1.5


@pytest.mark.parametrize("device", DEVICES)
def test_small_problems_rotate_and_huge_ones_do_not(device: str) -> None:
    assert 3 <= input_sets(2**20, device) <= 16
    assert input_sets(2**30, device) == 1
    assert input_sets(0, device) >= 3


def test_contenders_are_interleaved_on_every_input_set() -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str, seconds: float) -> object:
        def call(index: int) -> None:
            order.append((name, index))
            time.sleep(seconds)

        return call

    timing = measure({"slow": contender("slow", 4e-3), "fast": contender("fast", 1e-3)}, sets=3, device="cpu")  # type: ignore[dict-item]
    assert timing.ratio("slow", "fast") > 2
    assert {index for name, index in order if name == "slow"} == {0, 1, 2}
    names = [name for name, _ in order][-4 * timing.rounds :]
    assert names.count("slow") >= timing.rounds - 1  # neither runs all its rounds before the other
    assert all(sample.median_us > 0 and sample.iqr_us >= 0 for sample in timing.samples.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_time_is_not_host_time() -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    small = torch.randn(8, 8, device="cuda")

    def slow_host(index: int) -> None:
        time.sleep(2e-4)
        small.add_(1.0)

    timing = measure({"mm": lambda index: a @ a, "host": slow_host}, sets=1, device="cuda")
    assert timing.samples["host"].median_us < 100.0  # its host takes 200 us a call, its kernel about 2
    assert 100.0 < timing.samples["mm"].median_us < 5000.0

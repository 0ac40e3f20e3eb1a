"""Tuning on a device: a few kernels are measured, and calls follow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import epilogues as ep
import gemm_ops
from gemm_ops import dispatch
from gemm_ops.runtime.dependent_launch import overlapped_launches
from gemm_ops.tuner import known, tune
from gemm_ops.tuner.contenders import by_operations, computed
from gemm_ops.tuner.records import BY_OPERATIONS, TWO_PASSES
from gemm_ops.tuner.stopwatch import CudaStopwatch, copies_of_weight

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _knowing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Results count, and none is known; kernels come from, and go to, the usual cache."""
    monkeypatch.delenv("GEMM_OPS_TUNE")
    monkeypatch.setattr(known, "users_file", lambda device: tmp_path / known.file_name(device))
    monkeypatch.setattr(known, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(known, "_here", {})
    monkeypatch.setattr(known, "_files", {})
    monkeypatch.setattr(tune, "_tried", set())


def tensors(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    return x, weight * k**-0.5, torch.randn(n, device="cuda").bfloat16()


def test_a_call_is_tuned_and_the_next_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.plan_task, "__kwdefaults__", {"most": 2})
    x, weight, bias = tensors(512, 1024, 1024)
    before = gemm_ops.linear(x, weight, "gelu", bias=bias)
    with gemm_ops.tuning("now"):
        first = gemm_ops.linear(x, weight, "gelu", bias=bias)
    decision = gemm_ops.backend_for(x, weight.t(), "gelu", bias=bias)
    assert decision.reason.startswith("measured: "), decision.reason
    (result,) = known.all_of(torch.cuda.get_device_name()).values()
    assert len(result.us) >= 3 and TWO_PASSES in result.us and BY_OPERATIONS in result.us
    assert not any("wrong" in reason or "captured" in reason for reason in result.dropped.values()), result.dropped
    assert all(0.5 < time < 1e4 for time in result.us.values())
    after = gemm_ops.linear(x, weight, "gelu", bias=bias)
    for found in (first, after):
        torch.testing.assert_close(found, before, rtol=2e-2, atol=2e-2)


def test_nothing_is_measured_while_a_graph_is_captured() -> None:
    x, weight, bias = tensors(512, 1024, 1024)
    with gemm_ops.tuning("off"):
        expected = gemm_ops.linear(x, weight, "relu", bias=bias)  # built and loaded
    graph = torch.cuda.CUDAGraph()
    with gemm_ops.tuning("now"), torch.cuda.graph(graph):
        found = gemm_ops.linear(x, weight, "relu", bias=bias)
    graph.replay()
    assert torch.equal(found, expected) and not known.all_of(torch.cuda.get_device_name())


def test_the_stopwatch_reads_the_weights_in_turn() -> None:
    x, weight, bias = tensors(256, 1024, 1024)
    call = dispatch.bind_call(x, weight.t(), ep.builders.bias_activation("gelu"), {"bias": bias}, None)
    weights = copies_of_weight(call.b)
    cached = torch.cuda.get_device_properties(0).L2_cache_size
    assert len(weights) == 64 or len(weights) * weight.nbytes >= 2 * cached
    assert all(torch.equal(each, call.b) and each.stride() == call.b.stride() for each in weights)
    contender = by_operations(call)
    assert not bool(computed(contender, call)["D"].isnan().any())
    stopwatch = CudaStopwatch(x.device, weights)
    stopwatch.add("it", lambda b: contender.run(b, {}))
    before = overlapped_launches()
    with gemm_ops.use_backend("sm90"), gemm_ops.tuning("off"), torch.no_grad():
        stopwatch.add("ours", lambda b: gemm_ops.matmul(x, b, ep.builders.identity()))
        kernel = gemm_ops.backend_for(x, weight.t(), ep.builders.identity()).kernel
    assert kernel is not None and "1x1" not in kernel
    # every other call, and the first has nothing of ours ahead of it
    assert overlapped_launches() - before == (stopwatch.calls["ours"] + 1) // 2 - 1
    assert stopwatch.calls["it"] % len(weights) == 0 and 1 < stopwatch.time("it") < 1000


def test_the_device_rests_after_a_replay() -> None:
    _, weight, _ = tensors(512, 4096, 4096)
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    watch = CudaStopwatch(weight.device, copies_of_weight(weight.t()))
    watch.add("product", lambda b: x @ b)
    began = time.perf_counter()
    us = sum(watch.time("product") for _ in range(5)) * watch.calls["product"]
    assert (time.perf_counter() - began) * 1e6 > 3.5 * us

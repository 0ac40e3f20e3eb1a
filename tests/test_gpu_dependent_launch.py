"""Kernels that start while the one ahead of them ends, on a GPU: when they do, and that results are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_gpu_layouts import only

import epilogues as ep
import gemm_ops
from epilogues import Row, Scalar
from gemm_ops.kernels.config import SM90_CONFIGS, KernelConfig
from gemm_ops.runtime.dependent_launch import overlapped_launches, without_overlap

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: rows -> a configuration in clusters that takes them
CLUSTERS = {1000: SM90_CONFIGS[1], 40: next(config for config in SM90_CONFIGS if config.swapped)}
IN_NO_CLUSTER = next(config for config in SM90_CONFIGS if config.cluster == (1, 1))


@contextlib.contextmanager
def forced(config: KernelConfig | None) -> Iterator[None]:
    """One configuration of SM90; None: kernels for few rows."""
    with (
        only(config or SM90_CONFIGS[0]),
        gemm_ops.use_backend("sm90" if config else "skinny"),
        gemm_ops.tuning("off"),
        torch.no_grad(),
    ):
        yield


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of a call that has run before, and how many launches of it overlap."""
    call()
    torch.cuda.synchronize()
    before, graph = overlapped_launches(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph, overlapped_launches() - before


def chain(rows: int, links: int, width: int = 512) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """Products each of which reads what the one before wrote, and overwrites what that one read; input and result."""
    torch.manual_seed(0)
    buffers = [torch.randn(rows, width, device="cuda").to(BF16), torch.empty(rows, width, device="cuda", dtype=BF16)]
    weights = [(torch.randn(width, width, device="cuda") * width**-0.5).to(BF16) for _ in range(links)]
    bias = torch.randn(width, device="cuda").to(BF16)
    epilogue = ep.builders.SUITE["bias_gelu"]()

    def call() -> None:
        for index, weight in enumerate(weights):
            source, target = buffers[index % 2], buffers[1 - index % 2]
            gemm_ops.linear(source, weight, epilogue=epilogue, bias=bias, out=target)

    return call, buffers[0], buffers[links % 2]


@pytest.mark.parametrize("rows", [1000, 40, 8, 1])
def test_a_chain_gives_the_same_numbers(rows: int) -> None:
    """Reads after writes and writes after reads: each of 40 kernels waits for the one ahead; 25 times."""
    links = 40
    call, start, result = chain(rows, links)
    with forced(CLUSTERS.get(rows)):
        first = start.clone()
        with without_overlap():
            apart, count = capture(call)
        assert count == 0
        together, count = capture(call)
        # the first has nothing of ours ahead of it
        assert count == links - 1
        for _ in range(25):
            start.copy_(first)
            apart.replay()
            expected = result.clone()
            start.copy_(first)
            together.replay()
            assert torch.equal(result, expected)
    assert expected.isfinite().all() and expected.std() > 0.01


def launches(
    config: KernelConfig | None, rows: int, between: Callable[[], object] = lambda: None, **operands: Any
) -> int:
    """How many of two launches overlap."""
    x, weight = torch.randn(rows, 512, device="cuda").to(BF16), torch.randn(512, 512, device="cuda").to(BF16)
    epilogue = scaled if operands else ep.builders.identity()

    def call() -> None:
        gemm_ops.linear(x, weight, epilogue=epilogue, **operands)
        between()
        gemm_ops.linear(x, weight, epilogue=epilogue, **operands)

    with forced(config):
        return capture(call)[1]


@ep.epilogue
def scaled(acc, scale: Scalar, bias: Row):
    return acc * scale + bias


@pytest.mark.parametrize("rows", CLUSTERS)
def test_only_behind_our_own_kernels(rows: int) -> None:
    other = torch.ones(64, device="cuda")
    assert launches(CLUSTERS[rows], rows) == 1
    assert launches(CLUSTERS[rows], rows, between=lambda: other.add_(1)) == 0


@pytest.mark.parametrize("rows", [1, 16])
def test_kernels_for_few_rows(rows: int) -> None:
    other = torch.ones(64, device="cuda")
    assert launches(None, rows) == 1
    assert launches(None, rows, between=lambda: other.add_(1)) == 0


def test_blocks_in_no_cluster_do_not_overlap() -> None:
    assert launches(IN_NO_CLUSTER, 40) == 0


def test_scalars_in_memory_are_not_read_early() -> None:
    """The kernel ahead may write them: one that is given by value overlaps, one in memory does not."""
    bias = torch.zeros(512, device="cuda", dtype=BF16)
    assert launches(SM90_CONFIGS[1], 1000, scale=2.0, bias=bias) == 1
    assert launches(SM90_CONFIGS[1], 1000, scale=torch.tensor([2.0], device="cuda", dtype=BF16), bias=bias) == 0


def test_a_stream_that_joins_another_waits_for_both() -> None:
    """A launch that depends on two nodes is made as ever."""
    x, weight = torch.randn(1000, 512, device="cuda").to(BF16), torch.randn(512, 512, device="cuda").to(BF16)
    side = torch.cuda.Stream()

    def call() -> None:
        main = torch.cuda.current_stream()
        gemm_ops.linear(x, weight, epilogue=ep.builders.identity())
        side.wait_stream(main)
        with torch.cuda.stream(side):
            gemm_ops.linear(x, weight, epilogue=ep.builders.identity())
        main.wait_stream(side)
        gemm_ops.linear(x, weight, epilogue=ep.builders.identity())

    with forced(SM90_CONFIGS[1]):
        # the side stream's follows the first; the last depends on both of them
        assert capture(call)[1] <= 1


def test_uncaptured_calls_never_overlap() -> None:
    call, _, _ = chain(1000, 4)
    before = overlapped_launches()
    with forced(SM90_CONFIGS[1]):
        call()
    torch.cuda.synchronize()
    assert overlapped_launches() == before

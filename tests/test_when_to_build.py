"""When a call's kernel is built: while it waits, in the background, or not at all.  Compilers are shell scripts."""

from __future__ import annotations

import dataclasses
import queue
import time
from typing import Any

import pytest
import torch
from build_support import FAILS, OTHER, REAL_LIBRARY, SPEC, Install, count, fresh, install
from host_device import HostDevice

import epilogues as ep
import gemm_ops
from gemm_ops import FallbackWarning, announce, dispatch, plan, use_backend
from gemm_ops import when_to_build as building
from gemm_ops.build.cache import find_library
from gemm_ops.build.compiler import build_kernel
from gemm_ops.errors import ToolchainError

__all__ = ["fresh", "install"]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker, warning or plan of another test."""
    monkeypatch.setattr(building, "_asked", set())
    monkeypatch.setattr(building, "_workers", [])
    monkeypatch.setattr(building, "_waiting", queue.SimpleQueue())
    monkeypatch.setattr(announce, "_announced", set())
    monkeypatch.setattr(plan, "_plans", {})


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def decide(backend: str = "auto") -> dispatch.Decision:
    """The decision of a product on an H200 that is not there."""
    x, weight = (torch.empty(512, 512, dtype=torch.bfloat16, device="meta") for _ in range(2))
    call = dispatch.bind_call(x, weight.t(), ep.builders.activation("gelu"), {}, None)
    there = dataclasses.replace(call.problem, device=torch.device("cuda", 0))
    with pytest.MonkeyPatch.context() as patch, use_backend(backend):
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(dispatch, "multiprocessor_count", lambda device: 132)
        return dispatch.decide(dataclasses.replace(call, problem=there))


def test_the_way_is_the_contexts_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert building.way_of_building() == "wait"
    monkeypatch.setenv("GEMM_OPS_BUILD", "never")
    assert building.way_of_building() == "never"
    with gemm_ops.building("background"):
        assert building.way_of_building() == "background"
    assert building.way_of_building() == "never"
    monkeypatch.setenv("GEMM_OPS_BUILD", "NEVER")
    assert building.way_of_building() == "never"
    monkeypatch.setenv("GEMM_OPS_BUILD", "sometimes")
    with pytest.raises(ValueError, match="GEMM_OPS_BUILD should be one of wait, background, never, got 'sometimes'"):
        building.way_of_building()
    with pytest.raises(ValueError, match="got 'now'"), gemm_ops.building("now"):
        pass


def test_a_call_waits_unless_it_is_told_not_to(install: Install) -> None:
    install(REAL_LIBRARY)
    assert (found := decide()).backend == "sm90" and not found.for_now
    with gemm_ops.building("never"):
        found = decide()
        assert found.backend != "sm90" and found.for_now and found.awaited is None and found.loss
        assert found.reason.startswith("its kernel is not built, and gemm_ops.building or GEMM_OPS_BUILD says")
        with pytest.raises(gemm_ops.UnsupportedProblemError, match="its kernel is not built"):
            decide("sm90")
    with gemm_ops.building("background"):
        found = decide()
        assert found.backend != "sm90" and found.for_now and found.loss
        assert found.awaited is not None and "sm90" in found.awaited.title
        assert found.reason == "its kernel is being built in the background"
        assert decide("sm90").backend == "sm90", "a backend that is asked for is waited for"


def test_a_kernel_that_is_built_is_used_whatever_the_way(install: Install) -> None:
    install(REAL_LIBRARY)
    spec = decide().spec
    assert spec is not None
    build_kernel(spec, quiet=True)
    for way in building.WAYS:
        with gemm_ops.building(way):
            assert decide().backend == "sm90" and not decide().for_now


def test_where_there_is_no_compiler_it_is_said_as_ever() -> None:
    with gemm_ops.building("background"):
        found = decide()
        assert "cannot be: no usable nvcc found" in found.reason and not found.for_now
        with pytest.raises(ToolchainError):
            decide("sm90")


def test_in_the_background_each_kernel_is_built_once(install: Install) -> None:
    runs = install(REAL_LIBRARY)
    for spec in (SPEC, OTHER, SPEC, OTHER):
        building.build_in_background(spec)
    wait_for(lambda: find_library(SPEC) and find_library(OTHER))
    assert count(runs) == 2
    with gemm_ops.building("background"):
        assert building.obstacle(SPEC) is None


def test_one_that_does_not_compile_is_tried_once_and_says_so(install: Install) -> None:
    runs = install(FAILS)
    with gemm_ops.building("background"):
        first = building.obstacle(SPEC)
        assert isinstance(first, building.NotBuilt) and first.spec is SPEC
        building.build_in_background(SPEC)
        wait_for(lambda: not isinstance(building.obstacle(SPEC), building.NotBuilt))
        reason = building.obstacle(SPEC)
        assert reason is not None and reason.startswith("the kernel cannot be built: nvcc failed with exit code 1 on ")
        building.build_in_background(SPEC)
    assert count(runs) == 1


def test_calls_take_the_kernel_when_it_is_there(host: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elementwise call, on a device of a kind: PyTorch computes first, then the kernel, and nobody asks twice."""
    from gemm_ops import elementwise_call

    built: list[Any] = []
    there = False

    def obstacle(spec: Any, **_: Any) -> str | None:
        return None if there else building.NotBuilt.yet(spec)

    monkeypatch.setattr(elementwise_call, "obstacle", obstacle)
    monkeypatch.setattr(elementwise_call, "build_in_background", built.append)
    x = torch.randn(4, 8)
    with pytest.warns(FallbackWarning, match="its kernel is being built in the background"):
        first = gemm_ops.apply(x, "relu")
    gemm_ops.apply(x, "relu")
    assert not host.launched and len(built) == 2 and built[0].key == built[1].key
    there = True
    for _ in range(2):
        assert torch.equal(gemm_ops.apply(x, "relu"), first)
    assert len(host.launched) == 2 and len(built) == 2


def test_it_is_entered_around_what_is_compiled() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with gemm_ops.building("never"):
            return x + 1

    with pytest.raises(Exception, match="building cannot be entered within what torch"):
        compiled(torch.ones(2))

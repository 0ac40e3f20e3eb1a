"""Cases that do not fit in memory are skipped, not failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gemm_ops
from shape_sweeps import Case, load_epilogue, memory, run_sweep, runner
from shape_sweeps.errors import one_line
from shape_sweeps.records import FAILED, SKIPPED

SMALL = Case(33, 65, 127, "bf16", "gate")
GATE = {"gate": load_epilogue("gate")}


def cpu_allocator_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**61, dtype=torch.int8)
    return caught.value


ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"),
    RuntimeError("Storage size calculation overflowed with sizes=[2147483647, 2147483647]"),
    cpu_allocator_error(),
]


@pytest.mark.parametrize("extents", [(10**6, 10**6, 10**6), (2**31 - 1,) * 3, (2**31 - 1, 2**31 - 1, 0)])
def test_what_is_far_too_large_is_skipped_without_trying(extents: tuple[int, int, int]) -> None:
    sweep = run_sweep([Case(*extents, "bf16", "gate"), SMALL], GATE, timing=False)
    huge, small = sweep.records
    assert huge.status == SKIPPED and "does not fit in the memory of cpu: its tensors take at least" in huge.reason
    assert "\n" not in huge.reason and "TiB" in huge.reason
    assert small.status == "passed"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_allocation_that_fails_skips_the_case(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    for place in ("placeholder_inputs", "make_inputs"):
        with monkeypatch.context() as patch:
            patch.setattr(runner, place, fail)
            (record,) = run_sweep([SMALL], GATE, timing=False).records
        assert record.status == SKIPPED and record.reason.startswith("does not fit in the memory of cpu")


def test_a_fault_found_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def linear(*_: Any, out: Any, **__: Any) -> Any:
        calls.append(out)
        if len(calls) == 2:
            raise MemoryError
        return out  # writes nothing

    monkeypatch.setattr(runner.gemm_ops, "linear", linear)
    (record,) = run_sweep([SMALL], GATE, timing=False).records
    assert record.status == FAILED and "never written" in record.reason and "does not fit" in record.reason


def test_without_memory_for_timing_a_case_is_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(runner, "measure", fail)
    sweep = run_sweep([SMALL], GATE, timing=True)
    assert sweep.records[0].status == "passed" and sweep.records[0].timing is None
    assert sweep.notes == [f"{SMALL.id}: not timed, several sets of its inputs do not fit in memory"]


@pytest.mark.parametrize(
    "error", [RuntimeError("a launch failed"), ValueError("out of memory"), gemm_ops.BuildError("nvcc: out of memory")]
)
def test_other_errors_are_failures(error: Exception) -> None:
    assert not memory.is_allocation_error(error)


def test_what_a_case_needs_is_not_overestimated() -> None:
    """At least the inputs, at most what the suite's machines have."""
    assert memory.needed(SMALL, GATE["gate"]) > 33 * 127 * 2 + 127 * 65 * 2 + 33 * 65 * 2
    assert memory.needed(Case(8192, 14336, 4096, "bf16", "gate"), GATE["gate"]) < 5 * 2**30
    assert (memory.available("cpu") or 0) > 2**20


def test_frames_of_cpp_are_left_out() -> None:
    text = "Overflow when unpacking long long\nException raised from unpack at x.h:79\nframe #0: c10::Error + 0x9d"
    assert one_line(RuntimeError(text)) == "RuntimeError: Overflow when unpacking long long"

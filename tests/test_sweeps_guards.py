"""Guarded outputs: every element written outside, and every one not written inside, is found."""

from __future__ import annotations

import pytest
import torch

from shape_sweeps.guards import LAYOUTS, GuardedOutput

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
everywhere = pytest.mark.parametrize("layout", LAYOUTS)


def written(layout: str, m: int = 5, n: int = 7, dtype: torch.dtype = torch.bfloat16) -> GuardedOutput:
    guarded = GuardedOutput.allocate(m, n, dtype, "cpu", layout)
    guarded.view.copy_(torch.randn(m, n))
    return guarded


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_nan_and_guards_are_not(layout: str, dtype: torch.dtype) -> None:
    guarded = GuardedOutput.allocate(5, 7, dtype, "cpu", layout)
    assert guarded.view.isnan().all()
    assert int(guarded.buffer.isnan().sum()) == 5 * 7
    assert guarded.faults() == ["35 of 35 elements were never written, the first at row 0, column 0"]
    guarded.view.zero_()
    assert guarded.faults() == []


@everywhere
@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 7), (3, 8), (1, 64), (64, 1), (0, 5), (5, 0)])
def test_a_full_write_passes(layout: str, m: int, n: int) -> None:
    assert written(layout, m, n).faults() == []


@everywhere
def test_layouts_are_as_described(layout: str) -> None:
    guarded = GuardedOutput.allocate(5, 7, torch.bfloat16, "cpu", layout)
    assert guarded.view.stride() == ((7, 1) if layout == "contiguous" else (16, 1))
    assert guarded.view.is_contiguous() == (layout == "contiguous")
    assert guarded.view.data_ptr() % 16 == 0
    # a guard row before and after
    assert guarded.start >= guarded.view.stride(0)
    assert guarded.buffer.numel() - guarded.start - 5 * guarded.view.stride(0) >= guarded.view.stride(0)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_guard_element_is_watched(layout: str, dtype: torch.dtype) -> None:
    guarded = written(layout, 3, 5, dtype)
    inside = torch.zeros(guarded.buffer.numel(), dtype=torch.bool)
    inside.as_strided((3, 5), guarded.view.stride(), guarded.start).fill_(True)
    for position in range(guarded.buffer.numel()):
        if inside[position]:
            continue
        kept = guarded.buffer[position].clone()
        guarded.buffer[position] = 0.0
        (fault,) = guarded.faults()
        assert fault.startswith("1 elements outside the output written")
        guarded.buffer[position] = kept
    assert guarded.faults() == []


@everywhere
def test_an_element_left_out_is_found(layout: str) -> None:
    guarded = GuardedOutput.allocate(5, 7, torch.float16, "cpu", layout)
    guarded.view[:4].zero_()
    guarded.view[4, :6].zero_()
    assert guarded.faults() == ["1 of 35 elements were never written, the first at row 4, column 6"]


@everywhere
def test_a_nan_that_was_computed_is_not_poison(layout: str) -> None:
    guarded = written(layout)
    guarded.view[2, 3] = float("nan")
    assert guarded.faults() == []


def test_places_outside_are_told_in_words() -> None:
    padded = written("padded")
    padded.buffer[padded.start + 2 * 16 + 8] = 0.0
    assert padded.faults() == ["1 elements outside the output written, the first in row 2, 2 elements after its end"]
    contiguous = written("contiguous")
    contiguous.buffer[contiguous.start + 5 * 7] = 0.0
    assert contiguous.faults()[0].endswith("the first 1 elements after the last")
    before = written("contiguous")
    before.buffer[before.start - 3] = 0.0
    assert before.faults()[0].endswith("the first 3 elements before the first")

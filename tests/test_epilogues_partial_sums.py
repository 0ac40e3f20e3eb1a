"""What may come before an all-reduce: known epilogues, and that linear steps give the same on parts and on sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import inputs_for, some, trees

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar
from epilogues.analysis import check_partial_sums
from epilogues.reference import evaluate
from epilogues.tree import Apply, Cast, EpilogueTree, Store

CASES = {
    "acc": (lambda acc: acc, ()),
    "scale": (lambda acc, scale: acc * scale / 2, ()),
    "bias": (lambda acc, bias: acc + bias, ("add",)),
    "scale, then bias": (lambda acc, scale, bias: acc * scale + bias, ("add",)),
    "activation": (lambda acc, scale: ep.gelu(acc * scale), ("gelu_erf",)),
    "after an activation": (lambda acc, scale: ep.relu(acc) * scale, ("relu", "mul")),
    "square": (lambda acc: acc * acc, ("mul",)),
    "reciprocal": (lambda acc, scale: scale / acc, ("div",)),
    "sum with itself": (lambda acc, scale: acc * scale - acc, ()),
    "nothing added": (lambda acc: acc + 0.0, ()),
    "mask": (lambda acc, mask: ep.where(mask > 0, acc, 0.0), ()),
    "mask with a value": (lambda acc, mask: ep.where(mask > 0, acc, 1.0), ("where",)),
    "mask of the accumulator": (lambda acc: ep.where(acc > 0, acc, 0.0), ("gt", "where")),
    "cast": (lambda acc, scale: ep.cast(acc, torch.bfloat16) * scale, ("cast to bf16", "mul")),
    "operands alone": (lambda acc, bias: ep.gelu(bias) * acc, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_the_all_reduce(name: str) -> None:
    function, after = CASES[name]
    assert check_partial_sums(ep.epilogue(function).tree).after == after


@ep.epilogue
def everything(acc, scale: Row, bias: Row, offset: Column, alpha: Scalar, residual: Aux):
    return ep.gelu(acc * scale + bias + offset) * alpha + residual


def test_it_says_why_and_where() -> None:
    lines = str(check_partial_sums(everything.tree)).splitlines()
    assert "of 6 operations 5 follow the all-reduce" in lines[0]
    assert lines[1].startswith("  either:  mul")
    assert lines[2].startswith("  after:   add") and "added once on each device" in lines[2]
    assert "it reads what follows the all-reduce" in lines[3]
    assert all("test_epilogues_partial_sums.py" in line for line in lines[1:])


@some(300)
@given(trees(), st.integers(0, 2**32))
def test_what_may_come_before_gives_the_same_on_parts(tree: EpilogueTree, seed: int) -> None:
    """In fp64 on ordinary numbers, the sum over parts of a linear value is the value of the sum."""
    for node in tree.nodes:
        if not isinstance(node, Apply | Cast):
            continue
        part = EpilogueTree((Store("D", node),))
        found = check_partial_sums(part)
        if not found.steps or found.after:
            continue
        acc, operands = inputs_for(part, seed)
        acc = torch.randn(acc.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 2**31))
        other = acc.flip(0) * 0.75 - 0.5

        def value(given: torch.Tensor, part=part, operands=operands) -> torch.Tensor:
            return evaluate(part, given, operands, compute_dtype=torch.float64, out_dtype=torch.float64)["D"]

        together, apart = value(acc + other), value(acc) + value(other)
        finite = together.isfinite() & apart.isfinite()
        scale = value(acc).abs() + value(other).abs() + 1e-300
        assert (((together - apart).abs() / scale)[finite] < 1e-9).all(), str(part)

"""How shapes tell kinds, and what is said of those that don't."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import epilogues as ep
from epilogues import Aux, BroadcastError, Column, EpilogueError, Kind, Row, Scalar, epilogue
from epilogues.operand_shapes import bind_kind, check_names, spread_shape
from epilogues.tree import Operand

AUTO, ROW, COLUMN, SCALAR, AUX = Kind.AUTO, Kind.ROW, Kind.COLUMN, Kind.SCALAR, Kind.AUX

#: (kind asked for, shape or number, m_shape, n) -> kind
ACCEPTED = [
    # not annotated, two dimensions
    ((AUTO, 2.5, (4,), 8), SCALAR),
    ((AUTO, 3, (4,), 4), SCALAR),
    ((AUTO, np.float32(2), (4,), 8), SCALAR),
    ((SCALAR, np.int64(2), (4,), 8), SCALAR),
    ((SCALAR, Fraction(1, 3), (4,), 8), SCALAR),
    ((AUTO, (), (4,), 8), SCALAR),
    ((AUTO, (1,), (4,), 8), SCALAR),
    ((AUTO, (1, 1), (4,), 4), SCALAR),
    ((AUTO, (8,), (4,), 8), ROW),
    ((AUTO, (4,), (4,), 8), COLUMN),
    ((AUTO, (1, 8), (4,), 8), ROW),
    ((AUTO, (1, 4), (4,), 4), ROW),
    ((AUTO, (4, 1), (4,), 8), COLUMN),
    ((AUTO, (4, 1), (4,), 4), COLUMN),
    ((AUTO, (4, 8), (4,), 8), AUX),
    ((AUTO, (4, 4), (4,), 4), AUX),
    # M or N is 1: the kinds that fit hold the same values
    ((AUTO, (1, 8), (1,), 8), AUX),
    ((AUTO, (4, 1), (4,), 1), AUX),
    ((AUTO, (8,), (1,), 8), ROW),
    ((AUTO, (4,), (4,), 1), COLUMN),
    ((AUTO, (1,), (1,), 1), SCALAR),
    # nothing to tell apart
    ((AUTO, (0,), (0,), 0), ROW),
    ((AUTO, (0,), (4,), 0), ROW),
    ((AUTO, (0, 8), (0,), 8), AUX),
    # not annotated, more dimensions
    ((AUTO, (8,), (2, 3), 8), ROW),
    ((AUTO, (6,), (2, 3), 6), ROW),
    ((AUTO, (1, 8), (2, 3), 8), ROW),
    ((AUTO, (1, 1, 8), (2, 3), 8), ROW),
    ((AUTO, (2, 3), (2, 3), 8), COLUMN),
    ((AUTO, (2, 3, 1), (2, 3), 8), COLUMN),
    ((AUTO, (2, 3, 1), (2, 3), 3), COLUMN),
    ((AUTO, (2, 3, 8), (2, 3), 8), AUX),
    ((AUTO, (4, 1), (4, 1), 1), COLUMN),
    ((AUTO, (8,), (), 8), ROW),
    # annotated
    ((ROW, (4,), (4,), 4), ROW),
    ((ROW, (1, 1, 4), (2, 4), 4), ROW),
    ((ROW, (8,), (), 8), ROW),
    ((ROW, (1,), (4,), 1), ROW),
    ((COLUMN, (4,), (4,), 4), COLUMN),
    ((COLUMN, (4, 1), (4,), 4), COLUMN),
    ((COLUMN, (4, 8), (4, 8), 8), COLUMN),
    ((COLUMN, (4, 8, 1), (4, 8), 8), COLUMN),
    ((COLUMN, (), (), 8), COLUMN),
    ((SCALAR, 1, (4,), 4), SCALAR),
    ((SCALAR, (1, 1, 1), (4,), 4), SCALAR),
    ((AUX, (2, 4, 4), (2, 4), 4), AUX),
    ((AUX, torch.Size((4, 8)), (4,), 8), AUX),
]

REFUSED = [
    ((AUTO, (4,), (4,), 4), r"operand t: shape \(4,\) is ambiguous .*annotate it as Row or Column"),
    ((AUTO, (4, 8), (4, 8), 8), r"operand t: shape \(4, 8\) is ambiguous .*annotate"),
    ((AUTO, (1, 8), (1, 8), 8), "ambiguous"),
    (
        (AUTO, (5,), (4,), 8),
        r"shape \(5,\) does not spread .*Row: \(8,\); Column: \(4,\) or \(4, 1\); Scalar",
    ),
    ((AUTO, (6,), (2, 3), 8), "does not spread"),
    ((AUTO, (3, 8), (2, 3), 8), "does not spread"),
    ((AUTO, (8, 4), (4,), 8), "does not spread"),
    ((AUTO, (1, 4, 8), (4,), 8), "does not spread"),
    ((AUTO, (1, 1, 8), (4,), 8), "does not spread"),
    ((AUTO, (0,), (4,), 8), "does not spread"),
    ((ROW, (4,), (4,), 8), r"operand t \(Row\): expected shape \(8,\) .*shape \(4, 8\), got \(4,\)"),
    ((ROW, (8, 1), (4,), 8), r"got \(8, 1\)"),
    ((ROW, (1,), (4,), 8), r"got \(1,\)"),
    ((ROW, (), (4,), 8), r"got \(\)"),
    ((ROW, (4, 8), (4,), 8), r"got \(4, 8\)"),
    ((ROW, 1.0, (4,), 8), r"operand t \(Row\): expected a tensor of shape \(8,\), got the number 1.0"),
    ((COLUMN, (8,), (4,), 8), r"operand t \(Column\): expected shape \(4,\) or \(4, 1\)"),
    ((COLUMN, (1, 4), (4,), 8), r"got \(1, 4\)"),
    ((COLUMN, (6,), (2, 3), 8), r"expected shape \(2, 3\) or \(2, 3, 1\)"),
    ((COLUMN, 2, (4,), 8), "got the number 2"),
    ((ROW, np.float32(2), (4,), 8), "got the number"),
    (
        (SCALAR, (2,), (4,), 8),
        r"operand t \(Scalar\): expected a number or a tensor of one element for an accumulator of .*got \(2,\)",
    ),
    ((SCALAR, (0,), (4,), 8), "one element"),
    ((AUX, (8,), (4,), 8), r"operand t \(Aux\): expected shape \(4, 8\) .*got \(8,\)"),
    ((AUX, (1, 8), (4,), 8), r"got \(1, 8\)"),
    ((AUX, (6, 8), (2, 3), 8), r"expected shape \(2, 3, 8\)"),
    ((AUX, 0.0, (4,), 8), "got the number 0.0"),
]


@pytest.mark.parametrize(("given", "kind"), ACCEPTED, ids=str)
def test_accepted(given, kind):
    asked, shape, m_shape, n = given
    assert bind_kind(Operand("t", asked, 0), shape, m_shape, n) is kind
    spread = spread_shape(kind, m_shape, n)
    assert torch.broadcast_shapes(spread, (*m_shape, n)) == (*m_shape, n)
    if isinstance(shape, tuple):
        tensor = torch.empty(shape)
        assert tensor.reshape(spread).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_refused(given, message):
    asked, shape, m_shape, n = given
    with pytest.raises(BroadcastError, match=message):
        bind_kind(Operand("t", asked, 0), shape, m_shape, n)


@pytest.mark.parametrize("given", [True, np.bool_(True), 1j, "8", None, np.ones(3), {}])
@pytest.mark.parametrize("kind", [AUTO, SCALAR])
def test_neither_shape_nor_number(given, kind):
    with pytest.raises(EpilogueError, match="operand t: expected a tensor, an int or a float, got"):
        bind_kind(Operand("t", kind, 0), given, (4,), 8)


def test_names():
    @epilogue
    def f(acc, bias: Row, scale: Column, alpha: Scalar, residual: Aux, other):
        return (acc * scale + bias) * alpha + residual + other

    names = ["bias", "scale", "alpha", "residual", "other"]
    check_names(f.tree, reversed(names))
    signature = r"\(bias: Row, scale: Column, alpha: Scalar, residual: Aux, other: any kind\)"
    with pytest.raises(EpilogueError, match=rf"^missing operand scale, other; the epilogue takes {signature}"):
        check_names(f.tree, ["bias", "alpha", "residual"])
    with pytest.raises(EpilogueError, match=rf"^unknown operand offset; the epilogue takes {signature}"):
        check_names(f.tree, [*names, "offset"])
    with pytest.raises(EpilogueError, match=r"^missing operand bias and unknown operand beta"):
        check_names(f.tree, ["beta", *names[1:]])
    with pytest.raises(EpilogueError, match=r"takes \(no operands\)"):
        check_names(ep.builders.identity().tree, ["bias"])

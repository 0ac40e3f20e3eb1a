"""How shapes tell kinds, and what is said of those that don't."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import epilogues as ep
from epilogues import Aux, BroadcastError, Column, EpilogueError, Kind, Row, Scalar, epilogue
from epilogues.operand_shapes import bind_kind, check_names, fits, repeated_dims, spread_shape
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
    # batch dimensions broadcast
    ((ROW, (2, 1, 8), (2, 3), 8), ROW),
    ((ROW, (1, 1, 8), (2, 3), 8), ROW),
    ((ROW, (3, 1, 8), (2, 3, 4), 8), ROW),
    ((ROW, (2, 1, 1, 8), (2, 3, 4), 8), ROW),
    ((ROW, (2, 1, 8), (2, 1), 8), ROW),
    ((ROW, (0, 1, 8), (0, 3), 8), ROW),
    ((COLUMN, (3, 1), (2, 3), 8), COLUMN),
    ((COLUMN, (1, 3, 1), (2, 3), 8), COLUMN),
    ((COLUMN, (3, 4, 1), (2, 3, 4), 8), COLUMN),
    ((COLUMN, (2, 1, 4, 1), (2, 3, 4), 8), COLUMN),
    ((COLUMN, (2, 1, 1), (2, 1), 8), COLUMN),
    ((COLUMN, (0, 1), (2, 0), 8), COLUMN),
    ((COLUMN, (3, 1), (3, 1), 8), COLUMN),  # m_shape, although M is 1
    ((AUX, (3, 8), (2, 3), 8), AUX),
    ((AUX, (1, 3, 8), (2, 3), 8), AUX),
    ((AUX, (2, 1, 4, 8), (2, 3, 4), 8), AUX),
    ((AUX, (0, 8), (2, 0), 8), AUX),
    ((AUX, (8,), (), 8), AUX),
    ((SCALAR, (1, 1, 1, 1), (2, 3), 8), SCALAR),
]

#: what is not annotated: {(m_shape, n): {shape: kind, or the two kinds that a message names}}
TOLD = {
    ((2, 3), 8): {
        (2, 1, 8): ROW,
        (1, 1, 8): ROW,
        (1, 8): ROW,
        (3, 1): COLUMN,
        (1, 3, 1): COLUMN,
        (2, 3, 1): COLUMN,
        (2, 3): COLUMN,
        (3, 8): AUX,
        (1, 3, 8): AUX,
        (1, 1, 1): SCALAR,
    },
    # N is 1: a column is an aux
    ((2, 3), 1): {(3, 1): AUX, (1, 3, 1): AUX, (2, 3, 1): AUX, (2, 3): COLUMN, (2, 1, 1): ROW, (1, 1): SCALAR},
    # M is 1: a row is an aux
    ((2, 1), 8): {(2, 1, 8): AUX, (1, 1, 8): AUX, (1, 8): AUX, (8,): ROW, (2, 1): COLUMN, (2, 1, 1): COLUMN},
    # M and N are 1
    ((2, 1), 1): {(2, 1, 1): AUX, (2, 1): COLUMN, (1, 1): SCALAR},
    # M == N
    ((2, 4), 4): {(4,): ROW, (1, 4): ROW, (4, 1): COLUMN, (4, 4): AUX, (2, 1, 4): ROW, (2, 4): (ROW, COLUMN)},
    # M == N, and one batch
    ((1, 4), 4): {(4,): ROW, (1, 4): (ROW, COLUMN), (4, 1): COLUMN, (4, 4): AUX, (1, 4, 1): COLUMN, (1, 1, 4): ROW},
    # the batch is M, or N, or both
    ((3, 3), 8): {(3, 3): COLUMN, (3, 1): COLUMN, (3, 8): AUX, (3, 1, 8): ROW, (3, 3, 1): COLUMN},
    ((8, 3), 8): {(8,): ROW, (8, 3): COLUMN, (3, 8): AUX, (8, 1, 8): ROW, (3, 1): COLUMN},
    ((4, 4), 4): {(4, 4): (AUX, COLUMN), (4, 4, 1): COLUMN, (1, 4, 4): AUX, (4,): ROW, (4, 1): COLUMN, (4, 1, 4): ROW},
    ((3, 4), 4): {(3, 4): (ROW, COLUMN), (4, 4): AUX, (3, 4, 1): COLUMN},
    # all are 1
    ((1, 1), 1): {(1,): SCALAR, (1, 1): SCALAR, (1, 1, 1): SCALAR},
    ((1, 1), 8): {(8,): ROW, (1, 8): AUX, (1, 1, 8): AUX, (1, 1): SCALAR},
    # two batch dimensions
    ((2, 3, 4), 8): {
        (3, 1, 8): ROW,
        (2, 1, 1, 8): ROW,
        (3, 4, 1): COLUMN,
        (2, 1, 4, 1): COLUMN,
        (2, 3, 4): COLUMN,
        (3, 4, 8): AUX,
        (2, 1, 4, 8): AUX,
    },
    ((4, 4, 4), 4): {(4, 4, 4): (AUX, COLUMN), (4, 4): AUX, (4, 4, 1): COLUMN, (4, 1, 4): ROW},
    ((1, 4, 4), 4): {(1, 4, 4): (AUX, COLUMN), (4, 4): AUX, (1, 4, 4, 1): COLUMN},
    ((2, 4, 4), 4): {(2, 4, 4): (ROW, COLUMN), (2, 1, 4, 4): AUX},
    # without elements nothing is ambiguous
    ((0, 3), 8): {(0, 1, 8): ROW, (0, 3): COLUMN, (0, 3, 8): AUX, (3, 8): AUX, (3, 1): COLUMN},
    ((0, 4), 4): {(0, 4): COLUMN, (4, 4): AUX},
    ((0, 0), 0): {(0, 0): AUX, (0,): ROW, (0, 1): COLUMN},
    ((2, 0), 8): {(0, 8): AUX, (2, 0): COLUMN, (0, 1): COLUMN, (2, 1, 8): ROW},
    ((2, 3), 0): {(0,): ROW, (2, 1, 0): ROW, (3, 0): AUX, (2, 3): COLUMN},
}

REFUSED = [
    ((AUTO, (4,), (4,), 4), r"operand t: shape \(4,\) is ambiguous .*annotate it as Row or Column"),
    ((AUTO, (4, 8), (4, 8), 8), r"operand t: shape \(4, 8\) is ambiguous .*annotate"),
    ((AUTO, (1, 8), (1, 8), 8), "ambiguous"),
    (
        (AUTO, (5,), (4,), 8),
        r"shape \(5,\) does not spread .*Row: \(8,\); Column: \(4,\) or \(4, 1\); Scalar",
    ),
    ((AUTO, (6,), (2, 3), 8), "does not spread"),
    ((AUTO, (2, 8), (2, 3), 8), "does not spread"),
    ((AUTO, (2, 1), (2, 3), 8), "does not spread"),
    ((AUTO, (3,), (2, 3), 8), "does not spread .*; sizes before the last two may be 1, and the first ones left out$"),
    ((AUTO, (4, 8), (4,), 9), r"Aux: \(4, 9\)$"),
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
    # batch dimensions
    ((ROW, (2, 8), (2, 3), 8), r"expected shape \(8,\) or \(2, 1, 8\) for .*got \(2, 8\); sizes before the last two"),
    ((ROW, (3, 1, 8), (2, 3), 8), r"got \(3, 1, 8\)"),
    ((ROW, (2, 3, 8), (2, 3), 8), r"got \(2, 3, 8\)"),
    ((ROW, (2, 1, 8), (1, 3), 8), r"got \(2, 1, 8\)"),  # it would make the result larger
    ((ROW, (2, 1, 8), (0, 3), 8), r"got \(2, 1, 8\)"),
    ((ROW, (1, 2, 1, 8), (2, 3), 8), r"got \(1, 2, 1, 8\)"),
    ((COLUMN, (3,), (2, 3), 8), r"expected shape \(2, 3\) or \(2, 3, 1\) for .*got \(3,\); sizes"),
    ((COLUMN, (1, 3), (2, 3), 8), r"got \(1, 3\)"),
    ((COLUMN, (2, 1), (2, 3), 8), r"got \(2, 1\)"),
    ((COLUMN, (1, 2, 3, 1), (2, 3), 8), r"got \(1, 2, 3, 1\)"),
    ((AUX, (2, 1, 8), (2, 3), 8), r"expected shape \(2, 3, 8\) for .*got \(2, 1, 8\); sizes"),
    ((AUX, (8,), (1, 1), 8), r"got \(8,\)"),
    ((AUX, (1, 2, 3, 8), (2, 3), 8), r"got \(1, 2, 3, 8\)"),
    ((SCALAR, (2,), (2, 3), 8), r"got \(2,\)$"),
    # a number per batch
    ((AUTO, (2, 1, 1), (2, 3), 8), r"\(2, 1, 1\) is a number per batch: give it as a Column, t\.expand\(2, 3, 1\)$"),
    ((ROW, (2, 1, 1), (2, 3), 8), r"operand t \(Row\): .* a number per batch"),
    ((COLUMN, (2, 1, 1), (2, 3), 8), r"operand t \(Column\): .* a number per batch"),
    ((SCALAR, (2, 1, 1), (2, 3), 8), r"operand t \(Scalar\): .* a number per batch"),
    ((AUX, (2, 1, 1), (2, 3), 8), r"operand t \(Aux\): .* a number per batch"),
    ((AUTO, (3, 1, 1), (2, 3, 4), 8), r"t\.expand\(3, 4, 1\)"),
    ((AUTO, (2, 1, 1, 1), (2, 3, 4), 8), r"t\.expand\(2, 1, 4, 1\)"),
    ((AUTO, (0, 1, 1), (0, 3), 8), r"t\.expand\(0, 3, 1\)"),
    ((AUTO, (5, 1, 1), (2, 3), 8), "does not spread"),
]


@pytest.mark.parametrize(("given", "kind"), ACCEPTED, ids=str)
def test_accepted(given, kind):
    asked, shape, m_shape, n = given
    assert bind_kind(Operand("t", asked, 0), shape, m_shape, n) is kind
    if isinstance(shape, tuple):
        spread = spread_shape(kind, shape, m_shape, n)
        assert len(spread) == (0 if kind is SCALAR else len(m_shape) + 1)
        assert torch.broadcast_shapes(spread, (*m_shape, n)) == (*m_shape, n)
        tensor = torch.empty(shape)
        assert tensor.reshape(spread).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("m_shape", "n", "shape", "kinds"),
    [(m_shape, n, shape, kinds) for (m_shape, n), told in TOLD.items() for shape, kinds in told.items()],
    ids=str,
)
def test_without_annotation(m_shape, n, shape, kinds):
    operand = Operand("t", AUTO, 0)
    if isinstance(kinds, Kind):
        assert bind_kind(operand, shape, m_shape, n) is kinds
        return
    first, second = (kind.value.capitalize() for kind in kinds)
    with pytest.raises(BroadcastError, match=f"is ambiguous .* {first}.* {second}.*; annotate it as ") as caught:
        bind_kind(operand, shape, m_shape, n)
    # each of the ways that the message names tells the kind
    advice = str(caught.value).split("annotate it as ")[1]
    for kind in kinds:
        if fits(kind, shape, m_shape, n):
            assert kind.value.capitalize() in advice
            assert bind_kind(Operand("t", kind, 0), shape, m_shape, n) is kind
        else:
            assert kind is ROW and f"or give a Row for each batch as {(*shape[:-1], 1, n)}" in advice
            assert bind_kind(operand, (*shape[:-1], 1, n), m_shape, n) is ROW


EXTENTS = [1, 2, 3]


@pytest.mark.parametrize("n", [0, *EXTENTS])
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_every_small_shape(dims, n):
    """Annotated or not, no operand is read otherwise than PyTorch broadcasts it, m_shape itself apart."""
    for m_shape in itertools.product(EXTENTS, repeat=dims):
        for shape in itertools.chain.from_iterable(itertools.product(EXTENTS, repeat=i) for i in range(dims + 2)):
            shape = (*shape[:-1], n) if shape and shape[-1] == 3 else shape
            fit = [kind for kind in (ROW, COLUMN, AUX) if fits(kind, shape, m_shape, n)]
            views = {spread_shape(kind, shape, m_shape, n) for kind in fit}
            aligned = (1,) * (dims + 1 - len(shape)) + shape
            assert views <= {aligned, (*m_shape, 1)}
            if aligned in views:
                assert torch.broadcast_shapes(shape, (*m_shape, n)) == (*m_shape, n)
            if math.prod(shape) == 1:
                assert bind_kind(Operand("t", AUTO, 0), shape, m_shape, n) is SCALAR
            elif len(views) > 1 and math.prod(shape):
                with pytest.raises(BroadcastError, match="ambiguous"):
                    bind_kind(Operand("t", AUTO, 0), shape, m_shape, n)
            elif fit and not (shape == m_shape and shape[-1] == n):
                assert bind_kind(Operand("t", AUTO, 0), shape, m_shape, n) in fit
            elif not fit:
                with pytest.raises(BroadcastError):
                    bind_kind(Operand("t", AUTO, 0), shape, m_shape, n)


def test_what_repeats():
    assert repeated_dims((1, 1, 8), (2, 3, 8)) == (0, 1)
    assert repeated_dims((2, 1, 8), (2, 3, 8)) == (1,)
    assert repeated_dims((1, 1, 1), (2, 1, 8)) == (0, 2)
    assert repeated_dims((1, 8), (0, 8)) == (0,)
    assert repeated_dims((), (2, 1, 8)) == (0, 2)
    assert repeated_dims((2, 3, 8), (2, 3, 8)) == ()


def test_what_has_no_spread():
    with pytest.raises(EpilogueError, match=r"\(any kind\) is bound"):
        spread_shape(AUTO, (8,), (4,), 8)
    with pytest.raises(EpilogueError, match=r"\(Row\) is bound"):
        spread_shape(ROW, (5,), (4,), 8)


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

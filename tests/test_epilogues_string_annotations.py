"""Annotations as strings, which is what ``from __future__ import annotations`` makes of all of them."""

from __future__ import annotations

import pytest
import torch

import epilogues as ep
from epilogues import Column, DtypeError, EpilogueError, Kind, Row, epilogue


def test_globals():
    @epilogue
    def f(acc, row: Row, column: ep.Column, auto, wide: ep.Aux[torch.float32], quoted: "Row"):  # noqa: UP037
        return acc * row + column + auto + wide + quoted

    assert list(f.operands.values()) == [Kind.ROW, Kind.COLUMN, Kind.AUTO, Kind.AUX, Kind.ROW]
    assert f.tree.operands[3].dtype == "f32"


def test_closure():
    Mine = Column

    @epilogue
    def f(acc, column: Mine):
        assert Mine is Column  # a closure holds what the body mentions
        return acc + column

    assert f.operands == {"column": Kind.COLUMN}


def test_local_imports_that_the_body_does_not_mention():
    import epilogues as language
    from epilogues import Scalar as _unused  # noqa: F401

    @epilogue
    def f(acc, row: language.Row, half: language.Aux[torch.float16]):
        return acc + row + half

    assert f.operands == {"row": Kind.ROW, "half": Kind.AUX}
    assert f.tree.operands[1].dtype == "f16"


def test_other_names_are_refused():
    with pytest.raises(EpilogueError, match=r"operand row is annotated 'nowhere\.Rows'"):

        @epilogue
        def f(acc, row: nowhere.Rows):  # noqa: F821
            return acc + row


def test_local_aliases_that_the_body_does_not_mention():
    R = Row

    with pytest.raises(
        EpilogueError, match=r"operand bias is annotated 'R', which could not be evaluated \(NameError: .*'R'"
    ):

        @epilogue
        def f(acc, bias: R):
            return acc + bias


def test_accumulators_may_have_any_annotation():
    @epilogue
    def f(acc: nowhere.Accumulator, bias: Row):  # noqa: F821
        return acc + bias

    assert f.operands == {"bias": Kind.ROW}
    with pytest.raises(EpilogueError, match="the first parameter is the accumulator"):

        @epilogue
        def g(bias: ep.Row):
            return bias


def test_dtypes_by_name():
    import epilogues as language

    @epilogue
    def f(acc, row: Row["float16"], column: language.Column["fp32"]):  # noqa: F821, UP037
        return acc + row + column

    assert [operand.dtype for operand in f.tree.operands] == ["f16", "f32"]


def test_modules():
    class Module(torch.nn.Module):
        def forward(self, acc, bias: Row, scale: ep.Column):
            return acc * scale + bias

    assert epilogue(Module()).operands == {"bias": Kind.ROW, "scale": Kind.COLUMN}


def test_dtypes_that_operands_cannot_have():
    with pytest.raises(DtypeError, match=r"epilogue f: operand row: .*int8(?s:.)*string_annotations"):

        @epilogue
        def f(acc, row: Row[torch.int8]):
            return acc + row

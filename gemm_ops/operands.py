"""Epilogue operands of one call: checked against the tree, and viewed over the dimensions of the output.

    >>> bound = bind_operands(epilogue.tree, {"bias": bias, "alpha": 0.5}, problem)
    >>> bound[0].facts.kind, bound[0].facts.dtype
    (<Kind.ROW: 'row'>, 'bf16')

The rules of shapes are the language's (:mod:`epilogues.operand_shapes`); here they meet a problem and a device.
How an operand lies in memory, and whether a kernel reads it so, is the subject of :mod:`gemm_ops.addressing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epilogues.dtypes import dtype_name
from epilogues.operand_shapes import bind_kind, check_names, operand_number, spread_shape
from epilogues.reference import check_dense, check_operand_dtype, promotion_rank
from epilogues.tree import EpilogueTree, Kind

from .errors import ProblemError
from .problem import Problem


@dataclass(frozen=True)
class OperandFacts:
    """What there is to know of an operand besides its value and its place; hashable.

    Attributes:
        name: the operand's name in the epilogue.
        kind: row, column, scalar or aux.
        dtype: short dtype name it is loaded as; a number is "f32".
        rank: "number" or "0-dim" of what is no tensor with dimensions, as PyTorch's promotion counts it.
    """

    name: str
    kind: Kind
    dtype: str
    rank: str | None = None


@dataclass(frozen=True)
class BoundOperand:
    """One operand of a call: a tensor, or a number, with tensor None.

    Attributes:
        tensor: with the output's number of dimensions, each the output's or 1; of a scalar, of one element.
    """

    facts: OperandFacts
    tensor: Tensor | None
    value: float = 0.0


def bind_operands(
    tree: EpilogueTree, given: Mapping[str, Tensor | float], problem: Problem
) -> tuple[BoundOperand, ...]:
    """The operands of a call in the tree's order.

    Raises:
        EpilogueError: an operand is missing or unknown, or is neither a tensor nor a number.
        BroadcastError: a shape that does not fit, or is ambiguous.
        DtypeError: a dtype that operands cannot have, or not the one the epilogue declares.
        ProblemError: an operand on another device.
    """
    check_names(tree, given)
    bound = []
    for operand in tree.operands:
        value = given[operand.name]
        if not isinstance(value, Tensor):
            number = operand_number(operand, value)
            kind = bind_kind(operand, number, problem.m_shape, problem.n)
            facts = OperandFacts(operand.name, kind, operand.dtype or "f32", "number")
            bound.append(BoundOperand(facts, None, number))
            continue
        check_dense(f"operand {operand.name}", value)
        shape = tuple(value.shape)
        kind = bind_kind(operand, shape, problem.m_shape, problem.n)
        if value.device != problem.device:
            raise ProblemError(
                f"operand {operand.name!r} is on {value.device}, the matrices are on {problem.device}"
                + (": give a Python number, or move it" if kind is Kind.SCALAR else ": move it there first")
            )
        check_operand_dtype(operand, value.dtype, wide=problem.dtype == torch.float64)
        # float64 goes to the reference backend with its matrices, where nobody asks for a name
        dtype = "f32" if value.dtype == torch.float64 else dtype_name(value.dtype)
        facts = OperandFacts(operand.name, kind, dtype, promotion_rank(value))
        bound.append(BoundOperand(facts, spread(value, kind, problem)))
    return tuple(bound)


def spread(value: Tensor, kind: Kind, problem: Problem) -> Tensor:
    """An operand with the output's number of dimensions; a view, unless PyTorch's lazy negation has to be done."""
    return value.resolve_neg().reshape(spread_shape(kind, tuple(value.shape), problem.m_shape, problem.n))

"""Epilogue operands of one call: checked against the tree, and made addressable for a kernel.

    >>> bound = bind_operands(epilogue.tree, {"bias": bias, "alpha": 0.5}, problem)
    >>> bound[0].facts.kind, bound[0].facts.dtype
    (<Kind.ROW: 'row'>, 'bf16')

The rules of shapes are the language's (:mod:`epilogues.operand_shapes`); here they meet a problem, a device and
memory.  Row and column vectors that are not contiguous are copied (they are small); auxiliary matrices are taken
as they lie, and whether a kernel can read them so is the family's question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epilogues.dtypes import dtype_name
from epilogues.operand_shapes import bind_kind, check_names, operand_number
from epilogues.reference import check_dense, check_operand_dtype, promotion_rank
from epilogues.tree import EpilogueTree, Kind

from .errors import ProblemError
from .problem import ACCESS_BYTES, Matrix, Problem, address, read_matrix


@dataclass(frozen=True)
class OperandFacts:
    """What there is to know of an operand besides its value; hashable.

    Attributes:
        name: the operand's name in the epilogue.
        kind: row, column, scalar or aux.
        dtype: short dtype name it is loaded as; a number is "f32".
        aligned: whether it starts at a multiple of 16 bytes.
        matrix: the layout of an auxiliary matrix, else None.
        rank: "number" or "0-dim" of what is no tensor with dimensions, as PyTorch's promotion counts it.
    """

    name: str
    kind: Kind
    dtype: str
    aligned: bool = True
    matrix: Matrix | None = None
    rank: str | None = None


@dataclass(frozen=True)
class BoundOperand:
    """One operand of a call: a tensor of (N,), (M,), one element or (M, N); or a number, with tensor None."""

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
            facts = OperandFacts(operand.name, kind, operand.dtype or "f32", rank="number")
            bound.append(BoundOperand(facts, None, number))
            continue
        check_dense(f"operand {operand.name}", value)
        kind = bind_kind(operand, tuple(value.shape), problem.m_shape, problem.n)
        if value.device != problem.device:
            raise ProblemError(
                f"operand {operand.name!r} is on {value.device}, the matrices are on {problem.device}"
                + (": give a Python number, or move it" if kind is Kind.SCALAR else ": move it there first")
            )
        check_operand_dtype(operand, value.dtype, wide=problem.dtype == torch.float64)
        # float64 goes to the reference backend with its matrices, where nobody asks for a name
        dtype = "f32" if value.dtype == torch.float64 else dtype_name(value.dtype)
        tensor, matrix = _addressable(value, kind, problem)
        aligned = address(tensor) % ACCESS_BYTES == 0
        facts = OperandFacts(operand.name, kind, dtype, aligned, matrix, promotion_rank(value))
        bound.append(BoundOperand(facts, tensor))
    return tuple(bound)


def _addressable(value: Tensor, kind: Kind, problem: Problem) -> tuple[Tensor, Matrix | None]:
    value = value.resolve_neg()
    if kind is Kind.AUX:
        flat = value if value.ndim == 2 else value.reshape(problem.m, problem.n)
        return flat, read_matrix(flat, problem.m, problem.n, *flat.stride())
    return value.reshape(-1).contiguous(), None

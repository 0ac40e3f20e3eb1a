"""Constant folding: operations on nothing but constants, and what conditions that are known decide.

    >>> fold_constants(Apply("mul", (Constant(3.0), Constant(0.1))))
    Constant(value=0.30000001192092896)

Contract
--------
* Folded in float32, the compute dtype, by the row's own reference: what :func:`epilogues.reference.evaluate` computes.
* Through the operations of :data:`FOLDED` and no others: IEEE 754 defines these to the last bit, while the library
  functions of a CPU and a GPU differ in it, and a tree is to mean the same for both.
* A condition that is known is ``1.0 != 0.0`` or ``0.0 != 0.0``: there are no constants that are conditions.

The rules are part of :data:`epilogues.passes.simplify.RULES`.
"""

from __future__ import annotations

import math

import torch

from ..dtypes import torch_dtype
from ..operations import OPERATIONS, is_condition
from ..reference import scalar_tensor
from ..tree import Apply, Cast, Constant, Node
from .patterns import is_apply, is_constant, number_of

#: Operations that IEEE 754 defines to the last bit, or that only select, or compare: constants go through these.
FOLDED = frozenset(
    name
    for line in (
        "identity neg add sub mul div fma abs sign copysign floor ceil trunc round fmod sqrt reciprocal square",
        "minimum maximum fmin fmax clamp gt ge lt le eq ne isnan isinf isfinite",
        "logical_and logical_or logical_xor logical_not",
    )
    for name in line.split()
)


def fold_constants(node: Node) -> Node | None:
    """``f(c, d)`` -> its value in float32, and ``cast(c)``: the operation's own reference, on float32 numbers.

    Exact for the operations of :data:`FOLDED`.  Left as they are: what gives NaN, whose sign a constant does not
    keep, and bounds that are 0.0 and -0.0, of which either may come back.
    """
    numbers = [number_of(child) for child in node.inputs]
    if not numbers or None in numbers or is_condition(node):
        return None
    known = [number for number in numbers if number is not None]
    if isinstance(node, Cast):
        value = float(scalar_tensor(known[0], torch.float32, torch.device("cpu")).to(torch_dtype(node.dtype)))
    else:
        if not is_apply(node, *FOLDED) or (is_apply(node, "copysign") and math.isnan(known[1])):
            return None
        if is_apply(node, "minimum", "maximum", "fmin", "fmax", "clamp") and known.count(0.0) > 1:
            return None
        value = float(_evaluate(node, known))
    return None if math.isnan(value) else Constant(value)


def fold_conditions(node: Node) -> Node | None:
    """A comparison of constants, or logic on such -> ``1.0 != 0.0`` or ``0.0 != 0.0``: true or false, whatever it was.

    Comparisons are exact, of NaN too.
    """
    truth = _truth(node)
    if truth is None or (is_apply(node, "ne") and all(_is_zero_or_one(child) for child in node.inputs)):
        return None
    return Apply("ne", (Constant(float(truth)), Constant(0.0)))


def choose_by_known_condition(node: Node) -> Node | None:
    """``where(true, a, b)`` -> ``a``, and ``where(false, a, b)`` -> ``b``: that is all it does."""
    truth = _truth(node.inputs[0]) if is_apply(node, "where") else None
    return None if truth is None else node.inputs[1 if truth else 2]


def logic_with_constant(node: Node) -> Node | None:
    """``c and true``, ``c or false``, ``c xor false`` -> ``c``; ``c xor true`` -> ``not c``: two-valued logic."""
    if not is_apply(node, "logical_and", "logical_or", "logical_xor"):
        return None
    for condition, other in (node.inputs, node.inputs[::-1]):
        truth = _truth(other)
        if truth is not None:
            if truth is is_apply(node, "logical_and"):
                return condition
            if truth and is_apply(node, "logical_xor"):
                return Apply("logical_not", (condition,))
    return None


def _is_zero_or_one(node: Node) -> bool:
    return is_constant(node, 0.0) or is_constant(node, 1.0)


def _evaluate(node: Node, values: list[float]) -> torch.Tensor:
    assert isinstance(node, Apply)
    cpu = torch.device("cpu")
    row = OPERATIONS[node.operation]
    return row.reference(
        *(
            torch.tensor(bool(value)) if position in row.conditions else scalar_tensor(value, torch.float32, cpu)
            for position, value in enumerate(values)
        )
    )


def _truth(node: Node) -> bool | None:
    """Whether a condition on nothing but constants is true; None for other nodes.

    Logic on such is decided input by input: rules see their inputs rewritten, so that no other nodes lie below.
    """
    if not is_condition(node) or not is_apply(node, *FOLDED):
        return None
    known: list[float] = []
    for child in node.inputs:
        value = number_of(child)
        if value is None and is_condition(child) and all(isinstance(below, Constant) for below in child.inputs):
            value = _truth(child)
        if value is None:
            return None
        known.append(value)
    return bool(_evaluate(node, known))

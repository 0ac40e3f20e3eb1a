"""What of an epilogue may come before an all-reduce, where each device has a part of every sum.

    >>> print(check_partial_sums(bias_gelu.tree))
    the accumulator is a sum of parts, one on each device; of 2 operations 2 follow the all-reduce
      after: add       of every part, it would be added once on each device        model.py:12: return gelu(acc + bias)
      after: gelu_erf  of a sum it is not the sum of the results of its parts      model.py:12: return gelu(acc + bias)

A row-wise sharded layer (:class:`torch.distributed.tensor.parallel.RowwiseParallel`) multiplies a part of K on each
device.  An operation may be done on the parts if it gives the same there and after they are summed: if it is linear in
the accumulator without a constant term, exactly (scaling, negation, a choice that does not look at the accumulator).
A cast is not: it would round every part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Node, SourceLocation

#: How a value depends on the accumulator: not at all; as a linear function without a constant term; otherwise.
Dependence = Literal["none", "linear", "other"]

_ADDED = "of every part, it would be added once on each device"
_CURVED = "of a sum it is not the sum of the results of its parts"
_ROUNDED = "it would round every part, and then their sum"
_READS = "it reads what follows the all-reduce"


@dataclass(frozen=True)
class PartialStep:
    """One operation on the accumulator, or on what came of it.

    Attributes:
        operation: its name in the table, or "cast" and a dtype.
        after: whether it must follow the all-reduce.
        reason: why, "" where it need not.
        location: the line that it comes from; None if that is not known.
    """

    operation: str
    after: bool
    reason: str
    location: SourceLocation | None


@dataclass(frozen=True)
class PartialSums:
    """What of an epilogue may be done on each device's part of the sums; see :func:`check_partial_sums`.

    Attributes:
        steps: the operations that the accumulator goes through, in order.
    """

    steps: tuple[PartialStep, ...]

    @property
    def after(self) -> tuple[str, ...]:
        """The operations that must follow the all-reduce."""
        return tuple(step.operation for step in self.steps if step.after)

    def __str__(self) -> str:
        head = (
            "the accumulator is a sum of parts, one on each device; "
            f"of {len(self.steps)} operations {len(self.after)} follow the all-reduce"
        )
        rows = [
            ("after:" if step.after else "either:", step.operation, step.reason, str(step.location or ""))
            for step in self.steps
        ]
        widths = [max((len(row[place]) for row in rows), default=0) for place in range(3)]
        lines = [
            "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        return "\n".join([head, *(f"  {line}" for line in lines)])


def check_partial_sums(tree: EpilogueTree) -> PartialSums:
    """Which operations of an epilogue must follow the all-reduce of a row-wise sharded layer, and why.

        >>> check_partial_sums(ep.builders.bias_activation("gelu").tree).after
        ('add', 'gelu_erf')

    Args:
        tree: the epilogue's; its operands' kinds need not be known.
    """
    dependence: dict[int, Dependence] = {}
    steps: list[PartialStep] = []
    for node in tree.nodes:
        inputs = [dependence[id(child)] for child in node.inputs]
        if isinstance(node, Accumulator):
            dependence[id(node)] = "linear"
            continue
        if all(each == "none" for each in inputs):
            dependence[id(node)] = "none"
            continue
        name = f"cast to {node.dtype}" if isinstance(node, Cast) else node.operation if isinstance(node, Apply) else ""
        reason = _READS if "other" in inputs else _why_after(node, inputs)
        dependence[id(node)] = "other" if reason else "linear"
        steps.append(PartialStep(name, bool(reason), reason, node.location))
    return PartialSums(tuple(steps))


def _why_after(node: Node, inputs: list[Dependence]) -> str:
    """Why a node, whose inputs are linear or do not depend on the accumulator, is not linear; "" if it is."""
    if isinstance(node, Cast):
        return _ROUNDED
    assert isinstance(node, Apply)
    return _RULES.get(node.operation, lambda node, inputs: _CURVED)(node, inputs)


def _sum(node: Apply, inputs: list[Dependence]) -> str:
    return "" if all(map(_is_linear_or_zero, node.operands, inputs)) else _ADDED


def _is_linear_or_zero(node: Node, dependence: Dependence) -> bool:
    return dependence == "linear" or (isinstance(node, Constant) and node.value == 0)


def _product(node: Apply, inputs: list[Dependence]) -> str:
    return "" if inputs.count("linear") == 1 else _CURVED


def _quotient(node: Apply, inputs: list[Dependence]) -> str:
    return "" if inputs == ["linear", "none"] else _CURVED


def _product_and_sum(node: Apply, inputs: list[Dependence]) -> str:
    """Of x * y + z."""
    *factors, _ = inputs
    if factors.count("linear") == 2:
        return _CURVED
    if factors.count("linear") == 1:
        return "" if _is_linear_or_zero(node.operands[2], inputs[2]) else _ADDED
    return _ADDED  # the accumulator is z, and x * y is added


def _choice(node: Apply, inputs: list[Dependence]) -> str:
    """Of where(condition, x, y)."""
    if inputs[0] != "none":
        return _CURVED
    return "" if all(map(_is_linear_or_zero, node.operands[1:], inputs[1:])) else _ADDED


_RULES: dict[str, Callable[[Apply, list[Dependence]], str]] = {
    "identity": lambda node, inputs: "",
    "neg": lambda node, inputs: "",
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "div": _quotient,
    "fma": _product_and_sum,
    "where": _choice,
}

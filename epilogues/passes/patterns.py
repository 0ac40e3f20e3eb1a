"""What the rules of a pass ask of nodes: which operation, which number, what beside and below it.

    >>> minus = Apply("mul", (x, Constant(-1.0)))
    >>> is_apply(minus, "mul", "div"), number_of(minus.inputs[1]), beside(minus, -1.0) is x
    (True, -1.0, True)

Numbers are those of the compute dtype, float32; 0.0 and -0.0 are different ones.
"""

from __future__ import annotations

import math

import torch

from ..reference import scalar_tensor
from ..tree import Apply, Constant, Node


def is_apply(node: Node, *operations: str) -> bool:
    """Whether a node is one of these operations."""
    return isinstance(node, Apply) and node.operation in operations


def number_of(node: Node) -> float | None:
    """The value of a constant in float32; None for other nodes."""
    if not isinstance(node, Constant):
        return None
    return float(scalar_tensor(node.value, torch.float32, torch.device("cpu")))


def is_constant(node: Node, number: float) -> bool:
    """Whether the node is that constant, 0.0 and -0.0 apart."""
    value = number_of(node)
    return value == number and math.copysign(1.0, value) == math.copysign(1.0, number)


def beside(node: Node, number: float, *, ordered: bool = False) -> Node | None:
    """The other input of a node of two, one of which is this number; ``ordered``: the second."""
    x, y = node.inputs
    if is_constant(y, number):
        return x
    return y if not ordered and is_constant(x, number) else None


def below(node: Node, outer: str, inner: str) -> Node | None:
    """The x of ``outer(inner(x))``."""
    return node.inputs[0].inputs[0] if is_apply(node, outer) and is_apply(node.inputs[0], inner) else None

"""Instructions and registers of a tree's operations, from the operation table.

    >>> instructions_per_element(tree, fast_instructions)
    13

Every pass that weighs operations takes a :data:`Cost`; the ones here read :attr:`epilogues.operations.Operation.cost`,
here and nowhere else.  A kernel uses the fast functions where all outputs have 16 bits, else the exact ones.
"""

from __future__ import annotations

from collections.abc import Callable

from ..operations import OPERATIONS
from ..tree import Apply, Cast, EpilogueTree

#: operation name -> what it takes for one element
Cost = Callable[[str], int]


def exact_instructions(operation: str) -> int:
    """Instructions of the exact device function; one is the time of a float32 addition."""
    return OPERATIONS[operation].cost.exact


def fast_instructions(operation: str) -> int:
    """Instructions of the fast device function."""
    return OPERATIONS[operation].cost.fast


def exact_special_calls(operation: str) -> int:
    """Calls of the special function unit in the exact device function."""
    return OPERATIONS[operation].cost.special_exact


def fast_special_calls(operation: str) -> int:
    """Calls of the special function unit in the fast device function."""
    return OPERATIONS[operation].cost.special_fast


def inner_registers(operation: str) -> int:
    """Values alive within the device function, beyond its inputs and its result."""
    return OPERATIONS[operation].cost.registers


def instructions_per_element(tree: EpilogueTree, cost: Cost = exact_instructions) -> int:
    """Instructions for one element of all outputs: the costs of the tree's operations, and one for each cast."""
    return applied_cost(tree, cost) + sum(isinstance(node, Cast) for node in tree.nodes)


def applied_cost(tree: EpilogueTree, cost: Cost) -> int:
    """The costs of the tree's operations alone, such as their calls of the special function unit."""
    return sum(cost(node.operation) for node in tree.nodes if isinstance(node, Apply))

"""How many values of one element are alive at once: what the registers of a kernel have to hold.

    >>> live = count_live_values(tree)
    >>> live.peak, live.at
    (4, 'add')

Contract: operations are evaluated in the order of :attr:`EpilogueTree.nodes`.  The accumulator and every operand
that differs from element to element (Row, Column, Aux) are loaded before the first operation, as kernels do, which
read all inputs of a fragment and then compute; each lives until its last use.  A computed value lives from its
operation to its last use or to its store, which follows at once, but that the main output is stored last.  During an
operation its inputs and its result are alive together, unless an input ends there: then the result takes its place;
and so are the values that the operation's own function holds, by the operation table.
Constants, scalars, and what is computed of nothing else are the same for all elements and count nothing.

What follows for registers depends on how many elements a thread computes at once, which is the kernel's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tree import Accumulator, Apply, Cast, EpilogueTree, Node, Operand
from .costs import Cost, inner_registers
from .spread import spreads


@dataclass(frozen=True)
class LiveValues:
    """The most values of one element that are alive at once.

    Attributes:
        peak: how many, the accumulator among them where it is alive.
        at: the operation at which the peak is reached first; "load" if nothing that follows exceeds the inputs.
        loaded: the values alive before the first operation: accumulator and operands.
    """

    peak: int
    at: str
    loaded: int


def count_live_values(tree: EpilogueTree, registers: Cost = inner_registers) -> LiveValues:
    """The peak over the evaluation of a resolved tree; see the module's contract.

    Args:
        registers: values that the function of an operation holds, beyond its inputs and its result.
    """
    spread = spreads(tree)
    counted = [node for node in tree.nodes if spread[id(node)].has_dimensions]
    last_use = _last_uses(tree)
    alive = {id(node) for node in counted if isinstance(node, (Accumulator, Operand))}
    loaded = len(alive)
    peak, at = loaded, "load"
    for place, node in enumerate(tree.nodes):
        if isinstance(node, (Apply, Cast)):
            alive -= {id(child) for child in node.inputs if last_use[id(child)] <= place}
            inner = 0
            if spread[id(node)].has_dimensions:
                alive.add(id(node))
                inner = registers(node.operation) if isinstance(node, Apply) else 0
            if len(alive) + inner > peak:
                peak, at = len(alive) + inner, _name(node)
        alive -= {value for value in (id(node),) if last_use[value] <= place}
    return LiveValues(peak, at, loaded)


def _last_uses(tree: EpilogueTree) -> dict[int, int]:
    """id(node) -> the place in the order of evaluation after which its value is needed no more."""
    last = {id(node): place for place, node in enumerate(tree.nodes)}
    for place, node in enumerate(tree.nodes):
        for child in node.inputs:
            last[id(child)] = max(last[id(child)], place)
    main = tree.outputs[0].value
    last[id(main)] = len(tree.nodes)
    return last


def _name(node: Node) -> str:
    return node.operation if isinstance(node, Apply) else "cast"

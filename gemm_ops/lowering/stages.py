"""Splits a tree into one function per output, in an order in which they can be evaluated.

    >>> for stage in split_stages(tree):
    ...     print(stage.output.name, [leaf for leaf in stage.leaves])

Contract: the stages of the auxiliary outputs come first, each after the stages it reads; the main output's
stage is last and nothing reads it (CUTLASS 3.x keeps D out of the visitor's graph).  A stage reads the
accumulator, operands, and values that earlier stages store, in full precision: the value before it was rounded
for storing, exactly what the tree says.
"""

from __future__ import annotations

from dataclasses import dataclass

from epilogues.tree import Accumulator, EpilogueTree, Node, Operand, Store


@dataclass(frozen=True)
class Stage:
    """The function of one output.

    Attributes:
        index: the output's place in ``tree.outputs``; 0 is the main output.
        output: the store.
        leaves: what the function takes, in order: accumulator, operands, values of other outputs.
        body: the nodes that the function computes, inputs first; empty if the value is itself a leaf.
    """

    index: int
    output: Store
    leaves: tuple[Node, ...]
    body: tuple[Node, ...]


def split_stages(tree: EpilogueTree) -> tuple[Stage, ...]:
    """The stages of a tree, auxiliary outputs first and the main output last."""
    main, *auxiliary = tree.outputs
    place = {id(node): i for i, node in enumerate(tree.nodes)}
    # a value comes after everything it is made of, so node order is an order of evaluation; two outputs of one
    # value keep their declared order
    ordered = sorted(auxiliary, key=lambda store: place[id(store.value)])
    stored: set[int] = set()
    stages = []
    for store in (*ordered, main):
        index = next(i for i, candidate in enumerate(tree.outputs) if candidate is store)
        stages.append(_stage(index, store, frozenset(stored)))
        stored.add(id(store.value))
    return tuple(stages)


def _stage(index: int, output: Store, stored: frozenset[int]) -> Stage:
    leaves: list[Node] = []
    body: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(output.value, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            body.append(node)
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, (Accumulator, Operand)) or id(node) in stored:
            leaves.append(node)
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.inputs))
    return Stage(index, output, tuple(leaves), tuple(body))

"""The engine of passes over a tree: small rules, applied from the inputs up until none applies.

    >>> def double_negation(node):
    ...     if isinstance(node, Apply) and node.operation == "neg":
    ...         inner = node.operands[0]
    ...         if isinstance(inner, Apply) and inner.operation == "neg":
    ...             return inner.operands[0]
    ...     return None
    >>> rewrite(tree, [double_negation])

Contract
--------
* A rule is a function ``(node) -> Node | None``: what takes the node's place, or None where it does not apply.  It
  sees a node whose inputs are rewritten already, looks a few nodes deep, and makes new nodes freely.
* What is left has no node that a rule applies to: new nodes are rewritten too.  A set of rules must come to an end;
  one that goes around in circles is an AssertionError.
* Equal nodes become one: the first of the tree's order.  For ``commutative`` operations nodes are also equal if
  their two first inputs are swapped.
* Nothing gets lost.  A replacement that no longer reads the accumulator, or an operand that the node read, is not
  made: callers hand in all operands, and a value that depends on fewer of them may have another shape.
* Outputs keep their names, their order and their dtypes: an output that names no dtype is a cast if it was one.
* A node that a rule makes has the location of the node whose place it takes.
* Linear in the tree's size, and without recursion through it, so that long chains are fine.  A tree in which
  nothing changes is returned as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ..tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Node, Operand, SourceLocation, Store

#: What takes a node's place, or None.
Rule = Callable[[Node], "Node | None"]

#: More replacements of one node, one after the other or one within the other, than rules need that come to an end.
_CIRCLES = 100


def rewrite(tree: EpilogueTree, rules: Sequence[Rule], *, commutative: Collection[str] = ()) -> EpilogueTree:
    """The tree after the rules, with equal nodes shared; see the module's contract.

    Args:
        tree: any tree that keeps to :mod:`epilogues.validation`.
        rules: in the order in which they are tried.
        commutative: operations whose first two inputs may be swapped to share a node.
    """
    graph = _Graph(rules, commutative)
    done: dict[int, Node] = {}
    for node in tree.nodes:
        done[id(node)] = graph.settle(_with_inputs(node, [done[id(child)] for child in node.inputs]))
    stores = tuple(_store(store, done[id(store.value)], graph) for store in tree.outputs)
    if all(new is old for new, old in zip(stores, tree.outputs, strict=True)):
        return tree
    return replace(tree, outputs=stores)


class _Graph:
    """The nodes of one rewriting.  It keeps them all, so that an ``id`` stays that of its node."""

    def __init__(self, rules: Sequence[Rule], commutative: Collection[str]) -> None:
        self._rules = rules
        self._commutative = frozenset(commutative)
        self._nodes: dict[tuple[object, ...], Node] = {}  # every node once
        self._reads: dict[int, int] = {}  # of these nodes, as a set of bits
        self._settled: dict[int, Node] = {}  # of these nodes: what is left of them
        self._replacing = 0

    def settle(self, node: Node) -> Node:
        """What is left of a node that is of this graph, or made of nodes of this graph."""
        trail: list[Node] = []
        before = self._replacing
        while True:
            node = self.share(node)
            if id(node) in self._settled:
                node = self._settled[id(node)]
                break
            trail.append(node)
            if self._replacing > _CIRCLES:
                name = node.operation if isinstance(node, Apply) else type(node).__name__
                raise AssertionError(f"the rules replace {name} without end")
            better = self._replacement(node)
            if better is None:
                break
            node = better
            self._replacing += 1
        self._replacing = before
        for passed in trail:
            self._settled[id(passed)] = node
        return node

    def share(self, node: Node) -> Node:
        """The one node of the graph that is equal to this one: itself, if it is the first."""
        if id(node) in self._reads:
            return node
        # the recursion goes through what a rule has made, and ends at the nodes of the graph
        node = _with_inputs(node, [self.settle(child) for child in node.inputs])
        known = self._nodes.setdefault(self._key(node), node)
        if known is node:
            self._reads[id(node)] = self._read_by(node)
        return known

    def _replacement(self, node: Node) -> Node | None:
        for rule in self._rules:
            new = rule(node)
            if new is not None and self._read_by(new) == self._read_by(node):
                return self._at(new, node.location)
        return None

    def _at(self, node: Node, location: SourceLocation | None) -> Node:
        """The node, with the location where a rule has made it."""
        if id(node) in self._reads or location is None:
            return node
        node = _with_inputs(node, [self._at(child, location) for child in node.inputs])
        return node if node.location else replace(node, location=location)

    def _read_by(self, node: Node) -> int:
        """The accumulator and the operands that a value depends on: a bit for each."""
        if id(node) in self._reads:
            return self._reads[id(node)]
        if isinstance(node, Accumulator):
            return 1
        if isinstance(node, Operand):
            return 2 << node.position
        return _union(self._read_by(child) for child in node.inputs)

    def _key(self, node: Node) -> tuple[object, ...]:
        if isinstance(node, Operand):
            return ("operand", node.position)
        if isinstance(node, Constant):
            return ("constant", float(node.value).hex())
        inputs = [id(child) for child in node.inputs]
        if isinstance(node, Cast):
            return ("cast", node.dtype, *inputs)
        if isinstance(node, Apply):
            if node.operation in self._commutative:
                inputs[:2] = sorted(inputs[:2])
            return ("apply", node.operation, node.intermediate, *inputs)
        return (type(node).__name__,)


def _store(store: Store, value: Node, graph: _Graph) -> Store:
    """The output of a new value, in the dtype that it had."""
    was_cast = store.value.dtype if isinstance(store.value, Cast) else None
    is_cast = value.dtype if isinstance(value, Cast) else None
    if store.dtype is None and is_cast != was_cast:
        # not rewritten any more: the rules would take away again what names the dtype, or keeps one from being named
        location = store.value.location
        around = Cast(value, was_cast) if was_cast else Apply("identity", (value,))
        value = graph.share(replace(around, location=location))
    return store if value is store.value else replace(store, value=value)


def _with_inputs(node: Node, inputs: Sequence[Node]) -> Node:
    if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):
        return node
    if isinstance(node, Cast):
        return replace(node, value=inputs[0])
    assert isinstance(node, Apply)
    return replace(node, operands=tuple(inputs))


def _union(sets: Iterable[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union

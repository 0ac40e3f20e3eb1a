"""Which values a backward pass reads, and which it computes again: the choice that moves the fewest bytes.

    >>> plan = choose(tree, needed, Sizes(m=4096, n=4096))
    >>> [node for node in plan.read], plan.bytes_read, plan.bytes_written

Contract
--------
* What the backward needs of the forward is computed from what it reads: operands, values that the forward stores
  anyway, and values stored for the backward's sake.  Computing is free, since these kernels are bound by memory.
* Reading costs the bytes read, storing a value costs writing it in the forward and reading it in the backward.
  A matrix has M x N elements, a row N, a column M, a scalar 1; an operand without annotation counts as a row.
* A value that an output holds is read as it was stored, rounded.
* What may be stored is what a kernel can store: values, not conditions, that depend on the accumulator.
* The choice is a minimum vertex cut between what is there and what is needed.  Of several equally cheap ones it is
  the one next to what is needed, which leaves the least to compute again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..dtypes import torch_dtype
from ..operations import is_condition
from ..tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store

#: What an operand or output is taken to be stored in where nobody says: the usual 16 bits.
ASSUMED_DTYPE = "bf16"


@dataclass(frozen=True)
class Sizes:
    """What bytes are counted for.

    Attributes:
        m: rows of the accumulator.
        n: columns of the accumulator.
        dtype: short dtype name of matrices, and of operands and outputs that do not name theirs.
        save_dtype: short dtype name in which values are stored for the backward, but for those that a cast has
            rounded to fewer bytes; None: as any output.
    """

    m: int = 4096
    n: int = 4096
    dtype: str = ASSUMED_DTYPE
    save_dtype: str | None = None

    def operand(self, operand: Operand) -> int:
        """The bytes of an operand."""
        extents = {Kind.AUX: self.m * self.n, Kind.COLUMN: self.m, Kind.SCALAR: 1}
        return extents.get(operand.kind, self.n) * _itemsize(operand.dtype or self.dtype)

    def output(self, store: Store) -> int:
        """The bytes of an output."""
        return self.m * self.n * _itemsize(EpilogueTree.output_dtype(store, self.dtype))

    def saved(self, node: Node) -> int:
        """The bytes of a value stored for the backward."""
        return self.output(Store("saved", node, self.save_as(node)))

    def save_as(self, node: Node) -> str | None:
        """The dtype of the output that stores a value for the backward; None: that of a cast, else ``dtype``."""
        if isinstance(node, Cast) and self.save_dtype and _itemsize(node.dtype) <= _itemsize(self.save_dtype):
            return None  # exact as it is
        return self.save_dtype


@dataclass(frozen=True)
class Plan:
    """What the backward reads; all else that it needs it computes again.

    Attributes:
        stored: values read from outputs that the forward has anyway, with the output read.
        added: values that the forward must store for the backward.
        operands: operands that the backward reads.
        recomputed: how many operations and casts of the forward the backward computes again.
        bytes_written: bytes that the forward writes for the backward's sake.
        bytes_read: bytes that the backward reads, incoming gradients not counted.
    """

    stored: tuple[tuple[Node, Store], ...]
    added: tuple[Node, ...]
    operands: tuple[Operand, ...]
    recomputed: int
    bytes_written: int
    bytes_read: int


def choose(tree: EpilogueTree, needed: Sequence[Node], sizes: Sizes, *, store: bool = True) -> Plan:
    """The cheapest way to have the needed values in the backward.

    Args:
        tree: the forward epilogue.
        needed: values computed from nodes of the tree.
        sizes: what bytes are counted for.
        store: whether the forward may store values for the backward's sake; if not, what it stores anyway has to
            do, the accumulator among it where that is needed.
    """
    outputs: dict[int, Store] = {}
    for output in tree.outputs:
        known = outputs.get(id(output.value))
        if known is None or sizes.output(output) < sizes.output(known):
            outputs[id(output.value)] = output
    costs: dict[int, int] = {}
    for node in tree.nodes:
        if isinstance(node, Operand):
            costs[id(node)] = sizes.operand(node)
        elif id(node) in outputs:
            costs[id(node)] = sizes.output(outputs[id(node)])
    for node in _storable(tree) if store else ():
        costs.setdefault(id(node), 2 * sizes.saved(node))

    cut = minimum_cut(needed, costs)
    ids = {id(node) for node in cut}
    forward = {id(node) for node in tree.nodes if isinstance(node, Apply | Cast)}
    again = [node for node in _reachable(needed, ids) if id(node) in forward - ids]
    added = tuple(node for node in cut if not isinstance(node, Operand) and id(node) not in outputs)
    written = sum(sizes.saved(node) for node in added)
    return Plan(
        stored=tuple((node, outputs[id(node)]) for node in cut if id(node) in outputs),
        added=added,
        operands=tuple(node for node in cut if isinstance(node, Operand)),
        recomputed=len(again),
        bytes_written=written,
        bytes_read=sum(costs[id(node)] for node in cut) - written,
    )


def _storable(tree: EpilogueTree) -> list[Node]:
    """The values of a tree that a kernel could store."""
    depends: set[int] = set()
    for node in tree.nodes:
        if isinstance(node, Accumulator) or any(id(child) in depends for child in node.inputs):
            depends.add(id(node))
    return [node for node in tree.nodes if id(node) in depends and not is_condition(node)]


def minimum_cut(needed: Sequence[Node], costs: Mapping[int, int]) -> tuple[Node, ...]:
    """The cheapest nodes from which all needed ones can be computed, those nearest to them if several are.

    Args:
        needed: what must be computed.
        costs: ``id(node)`` -> what it costs to have that node; nodes that are not there must be computed from
            their inputs.  Constants cost nothing; every other node without inputs must have a cost.

    Returns:
        The nodes, constants left out, inputs before their users.
    """
    nodes = _reachable(needed, frozenset())
    endless = sum(costs.get(id(node), 0) for node in nodes) + 1
    index = {id(node): i for i, node in enumerate(nodes)}
    # Node i is an edge from vertex 2i to 2i + 1 that carries as much as the node costs; flow goes from inputs to users
    source, sink = 2 * len(nodes), 2 * len(nodes) + 1
    capacity: list[dict[int, int]] = [{} for _ in range(2 * len(nodes) + 2)]

    def connect(start: int, end: int, carries: int) -> None:
        capacity[start][end] = carries
        capacity[end].setdefault(start, 0)

    for i, node in enumerate(nodes):
        connect(2 * i, 2 * i + 1, 0 if isinstance(node, Constant) else costs.get(id(node), endless))
        if not node.inputs:
            connect(source, 2 * i, endless)
        for child in node.inputs:
            connect(2 * index[id(child)] + 1, 2 * i, endless)
    for node in needed:
        connect(2 * index[id(node)] + 1, sink, endless)

    while path := _augmenting_path(capacity, source, sink):
        carried = min(capacity[start][end] for start, end in path)
        for start, end in path:
            capacity[start][end] -= carried
            capacity[end][start] += carried

    # what still could carry more to the sink; the edges that lead there from elsewhere are full
    reaching, queue = {sink}, deque([sink])
    while queue:
        end = queue.popleft()
        for start in capacity[end]:
            if start not in reaching and capacity[start][end] > 0:
                reaching.add(start)
                queue.append(start)
    return tuple(
        node
        for i, node in enumerate(nodes)
        if 2 * i + 1 in reaching and 2 * i not in reaching and not isinstance(node, Constant)
    )


def _augmenting_path(capacity: list[dict[int, int]], source: int, sink: int) -> list[tuple[int, int]]:
    """The edges of a shortest path that can carry more; none if there is no such path."""
    before: dict[int, int] = {source: source}
    queue = deque([source])
    while queue and sink not in before:
        start = queue.popleft()
        for end, left in capacity[start].items():
            if left > 0 and end not in before:
                before[end] = start
                queue.append(end)
    if sink not in before:
        return []
    path = [(before[sink], sink)]
    while path[-1][0] != source:
        path.append((before[path[-1][0]], path[-1][0]))
    return path


def _reachable(needed: Sequence[Node], stop: set[int] | frozenset[int]) -> tuple[Node, ...]:
    """The needed nodes and all that they are computed of, inputs first; not beyond nodes to stop at."""
    order: list[Node] = []
    seen: set[int] = set()
    stack = [(node, False) for node in reversed(needed)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            if id(node) not in stop:
                stack.extend((child, False) for child in reversed(node.inputs))
    return tuple(order)


def _itemsize(dtype: str) -> int:
    return torch_dtype(dtype).itemsize

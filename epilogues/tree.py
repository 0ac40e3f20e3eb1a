"""The epilogue visitor tree: what is computed from the accumulator, as immutable data.

    >>> from epilogues.tree import *
    >>> acc, bias = Accumulator(), Operand("bias", Kind.ROW, 0)
    >>> tree = EpilogueTree((Store("D", Apply("relu", (Apply("add", (acc, bias)),))),))
    >>> print(tree)
    ...

Contract
--------
* A tree is one or more :class:`Store` nodes ("outputs") over a graph of values.  The first output is the
  main one and is called "D"; the others are auxiliary outputs of the same (M, N) shape.
* Nodes never change.  A node used twice is one object used twice (tracing shares equal nodes), so a graph
  may be visited in linear time with :meth:`EpilogueTree.nodes`.
* Values have dtypes.  An :class:`Operand` has the dtype of the tensor it is loaded from (``None`` until
  that is known), a :class:`Cast` the dtype it names, everything else the compute dtype, float32.  An
  operation converts its inputs to the compute dtype, computes there, and does *not* round its result: values
  are rounded exactly at :class:`Cast` and :class:`Store`, nowhere else.  A narrower compute dtype is written
  out as casts when the tree is resolved (:mod:`epilogues.passes.compute_dtype`).
* Rounding is the tree's: "once" as just said, or as eager PyTorch rounds, which takes the dtypes of a call, so
  that :meth:`EpilogueTree.resolve` inserts the casts (:mod:`epilogues.passes.eager_rounding`).
* Identity is structure.  ``tree == other`` and ``hash(tree)`` go by :attr:`EpilogueTree.rows`, the tree
  written out as a flat tuple in which operands are numbered; names of operands and of auxiliary outputs,
  and source locations, are labels and do not count.  Caches of compiled kernels rest on that.

This module knows no operation: names of operations are looked up in :mod:`epilogues.operations`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from .dtypes import dtype_name

#: The name every tree gives its main output.
MAIN_OUTPUT = "D"


class Kind(enum.Enum):
    """How an operand spreads over the (M, N) accumulator."""

    ROW = "row"  # length N: element (i, j) reads entry j
    COLUMN = "column"  # length M: element (i, j) reads entry i
    SCALAR = "scalar"  # one value for all elements: a Python number or a 1-element tensor
    AUX = "aux"  # M x N: element (i, j) reads entry (i, j)
    AUTO = "auto"  # not annotated: told from the operand's shape at the call, if that is unambiguous


@dataclass(frozen=True)
class SourceLocation:
    """The user's line that made a node."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 120 else f"{self.text[:117]}..."
        return f"{self.file}:{self.line}" + (f": {text}" if text else "")


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """A value of the graph.  Compared by identity; whole trees are compared by structure."""

    location: SourceLocation | None = field(default=None, kw_only=True, repr=False)

    @property
    def inputs(self) -> tuple[Node, ...]:
        return ()

    def _is_node(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, Node) or (isinstance(value, tuple) and all(isinstance(v, Node) for v in value))

    def __repr__(self) -> str:
        # inputs by their class only: written out, a graph with sharing may have exponentially many nodes
        own = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr and not self._is_node(f.name)]
        inputs = [type(child).__name__ for child in self.inputs]
        return f"{type(self).__name__}({', '.join([*own, *inputs])})"

    def __deepcopy__(self, memo: dict[int, object]) -> Node:
        return self  # it never changes, and a copy node by node would recurse through long chains


@dataclass(frozen=True, eq=False, repr=False)
class Accumulator(Node):
    """The element (i, j) of A @ B, in the accumulator's dtype (float32)."""


@dataclass(frozen=True, eq=False, repr=False)
class Operand(Node):
    """A tensor or number handed in with the call.  ``position`` numbers the operands of one tree."""

    name: str
    kind: Kind
    position: int
    dtype: str | None = None  # short dtype name; None: whatever the caller's tensor has


@dataclass(frozen=True, eq=False, repr=False)
class Constant(Node):
    """A number written in the epilogue itself."""

    value: float


@dataclass(frozen=True, eq=False, repr=False)
class Apply(Node):
    """An operation of the table, by name, on values.

    ``intermediate``: a step within one PyTorch function, such as the product of ``torch.addcmul``: eager PyTorch does
    not round it.
    """

    operation: str
    operands: tuple[Node, ...]
    intermediate: bool = False

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.operands


@dataclass(frozen=True, eq=False, repr=False)
class Cast(Node):
    """Rounds a value to a dtype (to nearest, ties to even)."""

    value: Node
    dtype: str

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.value,)


@dataclass(frozen=True, eq=False)
class Store:
    """An output.  ``dtype`` None: the dtype of the GEMM's inputs, unless the value is a cast."""

    name: str
    value: Node
    dtype: str | None = None


#: How values are rounded: at casts and stores only; or after every operation, as eager PyTorch does after
#: ``torch.matmul``, or after ``F.linear``, which adds a row (its bias) before it rounds.
ROUNDINGS = ("once", "eager", "eager_linear")


#: One node of :attr:`EpilogueTree.rows`: its class name, its own attributes, the indices of its inputs.
Row = tuple[str, tuple[object, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class EpilogueTree:
    """Outputs over a shared graph of values; see the module's contract.

    Args:
        outputs: one or more stores with different names; the first is the main output.
        rounding: one of :data:`ROUNDINGS`.
        compute_dtype: short name of the dtype that operations are computed in; of a resolved tree "f32", the others
            written out as casts.
    """

    outputs: tuple[Store, ...]
    rounding: str = "once"
    compute_dtype: str = "f32"

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node once, inputs before their users, in an order that only depends on structure."""
        order: list[Node] = []
        seen: set[int] = set()
        for store in self.outputs:
            stack: list[tuple[Node, bool]] = [(store.value, False)]
            while stack:
                node, ready = stack.pop()
                if ready:
                    order.append(node)
                elif id(node) not in seen:
                    seen.add(id(node))
                    stack.append((node, True))
                    stack.extend((child, False) for child in reversed(node.inputs))
        return tuple(order)

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The operands, by position."""
        found = {node.position: node for node in self.nodes if isinstance(node, Operand)}
        return tuple(found[position] for position in sorted(found))

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The tree as flat, hashable data without names and locations: its identity."""
        index = {id(node): i for i, node in enumerate(self.nodes)}
        rows = [_row(node, tuple(index[id(child)] for child in node.inputs)) for node in self.nodes]
        rows += [("Store", (store.dtype,), (index[id(store.value)],)) for store in self.outputs]
        if self.rounding != "once":
            rows.append(("Rounding", (self.rounding,), ()))
        if self.compute_dtype != "f32":
            rows.append(("ComputeDtype", (self.compute_dtype,), ()))
        return tuple(rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpilogueTree) and self.rows == other.rows

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.rows)

    def __hash__(self) -> int:
        return self._hash

    def map_nodes(self, change: Mapping[int, Node]) -> EpilogueTree:
        """The tree with nodes replaced: ``change`` maps ``id(node)`` to what takes the node's place."""
        done: dict[int, Node] = {}
        for node in self.nodes:
            new = change.get(id(node))
            if new is None:
                new = _with_inputs(node, tuple(done[id(child)] for child in node.inputs))
            done[id(node)] = new
        return replace(self, outputs=tuple(replace(store, value=done[id(store.value)]) for store in self.outputs))

    def resolve(
        self,
        operands: Mapping[str, tuple[Kind, str]],
        default_dtype: str,
        ranks: Mapping[str, str] | None = None,
    ) -> EpilogueTree:
        """The tree with every kind, dtype and rounding known, as a kernel or an exact description needs it.

        Args:
            operands: name -> (kind, short dtype name) of every operand.
            default_dtype: short dtype name of outputs that do not name one (the GEMM's input dtype).
            ranks: of a tree with eager rounding, what PyTorch promotes by: the names of operands that are not
                tensors with dimensions -> "number" (Python's) or "0-dim".
        """
        from .passes.compute_dtype import write_out_compute_dtype
        from .passes.eager_rounding import insert_eager_casts

        change: dict[int, Node] = {}
        for node in self.operands:
            kind, dtype = operands[node.name]
            change[id(node)] = replace(node, kind=kind, dtype=dtype_name(dtype))
        tree = self.map_nodes(change)
        stores = tuple(replace(s, dtype=self.output_dtype(s, default_dtype)) for s in tree.outputs)
        tree = replace(tree, outputs=stores)
        if self.rounding != "once":
            tree = insert_eager_casts(tree, default_dtype, ranks or {})
        return write_out_compute_dtype(tree).without_intermediates()

    def without_intermediates(self) -> EpilogueTree:
        """The tree with every ``intermediate`` mark removed: they matter to eager rounding only."""
        if not any(isinstance(node, Apply) and node.intermediate for node in self.nodes):
            return self
        done: dict[int, Node] = {}
        known: dict[object, Node] = {}  # equal without the mark: shared again
        for node in self.nodes:
            new = _with_inputs(node, tuple(done[id(child)] for child in node.inputs))
            if isinstance(new, Apply):
                if new.intermediate:
                    new = replace(new, intermediate=False)
                new = known.setdefault((new.operation, *(id(child) for child in new.inputs)), new)
            done[id(node)] = new
        return replace(self, outputs=tuple(replace(store, value=done[id(store.value)]) for store in self.outputs))

    @staticmethod
    def output_dtype(store: Store, default_dtype: str) -> str:
        """The dtype an output is stored in: its own, else that of a cast at its root, else the default."""
        if store.dtype is not None:
            return store.dtype
        return store.value.dtype if isinstance(store.value, Cast) else default_dtype

    def __reduce__(self) -> tuple[object, ...]:
        # flat, as node by node would recurse through long chains; and without the cached properties: hashes
        # of strings differ from one process to the next.  Source locations stay behind
        return (_unpickle, (self.to_json(),))

    def __copy__(self) -> EpilogueTree:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> EpilogueTree:
        return self

    def __repr__(self) -> str:
        # not the nodes within nodes, of which a graph with sharing may have exponentially many
        return f"<EpilogueTree {', '.join(store.name for store in self.outputs)}: {len(self.nodes)} nodes>"

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __str__(self) -> str:
        from .render import render_text

        return render_text(self)

    def to_json(self) -> str:
        """The tree as JSON text, names included; :meth:`from_json` reads it back."""
        from .serialize import tree_to_json

        return tree_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> EpilogueTree:
        """The tree that :meth:`to_json` wrote.

        Raises:
            EpilogueError: if the text is no such tree.
        """
        from .serialize import tree_from_json

        return tree_from_json(text)


def _unpickle(text: str) -> EpilogueTree:
    from .serialize import read_tree

    return read_tree(text)


def _row(node: Node, inputs: tuple[int, ...]) -> Row:
    attributes: tuple[object, ...] = ()
    if isinstance(node, Operand):
        attributes = (node.kind.value, node.position, node.dtype)
    elif isinstance(node, Constant):
        # hex() keeps -0.0 and 0.0 apart and every NaN together, which == on floats does not
        attributes = (float(node.value).hex(),)
    elif isinstance(node, Apply):
        attributes = (node.operation, "intermediate") if node.intermediate else (node.operation,)
    elif isinstance(node, Cast):
        attributes = (node.dtype,)
    return (type(node).__name__, attributes, inputs)


def _with_inputs(node: Node, inputs: tuple[Node, ...]) -> Node:
    if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):
        return node
    if isinstance(node, Apply):
        return replace(node, operands=inputs)
    if isinstance(node, Cast):
        return replace(node, value=inputs[0])
    return node

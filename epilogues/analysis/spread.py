"""How far a value spreads over the (M, N) result.

    >>> spread = spreads(tree)
    >>> spread[id(bias)].elements(m=128, n=4096)
    4096

Contract: an operand spreads as its kind says, a constant not at all, the accumulator over everything, and what is
computed of several values over whatever any of them spreads over.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import EpilogueError
from ..tree import Accumulator, EpilogueTree, Kind, Operand


@dataclass(frozen=True)
class Spread:
    """Whether a value differs from row to row, and from column to column."""

    rows: bool
    columns: bool

    def elements(self, m: int, n: int) -> int:
        """How many elements a tensor of such values has."""
        return (m if self.rows else 1) * (n if self.columns else 1)

    @property
    def has_dimensions(self) -> bool:
        """Whether PyTorch would hold it in a tensor with dimensions; the dtype of others does not promote."""
        return self.rows or self.columns


_BY_KIND = {
    Kind.ROW: Spread(rows=False, columns=True),
    Kind.COLUMN: Spread(rows=True, columns=False),
    Kind.SCALAR: Spread(rows=False, columns=False),
    Kind.AUX: Spread(rows=True, columns=True),
}


def spreads(tree: EpilogueTree) -> dict[int, Spread]:
    """id(node) -> how far the node's value spreads.

    Raises:
        EpilogueError: if the kind of an operand is not known yet.
    """
    found: dict[int, Spread] = {}
    for node in tree.nodes:
        if isinstance(node, Accumulator):
            found[id(node)] = Spread(rows=True, columns=True)
        elif isinstance(node, Operand):
            if node.kind not in _BY_KIND:
                raise EpilogueError(
                    f"operand {node.name}: its kind is told from a tensor's shape, and there is no tensor here; "
                    "annotate it as Row, Column, Scalar or Aux"
                )
            found[id(node)] = _BY_KIND[node.kind]
        else:
            inputs = [found[id(child)] for child in node.inputs]
            found[id(node)] = Spread(any(s.rows for s in inputs), any(s.columns for s in inputs))
    return found

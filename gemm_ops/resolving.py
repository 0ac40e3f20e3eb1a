"""A tree as one call has it: kinds and dtypes known, simplified.

>>> tree = resolve_tree(epilogue.tree, bound_operands, "bf16")
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from epilogues.passes.simplify import simplify
from epilogues.tree import EpilogueTree, Kind

from .operands import BoundOperand


def resolve_tree(tree: EpilogueTree, operands: Sequence[BoundOperand], element: str) -> EpilogueTree:
    """A tree with the kinds and dtypes of a call, simplified.

    Args:
        element: short dtype name of what outputs are stored as where the tree does not say.
    """
    rank = tree.rounding != "once"  # nothing else goes by ranks
    signature = tuple(
        (operand.facts.kind, operand.facts.dtype, operand.facts.rank if rank else None) for operand in operands
    )
    return _resolve(tree, signature, element)


@functools.lru_cache(maxsize=1024)
def _resolve(tree: EpilogueTree, signature: tuple[tuple[Kind, str, str | None], ...], element: str) -> EpilogueTree:
    # equal trees may differ in the names of operands: whichever came first gives the labels of the resolved
    # tree, and nothing after this point looks at them
    named = {operand.name: (kind, dtype) for operand, (kind, dtype, _) in zip(tree.operands, signature, strict=True)}
    ranks = {operand.name: rank for operand, (_, _, rank) in zip(tree.operands, signature, strict=True) if rank}
    return simplify(tree.resolve(named, element, ranks))

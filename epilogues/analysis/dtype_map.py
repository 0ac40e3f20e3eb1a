"""The dtype and cast map: what dtype every value has, and where it is converted or rounded.

    >>> for entry in map_dtypes(tree):
    ...     print(entry.text, entry.dtype, entry.conversion)
    %0 = accumulator f32
    %1 = operand bias (row, 0) bf16 read as f32, exactly
    %2 = add(%0, %1) f32
    store D = %2 bf16 rounded from f32 when stored

One entry for each line that ``print(tree)`` has.  Values are rounded where an entry says "rounded", nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..render import statements, value_dtype
from ..tree import Cast, EpilogueTree, Node, Operand, SourceLocation


@dataclass(frozen=True)
class NodeDtype:
    """One value, or one store, of a tree.

    Attributes:
        text: the value as ``print(tree)`` writes it, such as ``%2 = add(%0, %1)``.
        dtype: short dtype name: what it is loaded as, computed in, rounded to, or stored as; "bool" for conditions.
        conversion: what happens to its dtype there, in words; "" if nothing.
        location: the user's line that made it.
    """

    text: str
    dtype: str
    conversion: str
    location: SourceLocation | None


def map_dtypes(tree: EpilogueTree) -> tuple[NodeDtype, ...]:
    """The entries of a resolved tree, in order of evaluation, its stores last."""
    texts = statements(tree)
    values: list[tuple[str, str, SourceLocation | None]] = [
        (value_dtype(node), _conversion(node), node.location) for node in tree.nodes
    ]
    for store in tree.outputs:
        dtype, held = str(store.dtype), value_dtype(store.value)
        # a cast to the output's own dtype has rounded already
        words = "" if held == dtype else f"rounded from {_computed(store.value)} when stored"
        values.append((dtype, words, store.value.location))
    return tuple(NodeDtype(text, *value) for text, value in zip(texts, values, strict=True))


def _conversion(node: Node) -> str:
    if isinstance(node, Operand) and node.dtype not in (None, "f32"):
        return "read as f32, exactly"
    if isinstance(node, Cast):
        exact = node.dtype in ("f32", value_dtype(node.value))
        return "" if exact else f"rounded to {node.dtype}, then read as f32"
    return ""


def _computed(node: Node) -> str:
    return node.dtype if isinstance(node, Cast) else "f32"

"""A tree as text, one line for each node, with its dtype and the user's line that made it.

    >>> print(render_text(bias_relu.tree))
    %0 = accumulator            : f32
    %1 = operand bias (row, 0)  : any
    %2 = add(%0, %1)            : f32   # model.py:7
    %3 = relu(%2)               : f32   # model.py:7
    store D = %3                : default

The dtype of an operand is that of the tensor given ("any" until the tree fixes it); "default" is the dtype of
the GEMM's inputs.  Another rounding than "once" and another compute dtype than float32 follow in lines of their own.
Nodes are in topological order, as :attr:`EpilogueTree.nodes` has them.
"""

from __future__ import annotations

from .operations import is_condition
from .tree import Apply, Cast, Constant, EpilogueTree, Node, Operand, SourceLocation


def render_text(tree: EpilogueTree) -> str:
    """The text of a tree; see the module's example."""
    values: list[tuple[str, SourceLocation | None]] = [(value_dtype(node), node.location) for node in tree.nodes]
    values += [(tree.output_dtype(store, "default"), None) for store in tree.outputs]
    lines = [(left, *value) for left, value in zip(statements(tree), values, strict=True)]
    marks = [f"rounding: {tree.rounding}"] if tree.rounding != "once" else []
    marks += [f"computed in: {tree.compute_dtype}"] if tree.compute_dtype != "f32" else []
    width = max(len(left) for left, _, _ in lines)
    rendered = []
    for left, dtype, location in lines:
        line = f"{left:<{width}}  : {dtype}"
        rendered.append(f"{line:<{width + 8}}  # {location.file}:{location.line}" if location else line)
    return "\n".join([*rendered, *marks])


def statements(tree: EpilogueTree) -> list[str]:
    """What each node and each output is, without dtypes, in order: "%2 = add(%0, %1)", "store D = %2"."""
    names = {id(node): f"%{index}" for index, node in enumerate(tree.nodes)}
    made = [
        f"{names[id(node)]} = {_expression(node, [names[id(child)] for child in node.inputs])}" for node in tree.nodes
    ]
    return made + [f"store {store.name} = {names[id(store.value)]}" for store in tree.outputs]


def value_dtype(node: Node) -> str:
    """The short dtype name of a node's value: what it was rounded or loaded as; "any" if that is unknown.

    Conditions are "bool", which no operand or output is.
    """
    if is_condition(node):
        return "bool"
    if isinstance(node, Operand):
        return node.dtype or "any"
    return node.dtype if isinstance(node, Cast) else "f32"


def _expression(node: Node, inputs: list[str]) -> str:
    if isinstance(node, Operand):
        return f"operand {node.name} ({node.kind.value}, {node.position})"
    if isinstance(node, Constant):
        return f"constant {node.value!r}"
    if isinstance(node, Cast):
        return f"cast({inputs[0]}, {node.dtype})"
    if isinstance(node, Apply):
        return f"{node.operation}({', '.join(inputs)})"
    return type(node).__name__.lower()

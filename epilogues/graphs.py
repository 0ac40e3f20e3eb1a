"""A picture of a tree, as text that Mermaid or Graphviz draws.

    >>> print(to_mermaid(bias_relu.tree))
    flowchart TD
        n0["accumulator<br/>f32"]
        n1[/"bias: row<br/>bf16"/]
        n2("add<br/>f32")
        ...
        n0 -->|1| n2
        n1 -->|2| n2

GitHub, GitLab and most notebooks draw Mermaid in Markdown; Graphviz draws with ``dot -Tsvg tree.dot -o tree.svg``.

Every node says its dtype; "any" is that of the tensor given, "default" that of the matrices.  Inputs of operations
that take several are numbered.  Shapes: boxes are the accumulator and constants, slanted boxes operands, rounded ones
operations, hexagons casts, and a store is a cylinder.
"""

from __future__ import annotations

from dataclasses import dataclass

from .render import value_dtype
from .tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Node, Operand


@dataclass(frozen=True)
class _Vertex:
    name: str
    kind: str  # a key of the tables of shapes
    lines: tuple[str, str]


@dataclass(frozen=True)
class _Edge:
    start: str
    end: str
    label: str


# what goes before and after the label
_MERMAID = {
    "accumulator": ("[", "]"),
    "constant": ("[", "]"),
    "operand": ("[/", "/]"),
    "operation": ("(", ")"),
    "cast": ("{{", "}}"),
    "store": ("[(", ")]"),
}

_GRAPHVIZ = {
    "accumulator": "box",
    "constant": "plaintext",
    "operand": "parallelogram",
    "operation": "ellipse",
    "cast": "hexagon",
    "store": "cylinder",
}


def to_mermaid(tree: EpilogueTree) -> str:
    """The tree as a Mermaid flowchart, from the accumulator down."""
    vertices, edges = _graph(tree)
    lines = ["flowchart TD"]
    for vertex in vertices:
        before, after = _MERMAID[vertex.kind]
        label = "<br/>".join(_escape_mermaid(line) for line in vertex.lines)
        lines.append(f'    {vertex.name}{before}"{label}"{after}')
    for edge in edges:
        label = f"|{edge.label}|" if edge.label else ""
        lines.append(f"    {edge.start} -->{label} {edge.end}")
    return "\n".join(lines)


def to_graphviz(tree: EpilogueTree) -> str:
    """The tree as a Graphviz digraph, from the accumulator down."""
    vertices, edges = _graph(tree)
    lines = ["digraph epilogue {", '    node [fontname="Helvetica"];']
    for vertex in vertices:
        label = "\\n".join(_escape_graphviz(line) for line in vertex.lines)
        lines.append(f'    {vertex.name} [shape={_GRAPHVIZ[vertex.kind]}, label="{label}"];')
    for edge in edges:
        label = f' [label="{edge.label}"]' if edge.label else ""
        lines.append(f"    {edge.start} -> {edge.end}{label};")
    return "\n".join([*lines, "}"])


def _graph(tree: EpilogueTree) -> tuple[list[_Vertex], list[_Edge]]:
    names = {id(node): f"n{index}" for index, node in enumerate(tree.nodes)}
    vertices = [_Vertex(names[id(node)], *_describe(node)) for node in tree.nodes]
    edges = []
    for node in tree.nodes:
        several = len(node.inputs) > 1
        for place, child in enumerate(node.inputs, start=1):
            edges.append(_Edge(names[id(child)], names[id(node)], str(place) if several else ""))
    for index, store in enumerate(tree.outputs):
        name = f"out{index}"
        vertices.append(_Vertex(name, "store", (f"store {store.name}", tree.output_dtype(store, "default"))))
        edges.append(_Edge(names[id(store.value)], name, ""))
    return vertices, edges


def _describe(node: Node) -> tuple[str, tuple[str, str]]:
    """The kind of vertex and the two lines of its label."""
    dtype = value_dtype(node)
    if isinstance(node, Accumulator):
        return "accumulator", ("accumulator", dtype)
    if isinstance(node, Operand):
        return "operand", (f"{node.name}: {node.kind.value}", dtype)
    if isinstance(node, Constant):
        return "constant", (repr(node.value), dtype)
    if isinstance(node, Cast):
        return "cast", (f"cast to {node.dtype}", dtype)
    assert isinstance(node, Apply)
    return "operation", (node.operation, dtype)


def _escape_mermaid(text: str) -> str:
    # names of trees that nobody validated may hold anything
    for mark, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("`", "#96;")):
        text = text.replace(mark, code)
    return " ".join(text.split())


def _escape_graphviz(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"')

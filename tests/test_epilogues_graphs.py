"""Pictures of trees: every node and edge is there, labels are what the tree says."""

from __future__ import annotations

import re

import epilogues as ep
from epilogues import Row
from epilogues.graphs import to_graphviz, to_mermaid
from epilogues.tree import Accumulator, Apply, Constant, EpilogueTree, Kind, Operand, Store


@ep.epilogue
def two_outputs(acc, scale: Row):
    z = ep.cast(acc * scale, "f16")
    return {"D": ep.where(z > 0.5, z, -z), "preact": z}


def test_mermaid_has_every_node_and_edge() -> None:
    tree = two_outputs.tree
    text = to_mermaid(tree)
    assert text.splitlines()[0] == "flowchart TD"
    vertices = re.findall(r"^    (n\d+|out\d+)[\[({]", text, re.M)
    assert vertices == [f"n{i}" for i in range(len(tree.nodes))] + ["out0", "out1"]
    edges = re.findall(r"^    (n\d+) -->(?:\|(\d)\|)? (n\d+|out\d+)$", text, re.M)
    assert len(edges) == sum(len(node.inputs) for node in tree.nodes) + 2
    for index, node in enumerate(tree.nodes):
        places = [place for _, place, end in edges if end == f"n{index}"]
        expected = [str(i + 1) for i in range(len(node.inputs))] if len(node.inputs) > 1 else [""] * len(node.inputs)
        assert places == expected


def test_labels_say_what_the_tree_says() -> None:
    text = to_mermaid(two_outputs.tree)
    for label in ('["accumulator<br/>f32"]', '[/"scale: row<br/>any"/]', '("mul<br/>f32")', '("gt<br/>bool")'):
        assert label in text, text
    assert '{{"cast to f16<br/>f16"}}' in text
    assert '[("store D<br/>default")]' in text and '[("store preact<br/>f16")]' in text
    assert '["0.5<br/>f32"]' in text
    dot = to_graphviz(two_outputs.tree)
    assert 'label="scale: row\\nany"' in dot and 'shape=hexagon, label="cast to f16\\nf16"' in dot


def test_graphviz_is_balanced_and_has_the_same_edges() -> None:
    dot = to_graphviz(two_outputs.tree)
    assert dot.startswith("digraph epilogue {") and dot.endswith("}") and dot.count("{") == dot.count("}") == 1
    edges = re.findall(r"(\w+) -> (\w+)", dot)
    assert edges == re.findall(r"(\w+) -->(?:\|\d\|)? (\w+)", to_mermaid(two_outputs.tree))


def test_a_value_used_twice_is_one_node_with_two_edges() -> None:
    acc = Accumulator()
    text = to_mermaid(EpilogueTree((Store("D", Apply("mul", (acc, acc))),)))
    assert "n0 -->|1| n1" in text and "n0 -->|2| n1" in text and text.count("accumulator") == 1


def test_names_cannot_break_out_of_their_labels() -> None:
    name = 'a"]; x --> y\n<b>'
    operand = Operand(name, Kind.ROW, 0)
    tree = EpilogueTree((Store("D", Apply("add", (Accumulator(), Apply("mul", (operand, Constant(float("nan"))))))),))
    assert '[/"a#quot;]; x --#gt; y #lt;b#gt;: row<br/>any"/]' in to_mermaid(tree)
    assert 'label="a\\"]; x --> y <b>: row\\nany"' in to_graphviz(tree)


def test_a_deep_tree() -> None:
    node: Accumulator | Apply = Accumulator()
    for _ in range(5000):
        node = Apply("add", (node, node))
    assert len(to_mermaid(EpilogueTree((Store("D", node),))).splitlines()) == 1 + 5001 + 1 + 10000 + 1

"""Trees as JSON text, and back.

    >>> EpilogueTree.from_json(tree.to_json()) == tree
    True

The form, version 1: a flat list of nodes, inputs before their users and named by their index, then the
outputs.  Names are kept, source locations are not.  Constants are written with ``float.hex``, so that NaN,
infinities and -0.0 survive.  "rounding" and "compute_dtype" of the tree and "intermediate" of an operation are there
where they are not "once", "f32" and false::

    {"version": 1,
     "nodes": [{"node": "accumulator"},
               {"node": "operand", "name": "bias", "kind": "row", "position": 0, "dtype": null},
               {"node": "constant", "value": "0x1.0000000000000p-1"},
               {"node": "apply", "operation": "add", "inputs": [0, 1]},
               {"node": "cast", "dtype": "bf16", "inputs": [3]}],
     "outputs": [{"name": "D", "dtype": null, "value": 4}]}

Reading checks the form here and the tree with :mod:`epilogues.validation`.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from .dtypes import DTYPES
from .errors import EpilogueError
from .source import short
from .tree import ROUNDINGS, Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store
from .validation import validate

VERSION = 1

_T = TypeVar("_T")


def tree_to_json(tree: EpilogueTree) -> str:
    """The JSON text of a tree."""
    index = {id(node): i for i, node in enumerate(tree.nodes)}
    nodes = [_write(node, [index[id(child)] for child in node.inputs]) for node in tree.nodes]
    outputs = [{"name": s.name, "dtype": s.dtype, "value": index[id(s.value)]} for s in tree.outputs]
    marks = {} if tree.rounding == "once" else {"rounding": tree.rounding}
    marks |= {} if tree.compute_dtype == "f32" else {"compute_dtype": tree.compute_dtype}
    return json.dumps({"version": VERSION, **marks, "nodes": nodes, "outputs": outputs})


def tree_from_json(text: str) -> EpilogueTree:
    """The tree that :func:`tree_to_json` wrote.

    Raises:
        EpilogueError: (or a subclass) saying what is wrong with the text or the tree.
    """
    tree = read_tree(text)
    validate(tree)
    return tree


def read_tree(text: str) -> EpilogueTree:
    """The tree that :func:`tree_to_json` wrote, valid or not.

    Raises:
        EpilogueError: if the text does not have the form.
    """
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise EpilogueError(f"the text is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise EpilogueError(f"expected a JSON object with version, nodes and outputs, got {short(data)}")
    if data.get("version") != VERSION:
        raise EpilogueError(f"expected a tree of version {VERSION}, got {short(data.get('version'))}")
    nodes: list[Node] = []
    for i, item in enumerate(_field(data, "nodes", list, "the tree")):
        nodes.append(_read(item, nodes, f"node {i}"))
    outputs = []
    for i, item in enumerate(_field(data, "outputs", list, "the tree")):
        where = f"output {i}"
        name, dtype = _field(item, "name", str, where), _dtype(item, where)
        outputs.append(Store(name, _earlier(item.get("value"), nodes, where), dtype))
    rounding = data.get("rounding", "once")
    if rounding not in ROUNDINGS:
        raise EpilogueError(f"expected a rounding among {', '.join(ROUNDINGS)}, got {short(rounding)}")
    compute_dtype = data.get("compute_dtype", "f32")
    if compute_dtype not in DTYPES:
        raise EpilogueError(f"expected a compute_dtype among {', '.join(DTYPES)}, got {short(compute_dtype)}")
    return EpilogueTree(tuple(outputs), rounding, compute_dtype)


def _write(node: Node, inputs: list[int]) -> dict[str, Any]:
    if isinstance(node, Operand):
        operand = {"name": node.name, "kind": node.kind.value, "position": node.position, "dtype": node.dtype}
        return {"node": "operand", **operand}
    if isinstance(node, Constant):
        return {"node": "constant", "value": float(node.value).hex()}
    if isinstance(node, Apply):
        mark = {"intermediate": True} if node.intermediate else {}
        return {"node": "apply", "operation": node.operation, "inputs": inputs, **mark}
    if isinstance(node, Cast):
        return {"node": "cast", "dtype": node.dtype, "inputs": inputs}
    return {"node": "accumulator"}


def _read(item: Any, earlier: list[Node], where: str) -> Node:
    tag = _field(item, "node", str, where)
    if tag == "accumulator":
        return Accumulator()
    if tag == "operand":
        name, position = _field(item, "name", str, where), _field(item, "position", int, where)
        kind = _field(item, "kind", str, where)
        if kind not in {known.value for known in Kind}:
            known = ", ".join(known.value for known in Kind)
            raise EpilogueError(f"{where}: expected a kind among {known}, got {kind!r}")
        return Operand(name, Kind(kind), position, _dtype(item, where))
    if tag == "constant":
        value = _field(item, "value", str, where)
        try:
            return Constant(float.fromhex(value))
        except (ValueError, OverflowError):
            raise EpilogueError(f"{where}: expected a number as float.hex writes it, got {value!r}") from None
    if tag == "apply":
        mark = item.get("intermediate", False)
        if not isinstance(mark, bool):
            raise EpilogueError(f"{where}: expected intermediate to be true or false, got {short(mark)}")
        return Apply(_field(item, "operation", str, where), _inputs(item, earlier, where), mark)
    if tag == "cast":
        inputs = _inputs(item, earlier, where)
        if len(inputs) != 1:
            raise EpilogueError(f"{where}: a cast has 1 input, got {len(inputs)}")
        return Cast(inputs[0], _field(item, "dtype", str, where))
    raise EpilogueError(f"{where}: expected accumulator, operand, constant, apply or cast, got {tag!r}")


def _inputs(item: Any, earlier: list[Node], where: str) -> tuple[Node, ...]:
    return tuple(_earlier(index, earlier, where) for index in _field(item, "inputs", list, where))


def _earlier(index: Any, earlier: list[Node], where: str) -> Node:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(earlier):
        raise EpilogueError(
            f"{where}: expected the index of an earlier node, 0 to {len(earlier) - 1}, got {short(index)}"
        )
    return earlier[index]


def _field(item: Any, key: str, kind: type[_T], where: str) -> _T:
    if not isinstance(item, dict):
        raise EpilogueError(f"{where}: expected a JSON object, got {short(item)}")
    value = item.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise EpilogueError(f"{where}: expected {key} to be of type {kind.__name__}, got {short(value)}")
    return value


def _dtype(item: Any, where: str) -> str | None:
    return None if item.get("dtype") is None else _field(item, "dtype", str, where)

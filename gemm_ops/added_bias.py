"""What is left of an epilogue where other code has added the layer's bias to the product already.

>>> after_bias(ep.builders.bias_activation("gelu")) == ep.builders.activation("gelu")
True
"""

from __future__ import annotations

from dataclasses import replace

from epilogues import Epilogue
from epilogues.tree import Accumulator, Apply, EpilogueTree, Node, Operand

BIAS = "bias"


def after_bias(epilogue: Epilogue) -> Epilogue:
    """The epilogue that takes ``acc + bias`` for its accumulator, and gives what ``epilogue`` gives of ``acc``.

    Where the bias is added to the accumulator and does nothing else (:func:`adds_bias_first`) the addition is left out,
    and with it the operand; elsewhere the bias is subtracted first, in the epilogue's own rounding.  An epilogue
    without an operand ``bias`` is returned as it is.
    """
    tree = epilogue.tree
    bias = _bias_of(tree)
    if bias is None:
        return epilogue
    addition = _addition_of(tree, bias)
    if addition is None:
        subtracted = {id(node): Apply("sub", (node, bias)) for node in tree.nodes if isinstance(node, Accumulator)}
        return Epilogue.from_tree(tree.map_nodes(subtracted), epilogue.name)
    change: dict[int, Node] = {id(addition): Accumulator()}
    for node in tree.operands:
        if node.position > bias.position:
            change[id(node)] = replace(node, position=node.position - 1)
    return Epilogue.from_tree(tree.map_nodes(change), epilogue.name)


def adds_bias_first(epilogue: Epilogue) -> bool:
    """Whether the operand ``bias`` is added to the accumulator, and neither is used elsewhere.

    >>> adds_bias_first(ep.builders.layer_scale()), adds_bias_first(ep.builders.scaled_residual())
    (True, False)
    """
    bias = _bias_of(epilogue.tree)
    return bias is not None and _addition_of(epilogue.tree, bias) is not None


def is_identity(epilogue: Epilogue) -> bool:
    """Whether the one output is the accumulator, in the dtype of the matrices."""
    store, *others = epilogue.tree.outputs
    return not others and isinstance(store.value, Accumulator) and store.dtype is None


def _bias_of(tree: EpilogueTree) -> Operand | None:
    return next((operand for operand in tree.operands if operand.name == BIAS), None)


def _addition_of(tree: EpilogueTree, bias: Operand) -> Node | None:
    """The node ``acc + bias``, if it is the only one that reads either."""
    either = {
        id(node)
        for node in tree.nodes
        if isinstance(node, Accumulator) or (isinstance(node, Operand) and node.position == bias.position)
    }
    readers = [node for node in tree.nodes if any(id(child) in either for child in node.inputs)]
    if len(readers) != 1 or any(id(store.value) in either for store in tree.outputs):
        return None
    (reader,) = readers
    kinds = sorted(type(child).__name__ for child in reader.inputs)
    is_sum = isinstance(reader, Apply) and reader.operation == "add" and kinds == ["Accumulator", "Operand"]
    return reader if is_sum else None

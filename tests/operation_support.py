"""Trees that use a row of the operation table, whatever its inputs and its result are."""

from __future__ import annotations

import epilogues as ep
from epilogues.operations import OPERATIONS
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store

#: Rows that subtract two close values: their error is a few units of their inputs, not of the result.
CANCELLING = ("lerp", "logaddexp", "logaddexp2", "tanhshrink")


def apply_row(name: str, *values: Node) -> Node:
    """The row on the first of these values; where it takes a condition or gives one, that of a comparison."""
    row = OPERATIONS[name]
    inputs = [
        Apply("gt", (value, Constant(0.25))) if index in row.conditions else value
        for index, value in enumerate(values[: row.arity])
    ]
    node = Apply(name, tuple(inputs))
    return Apply("where", (node, Constant(1.5), Constant(-0.5))) if row.result == "condition" else node


def row_tree(name: str, output: str) -> EpilogueTree:
    """D = row(acc, row, 2.5), as many of these as it takes."""
    node = apply_row(name, Accumulator(), Operand("row", Kind.ROW, 0, "bf16"), Constant(2.5))
    return EpilogueTree((Store("D", node, output),))


def every_row_tree(output: str) -> EpilogueTree:
    """One value that goes through every row of the table in turn."""
    row = Operand("row", Kind.ROW, 0, "bf16")
    value: Node = Accumulator()
    for name in OPERATIONS:
        value = apply_row(name, value, row, Constant(2.5))
    return EpilogueTree((Store("D", value, output),))


def packs(dtype: str, size: int = 6) -> list[ep.Epilogue]:
    """Epilogues of several outputs that together compute every row of the table, a row to an output.

    Every row sees the accumulator / 16; its further inputs are a row operand and 2.5.
    """
    names = list(OPERATIONS)
    made = []
    for start in range(0, len(names), size):
        accumulator, row = Apply("mul", (Accumulator(), Constant(0.0625))), Operand("row", Kind.ROW, 0)
        stores = []
        for index, name in enumerate(names[start : start + size]):
            # the row operand is added to nothing, so that it is there even in a pack of unary rows
            first = Apply("add", (accumulator, Apply("mul", (row, Constant(0.0)))))
            value = Cast(apply_row(name, first, row, Constant(2.5)), dtype)
            stores.append(Store("D" if index == 0 else name, value))
        made.append(ep.Epilogue.from_tree(EpilogueTree(tuple(stores)), f"{names[start]}-to-{name}-{dtype}"))
    return made

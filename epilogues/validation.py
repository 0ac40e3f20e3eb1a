"""What makes a tree an epilogue: rules, each a function that raises what it finds wrong.

    >>> from epilogues.validation import validate
    >>> validate(EpilogueTree((Store("D", Constant(1.0)),)))
    Traceback (most recent call last):
    epilogues.errors.EpilogueError: output D does not depend on the accumulator ...

The tracer, :meth:`EpilogueTree.from_json` and :meth:`Epilogue.from_tree` all run :func:`validate`; whatever
takes a tree may rely on :data:`RULES` holding.
"""

from __future__ import annotations

import difflib
from collections import Counter

from .dtypes import DTYPES
from .errors import DtypeError, EpilogueError, UnsupportedOperationError
from .operations import OPERATIONS, is_condition
from .signature import RESERVED_NAMES, reserved_hint
from .source import explain
from .tree import MAIN_OUTPUT, Accumulator, Apply, Cast, EpilogueTree, Node, Operand


def outputs_are_named(tree: EpilogueTree) -> None:
    """At least one output, the first called "D", all with different identifiers for names."""
    names = [store.name for store in tree.outputs]
    if not names:
        raise EpilogueError("a tree without outputs; expected at least the main one, " + repr(MAIN_OUTPUT))
    if names[0] != MAIN_OUTPUT:
        raise EpilogueError(f"the first output is called {names[0]!r}; expected {MAIN_OUTPUT!r}")
    for name, count in Counter(names).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise EpilogueError(f"an output is named {name!r}; expected an identifier such as 'preact'")
        if count > 1:
            raise EpilogueError(f"{count} outputs are named {name!r}; expected different names")


def operations_are_known(tree: EpilogueTree) -> None:
    """Every operation is in the table and has as many inputs as the table says."""
    for node in tree.nodes:
        if not isinstance(node, Apply):
            continue
        row = OPERATIONS.get(node.operation)
        if row is None:
            raise UnsupportedOperationError(
                explain(
                    f"operation {node.operation!r} is not in the operation table",
                    node.location,
                    instead=f"expected {_nearest(node.operation)} of epilogues.operations.OPERATIONS",
                )
            )
        if len(node.operands) != row.arity:
            raise EpilogueError(
                explain(
                    f"operation {row.name} has {len(node.operands)} inputs; expected {row.arity}",
                    node.location,
                )
            )


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, OPERATIONS, n=3, cutoff=0.7)
    return f"{' or '.join(close)}, or another" if close else "one"


def conditions_are_conditions(tree: EpilogueTree) -> None:
    """A condition feeds operations that take one there, and is neither stored nor cast; a value is no condition."""
    for node in tree.nodes:
        if isinstance(node, Cast) and is_condition(node.value):
            raise DtypeError(explain(f"a cast of {_shown(node.value)}", node.location, instead=_AS_VALUE))
        if not isinstance(node, Apply):
            continue
        takes = OPERATIONS[node.operation].conditions
        for position, child in enumerate(node.operands):
            if is_condition(child) and position not in takes:
                message = f"input {position} of operation {node.operation} is {_shown(child)}; expected a value"
                raise DtypeError(explain(message, node.location, instead=_AS_VALUE))
            if not is_condition(child) and position in takes:
                message = f"input {position} of operation {node.operation} is a value; expected a condition"
                raise DtypeError(explain(message, node.location, instead="compare it, such as ne(value, 0.0)"))
    for store in tree.outputs:
        if is_condition(store.value):
            message = f"output {store.name} is {_shown(store.value)}; expected a value"
            raise DtypeError(explain(message, store.value.location, instead=_AS_VALUE))


_AS_VALUE = "make it a value: torch.where(condition, 1.0, 0.0), or condition.float()"


def _shown(node: Node) -> str:
    return f"a condition ({node.operation})" if isinstance(node, Apply) else type(node).__name__


def dtypes_are_known(tree: EpilogueTree) -> None:
    """Every dtype named by a cast, an operand or an output is one of the language."""
    named = [("cast", node.dtype, node.location) for node in tree.nodes if isinstance(node, Cast)]
    named += [(f"operand {op.name}", op.dtype, op.location) for op in _operands(tree) if op.dtype is not None]
    named += [(f"output {s.name}", s.dtype, s.value.location) for s in tree.outputs if s.dtype is not None]
    for what, dtype, location in named:
        if dtype not in DTYPES:
            raise DtypeError(explain(f"{what} has dtype {dtype!r}; expected one of {', '.join(DTYPES)}", location))


def operands_are_numbered(tree: EpilogueTree) -> None:
    """Operands have positions 0, 1, ... without gaps, each taken once."""
    positions = sorted(operand.position for operand in _operands(tree))
    if positions != list(range(len(positions))):
        raise EpilogueError(f"operands have positions {positions}; expected each of 0 to {len(positions) - 1} once")


def operands_are_named(tree: EpilogueTree) -> None:
    """Operands have different identifiers for names, none that a function taking operands uses itself."""
    for name, count in Counter(operand.name for operand in _operands(tree)).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise EpilogueError(f"an operand is named {name!r}; expected an identifier such as 'bias'")
        if count > 1:
            raise EpilogueError(f"{count} operands are named {name!r}; expected different names")
        if name in RESERVED_NAMES:
            raise EpilogueError(f"an operand is named {name!r}, which is reserved; {reserved_hint(name)}")


def outputs_depend_on_the_accumulator(tree: EpilogueTree) -> None:
    """No output could be computed without the GEMM."""
    depends: dict[int, bool] = {}
    for node in tree.nodes:
        inputs = [depends[id(child)] for child in node.inputs]
        depends[id(node)] = isinstance(node, Accumulator) or any(inputs)
    for store in tree.outputs:
        if not depends[id(store.value)]:
            raise EpilogueError(
                explain(
                    f"output {store.name} does not depend on the accumulator",
                    store.value.location,
                    instead="compute it from the first parameter of the function, or outside of the epilogue",
                )
            )


#: In the order in which they are checked: later rules rely on earlier ones.
RULES = (
    outputs_are_named,
    operations_are_known,
    conditions_are_conditions,
    dtypes_are_known,
    operands_are_numbered,
    operands_are_named,
    outputs_depend_on_the_accumulator,
)


def validate(tree: EpilogueTree) -> None:
    """Checks every rule.

    Raises:
        EpilogueError: (or a subclass) what the first broken rule says.
    """
    for rule in RULES:
        rule(tree)


def _operands(tree: EpilogueTree) -> list[Operand]:
    return [node for node in tree.nodes if isinstance(node, Operand)]

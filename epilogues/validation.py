"""What makes a tree an epilogue: rules, each with a name, an error class, an example of its message, and a hint.

    >>> from epilogues.validation import describe_rules, validate
    >>> validate(EpilogueTree((Store("D", Constant(1.0)),)))
    Traceback (most recent call last):
    epilogues.errors.EpilogueError: output D does not depend on the accumulator
      instead: compute it from the first parameter of the function, or outside of the epilogue
    >>> print(describe_rules())
    ...

The tracer, :meth:`EpilogueTree.from_json` and :meth:`Epilogue.from_tree` all run :func:`validate`; whatever
takes a tree may rely on :data:`RULES` holding.  What is refused before there is a tree, while a function is traced,
is in :mod:`epilogues.refusals`; :mod:`epilogues.error_catalogue` lists both.

A rule is a function that yields what it finds wrong, as a message and the user's line; :func:`_rule` makes it a row
of the list.  Add one there, and a tree that breaks it to ``BROKEN`` in ``tests/test_epilogues_validation.py``.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .dtypes import DTYPES
from .errors import DtypeError, EpilogueError, UnsupportedOperationError
from .operand_shapes import is_number
from .operations import OPERATIONS, is_condition
from .signature import RESERVED_NAMES, reserved_hint
from .source import explain, short
from .tree import (
    MAIN_OUTPUT,
    ROUNDINGS,
    Accumulator,
    Apply,
    Cast,
    Constant,
    EpilogueTree,
    Kind,
    Node,
    Operand,
    SourceLocation,
)

#: What a rule finds: a message, and the line of the node that it is about.
Finding = tuple[str, "SourceLocation | None"]


@dataclass(frozen=True)
class ValidationRule:
    """A rule that every tree keeps to.

    Attributes:
        name: what reports and tests call it.
        holds: what is true of a tree that keeps to it.
        error: the class of what :func:`validate` raises otherwise.
        example: a message that it gives, without the line and the hint.
        instead: what to do instead; part of every message.
        findings: the function that looks for what is wrong.
    """

    name: str
    holds: str
    error: type[EpilogueError]
    example: str
    instead: str
    findings: Callable[[EpilogueTree], Iterator[Finding]]

    def check(self, tree: EpilogueTree) -> None:
        """Raises the first finding.

        Raises:
            EpilogueError: of the class :attr:`error`.
        """
        for message, location in self.findings(tree):
            raise self.error(explain(message, location, instead=self.instead))


_rules: list[ValidationRule] = []


def _rule(
    error: type[EpilogueError], *, example: str, instead: str
) -> Callable[[Callable[[EpilogueTree], Iterator[Finding]]], ValidationRule]:
    """Makes a row of the list of a function; rules are checked in the order in which they stand in this file."""

    def decorate(findings: Callable[[EpilogueTree], Iterator[Finding]]) -> ValidationRule:
        holds = " ".join((findings.__doc__ or "").split())
        _rules.append(ValidationRule(findings.__name__, holds, error, example, instead, findings))
        return _rules[-1]

    return decorate


_AS_VALUE = "make it a value: torch.where(condition, 1.0, 0.0), or condition.float()"
_IDENTIFIER = "take an identifier such as {!r}"
_NUMBERED = "number the operands in the order in which they are given, from 0, and use each"


# outputs


@_rule(
    EpilogueError,
    example="a tree without outputs; expected at least the main one, 'D'",
    instead="store a value that is computed from the accumulator as 'D'",
)
def there_is_an_output(tree: EpilogueTree) -> Iterator[Finding]:
    """At least one output."""
    if not tree.outputs:
        yield f"a tree without outputs; expected at least the main one, {MAIN_OUTPUT!r}", None


@_rule(
    EpilogueError,
    example="the first output is called 'E'; expected 'D'",
    instead="name the main output 'D' and put it first",
)
def main_output_comes_first(tree: EpilogueTree) -> Iterator[Finding]:
    """The first output is the main one and is called "D"."""
    first = tree.outputs[0]
    if first.name != MAIN_OUTPUT:
        yield f"the first output is called {first.name!r}; expected {MAIN_OUTPUT!r}", first.value.location


@_rule(
    EpilogueError,
    example="an output is named 'no name'; expected an identifier such as 'preact'",
    instead=_IDENTIFIER.format("preact"),
)
def outputs_have_names(tree: EpilogueTree) -> Iterator[Finding]:
    """Every output's name is an identifier."""
    for store in tree.outputs:
        if not _is_identifier(store.name):
            yield f"an output is named {store.name!r}; expected an identifier such as 'preact'", store.value.location


@_rule(
    EpilogueError,
    example="2 outputs are named 'E'; expected different names",
    instead="give every output a name of its own",
)
def output_names_differ(tree: EpilogueTree) -> Iterator[Finding]:
    """No two outputs have the same name."""
    for name, count in Counter(store.name for store in tree.outputs).items():
        if count > 1:
            yield f"{count} outputs are named {name!r}; expected different names", None


# operations


@_rule(
    UnsupportedOperationError,
    example="operation 'relu7' is not in the operation table; did you mean relu or elu?",
    instead="take one of epilogues.operations.OPERATIONS, or compute it from several",
)
def operations_are_known(tree: EpilogueTree) -> Iterator[Finding]:
    """Every operation is in the table."""
    for node in _applies(tree):
        if not isinstance(node.operation, str) or node.operation not in OPERATIONS:
            close = difflib.get_close_matches(str(node.operation), OPERATIONS, n=3, cutoff=0.7)
            meant = f"; did you mean {' or '.join(close)}?" if close else ""
            yield f"operation {node.operation!r} is not in the operation table{meant}", node.location


@_rule(
    EpilogueError,
    example="operation add has 3 inputs; expected 2",
    instead="give it the inputs that its row of epilogues.operations.OPERATIONS names; parameters are inputs too",
)
def operations_have_their_inputs(tree: EpilogueTree) -> Iterator[Finding]:
    """Every operation has as many inputs as the table says."""
    for node in _applies(tree):
        arity = OPERATIONS[node.operation].arity
        if len(node.operands) != arity:
            yield f"operation {node.operation} has {len(node.operands)} inputs; expected {arity}", node.location


# conditions


@_rule(DtypeError, example="a cast of a condition (gt)", instead=_AS_VALUE)
def conditions_are_not_cast(tree: EpilogueTree) -> Iterator[Finding]:
    """What is cast is a value."""
    for node in tree.nodes:
        if isinstance(node, Cast) and is_condition(node.value):
            yield f"a cast of {_shown(node.value)}", node.location


@_rule(
    DtypeError,
    example="input 0 of operation where is a value; expected a condition",
    instead="compare it, such as ne(value, 0.0)",
)
def values_are_not_conditions(tree: EpilogueTree) -> Iterator[Finding]:
    """Where an operation takes a condition it has one."""
    for node, position, child in _inputs(tree):
        if not is_condition(child) and position in OPERATIONS[node.operation].conditions:
            message = f"input {position} of operation {node.operation} is a value; expected a condition"
            yield message, node.location


@_rule(
    DtypeError,
    example="input 0 of operation relu is a condition (gt); expected a value",
    instead=_AS_VALUE,
)
def conditions_are_not_values(tree: EpilogueTree) -> Iterator[Finding]:
    """A condition feeds an operation only where it takes one."""
    for node, position, child in _inputs(tree):
        if is_condition(child) and position not in OPERATIONS[node.operation].conditions:
            message = f"input {position} of operation {node.operation} is {_shown(child)}; expected a value"
            yield message, node.location


@_rule(DtypeError, example="output D is a condition (gt); expected a value", instead=_AS_VALUE)
def conditions_are_not_stored(tree: EpilogueTree) -> Iterator[Finding]:
    """Every output is a value."""
    for store in tree.outputs:
        if is_condition(store.value):
            yield f"output {store.name} is {_shown(store.value)}; expected a value", store.value.location


# dtypes and operands


@_rule(
    DtypeError,
    example=f"cast has dtype 'f64'; expected one of {', '.join(DTYPES)}",
    instead="name one of these by its short name; values are computed in f32",
)
def dtypes_are_known(tree: EpilogueTree) -> Iterator[Finding]:
    """Every dtype named by a cast, an operand or an output is one of the language."""
    named = [("cast", node.dtype, node.location) for node in tree.nodes if isinstance(node, Cast)]
    named += [(f"operand {op.name}", op.dtype, op.location) for op in _operands(tree) if op.dtype is not None]
    named += [(f"output {s.name}", s.dtype, s.value.location) for s in tree.outputs if s.dtype is not None]
    for what, dtype, location in named:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            yield f"{what} has dtype {dtype!r}; expected one of {', '.join(DTYPES)}", location


@_rule(
    EpilogueError,
    example="a constant is 'pi'; expected a number",
    instead="write an int or a float; what changes from call to call is an operand",
)
def constants_are_numbers(tree: EpilogueTree) -> Iterator[Finding]:
    """Every constant is a number that a float holds."""
    for node in tree.nodes:
        if isinstance(node, Constant) and not _is_float(node.value):
            yield f"a constant is {short(node.value)}; expected a number", node.location


@_rule(
    EpilogueError,
    example="operand bias has kind 'row'; expected one of Kind.ROW, Kind.COLUMN, Kind.SCALAR, Kind.AUX, Kind.AUTO",
    instead="take a member of epilogues.Kind",
)
def kinds_are_known(tree: EpilogueTree) -> Iterator[Finding]:
    """Every operand has a kind."""
    for operand in _operands(tree):
        if not isinstance(operand.kind, Kind):
            known = ", ".join(map(str, Kind))
            yield f"operand {operand.name} has kind {short(operand.kind)}; expected one of {known}", operand.location


@_rule(
    EpilogueError,
    example="operands have positions [1]; expected each of 0 to 0 once",
    instead=_NUMBERED,
)
def operands_are_numbered(tree: EpilogueTree) -> Iterator[Finding]:
    """Operands have positions 0, 1, ... without gaps, each taken once."""
    positions: list[Any] = [operand.position for operand in _operands(tree)]
    if all(isinstance(position, int) for position in positions):
        positions.sort()
    if positions != list(range(len(positions))):
        yield f"operands have positions {positions}; expected each of 0 to {len(positions) - 1} once", None


@_rule(
    EpilogueError,
    example="an operand is named 'a b'; expected an identifier such as 'bias'",
    instead=_IDENTIFIER.format("bias"),
)
def operands_have_names(tree: EpilogueTree) -> Iterator[Finding]:
    """Every operand's name is an identifier."""
    for operand in _operands(tree):
        if not _is_identifier(operand.name):
            yield f"an operand is named {operand.name!r}; expected an identifier such as 'bias'", operand.location


@_rule(
    EpilogueError,
    example="2 operands are named 'bias'; expected different names",
    instead="give every operand a name of its own, and one node",
)
def operand_names_differ(tree: EpilogueTree) -> Iterator[Finding]:
    """No two operands have the same name."""
    for name, count in Counter(operand.name for operand in _operands(tree)).items():
        if count > 1:
            yield f"{count} operands are named {name!r}; expected different names", None


@_rule(
    EpilogueError,
    example=f"an operand is named 'weight', which is reserved; {reserved_hint('weight')}",
    instead="take a name that no argument of matmul, linear or reference has",
)
def operand_names_are_free(tree: EpilogueTree) -> Iterator[Finding]:
    """No operand has a name that a function taking operands uses itself."""
    for operand in _operands(tree):
        if operand.name in RESERVED_NAMES:
            message = f"an operand is named {operand.name!r}, which is reserved; {reserved_hint(operand.name)}"
            yield message, operand.location


@_rule(
    EpilogueError,
    example="output D does not depend on the accumulator",
    instead="compute it from the first parameter of the function, or outside of the epilogue",
)
def outputs_depend_on_the_accumulator(tree: EpilogueTree) -> Iterator[Finding]:
    """No output could be computed without the GEMM."""
    depends: dict[int, bool] = {}
    for node in tree.nodes:
        inputs = [depends[id(child)] for child in node.inputs]
        depends[id(node)] = isinstance(node, Accumulator) or any(inputs)
    for store in tree.outputs:
        if not depends[id(store.value)]:
            yield f"output {store.name} does not depend on the accumulator", store.value.location


@_rule(
    EpilogueError,
    example=f"the tree rounds 'twice'; expected one of {', '.join(ROUNDINGS)}",
    instead="leave rounding out: values are rounded once, where they are cast or stored",
)
def rounding_is_known(tree: EpilogueTree) -> Iterator[Finding]:
    """The tree's rounding is one of the language."""
    if tree.rounding not in ROUNDINGS:
        yield f"the tree rounds {tree.rounding!r}; expected one of {', '.join(ROUNDINGS)}", None


@_rule(
    EpilogueError,
    example="the tree computes in bf16 and rounds 'eager'; expected float32, in which eager PyTorch's kernels compute",
    instead="leave out the one or the other",
)
def compute_dtype_goes_with_rounding(tree: EpilogueTree) -> Iterator[Finding]:
    """The tree's compute dtype is one of the language, and float32 where it rounds as eager PyTorch."""
    if tree.compute_dtype not in DTYPES:
        yield f"the tree computes in {short(tree.compute_dtype)}; expected one of {', '.join(DTYPES)}", None
    elif tree.rounding != "once" and tree.compute_dtype != "f32":
        expected = "expected float32, in which eager PyTorch's kernels compute"
        yield f"the tree computes in {tree.compute_dtype} and rounds {tree.rounding!r}; {expected}", None


#: In the order in which they are checked: later rules rely on earlier ones.
RULES: tuple[ValidationRule, ...] = tuple(_rules)


def validate(tree: EpilogueTree) -> None:
    """Checks every rule.

    Raises:
        EpilogueError: (or a subclass) what the first broken rule says.
    """
    for rule in RULES:
        rule.check(tree)


def describe_rules() -> str:
    """The list as text: each rule with what holds, the error class, an example of its message, and the hint."""
    return "\n".join(
        f"{rule.name}: {rule.holds}\n  {rule.error.__name__}: {rule.example}\n  instead: {rule.instead}"
        for rule in RULES
    )


def _applies(tree: EpilogueTree) -> Iterable[Apply]:
    return (node for node in tree.nodes if isinstance(node, Apply))


def _inputs(tree: EpilogueTree) -> Iterator[tuple[Apply, int, Node]]:
    for node in _applies(tree):
        for position, child in enumerate(node.operands):
            yield node, position, child


def _operands(tree: EpilogueTree) -> list[Operand]:
    return [node for node in tree.nodes if isinstance(node, Operand)]


def _is_identifier(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def _is_float(value: Any) -> bool:
    if not is_number(value):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _shown(node: Node) -> str:
    return f"a condition ({node.operation})" if isinstance(node, Apply) else type(node).__name__

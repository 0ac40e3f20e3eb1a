"""From an ordinary function to a tree: run the function once, on symbols instead of numbers.

    >>> from epilogues.tracing import trace
    >>> def scaled_gelu(acc, scale: Row, bias: Row):
    ...     return torch.nn.functional.gelu(acc * scale + bias)
    >>> tree = trace(scaled_gelu, "scaled_gelu")

Contract
--------
* A :class:`Symbol` stands for one value of one trace.  Operators, ``epilogues`` functions, the methods of a
  tensor and the functions of ``torch`` and ``torch.nn.functional`` of the same name all make nodes; see
  ``torch_calls`` for the list.  Whatever is not elementwise raises there and then, naming the user's line.
* A condition, such as ``x > 0``, used where a value is wanted is ``where(condition, 1.0, 0.0)``, as PyTorch
  promotes it; a value is no condition, and an output is never one.
* Python numbers become constants.  Tensors from outside are refused: an epilogue's inputs are its operands.
* Values never change: what would write in place, such as ``y *= 2``, is refused.
* Equal nodes of a trace are one object, so common subexpressions are computed once.
* An operand handed on to another epilogue as it is is what that epilogue declares, kind and dtype.
* A function returns a symbol, the main output "D", or a dict of output names to symbols with "D" in it.
* Every output depends on the accumulator, every operand is used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .dtypes import dtype_name, torch_dtype
from .errors import BroadcastError, DtypeError, EpilogueError, UnsupportedOperationError
from .operand_shapes import is_number
from .operations import ON_CONDITIONS, OPERATIONS, is_condition
from .outputs import one_value
from .signature import Parameter, read_parameters
from .source import explain, function_location, raised_at, short, shortened, user_location
from .symbol import Symbol
from .tree import (
    MAIN_OUTPUT,
    Accumulator,
    Apply,
    Cast,
    Constant,
    EpilogueTree,
    Kind,
    Node,
    Operand,
    SourceLocation,
    Store,
)
from .validation import validate


@dataclass
class _Declaration:
    """What is known of an operand's kind and dtype, and which epilogue said so."""

    kind: Kind
    dtype: str | None
    kind_from: str
    dtype_from: str


class Trace:
    """The nodes made while one function runs; equal nodes are made once."""

    def __init__(self, name: str, rounding: str = "once") -> None:
        self.name = name
        self.rounding = rounding
        self._with_gradients = torch.is_grad_enabled()
        #: where the nodes now made come from, if not from the line that is running
        self.location: SourceLocation | None = None
        self._nodes: dict[tuple[object, ...], Node] = {}
        self._depth = 0  # of functions that count as one
        self._declarations: dict[int, _Declaration] = {}  # by position, of operands handed on as they are

    def accumulator(self) -> Symbol:
        return self._symbol(("accumulator",), lambda: Accumulator(location=user_location()))

    def operand(self, parameter: Parameter, position: int) -> Symbol:
        def make() -> Operand:
            return Operand(parameter.name, parameter.kind, position, parameter.dtype, location=user_location())

        return self._symbol(("operand", position), make)

    def apply(self, operation: str, *values: Any) -> Symbol:
        """The operation of the table on symbols and numbers; conditions become values where it takes values."""
        row = OPERATIONS[operation]
        if len(values) != row.arity:
            raise AssertionError(f"{operation} takes {row.arity} inputs, got {len(values)}")
        if operation in ON_CONDITIONS and all(_is_condition(value) for value in values):
            return self._apply_to_conditions(operation, *values)
        inputs = tuple(
            (self.condition(value) if position in row.conditions else self.value(value)).node
            for position, value in enumerate(values)
        )
        return self._made(operation, inputs, self._depth > 0)

    def _made(self, operation: str, inputs: tuple[Node, ...], intermediate: bool) -> Symbol:
        key = (operation, intermediate, *(id(node) for node in inputs))
        return self._symbol(key, lambda: Apply(operation, inputs, intermediate, location=self._location()))

    def as_intermediate(self, operation: str, *values: Any) -> Symbol:
        """The operation as a step within one PyTorch function."""
        self._depth += 1
        try:
            return self.apply(operation, *values)
        finally:
            self._depth -= 1

    def as_one_function(self, compute: Callable[[], Any]) -> Any:
        """What a function returns that is one function to PyTorch: all that it makes but its result is intermediate."""
        self._depth += 1
        try:
            result = compute()
        finally:
            self._depth -= 1
        node = result.node if isinstance(result, Symbol) else None
        if self._depth == 0 and isinstance(node, Apply) and node.intermediate:
            return self._made(node.operation, node.operands, False)
        return result

    def _apply_to_conditions(self, operation: str, *values: Any) -> Symbol:
        """Arithmetic that on tensors of dtype bool is logic, or an error."""
        logic = ON_CONDITIONS[operation]
        if logic is None:
            raise DtypeError(
                explain(
                    f"{operation} of nothing but conditions",
                    user_location(),
                    why="PyTorch has none for tensors of dtype bool",
                    instead="write ~condition, a ^ b or condition.float()",
                )
            )
        return self.apply(logic, *values)

    def value(self, value: Any) -> Symbol:
        """The symbol of a value; of a condition 1.0 where it is true and 0.0 where not."""
        symbol = self.lift(value)
        if not is_condition(symbol.node):
            return symbol
        return self._made("where", (symbol.node, self.constant(1.0).node, self.constant(0.0).node), True)

    def condition(self, value: Any) -> Symbol:
        """The symbol of a condition: itself, or what stands for a Python bool.

        Raises:
            DtypeError: if it is a value.
        """
        if isinstance(value, bool):
            return self.apply("ne", float(value), 0.0)
        symbol = self.lift(value)
        if not is_condition(symbol.node):
            raise DtypeError(
                explain(
                    f"expected a condition, such as x > 0, got the value {symbol!r}",
                    user_location(),
                    instead="compare it: x > 0, or x != 0 for what is not zero",
                )
            )
        return symbol

    def cast(self, value: Any, dtype: torch.dtype | str) -> Symbol:
        """The value rounded to a dtype."""
        try:
            name = dtype_name(dtype)
        except DtypeError as error:
            raise DtypeError(explain(str(error), user_location())) from None
        node = self.value(value).node
        return self._symbol(("cast", id(node), name), lambda: Cast(node, name, location=self._location()))

    def lift(self, value: Any) -> Symbol:
        """The symbol of a value: itself, or the constant that a Python number stands for."""
        value = one_value(value)
        if isinstance(value, Symbol):
            if value.recorder is not self:
                raise EpilogueError(
                    explain(
                        f"a value of epilogue {value.recorder.name} was used in epilogue {self.name}",
                        user_location(),
                        instead="keep values inside the function that computes them",
                    )
                )
            return value
        if isinstance(value, torch.Tensor):
            raise UnsupportedOperationError(
                explain(
                    f"a tensor of shape {tuple(value.shape)} was used that is not an operand of the epilogue",
                    user_location(),
                    why="an epilogue is traced once and then used with different tensors",
                    instead="make it an operand: add a parameter annotated Row, Column, Scalar or Aux, "
                    "and give the tensor with each call"
                    + ("; or write the number itself, if it never changes" if value.numel() == 1 else ""),
                )
            )
        if is_number(value):
            return self.constant(value)
        raise UnsupportedOperationError(
            explain(
                f"expected a value of the epilogue or a Python number, got {type(value).__name__} {short(value)}",
                user_location(),
                instead="write an int or float, or make it an operand of the epilogue",
            )
        )

    def constant(self, value: Any) -> Symbol:
        try:
            number = float(value)
        except OverflowError:
            raise EpilogueError(explain("an integer too large for a float", user_location())) from None
        return self._symbol(("constant", number.hex()), lambda: Constant(number, location=self._location()))

    def hand_on(self, value: Symbol, declared: Operand, inner: str) -> None:
        """Holds an operand that is given to another epilogue as it is to what that one declares.

        Args:
            value: what is given; computed values have no kind, and may be given for any operand.
            declared: the other epilogue's operand.
            inner: the other epilogue's name.

        Raises:
            BroadcastError: if the operand has another kind already.
            DtypeError: if it has another dtype already.
        """
        node = value.node
        if not isinstance(node, Operand):
            return
        known = self._declarations.setdefault(
            node.position, _Declaration(node.kind, node.dtype, kind_from=self.name, dtype_from=self.name)
        )

        def conflict(wanted: str, found: str, source: str) -> str:
            return explain(
                f"epilogue {inner} declares operand {declared.name} as {wanted}, and operand {node.name}, given for "
                f"it, is {found} by the declaration of epilogue {source}",
                user_location(),
                instead="declare both alike; where it is meant, give a computed value, such as "
                f"ep.identity({node.name})",
            )

        if declared.kind is not Kind.AUTO:
            if known.kind is Kind.AUTO:
                known.kind, known.kind_from = declared.kind, inner
            elif known.kind is not declared.kind:
                wanted, found = declared.kind.value.capitalize(), known.kind.value.capitalize()
                raise BroadcastError(conflict(wanted, found, known.kind_from))
        if declared.dtype is not None:
            if known.dtype is None:
                known.dtype, known.dtype_from = declared.dtype, inner
            elif known.dtype != declared.dtype:
                wanted, found = str(torch_dtype(declared.dtype)), str(torch_dtype(known.dtype))
                raise DtypeError(conflict(wanted, found, known.dtype_from))

    def declared(self, tree: EpilogueTree) -> EpilogueTree:
        """The tree with its operands as the epilogues that they were handed on to declare them."""
        change: dict[int, Node] = {}
        for operand in tree.operands:
            known = self._declarations.get(operand.position)
            if known is not None:
                change[id(operand)] = replace(operand, kind=known.kind, dtype=known.dtype)
        return tree.map_nodes(change)

    def _location(self) -> SourceLocation | None:
        return self.location or user_location()

    def _symbol(self, key: tuple[object, ...], make: Callable[[], Node]) -> Symbol:
        if self._with_gradients and not torch.is_grad_enabled():
            raise UnsupportedOperationError(
                explain(
                    "a computation without gradients (torch.no_grad, or inside a torch.autograd.Function)",
                    user_location(),
                    why="an epilogue is differentiated as what it computes, so its gradient would be another one",
                    instead="write the operations themselves, or compute that part outside and pass it as an operand",
                )
            )
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = make()
        return Symbol(node, self)


def _is_condition(value: Any) -> bool:
    return isinstance(value, Symbol) and is_condition(value.node)


def trace_of(values: Iterable[Any]) -> Trace | None:
    """The trace that the first symbol among the values belongs to; None if there is none."""
    return next((value.recorder for value in map(one_value, values) if isinstance(value, Symbol)), None)


def trace(function: Callable[..., Any], name: str, rounding: str = "once") -> EpilogueTree:
    """The tree that a function of the accumulator and operands computes.

    Args:
        function: see the module's contract.
        name: what error messages call it.
        rounding: the tree's.

    Raises:
        EpilogueError: one of its subclasses says what cannot be fused; itself, what is wrong with the
            function's parameters or what it returns.
    """
    parameters = read_parameters(function, name)
    recorder = Trace(name, rounding)
    acc = recorder.accumulator()
    operands = {p.name: recorder.operand(p, position) for position, p in enumerate(parameters)}
    positional = [operands[p.name] for p in parameters if not p.keyword_only]
    keywords = {p.name: operands[p.name] for p in parameters if p.keyword_only}
    result = _run(function, name, acc, *positional, **keywords)
    where = function_location(function)
    try:
        tree = recorder.declared(EpilogueTree(_stores(result, recorder), rounding))
        used = {node.name for node in tree.operands}
        unused = [operand_name for operand_name in operands if operand_name not in used]
        if unused:
            raise EpilogueError(
                f"no output depends on operand {', '.join(unused)}\n"
                "  instead: use it in what the function returns, or remove the parameter"
            )
        validate(tree)
    except EpilogueError as error:
        message = f"epilogue {name}: {error}"
        located = "\n  at " in message
        raise type(error)(explain(message, None if located else where)) from None
    return tree


def _run(function: Callable[..., Any], name: str, *args: Any, **keywords: Any) -> Any:
    """What the function returns; what Python or PyTorch say of symbols, with the line and in our words."""
    try:
        return function(*args, **keywords)
    except EpilogueError:
        raise
    except RecursionError as error:
        message = f"epilogue {name}: the function recurses, deeper than Python's {sys.getrecursionlimit()} calls"
        where, instead = raised_at(error), "write a loop; how often it runs must be known while tracing"
        raise EpilogueError(explain(message, where, instead=instead)) from None
    except Exception as error:
        if not re.search(rf"\b{Symbol.__name__}\b", str(error)):
            raise  # the user's own
        complaint = shortened(" ".join(str(error).split()), 300)
        raise UnsupportedOperationError(
            explain(
                f"epilogue {name}: {type(error).__name__}: {complaint}",
                raised_at(error),
                why="a value of an epilogue (a Symbol) is no tensor; it stands for every element at once",
                instead="compute with operators, ep.* and elementwise torch functions, without vmap, jit and the like",
            )
        ) from error


def _stores(result: Any, recorder: Trace) -> tuple[Store, ...]:
    """The outputs that a function's return value names, the main one first."""
    expected = f'expected a value computed from the accumulator, or a dict {{"{MAIN_OUTPUT}": value, ...}}'
    if isinstance(result, Symbol):
        result = {MAIN_OUTPUT: result}
    if not isinstance(result, dict):
        raise EpilogueError(f"returned {_describe(result)}; {expected}")
    if MAIN_OUTPUT not in result:
        names = ", ".join(repr(key) for key in result) or "nothing"
        raise EpilogueError(f'returned a dict of {names} without the main output "{MAIN_OUTPUT}"; {expected}')
    for key, value in result.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise EpilogueError(f"returned an output named {key!r}; expected a name such as 'preact'")
        if not isinstance(one_value(value), Symbol):
            raise EpilogueError(f"output {key!r} is {_describe(value)}; expected a value of the epilogue")
    order = [MAIN_OUTPUT, *(key for key in result if key != MAIN_OUTPUT)]
    return tuple(Store(key, recorder.lift(result[key]).node) for key in order)


def _describe(value: Any) -> str:
    if value is None:
        return "nothing (None)"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} values"
    if isinstance(value, int | float):
        return f"the number {value!r}"
    return f"a {type(value).__name__}"


def replay(tree: EpilogueTree, acc: Symbol, operands: Mapping[str, Symbol]) -> dict[str, Symbol]:
    """What a tree computes, from a symbol for its accumulator and one for each of its operands."""
    recorder = acc.recorder
    done: dict[int, Symbol] = {}
    before = recorder.location
    try:
        for node in tree.nodes:
            recorder.location = node.location or before  # nodes keep the line of the inner epilogue
            done[id(node)] = _again(node, recorder, acc, operands, done)
    finally:
        recorder.location = before
    return {store.name: done[id(store.value)] for store in tree.outputs}


def _again(
    node: Node, recorder: Trace, acc: Symbol, operands: Mapping[str, Symbol], done: Mapping[int, Symbol]
) -> Symbol:
    """One node of another tree, made in this trace of what its inputs became."""
    if isinstance(node, Accumulator):
        return acc
    if isinstance(node, Operand):
        return recorder.lift(operands[node.name])
    if isinstance(node, Constant):
        return recorder.constant(node.value)
    if isinstance(node, Cast):
        return recorder.cast(done[id(node.value)], node.dtype)
    assert isinstance(node, Apply)
    values = [done[id(child)] for child in node.operands]
    if node.intermediate:
        return recorder.as_intermediate(node.operation, *values)
    return recorder.apply(node.operation, *values)

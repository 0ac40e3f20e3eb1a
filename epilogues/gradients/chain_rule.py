"""The chain rule over a tree: gradients as nodes, by the derivatives of the operation table.

    >>> found = differentiate(ep.builders.bias_activation("relu"), targets=("accumulator", "bias"), from_outputs=("D",))
    >>> found.gradients["bias"]

Contract
--------
* Incoming gradients are operands, called ``grad_`` and the output's name; values of the forward are its own nodes.
  What of these a backward reads, and what it computes again, is not decided here.
* A derivative that selects, such as 0 where x <= 0 and else 1, selects the gradient; one that divides divides it.
  That is how autograd computes it, and differs from a product where the gradient is 0, infinite or NaN.
* A derivative of 1 or -1 multiplies nothing; an input of derivative zero gets no gradient.
* Within one PyTorch function that is several operations here, a gradient that was selected as zero stays zero,
  whatever multiplies it: PyTorch's one kernel never computes the arm that was not taken.  Between the operations of a
  user's own composition autograd multiplies that zero, so that infinite derivatives give NaN, and so does this.
* ``reciprocal(square(x))`` is ``x ** -2``, whose derivative is that of a power, at 0 and the infinities too.
* The gradient of a cast is cast to the same dtype where the value has as many elements as the accumulator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .. import functions
from ..declare import Epilogue
from ..operand_shapes import is_number
from ..operations import OPERATIONS
from ..signature import RESERVED_NAMES
from ..symbol import Symbol
from ..tracing import Trace, replay
from ..tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store
from .backward import ACCUMULATOR

#: Rows whose derivative is the same of the output in place of the input: relu(x) <= 0 exactly where x <= 0.
_BY_OUTPUT = frozenset({"relu"})
#: Rows and inputs where autograd computes the derivative with its zeros first and multiplies by it, zeros too.
_MULTIPLIED = frozenset({("copysign", 0), ("pow", 1), ("atan2", 0), ("atan2", 1)})


@dataclass(frozen=True)
class Differentiated:
    """The forward and its gradients as one graph; in it the incoming gradients are operands too.

    Attributes:
        forward: the forward tree, its nodes shared with the gradients.
        incoming: forward output -> what stands for its gradient.
        gradients: target -> its gradient, targets whose gradient is zero left out.
    """

    forward: EpilogueTree
    incoming: dict[str, Operand]
    gradients: dict[str, Node]

    def needed(self) -> list[Node]:
        """The values of the forward that the gradients are computed from, each once."""
        found: dict[int, Node] = {}
        depends = self._incoming_of()
        for node in self._nodes():
            if depends[id(node)]:
                found.update((id(child), child) for child in node.inputs if not depends[id(child)])
        return list(found.values())

    def gradient_of(self, target: str) -> str:
        """The output whose gradient the target's is computed from; of several the first."""
        needs = self._incoming_of()[id(self.gradients[target])]
        return next(name for name in self.incoming if name in needs)

    def _nodes(self) -> tuple[Node, ...]:
        return EpilogueTree(tuple(Store(name, node) for name, node in self.gradients.items())).nodes

    def _incoming_of(self) -> dict[int, frozenset[str]]:
        """``id(node)`` -> the outputs whose gradients it is computed from."""
        names = {id(operand): frozenset({name}) for name, operand in self.incoming.items()}
        found: dict[int, frozenset[str]] = {}
        for node in self._nodes():
            found[id(node)] = names.get(id(node), frozenset()).union(*(found[id(child)] for child in node.inputs))
        return found


def differentiate(epilogue: Epilogue, targets: Sequence[str], from_outputs: Sequence[str]) -> Differentiated:
    """The gradients of the targets by the chain rule, outputs to inputs."""
    trace = Trace(f"{epilogue.name}_backward")
    start = Symbol(Accumulator(), trace)
    leaves = {operand.name: Symbol(operand, trace) for operand in epilogue.tree.operands}
    values = replay(epilogue.tree, start, leaves)
    forward = replace(
        epilogue.tree,
        outputs=tuple(replace(store, value=values[store.name].node) for store in epilogue.tree.outputs),
    )
    wanted = {name: (start if name == ACCUMULATOR else leaves[name]).node for name in targets}
    differentiable = _depends_on(forward, wanted.values())
    whole = _whole(forward)

    taken = set(leaves)
    incoming: dict[str, Operand] = {}
    gradients: dict[int, Symbol] = {}
    given: set[int] = set()  # gradients of whole PyTorch functions, which their steps take as they are

    def add(node: Node, gradient: Symbol | None) -> None:
        if gradient is not None and id(node) in differentiable:
            known = gradients.get(id(node))
            if known is None:
                gradients[id(node)] = gradient
            elif _is_step(node):
                gradients[id(node)] = _sum_within(known, gradient, given)
            else:
                gradients[id(node)] = functions.add(known, gradient)

    for store in forward.outputs:
        if store.name in from_outputs:
            name = free_name(f"grad_{store.name}", taken)
            operand = incoming[store.name] = Operand(name, Kind.AUX, len(taken), location=store.value.location)
            add(store.value, Symbol(operand, trace))
    for node in reversed(forward.nodes):
        gradient = gradients.get(id(node))
        if gradient is None:
            continue
        trace.location = node.location
        if isinstance(node, Cast):
            add(node.value, _rounded(trace, gradient, node.dtype) if id(node.value) in whole else gradient)
        elif isinstance(node, Apply):
            if not node.intermediate and any(_is_step(child) for child in node.operands):
                given.add(id(gradient.node))
            base = _inverse_square_of(node)
            if base is not None:
                power = functools.partial(_through_inverse_square, Symbol(node, trace), Symbol(base, trace))
                add(base, _in_arms(gradient, power, given) if node.intermediate else power(gradient))
                continue
            for position, child in enumerate(node.operands):
                if id(child) in differentiable:
                    through = functools.partial(_through, trace, node, position)
                    add(child, _in_arms(gradient, through, given) if node.intermediate else through(gradient))
    found = {name: gradients[id(node)].node for name, node in wanted.items() if id(node) in gradients}
    return Differentiated(forward, incoming, found)


def _depends_on(tree: EpilogueTree, targets: Iterable[Node]) -> set[int]:
    """The nodes that have a derivative, if not a zero one, with respect to a target; targets included."""
    found = {id(node) for node in targets}
    for node in tree.nodes:
        rules = OPERATIONS[node.operation].derivatives if isinstance(node, Apply) else (True,) * len(node.inputs)
        if any(rule and id(child) in found for rule, child in zip(rules, node.inputs, strict=True)):
            found.add(id(node))
    return found


def _whole(tree: EpilogueTree) -> set[int]:
    """The nodes that have as many elements as the accumulator; an operand without annotation is taken for a row."""
    extents: dict[int, frozenset[str]] = {}
    for node in tree.nodes:
        if isinstance(node, Accumulator):
            own = frozenset({"M", "N"})
        elif isinstance(node, Operand):
            own = _EXTENTS[node.kind]
        else:
            own = frozenset()
        extents[id(node)] = own.union(*(extents[id(child)] for child in node.inputs))
    return {key for key, found in extents.items() if len(found) == 2}


_EXTENTS = {
    Kind.AUX: frozenset({"M", "N"}),
    Kind.ROW: frozenset({"N"}),
    Kind.COLUMN: frozenset({"M"}),
    Kind.SCALAR: frozenset[str](),
    Kind.AUTO: frozenset({"N"}),
}


def _rounded(trace: Trace, gradient: Symbol, dtype: str) -> Symbol:
    known = gradient.node
    return gradient if isinstance(known, Cast) and known.dtype == dtype else trace.cast(gradient, dtype)


def _through(trace: Trace, node: Apply, position: int, gradient: Symbol) -> Symbol | None:
    """The gradient of one input of an operation, of that of its output; None if it is zero."""
    rule = OPERATIONS[node.operation].derivatives[position]
    if rule is None:
        return None
    output = Symbol(node, trace)
    inputs = tuple(Symbol(child, trace) for child in node.operands)
    factor = rule(functions, (output,) if node.operation in _BY_OUTPUT else inputs, output)
    if (node.operation, position) in _MULTIPLIED:
        product: Symbol = functions.mul(gradient, factor)
        return product
    # equal constants are one node: a zero of the operation is told from one that the rule writes by a copy of its own
    marked = tuple(Symbol(replace(v.node), trace) if _is_zero(v.node) else v for v in inputs)
    known = {id(value.node) for value in (*marked, output)}
    has_zeros = any(_is_zero(child) for child in node.operands)
    return _times(gradient, factor, rule(functions, marked, output) if has_zeros else factor, known)


def _inverse_square_of(node: Apply) -> Node | None:
    """What ``x ** -2`` is computed of, which is ``reciprocal(square(x))``; None for other operations."""
    inner = node.operands[0]
    is_power = node.operation == "reciprocal" and isinstance(inner, Apply) and inner.operation == "square"
    return inner.inputs[0] if is_power else None


def _through_inverse_square(output: Symbol, base: Symbol, gradient: Symbol) -> Symbol:
    # not by way of the square, whose derivative is 0 where that of the reciprocal is infinite
    product: Symbol = functions.mul(gradient, functions.mul(functions.div(output, base), -2.0))
    return product


def _is_step(node: Node) -> bool:
    """Whether a node is a step within one PyTorch function."""
    return isinstance(node, Apply) and node.intermediate


def _in_arms(gradient: Symbol, through: Callable[[Symbol], Symbol | None], given: set[int]) -> Symbol | None:
    """``through(gradient)``, computed within the arms that selected the gradient, so that its zeros stay zero.

    Args:
        gradient: of a step within one PyTorch function.
        through: linear: what becomes of the gradient; None if that is zero.
        given: ``id(node)`` of gradients that are whole, whatever they are made of.
    """
    node = gradient.node
    if not _selects_zero(node, given):
        return through(gradient)
    parts = [Symbol(child, gradient.recorder) for child in node.inputs]
    if len(parts) == 2:
        terms = [found for term in parts if (found := _in_arms(term, through, given)) is not None]
        return functools.reduce(functions.add, terms) if terms else None
    condition, *arms = parts
    one, other = (None if _is_zero(arm.node) else _in_arms(arm, through, given) for arm in arms)
    return _selection(condition, one, other)


def _sum_within(one: Symbol, other: Symbol, given: set[int]) -> Symbol:
    """The sum of two gradients of a step; of two selections by one condition the selection of the sums."""
    if _selects_zero(one.node, given) and _selects_zero(other.node, given):
        (condition, *arms), (same, *more) = one.node.inputs, other.node.inputs
        if condition is same and len(arms) == len(more) == 2:
            sums = []
            for left, right in zip(arms, more, strict=True):
                terms = [Symbol(term, one.recorder) for term in (left, right) if not _is_zero(term)]
                sums.append(functools.reduce(functions.add, terms) if terms else None)
            selected = _selection(Symbol(condition, one.recorder), *sums)
            return one if selected is None else selected
    total: Symbol = functions.add(one, other)
    return total


def _selects_zero(node: Node, given: set[int]) -> bool:
    """Whether a gradient is a selection with an arm that is zero, or a sum or selection of such."""
    if not isinstance(node, Apply) or id(node) in given:
        return False
    if node.operation == "add":
        return any(_selects_zero(term, given) for term in node.operands)
    return node.operation == "where" and any(_is_zero(arm) or _selects_zero(arm, given) for arm in node.operands[1:])


def _is_zero(node: Node) -> bool:
    return isinstance(node, Constant) and node.value == 0


def _selection(condition: Symbol, one: Symbol | None, other: Symbol | None) -> Symbol | None:
    """``where(condition, one, other)`` of gradients, None for one that is zero."""
    if one is None and other is None:
        return None
    if one is not None and other is not None and one.node is other.node:
        return one
    zero = condition.recorder.constant(0.0)
    selected: Symbol = functions.where(condition, zero if one is None else one, zero if other is None else other)
    return selected


def _times(gradient: Symbol, factor: Symbol | float, marked: Symbol | float, known: set[int]) -> Symbol | None:
    """``gradient * factor`` as autograd computes it; None where that is zero.

    ``known`` are the operation's own values in ``marked``, which is the factor once more.  By those it multiplies,
    whatever they are; what else is a selection, a quotient or a logarithm is the derivative's own, and takes the
    gradient in.
    """
    if is_number(factor):
        return _times_number(gradient, float(factor))
    assert isinstance(factor, Symbol) and isinstance(marked, Symbol)
    node, is_known = factor.node, id(marked.node) in known
    if isinstance(node, Constant) and (not is_known or abs(node.value) == 1):
        return _times_number(gradient, node.value)
    if isinstance(node, Apply) and not is_known:
        parts = [Symbol(child, factor.recorder) for child in node.operands]
        if node.operation == "where":
            condition, *arms = parts
            marks = [Symbol(child, factor.recorder) for child in marked.node.inputs[1:]]
            one, other = (_times(gradient, arm, mark, known) for arm, mark in zip(arms, marks, strict=True))
            return _selection(condition, one, other)
        if node.operation == "reciprocal":
            return _over(gradient, parts[0])
        if node.operation == "mul" and isinstance(parts[1].node, Constant) and _is_reciprocal(parts[0].node):
            # a number divided by a value
            scaled = _times_number(gradient, parts[1].node.value)
            return None if scaled is None else _over(scaled, Symbol(parts[0].node.inputs[0], factor.recorder))
        if node.operation == "log":
            logarithm: Symbol = functions.xlogy(gradient, parts[0])  # 0 where the gradient is, of log(0) too
            return logarithm
    product: Symbol = functions.mul(gradient, factor)
    return product


def _is_reciprocal(node: Node) -> bool:
    return isinstance(node, Apply) and node.operation == "reciprocal"


def _times_number(gradient: Symbol, number: float) -> Symbol | None:
    if number == 0:
        return None
    if abs(number) == 1:
        negative: Symbol = functions.neg(gradient)
        return gradient if number == 1 else negative
    product: Symbol = functions.mul(gradient, number)
    return product


def _over(gradient: Symbol, divisor: Symbol) -> Symbol:
    quotient: Symbol = functions.div(gradient, divisor)
    return quotient


def free_name(name: str, taken: set[str]) -> str:
    """The name, or one like it, that operands and outputs may still have; it is then taken."""
    chosen, count = name, 1
    while chosen in taken or chosen in RESERVED_NAMES or chosen == ACCUMULATOR:
        count += 1
        chosen = f"{name}_{count}"
    taken.add(chosen)
    return chosen

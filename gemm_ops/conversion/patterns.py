"""The patterns that conversion looks for, as data, and which of them a step belongs to.

    >>> [pattern.name for pattern in PATTERNS]
    ['activation', 'residual', 'scale', 'gate', 'elementwise']

A pattern is what one step after a product does; a fused call has one or several, such as "activation + gate".  They say
what reports call it and what ``fuse(model, patterns=...)`` selects.  Whether a step can be fused is another question,
which the language of epilogues answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What tells steps apart.

    Attributes:
        target: the name of the function or method: "add", "mul", "where".
        operands: what each operand is: "parameter" of the model, or a "value" that it computes.
        has_number: whether a number is among the arguments.
        values: how many of the arguments are the product or come of it.
    """

    target: str
    operands: tuple[str, ...]
    has_number: bool
    values: int


@dataclass(frozen=True)
class Pattern:
    """One pattern: the first whose ``matches`` holds is the step's.

    Attributes:
        name: what it is called.
        meaning: a formula.
        operand: what an operand of such a step is called.
        matches: whether a step is one.
    """

    name: str
    meaning: str
    operand: str
    matches: Callable[[Traits], bool]


_SUMS = ("add", "sub", "rsub")
_PRODUCTS = ("mul", "truediv", "div", "true_divide")

PATTERNS = (
    Pattern(
        "activation",
        "act(product)",
        "operand",
        lambda step: not step.operands and not (step.target in _PRODUCTS and step.has_number),
    ),
    Pattern("residual", "product + residual", "residual", lambda step: step.target in _SUMS and _one_value(step)),
    Pattern(
        "scale",
        "product * scale, of a number or a parameter",
        "scale",
        lambda step: step.target in _PRODUCTS and (not step.operands or step.operands == ("parameter",)),
    ),
    Pattern("gate", "act(product) * gate", "gate", lambda step: step.target in _PRODUCTS and _one_value(step)),
    Pattern("elementwise", "any other elementwise function of several tensors", "operand", lambda step: True),
)
NAMES = tuple(pattern.name for pattern in PATTERNS)


def _one_value(step: Traits) -> bool:
    return step.operands == ("value",)


def classify(step: Traits) -> Pattern:
    """The step's pattern."""
    return next(pattern for pattern in PATTERNS if pattern.matches(step))


def chosen_patterns(patterns: Iterable[str] | None) -> frozenset[str]:
    """The patterns asked for, by name; all for None.

    Raises:
        ValueError: for a name that is none.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    chosen = frozenset(NAMES if patterns is None else patterns)
    unknown = sorted(chosen - set(NAMES))
    if unknown:
        raise ValueError(f"unknown pattern {', '.join(unknown)}; expected some of {', '.join(NAMES)}")
    return chosen

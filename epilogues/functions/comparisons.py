"""Comparisons, which give conditions, logic on conditions, and selection by a condition."""

from __future__ import annotations

import math
from typing import Any

from .apply import Value, apply, is_conditional

__all__ = [
    "eq",
    "ge",
    "gt",
    "heaviside",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "le",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lt",
    "masked_fill",
    "ne",
    "signbit",
    "where",
]


def gt(x: Value, y: Value) -> Any:
    """Whether ``x > y``."""
    return apply("gt", x, y)


def ge(x: Value, y: Value) -> Any:
    """Whether ``x >= y``."""
    return apply("ge", x, y)


def lt(x: Value, y: Value) -> Any:
    """Whether ``x < y``."""
    return apply("lt", x, y)


def le(x: Value, y: Value) -> Any:
    """Whether ``x <= y``."""
    return apply("le", x, y)


def eq(x: Value, y: Value) -> Any:
    """Whether ``x == y``."""
    return apply("eq", x, y)


def ne(x: Value, y: Value) -> Any:
    """Whether ``x != y``."""
    return apply("ne", x, y)


def isnan(x: Value) -> Any:
    """Whether x is NaN."""
    return apply("isnan", x)


def isinf(x: Value) -> Any:
    """Whether x is infinite."""
    return apply("isinf", x)


def isfinite(x: Value) -> Any:
    """Whether x is neither infinite nor NaN."""
    return apply("isfinite", x)


def isposinf(x: Value) -> Any:
    """Whether x is infinity."""
    return eq(x, math.inf)


def isneginf(x: Value) -> Any:
    """Whether x is minus infinity."""
    return eq(x, -math.inf)


def signbit(x: Value) -> Any:
    """Whether the sign of x is minus, that of zeros and NaN too."""
    return lt(apply("copysign", 1.0, x), 0.0)


def logical_and(x: Value, y: Value) -> Any:
    """Whether x and y are true."""
    return apply("logical_and", truth(x), truth(y))


def logical_or(x: Value, y: Value) -> Any:
    """Whether x or y is true."""
    return apply("logical_or", truth(x), truth(y))


def logical_xor(x: Value, y: Value) -> Any:
    """Whether one of x and y is true, and the other is not."""
    return apply("logical_xor", truth(x), truth(y))


def logical_not(x: Value) -> Any:
    """Whether x is not true."""
    return apply("logical_not", truth(x))


def truth(x: Value) -> Any:
    """A condition as it is; of a value, whether it is not zero."""
    return x if is_conditional(x) else ne(x, 0.0)


def where(condition: Value, x: Value, y: Value) -> Any:
    """``x`` where the condition is true, ``y`` where it is not; of two conditions, a condition."""
    if is_conditional(x) and is_conditional(y):
        return logical_or(logical_and(condition, x), logical_and(logical_not(condition), y))
    return apply("where", condition, x, y)


def masked_fill(x: Value, mask: Value, value: Value) -> Any:
    """``value`` where the mask, a condition, is true, ``x`` where it is not."""
    return where(mask, value, x)


def heaviside(x: Value, values: Value) -> Any:
    """0 where x < 0, ``values`` where it is 0, 1 where it is larger."""
    return where(eq(x, 0.0), values, where(gt(x, 0.0), 1.0, 0.0))

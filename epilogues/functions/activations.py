"""Activations."""

from __future__ import annotations

import math
from typing import Any

from ..errors import EpilogueError
from ..operand_shapes import is_number
from ..source import explain, user_location
from .apply import Value, apply, check_number
from .comparisons import ge, le, where

__all__ = [
    "celu",
    "elu",
    "expit",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "prelu",
    "quick_gelu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "swish",
    "tanhshrink",
    "threshold",
]


def relu(x: Value) -> Any:
    """max(x, 0); NaN stays NaN."""
    return apply("relu", x)


def relu6(x: Value) -> Any:
    """x, no smaller than 0 and no larger than 6."""
    return hardtanh(x, 0.0, 6.0)


def hardtanh(x: Value, min_val: Value = -1.0, max_val: Value = 1.0) -> Any:
    """x, no smaller than ``min_val`` and no larger than ``max_val``; unlike clamp, without gradient at the bounds.

    Raises:
        EpilogueError: if both bounds are numbers, and ``min_val`` is the larger.
    """
    if is_number(min_val) and is_number(max_val):
        check_number("hardtanh", "min_val", min_val, not min_val > max_val, f"no larger than max_val, {max_val}")
    above = relu(x) if is_number(min_val) and min_val == 0 else where(le(x, min_val), min_val, x)
    return where(ge(x, max_val), max_val, above)


def leaky_relu(x: Value, negative_slope: Value = 0.01) -> Any:
    """``x`` where x > 0, else ``x * negative_slope``."""
    return apply("leaky_relu", x, negative_slope)


def prelu(x: Value, weight: Value) -> Any:
    """``x`` where x > 0, else ``x * weight``; the weight may be an operand."""
    return apply("leaky_relu", x, weight)


def threshold(x: Value, threshold: Value, value: Value) -> Any:
    """``x`` where it is above the threshold, else ``value``."""
    return apply("threshold", x, threshold, value)


def sigmoid(x: Value) -> Any:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


expit = sigmoid


def logsigmoid(x: Value) -> Any:
    """``log(sigmoid(x))``."""
    return apply("logsigmoid", x)


def silu(x: Value) -> Any:
    """``x * sigmoid(x)``, also called swish."""
    return apply("silu", x)


swish = silu


def gelu(x: Value, approximate: str = "none") -> Any:
    """``x * Phi(x)``, by the error function ("none") or by its approximation with tanh ("tanh").

    Raises:
        EpilogueError: for any other ``approximate``.
    """
    operation = {"none": "gelu_erf", "tanh": "gelu_tanh"}.get(approximate)
    if operation is None:
        raise EpilogueError(
            explain(f'gelu: expected approximate="none" or "tanh", got {approximate!r}', user_location())
        )
    return apply(operation, x)


def quick_gelu(x: Value) -> Any:
    """``x * sigmoid(1.702 * x)``."""
    return apply("quick_gelu", x)


def softplus(x: Value, beta: Value = 1.0, threshold: Value = 20.0) -> Any:
    """``log(1 + exp(beta * x)) / beta``; x itself where ``beta * x`` is above the threshold."""
    return apply("softplus", x, beta, threshold)


def mish(x: Value) -> Any:
    """``x * tanh(softplus(x))``."""
    return apply("mish", x)


def elu(x: Value, alpha: Value = 1.0) -> Any:
    """``x`` where x > 0, else ``alpha * (exp(x) - 1)``."""
    return apply("elu", x, alpha)


def selu(x: Value) -> Any:
    """1.0507 times x where x > 0, else 1.0507 * 1.6733 * (exp(x) - 1)."""
    return apply("selu", x)


def celu(x: Value, alpha: Value = 1.0) -> Any:
    """``x`` where x > 0, else ``alpha * (exp(x / alpha) - 1)``.

    Raises:
        EpilogueError: if ``alpha`` is the number 0.
    """
    check_number("celu", "alpha", alpha, bool(not is_number(alpha) or alpha != 0), "other than 0")
    return apply("celu", x, alpha)


def hardsigmoid(x: Value) -> Any:
    """``clamp(x + 3, 0, 6) / 6``."""
    return apply("hardsigmoid", x)


def hardswish(x: Value) -> Any:
    """``x * clamp(x + 3, 0, 6) / 6``."""
    return apply("hardswish", x)


def hardshrink(x: Value, lambd: Value = 0.5) -> Any:
    """0 where x is between -lambd and lambd, else ``x``."""
    return apply("hardshrink", x, lambd)


def softshrink(x: Value, lambd: Value = 0.5) -> Any:
    """x, nearer to 0 by ``lambd``.

    Raises:
        EpilogueError: if ``lambd`` is a number smaller than 0.
    """
    check_number("softshrink", "lambd", lambd, bool(not is_number(lambd) or 0 <= lambd < math.inf), "0 or larger")
    return apply("softshrink", x, lambd)


def softsign(x: Value) -> Any:
    """``x / (1 + abs(x))``."""
    return apply("softsign", x)


def tanhshrink(x: Value) -> Any:
    """``x - tanh(x)``."""
    return apply("tanhshrink", x)

"""Powers, roots, exponentials, logarithms, trigonometry, error functions."""

from __future__ import annotations

from typing import Any

from ..operand_shapes import is_number
from .apply import Value, apply, one_function
from .arithmetic import clamp

__all__ = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cos",
    "cosh",
    "entr",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "float_power",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logaddexp2",
    "logit",
    "pow",
    "reciprocal",
    "rsqrt",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "xlogy",
]


def reciprocal(x: Value) -> Any:
    """``1 / x``."""
    return apply("reciprocal", x)


def square(x: Value) -> Any:
    """``x * x``."""
    return apply("square", x)


def sqrt(x: Value) -> Any:
    """The square root of x."""
    return apply("sqrt", x)


def rsqrt(x: Value) -> Any:
    """``1 / sqrt(x)``."""
    return apply("rsqrt", x)


def pow(x: Value, y: Value) -> Any:
    """``x ** y``.

    For some numbers y PyTorch has other ways than for tensors, which are taken here too.
    """
    if not is_number(y):
        return apply("pow", x, y)
    if y == 1:
        return x if not is_number(x) else float(x)
    if y == 3:
        return apply("mul", apply("mul", x, x), x)
    if y == -2:
        return reciprocal(square(x))
    shorter = {2.0: square, 0.5: sqrt, -1.0: reciprocal, -0.5: rsqrt}.get(float(y))
    return apply("pow", x, y) if shorter is None else shorter(x)


def float_power(x: Value, y: Value) -> Any:
    """``x ** y``, in the compute dtype as everything else."""
    return pow(x, y)


def exp(x: Value) -> Any:
    """The exponential of x."""
    return apply("exp", x)


def exp2(x: Value) -> Any:
    """``2 ** x``."""
    return apply("exp2", x)


def expm1(x: Value) -> Any:
    """``exp(x) - 1``, exact for small x too."""
    return apply("expm1", x)


def log(x: Value) -> Any:
    """The natural logarithm of x."""
    return apply("log", x)


def log2(x: Value) -> Any:
    """The logarithm of x to base 2."""
    return apply("log2", x)


def log10(x: Value) -> Any:
    """The logarithm of x to base 10."""
    return apply("log10", x)


def log1p(x: Value) -> Any:
    """``log(1 + x)``, exact for small x too."""
    return apply("log1p", x)


def logaddexp(x: Value, y: Value) -> Any:
    """``log(exp(x) + exp(y))``."""
    return apply("logaddexp", x, y)


def logaddexp2(x: Value, y: Value) -> Any:
    """``log2(2 ** x + 2 ** y)``."""
    return apply("logaddexp2", x, y)


def xlogy(x: Value, y: Value) -> Any:
    """``x * log(y)``; 0 where x is 0 and y is not NaN."""
    return apply("xlogy", x, y)


@one_function
def logit(x: Value, eps: float | None = None) -> Any:
    """``log(x / (1 - x))``, the inverse of sigmoid; with ``eps``, of x clamped to [eps, 1 - eps]."""
    if eps is not None:
        x = clamp(x, eps, 1 - eps)
    return apply("logit", x)


def entr(x: Value) -> Any:
    """``-x * log(x)``, 0 at 0 and -inf below."""
    return apply("entr", x)


def sinc(x: Value) -> Any:
    """``sin(pi * x) / (pi * x)``, 1 at 0."""
    return apply("sinc", x)


def sin(x: Value) -> Any:
    """The sine of x."""
    return apply("sin", x)


def cos(x: Value) -> Any:
    """The cosine of x."""
    return apply("cos", x)


def tan(x: Value) -> Any:
    """The tangent of x."""
    return apply("tan", x)


def asin(x: Value) -> Any:
    """The arc sine of x."""
    return apply("asin", x)


def acos(x: Value) -> Any:
    """The arc cosine of x."""
    return apply("acos", x)


def atan(x: Value) -> Any:
    """The arc tangent of x."""
    return apply("atan", x)


def atan2(y: Value, x: Value) -> Any:
    """The angle of the point (x, y)."""
    return apply("atan2", y, x)


def sinh(x: Value) -> Any:
    """The hyperbolic sine of x."""
    return apply("sinh", x)


def cosh(x: Value) -> Any:
    """The hyperbolic cosine of x."""
    return apply("cosh", x)


def tanh(x: Value) -> Any:
    """The hyperbolic tangent of x."""
    return apply("tanh", x)


def asinh(x: Value) -> Any:
    """The inverse hyperbolic sine of x."""
    return apply("asinh", x)


def acosh(x: Value) -> Any:
    """The inverse hyperbolic cosine of x."""
    return apply("acosh", x)


def atanh(x: Value) -> Any:
    """The inverse hyperbolic tangent of x."""
    return apply("atanh", x)


def erf(x: Value) -> Any:
    """The error function of x."""
    return apply("erf", x)


def erfc(x: Value) -> Any:
    """``1 - erf(x)``, exact for large x too."""
    return apply("erfc", x)

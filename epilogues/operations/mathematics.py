"""Rows of the operation table: powers, roots, exponentials, logarithms, trigonometry, error functions.

In the derivatives ``f`` is the module :mod:`epilogues.functions`, ``z`` the operation's output.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .row import row

_LN_2, _LN_10 = math.log(2), math.log(10)
_TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)


def _d_logit(f: Any, x: Any, z: Any) -> Any:
    outside = f.logical_or(f.lt(x, 0.0), f.gt(x, 1.0))
    return f.where(outside, math.nan, f.reciprocal(x * (1 - x)))


def _d_sinc(f: Any, x: Any, z: Any) -> Any:
    scaled, area = x * math.pi, x * x * math.pi
    return f.where(f.eq(area, 0.0), 0.0, (scaled * f.cos(scaled) - f.sin(scaled)) / area)


def _over(f: Any, x: Any, y: Any) -> Any:
    """``x / y``, 0 where y is."""
    return f.where(f.eq(y, 0.0), 0.0, x / y)


ROWS = (
    # powers and roots
    row("reciprocal", torch.reciprocal, lambda f, x, z: -(z * z)),
    row("square", torch.square, lambda f, x, z: 2 * x),
    row("sqrt", torch.sqrt, lambda f, x, z: 0.5 / z),
    row("rsqrt", torch.rsqrt, lambda f, x, z: -0.5 * (z * z * z)),
    row(
        "pow",
        torch.pow,
        lambda f, x, y, z: f.where(f.eq(y, 0.0), 0.0, y * f.pow(x, y - 1)),
        lambda f, x, y, z: f.where(f.logical_and(f.eq(x, 0.0), f.ge(y, 0.0)), 0.0, z * f.log(x)),
        note="1 where the exponent is 0, NaN where a negative number has an exponent that is no integer",
    ),
    # exponentials and logarithms
    row("exp", torch.exp, lambda f, x, z: z),
    row("exp2", torch.exp2, lambda f, x, z: z * _LN_2),
    row("expm1", torch.expm1, lambda f, x, z: z + 1),
    row("log", torch.log, lambda f, x, z: f.reciprocal(x)),
    row("log2", torch.log2, lambda f, x, z: 1 / (x * _LN_2)),
    row("log10", torch.log10, lambda f, x, z: 1 / (x * _LN_10)),
    row("log1p", torch.log1p, lambda f, x, z: f.reciprocal(x + 1)),
    row(
        "logaddexp",
        torch.logaddexp,
        lambda f, x, y, z: 1 / (1 + f.exp(y - x)),
        lambda f, x, y, z: 1 / (1 + f.exp(x - y)),
        note="log(exp(x) + exp(y)), without overflow",
    ),
    row(
        "logaddexp2",
        torch.logaddexp2,
        lambda f, x, y, z: 1 / (1 + f.exp2(y - x)),
        lambda f, x, y, z: 1 / (1 + f.exp2(x - y)),
        note="log2(2**x + 2**y), without overflow",
    ),
    row(
        "xlogy",
        torch.xlogy,
        lambda f, x, y, z: f.where(f.logical_and(f.eq(x, 0.0), f.le(y, 0.0)), 0.0, f.log(y)),
        lambda f, x, y, z: x / y,
        note="x * log(y), 0 where x is 0 and y is not NaN",
    ),
    row("logit", torch.logit, _d_logit, note="log(x / (1 - x)), the inverse of sigmoid"),
    row(
        "entr",
        torch.special.entr,
        lambda f, x, z: -(1 + f.log(x)),
        note="-x * log(x), 0 at 0 and -inf below",
    ),
    # trigonometry
    row("sin", torch.sin, lambda f, x, z: f.cos(x)),
    row("sinc", torch.sinc, _d_sinc, note="sin(pi x) / (pi x), 1 at 0"),
    row("cos", torch.cos, lambda f, x, z: -f.sin(x)),
    row("tan", torch.tan, lambda f, x, z: 1 + z * z),
    row("asin", torch.asin, lambda f, x, z: f.rsqrt(1 - x * x)),
    row("acos", torch.acos, lambda f, x, z: -f.rsqrt(1 - x * x)),
    row("atan", torch.atan, lambda f, x, z: f.reciprocal(x * x + 1)),
    row(
        "atan2",
        torch.atan2,
        lambda f, y, x, z: _over(f, x, y * y + x * x),
        lambda f, y, x, z: _over(f, -y, y * y + x * x),
        note="the angle of the point (second input, first input); its derivatives at (0, 0) are 0",
    ),
    row("sinh", torch.sinh, lambda f, x, z: f.cosh(x)),
    row("cosh", torch.cosh, lambda f, x, z: f.sinh(x)),
    row("tanh", torch.tanh, lambda f, x, z: 1 - z * z),
    row("asinh", torch.asinh, lambda f, x, z: f.rsqrt(x * x + 1)),
    row("acosh", torch.acosh, lambda f, x, z: f.rsqrt(x * x - 1)),
    row("atanh", torch.atanh, lambda f, x, z: f.reciprocal(1 - x * x)),
    # error functions
    row("erf", torch.erf, lambda f, x, z: _TWO_OVER_SQRT_PI * f.exp(-(x * x))),
    row("erfc", torch.erfc, lambda f, x, z: -_TWO_OVER_SQRT_PI * f.exp(-(x * x))),
)

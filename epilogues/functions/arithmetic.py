"""Arithmetic, bounds, and rounding to integers."""

from __future__ import annotations

import builtins
import math
from typing import Any

import torch
from torch import Tensor

from ..errors import EpilogueError
from ..operand_shapes import is_number
from ..source import explain, user_location
from .apply import Value, apply, one_function
from .comparisons import eq, gt, isnan, logical_and, logical_xor, lt, ne, where

__all__ = [
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "ceil",
    "clamp",
    "copysign",
    "deg2rad",
    "div",
    "floor",
    "floor_divide",
    "fma",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "hypot",
    "identity",
    "lerp",
    "maximum",
    "minimum",
    "mul",
    "nan_to_num",
    "neg",
    "rad2deg",
    "remainder",
    "round",
    "rsub",
    "sign",
    "sub",
    "trunc",
]


def identity(x: Value) -> Any:
    """``x`` itself."""
    return apply("identity", x)


def neg(x: Value) -> Any:
    """``-x``."""
    return apply("neg", x)


def add(x: Value, y: Value) -> Any:
    """``x + y``."""
    return apply("add", x, y)


def sub(x: Value, y: Value) -> Any:
    """``x - y``."""
    return apply("sub", x, y)


def mul(x: Value, y: Value) -> Any:
    """``x * y``."""
    return apply("mul", x, y)


def div(x: Value, y: Value) -> Any:
    """``x / y``."""
    return apply("div", x, y)


def rsub(x: Value, y: Value) -> Any:
    """``y - x``."""
    return sub(y, x)


def fma(x: Value, y: Value, z: Value) -> Any:
    """``x * y + z``, rounded once in float32."""
    return apply("fma", x, y, z)


@one_function
def addcmul(x: Value, a: Value, b: Value, value: Value = 1.0) -> Any:
    """``x + value * a * b``, the last product and the sum rounded once."""
    return fma(a, b, x) if is_number(value) and value == 1 else fma(value, mul(a, b), x)


@one_function
def addcdiv(x: Value, a: Value, b: Value, value: Value = 1.0) -> Any:
    """``x + value * (a / b)``, the product and the sum rounded once."""
    return add(x, div(a, b)) if is_number(value) and value == 1 else fma(value, div(a, b), x)


def scaled(x: Value, factor: Value) -> Any:
    """``factor * x``; ``x`` itself where the factor is the number 1."""
    return x if is_number(factor) and factor == 1 else mul(factor, x)


def lerp(start: Value, end: Value, weight: Value) -> Any:
    """``start + weight * (end - start)``."""
    return apply("lerp", start, end, weight)


def minimum(x: Value, y: Value) -> Any:
    """The smaller of x and y; NaN if either is."""
    return apply("minimum", x, y)


def maximum(x: Value, y: Value) -> Any:
    """The larger of x and y; NaN if either is."""
    return apply("maximum", x, y)


def fmin(x: Value, y: Value) -> Any:
    """The smaller of x and y; the other one where one is NaN."""
    return apply("fmin", x, y)


def fmax(x: Value, y: Value) -> Any:
    """The larger of x and y; the other one where one is NaN."""
    return apply("fmax", x, y)


def clamp(x: Value, min: Value | None = None, max: Value | None = None) -> Any:
    """x, no smaller than ``min`` and no larger than ``max``; either bound may be left out.

    NaN stays NaN, a bound that is NaN makes the result NaN, and ``max`` wins where the bounds cross.

    Raises:
        EpilogueError: with neither bound.
    """
    if min is None and max is None:
        raise EpilogueError(
            explain(
                "clamp got neither bound; expected at least one of min and max",
                user_location(),
                instead="write ep.clamp(x, min=...), ep.clamp(x, max=...) or both",
            )
        )
    low = -float("inf") if min is None else min
    high = float("inf") if max is None else max
    return apply("clamp", x, low, high)


def abs(x: Value) -> Any:
    """The absolute value of x."""
    return apply("abs", x)


def sign(x: Value) -> Any:
    """-1, 0 or 1, as x is negative, 0 or positive; 0 for NaN."""
    return apply("sign", x)


def copysign(x: Value, y: Value) -> Any:
    """The absolute value of x with the sign of y."""
    return apply("copysign", x, y)


def hypot(x: Value, y: Value) -> Any:
    """``sqrt(x * x + y * y)``."""
    return apply("hypot", x, y)


def floor(x: Value) -> Any:
    """The largest integer that is no larger than x."""
    return apply("floor", x)


def ceil(x: Value) -> Any:
    """The smallest integer that is no smaller than x."""
    return apply("ceil", x)


def trunc(x: Value) -> Any:
    """The integer between 0 and x that is nearest to x."""
    return apply("trunc", x)


def round(x: Value, decimals: int = 0) -> Any:
    """The integer nearest to x, of two the even one; or the nearest multiple of ``10**-decimals``."""
    if decimals == 0:
        return apply("round", x)
    unit = 10.0 ** builtins.abs(decimals)
    return div(round(mul(x, unit)), unit) if decimals > 0 else mul(round(div(x, unit)), unit)


def frac(x: Value) -> Any:
    """What follows the point: ``x - trunc(x)``."""
    return sub(x, trunc(x))


def fmod(x: Value, y: Value) -> Any:
    """What is left of x divided by y, with the sign of x."""
    return apply("fmod", x, y)


def remainder(x: Value, y: Value) -> Any:
    """What is left of x divided by y, with the sign of y, as ``%`` in Python."""
    return apply("remainder", x, y)


def floor_divide(x: Value, y: Value) -> Any:
    """The floor of the exact ``x / y``, as ``//`` in Python, where the rounded quotient may be one too large."""
    left = fmod(x, y)
    borrows = logical_and(ne(left, 0.0), logical_xor(lt(y, 0.0), lt(left, 0.0)))
    quotient = div(sub(x, left), y)
    quotient = where(borrows, sub(quotient, 1.0), quotient)
    below = floor(quotient)
    whole = where(gt(sub(quotient, below), 0.5), add(below, 1.0), below)
    ratio = div(x, y)
    whole = where(ne(quotient, 0.0), whole, copysign(0.0, ratio))
    return where(eq(y, 0.0), ratio, whole)


def nan_to_num(x: Value, nan: Value | None = 0.0, posinf: Value | None = None, neginf: Value | None = None) -> Any:
    """x, with other numbers in place of NaN and the infinities: 0, and the largest and smallest of float32."""
    largest = torch.finfo(torch.float64 if isinstance(x, Tensor) and x.dtype == torch.float64 else torch.float32).max
    above = where(eq(x, math.inf), largest if posinf is None else posinf, x)
    within = where(eq(x, -math.inf), -largest if neginf is None else neginf, above)
    return where(isnan(x), 0.0 if nan is None else nan, within)


def deg2rad(x: Value) -> Any:
    """The angle x of degrees, in radians."""
    return mul(x, math.pi / 180)


def rad2deg(x: Value) -> Any:
    """The angle x of radians, in degrees."""
    return mul(x, 180 / math.pi)

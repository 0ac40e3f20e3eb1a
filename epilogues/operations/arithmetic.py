"""Rows of the operation table: arithmetic, bounds, rounding to integers, and selection.

In the derivatives ``f`` is the module :mod:`epilogues.functions`, ``z`` the operation's output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..tree import Constant
from .row import row


def _clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.clamp(x, low, high)


def _is_absent(bound: Any, infinity: float) -> bool:
    """Whether a bound of a clamp is none: this infinity, as a constant of a tree."""
    node = getattr(bound, "node", None)
    return isinstance(node, Constant) and node.value == infinity


def _d_clamp_low(f: Any, x: Any, low: Any, high: Any, z: Any) -> Any:
    below = f.lt(x, low)
    return f.where(below if _is_absent(high, math.inf) else f.logical_and(f.lt(low, high), below), 1.0, 0.0)


def _d_clamp_high(f: Any, x: Any, low: Any, high: Any, z: Any) -> Any:
    above = f.gt(x, high)
    return f.where(above if _is_absent(low, -math.inf) else f.logical_or(above, f.lt(high, low)), 1.0, 0.0)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    if a.dtype != torch.float32:
        return a * b + c
    return (a.double() * b.double() + c.double()).float()  # the product of two float32 is exact in float64


ROWS = (
    row("identity", lambda x: x, lambda f, x, z: 1.0),
    row("neg", torch.neg, lambda f, x, z: -1.0),
    row("add", torch.add, lambda f, x, y, z: 1.0, lambda f, x, y, z: 1.0, keeps_numbers=True),
    row("sub", torch.sub, lambda f, x, y, z: 1.0, lambda f, x, y, z: -1.0, keeps_numbers=True),
    row("mul", torch.mul, lambda f, x, y, z: y, lambda f, x, y, z: x, keeps_numbers=True),
    row(
        "div",
        torch.div,
        lambda f, x, y, z: f.reciprocal(y),
        lambda f, x, y, z: -(z / y),
        note="true division, rounded to nearest",
        keeps_numbers=True,
    ),
    row(
        "fma",
        _fma,
        lambda f, a, b, c, z: b,
        lambda f, a, b, c, z: a,
        lambda f, a, b, c, z: 1.0,
        note="a * b + c, rounded once in float32",
        keeps_numbers=True,
    ),
    row(
        "lerp",
        torch.lerp,
        lambda f, a, b, weight, z: 1 - weight,
        lambda f, a, b, weight, z: weight,
        lambda f, a, b, weight, z: b - a,
        note="a + weight * (b - a), computed from the nearer end",
        keeps_numbers=True,
    ),
    # bounds
    row(
        "minimum",
        torch.minimum,
        lambda f, x, y, z: f.where(f.eq(x, y), 0.5, f.where(f.gt(x, y), 0.0, 1.0)),
        lambda f, x, y, z: f.where(f.eq(x, y), 0.5, f.where(f.lt(x, y), 0.0, 1.0)),
        note="NaN if either input is NaN; a tie shares the gradient",
    ),
    row(
        "maximum",
        torch.maximum,
        lambda f, x, y, z: f.where(f.eq(x, y), 0.5, f.where(f.lt(x, y), 0.0, 1.0)),
        lambda f, x, y, z: f.where(f.eq(x, y), 0.5, f.where(f.gt(x, y), 0.0, 1.0)),
        note="NaN if either input is NaN; a tie shares the gradient",
    ),
    row(
        "fmin",
        torch.fmin,
        lambda f, x, y, z: f.where(f.logical_or(f.le(x, y), f.isnan(y)), 1.0, 0.0),
        lambda f, x, y, z: f.where(f.logical_or(f.le(x, y), f.isnan(y)), 0.0, 1.0),
        note="the other input if one is NaN",
    ),
    row(
        "fmax",
        torch.fmax,
        lambda f, x, y, z: f.where(f.logical_or(f.ge(x, y), f.isnan(y)), 1.0, 0.0),
        lambda f, x, y, z: f.where(f.logical_or(f.ge(x, y), f.isnan(y)), 0.0, 1.0),
        note="the other input if one is NaN",
    ),
    row(
        "clamp",
        _clamp,
        lambda f, x, low, high, z: f.where(f.logical_and(f.ge(x, low), f.le(x, high)), 1.0, 0.0),
        _d_clamp_low,
        _d_clamp_high,
        note="NaN stays NaN; the upper bound wins where bounds cross",
        keeps_numbers=True,
    ),
    # sign and size
    row("abs", torch.abs, lambda f, x, z: f.sign(x)),
    row("sign", torch.sign, None, note="0 for NaN"),
    row(
        "copysign",
        torch.copysign,
        lambda f, x, y, z: f.where(f.eq(x, 0.0), 0.0, z / x),
        None,
        note="the size of the first input, the sign of the second, that of zeros and NaN too",
    ),
    row("hypot", torch.hypot, lambda f, x, y, z: x / z, lambda f, x, y, z: y / z),
    # to integers, and what they leave
    row("floor", torch.floor, None),
    row("ceil", torch.ceil, None),
    row("trunc", torch.trunc, None),
    row("round", torch.round, None, note="halves to the even integer"),
    row(
        "fmod",
        torch.fmod,
        lambda f, x, y, z: 1.0,
        lambda f, x, y, z: -f.trunc(x / y),
        note="the sign of the first input; exact",
    ),
    row(
        "remainder",
        torch.remainder,
        lambda f, x, y, z: 1.0,
        lambda f, x, y, z: -f.floor_divide(x, y),
        note="the sign of the second input, as % in Python",
    ),
    # selection
    row(
        "where",
        torch.where,
        None,
        lambda f, condition, a, b, z: f.where(condition, 1.0, 0.0),
        lambda f, condition, a, b, z: f.where(condition, 0.0, 1.0),
        conditions=(0,),
    ),
)

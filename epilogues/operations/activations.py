"""Rows of the operation table: the activations of ``torch.nn.functional``, parameters as further inputs.

In the derivatives ``f`` is the module :mod:`epilogues.functions`, ``z`` the operation's output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .row import row

_SQRT_HALF = math.sqrt(0.5)
_PDF = 1 / math.sqrt(2 * math.pi)
_GELU_BETA, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
_QUICK = 1.702


def _leaky_relu(x: Tensor, negative_slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


# In a branch that is not taken an exponential of a large x overflows, and autograd would make NaN of it: 0 * inf.
# So the branch gets 0 there.


def _elu(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x <= 0, torch.expm1(torch.where(x <= 0, x, 0.0)) * alpha, x)


def _celu(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x < 0, torch.expm1(torch.where(x < 0, x, 0.0) * (1 / alpha)) * alpha, x)


def _softplus(x: Tensor, beta: Tensor, threshold: Tensor) -> Tensor:
    scaled = x * beta
    linear = scaled > threshold
    return torch.where(linear, x, torch.log1p(torch.exp(torch.where(linear, 0.0, scaled))) / beta)


def _hardshrink(x: Tensor, lambd: Tensor) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, x)


def _softshrink(x: Tensor, lambd: Tensor) -> Tensor:
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, torch.where(x == x, 0.0, x)))


def _threshold(x: Tensor, threshold: Tensor, value: Tensor) -> Tensor:
    return torch.where(x <= threshold, value, x)


def _d_silu(f: Any, x: Any, z: Any) -> Any:
    s = f.sigmoid(x)
    return s * (1 + x * (1 - s))


def _d_gelu_erf(f: Any, x: Any, z: Any) -> Any:
    return 0.5 * f.erfc(x * -_SQRT_HALF) + x * (f.exp(x * x * -0.5) * _PDF)


def _d_gelu_tanh(f: Any, x: Any, z: Any) -> Any:
    square = x * x
    t = f.tanh(_GELU_BETA * (x + _GELU_CUBIC * (square * x)))
    inner = _GELU_BETA * (1 + 3 * _GELU_CUBIC * square)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def _d_quick_gelu(f: Any, x: Any, z: Any) -> Any:
    s = f.sigmoid(_QUICK * x)
    return s + x * ((1 - s) * s) * _QUICK


def _d_mish(f: Any, x: Any, z: Any) -> Any:
    t = f.tanh(f.softplus(x))
    return t + x * f.sigmoid(x) * (1 - t * t)


def _d_hardswish(f: Any, x: Any, z: Any) -> Any:
    return f.where(f.le(x, -3.0), 0.0, f.where(f.lt(x, 3.0), x / 3 + 0.5, 1.0))


def _beyond(f: Any, x: Any, lambd: Any) -> Any:
    """1 where shrinking leaves something, else 0."""
    return f.where(f.logical_or(f.lt(x, -lambd), f.gt(x, lambd)), 1.0, 0.0)


def _not_above_0(f: Any, x: Any) -> Any:
    """X where it is used, so that what is not used does not overflow: the second derivative multiplies it by 0."""
    return f.where(f.le(x, 0.0), x, 0.0)


def _d_celu_alpha(f: Any, x: Any, alpha: Any, z: Any) -> Any:
    scaled = x / alpha
    return f.where(f.gt(x, 0.0), 0.0, f.expm1(scaled) - scaled * f.exp(scaled))


ROWS = (
    row("relu", torch.relu, lambda f, x, z: f.where(f.le(x, 0.0), 0.0, 1.0), note="NaN stays NaN"),
    row(
        "leaky_relu",
        _leaky_relu,
        lambda f, x, slope, z: f.where(f.gt(x, 0.0), 1.0, slope),
        lambda f, x, slope, z: f.where(f.gt(x, 0.0), 0.0, x),
        note="second input: the negative slope",
        keeps_numbers=True,
    ),
    row(
        "threshold",
        _threshold,
        lambda f, x, threshold, value, z: f.where(f.le(x, threshold), 0.0, 1.0),
        None,
        lambda f, x, threshold, value, z: f.where(f.le(x, threshold), 1.0, 0.0),
        note="inputs: x, threshold, and the value where x is not above it",
    ),
    row("sigmoid", torch.sigmoid, lambda f, x, z: (1 - z) * z),
    row("logsigmoid", F.logsigmoid, lambda f, x, z: f.sigmoid(-x), note="log(sigmoid(x)), without cancellation"),
    row("silu", F.silu, _d_silu),
    row("gelu_erf", lambda x: F.gelu(x), _d_gelu_erf, note="the exact GELU"),
    row(
        "gelu_tanh",
        lambda x: F.gelu(x, approximate="tanh"),
        _d_gelu_tanh,
        note="on the device x * sigmoid(2u): no cancellation where x is very negative",
    ),
    row(
        "quick_gelu",
        lambda x: x * torch.sigmoid(_QUICK * x),
        _d_quick_gelu,
        note="x * sigmoid(1.702 x)",
        eager=lambda f, x: f.mul(x, f.sigmoid(f.mul(_QUICK, x))),
    ),
    row(
        "softplus",
        _softplus,
        lambda f, x, beta, threshold, z: f.where(f.gt(x * beta, threshold), 1.0, f.sigmoid(x * beta)),
        lambda f, x, beta, threshold, z: f.where(f.gt(x * beta, threshold), 0.0, (x * f.sigmoid(x * beta) - z) / beta),
        None,
        note="inputs: x, beta, threshold; x itself where beta * x is above the threshold",
        keeps_numbers=True,
    ),
    row("mish", F.mish, _d_mish, note="x * tanh(softplus(x))"),
    row(
        "elu",
        _elu,
        lambda f, x, alpha, z: f.where(f.le(x, 0.0), alpha * f.exp(_not_above_0(f, x)), 1.0),
        lambda f, x, alpha, z: f.where(f.gt(x, 0.0), 0.0, f.expm1(x)),
        note="second input: alpha; at 0 the derivative is alpha, as PyTorch has it",
        keeps_numbers=True,
    ),
    row(
        "selu",
        F.selu,
        lambda f, x, z: f.where(f.le(x, 0.0), _SELU_ALPHA * _SELU_SCALE * f.exp(_not_above_0(f, x)), _SELU_SCALE),
    ),
    row(
        "celu",
        _celu,
        lambda f, x, alpha, z: f.where(f.le(x, 0.0), f.exp(_not_above_0(f, x) / alpha), 1.0),
        _d_celu_alpha,
        note="second input: alpha",
        keeps_numbers=True,
    ),
    row("hardsigmoid", F.hardsigmoid, lambda f, x, z: f.where(f.lt(f.abs(x), 3.0), 1 / 6, 0.0)),
    row("hardswish", F.hardswish, _d_hardswish),
    row(
        "hardshrink",
        _hardshrink,
        lambda f, x, lambd, z: _beyond(f, x, lambd),
        None,
        note="second input: lambda; NaN stays NaN, with a derivative of 0 (PyTorch's own kernels differ there)",
    ),
    row(
        "softshrink",
        _softshrink,
        lambda f, x, lambd, z: _beyond(f, x, lambd),
        lambda f, x, lambd, z: f.where(f.gt(x, lambd), -1.0, f.where(f.lt(x, -lambd), 1.0, 0.0)),
        note="second input: lambda; NaN stays NaN, with a derivative of 0 (PyTorch's own kernels differ there)",
    ),
    row(
        "softsign",
        F.softsign,
        lambda f, x, z: (1 - f.abs(z)) / (1 + f.abs(x)),
        note="NaN at infinity",
        eager=lambda f, x: f.div(x, f.add(f.abs(x), 1.0)),
    ),
    row(
        "tanhshrink",
        F.tanhshrink,
        lambda f, x, z: f.square(f.tanh(x)),
        note="x - tanh(x)",
        eager=lambda f, x: f.sub(x, f.tanh(x)),
    ),
)

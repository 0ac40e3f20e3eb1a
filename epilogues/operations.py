"""The operation table: one row says all there is to know about an elementwise operation.

    >>> from epilogues.operations import OPERATIONS
    >>> OPERATIONS["gelu_tanh"].arity
    1

Everything else reads this table: the reference calls ``reference``, the tracer makes nodes by ``name``,
the GEMM lowering calls ``functor`` from ``gemm_ops/cuda/functors.cuh``.  Adding an operation is adding a
row here and the functor of the same name there; ``tests/test_operations.py`` checks that the two agree.

A row's ``reference`` takes and returns tensors of the compute dtype (float32, or float64 when a caller
wants the mathematical value), already broadcast against each other or broadcastable, and computes what the
PyTorch function of the same name computes, NaN and infinity included.  Parameters such as ``negative_slope``
are ordinary inputs (constants), so that a row needs no special cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Operation:
    """One elementwise operation.

    Attributes:
        name: the name in trees, JSON and error messages.
        arity: the number of inputs.
        reference: the PyTorch computation, ``arity`` tensors to one.
        functor: the device function, in namespace ``ep`` of ``functors.cuh``.
        note: what is worth knowing of its numbers.
    """

    name: str
    arity: int
    reference: Callable[..., Tensor]
    functor: str
    note: str = ""


def _leaky_relu(x: Tensor, negative_slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def _clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.clamp(x, low, high)


_ROWS = (
    Operation("identity", 1, lambda x: x, "identity"),
    Operation("neg", 1, torch.neg, "neg"),
    Operation("add", 2, torch.add, "add"),
    Operation("sub", 2, torch.sub, "sub"),
    Operation("mul", 2, torch.mul, "mul"),
    Operation("div", 2, torch.div, "div", "true division, rounded to nearest"),
    Operation("minimum", 2, torch.minimum, "minimum", "NaN if either input is NaN"),
    Operation("maximum", 2, torch.maximum, "maximum", "NaN if either input is NaN"),
    Operation("clamp", 3, _clamp, "clamp", "NaN stays NaN; the upper bound wins where bounds cross"),
    Operation("relu", 1, torch.relu, "relu", "NaN stays NaN"),
    Operation("leaky_relu", 2, _leaky_relu, "leaky_relu", "second input: the negative slope"),
    Operation("exp", 1, torch.exp, "exp"),
    Operation("sigmoid", 1, torch.sigmoid, "sigmoid"),
    Operation("tanh", 1, torch.tanh, "tanh"),
    Operation("silu", 1, F.silu, "silu"),
    Operation("gelu_erf", 1, lambda x: F.gelu(x), "gelu_erf", "the exact GELU"),
    Operation(
        "gelu_tanh",
        1,
        lambda x: F.gelu(x, approximate="tanh"),
        "gelu_tanh",
        "on the device x * sigmoid(2u): no cancellation where x is very negative",
    ),
)

#: name -> row
OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}

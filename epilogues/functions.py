"""The operations of the language, as functions.

    >>> import epilogues as ep
    >>> @ep.epilogue
    ... def swiglu(acc, bias: ep.Row, gate: ep.Aux):
    ...     return ep.silu(acc + bias) * gate
    >>> ep.silu(torch.randn(4))            # the same computation, eagerly

Contract
--------
* Inside an epilogue the arguments are its values and Python numbers, and the result is a value.
* On tensors the operation is computed there and then, as the reference does: in float32 (float64 if one of
  the tensors is float64), the result not rounded.  On numbers alone the result is a Python number.
* Every function computes what the PyTorch function of the same name does, NaN and infinity included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dtypes import dtype_name, torch_dtype
from .errors import EpilogueError, UnsupportedOperationError
from .operand_shapes import is_number
from .operations import OPERATIONS
from .reference import scalar_tensor
from .source import explain, short, user_location
from .tracing import Symbol, trace_of

#: What the functions take and return: a value of an epilogue, a tensor, or a number.
Value = Symbol | Tensor | float

__all__ = [
    "add",
    "cast",
    "clamp",
    "div",
    "exp",
    "gelu",
    "identity",
    "leaky_relu",
    "maximum",
    "minimum",
    "mul",
    "neg",
    "relu",
    "sigmoid",
    "silu",
    "sub",
    "swish",
    "tanh",
]


def identity(x: Value) -> Any:
    """``x`` itself."""
    return _call("identity", x)


def neg(x: Value) -> Any:
    """``-x``."""
    return _call("neg", x)


def add(x: Value, y: Value) -> Any:
    """``x + y``."""
    return _call("add", x, y)


def sub(x: Value, y: Value) -> Any:
    """``x - y``."""
    return _call("sub", x, y)


def mul(x: Value, y: Value) -> Any:
    """``x * y``."""
    return _call("mul", x, y)


def div(x: Value, y: Value) -> Any:
    """``x / y``."""
    return _call("div", x, y)


def minimum(x: Value, y: Value) -> Any:
    """The smaller of x and y; NaN if either is."""
    return _call("minimum", x, y)


def maximum(x: Value, y: Value) -> Any:
    """The larger of x and y; NaN if either is."""
    return _call("maximum", x, y)


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
    return _call("clamp", x, low, high)


def relu(x: Value) -> Any:
    """max(x, 0); NaN stays NaN."""
    return _call("relu", x)


def leaky_relu(x: Value, negative_slope: Value = 0.01) -> Any:
    """``x`` where x > 0, else ``x * negative_slope``."""
    return _call("leaky_relu", x, negative_slope)


def exp(x: Value) -> Any:
    """The exponential of x."""
    return _call("exp", x)


def sigmoid(x: Value) -> Any:
    """1 / (1 + exp(-x))."""
    return _call("sigmoid", x)


def tanh(x: Value) -> Any:
    """The hyperbolic tangent of x."""
    return _call("tanh", x)


def silu(x: Value) -> Any:
    """``x * sigmoid(x)``, also called swish."""
    return _call("silu", x)


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
    return _call(operation, x)


def cast(x: Value, dtype: torch.dtype | str) -> Any:
    """``x`` rounded to a dtype: to nearest, ties to even.  What follows computes with the rounded value.

    Raises:
        DtypeError: for dtypes other than float32, float16 and bfloat16.
    """
    trace = trace_of((x,))
    if trace is not None:
        return trace.cast(x, dtype)
    target = torch_dtype(dtype_name(dtype))
    if isinstance(x, Tensor):
        return x.to(target)
    return torch.tensor(_number(x), dtype=torch.float64).to(target).item()


def _call(operation: str, *values: Any) -> Any:
    trace = trace_of(values)
    if trace is not None:
        return trace.apply(operation, *values)
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise UnsupportedOperationError(
                explain(
                    f"{operation} of a tensor of dtype {tensor.dtype}; expected a floating dtype",
                    user_location(),
                )
            )
    wide = not tensors or any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    device = tensors[0].device if tensors else torch.device("cpu")
    inputs = [
        value.to(dtype) if isinstance(value, Tensor) else scalar_tensor(_number(value), dtype, device)
        for value in values
    ]
    result = OPERATIONS[operation].reference(*inputs)
    return result if tensors else result.item()


def _number(value: Any) -> float:
    if is_number(value):
        return float(value)
    raise EpilogueError(
        explain(
            f"expected a value of an epilogue, a tensor or a number, got {type(value).__name__} {short(value)}",
            user_location(),
        )
    )

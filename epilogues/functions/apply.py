"""What every function of the language does: make a node, or compute there and then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..dtypes import dtype_name, torch_dtype
from ..errors import DtypeError, EpilogueError, UnsupportedOperationError
from ..operand_shapes import is_number
from ..operations import ON_CONDITIONS, OPERATIONS, is_condition
from ..reference import scalar_tensor
from ..source import explain, short, user_location
from ..symbol import Symbol
from ..tracing import trace_of

#: What the functions take and return: a value of an epilogue, a tensor, or a number.
Value = Symbol | Tensor | float

__all__ = ["cast"]


def apply(operation: str, *values: Any) -> Any:
    """The operation of the table: a node if one of the values is a symbol, else its result."""
    trace = trace_of(values)
    if trace is not None:
        return trace.apply(operation, *values)
    if ON_CONDITIONS.get(operation) and all(isinstance(v, Tensor) and is_conditional(v) for v in values):
        operation = str(ON_CONDITIONS[operation])
    row = OPERATIONS[operation]
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
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
        _condition(operation, value, device) if position in row.conditions else _value(value, dtype, device)
        for position, value in enumerate(values)
    ]
    result = row.reference(*inputs)
    return result if tensors else result.item()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def one_function(function: _Function) -> _Function:
    """Marks a function made of several operations that PyTorch has one kernel for: eager rounding rounds it once."""

    @functools.wraps(function)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        trace = trace_of((*args, *keywords.values()))
        if trace is None:
            return function(*args, **keywords)
        return trace.as_one_function(lambda: function(*args, **keywords))

    return wrapped  # type: ignore[return-value]


def is_conditional(value: Any) -> bool:
    """Whether a value is a condition: a symbol of one, a tensor of dtype bool, or a Python bool."""
    if isinstance(value, Symbol):
        return is_condition(value.node)
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)


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


def check_number(function: str, parameter: str, value: Any, holds: bool, expected: str) -> None:
    """Refuses a parameter that PyTorch refuses; what operands hold cannot be checked.

    Raises:
        EpilogueError: if it does not hold.
    """
    if not holds:
        message = f"{function}: expected a number, {expected}, for {parameter}, got {short(value)}"
        raise EpilogueError(explain(message, user_location()))


def _value(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return value.to(dtype) if isinstance(value, Tensor) else scalar_tensor(_number(value), dtype, device)


def _condition(operation: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, bool):
        return torch.full((), value, dtype=torch.bool, device=device)
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return value
    found = f"a tensor of dtype {value.dtype}" if isinstance(value, Tensor) else short(value)
    raise DtypeError(
        explain(
            f"{operation}: expected a condition, such as x > 0 or a tensor of dtype bool, got {found}", user_location()
        )
    )


def _number(value: Any) -> float:
    if is_number(value):
        return float(value)
    raise EpilogueError(
        explain(
            f"expected a value of an epilogue, a tensor or a number, got {type(value).__name__} {short(value)}",
            user_location(),
        )
    )

"""Ready-made epilogues between quantised and real values: after an int8 or fp8 GEMM, and before the next one.

    >>> y = gemm_ops.linear(x, weight, quantize("int8"), bias=bias, scale=0.02, zero_point=0.0, out_dtype=...)
    >>> y.to(torch.int8)                    # whole numbers of the range already: nothing is rounded or cut off here

Contract
--------
* Quantised values are kept in floating dtypes.  The language stores float32, float16 and bfloat16 today, so
  :func:`quantize` gives the values that the quantised dtype has, rounded and clamped, and a cast to it after the
  GEMM is exact.  float16 and bfloat16 hold every value of every range of :data:`QUANTIZED`.
* :data:`QUANTIZED` is the table of ranges; a new one is a new row.
* Scales are steps: real value = (quantised value - zero point) * scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import functions as ep
from ..declare import Epilogue
from ..errors import DtypeError, did_you_mean
from ..functions.apply import one_function
from ..operand_shapes import is_number
from ..signature import Column, Row, Scalar
from ..source import short
from ..symbol import Symbol
from .names import activation_function, builder, named


@dataclass(frozen=True)
class QuantizedRange:
    """The values of a quantised dtype.

    Attributes:
        name: the name in :data:`QUANTIZED`.
        low: the smallest value.
        high: the largest value.
        digits: binary digits after the leading one; None: whole numbers.
        exponent: the smallest exponent of a floating dtype, below which values are evenly spaced.
    """

    name: str
    low: float
    high: float
    digits: int | None = None
    exponent: int = 0

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        if not all(is_number(end) and math.isfinite(end) for end in ends) or not self.low < self.high:
            raise DtypeError(
                f"QuantizedRange: expected finite numbers low < high, got {short(self.low)}, {short(self.high)}"
            )
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise DtypeError(f"QuantizedRange: expected a name such as 'int6', got {short(self.name)}")
        if self.digits is not None and (type(self.digits) is not int or self.digits < 0):
            raise DtypeError(f"QuantizedRange: expected a number of binary digits or None, got {short(self.digits)}")
        if type(self.exponent) is not int:
            raise DtypeError(f"QuantizedRange: expected a whole number for the exponent, got {short(self.exponent)}")

    def round(self, x: Any) -> Any:
        """The value nearest to each x, which is within the range; of two the even one."""
        if self.digits is None:
            return ep.round(x)
        return _round_to_digits(x, self.digits, self.exponent)

    def clamp(self, x: Any) -> Any:
        """The value of the range that is nearest to each x; NaN stays NaN."""
        return ep.clamp(x, self.low, self.high)


@one_function
def _round_to_digits(x: Any, digits: int, smallest: int) -> Any:
    """The floating value nearest to x, with so many binary digits and exponents from the smallest on.

    One function, as PyTorch's conversion to the quantised dtype is.
    """
    # The exponent may come out one too small or too large next to a power of two, where log2 is not exact:
    # the power itself is a multiple of either step, and what lies beside it rounds to it with either.
    exponent = ep.floor(ep.log2(ep.clamp(ep.abs(x), min=2.0**smallest)))
    step = ep.exp2(exponent - digits)
    return ep.round(x / step) * step


#: name -> range; the names are those of PyTorch's dtypes where it has one.
QUANTIZED: dict[str, QuantizedRange] = {
    made.name: made
    for made in (
        QuantizedRange("int8", -128, 127),
        QuantizedRange("uint8", 0, 255),
        QuantizedRange("int4", -8, 7),
        QuantizedRange("uint4", 0, 15),
        QuantizedRange("float8_e4m3fn", -448, 448, digits=3, exponent=-6),
        QuantizedRange("float8_e5m2", -57344, 57344, digits=2, exponent=-14),
    )
}


def quantized_range(dtype: torch.dtype | str | QuantizedRange) -> QuantizedRange:
    """The range of a quantised dtype, given as a torch dtype, by name, or as a range of your own.

    Raises:
        DtypeError: if it is not in :data:`QUANTIZED`.
    """
    if isinstance(dtype, QuantizedRange):
        return dtype
    found = QUANTIZED.get(str(dtype).removeprefix("torch.")) if isinstance(dtype, torch.dtype | str) else None
    if found is None:
        meant = did_you_mean(dtype, QUANTIZED)
        raise DtypeError(f"quantize: expected one of {', '.join(QUANTIZED)}, got {short(dtype)}{meant}")
    return found


@builder
def dequantize(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act(acc * row_scale[m] * col_scale[n] + bias[n]), a scale for each token and each output channel."""
    act = activation_function(activation, **params)

    def dequantize(acc: Symbol, row_scale: Column, col_scale: Row, bias: Row) -> Any:
        return act(acc * row_scale * col_scale + bias)

    return Epilogue(dequantize, named("dequantize", activation))


@builder
def dequantize_per_tensor(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act(acc * scale + bias[n]), where scale is the product of both matrices' scales."""
    act = activation_function(activation, **params)

    def dequantize_per_tensor(acc: Symbol, scale: Scalar, bias: Row) -> Any:
        return act(acc * scale + bias)

    return Epilogue(dequantize_per_tensor, named("dequantize_per_tensor", activation))


@builder
def dequantize_asymmetric(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act((acc - zero_point[m] * weight_sum[n]) * row_scale[m] * col_scale[n] + bias[n]).

    The left matrix has zero points, one for each row; weight_sum[n] is the sum of the other's quantised values for
    output n, ``weight.sum(dim=1)`` of a weight (N, K), known before the GEMM.
    """
    act = activation_function(activation, **params)

    def dequantize_asymmetric(
        acc: Symbol, zero_point: Column, weight_sum: Row, row_scale: Column, col_scale: Row, bias: Row
    ) -> Any:
        return act((acc - zero_point * weight_sum) * row_scale * col_scale + bias)

    return Epilogue(dequantize_asymmetric, named("dequantize_asymmetric", activation))


@builder
def quantize(dtype: torch.dtype | str = "int8", activation: str | None = None, **params: Any) -> Epilogue:
    """D = round(clamp(act(acc + bias[n]) / scale + zero_point)), the quantised values, in a floating dtype.

    Halves are rounded to even, and what is rounded is fma(value, 1 / scale, zero_point), as torch.quantize_per_tensor
    does.  Floating ranges have no zero point, and no such operand.  NaN stays NaN, which integers do not have.

    Raises:
        DtypeError: if the dtype is not in :data:`QUANTIZED`.
    """
    target = quantized_range(dtype)
    act = activation_function(activation, **params)

    def quantize(acc: Symbol, bias: Row, scale: Scalar) -> Any:
        return target.round(target.clamp(act(acc + bias) * ep.reciprocal(scale)))

    def quantize_from_zero_point(acc: Symbol, bias: Row, scale: Scalar, zero_point: Scalar) -> Any:
        return target.round(target.clamp(ep.fma(act(acc + bias), ep.reciprocal(scale), zero_point)))

    function = quantize_from_zero_point if target.digits is None else quantize
    return Epilogue(function, named(f"quantize_{target.name}", activation))

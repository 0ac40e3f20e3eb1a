"""Functions of ``torch.special`` that are composed of the table's operations."""

from __future__ import annotations

import math
from typing import Any

from .apply import Value, one_function
from .arithmetic import mul
from .comparisons import eq, isnan, le, logical_and, logical_or, lt, where
from .mathematics import erfc, log1p

__all__ = ["angle", "ndtr", "xlog1py"]


@one_function
def ndtr(x: Value) -> Any:
    """The area under the standard normal density up to x."""
    return mul(0.5, erfc(mul(x, -math.sqrt(0.5))))


@one_function
def xlog1py(x: Value, y: Value) -> Any:
    """``x * log(1 + y)``, exact for small y too; 0 where x is 0 and y is not NaN."""
    boundless = logical_or(le(y, -1.0), eq(y, math.inf))
    return mul(x, where(logical_and(eq(x, 0.0), boundless), 0.0, log1p(y)))


@one_function
def angle(x: Value) -> Any:
    """The angle of the real number x: pi where it is negative, else 0; NaN of NaN."""
    return where(isnan(x), x, where(lt(x, 0.0), math.pi, 0.0))

"""The argument block of a standalone elementwise kernel, declared once for Python and C++.

    >>> block = ElementwiseArguments(columns=4096, pieces_per_row=512)
    >>> print(declarations())
    struct ElementwiseTensor {
    ...

As in :mod:`gemm_ops.runtime.abi`, the tables below are the only declaration.  Strides are in bytes, 0 along dimensions
in which a tensor is repeated; outer dimensions are counted from the outermost.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..runtime.abi import MAX_OPERANDS, MAX_OUTPUTS, declare

#: Dimensions outside of the innermost one that a kernel walks through.
MAX_OUTER = 5
#: x, and the operands.
MAX_INPUTS = 1 + MAX_OPERANDS

_TENSOR_FIELDS: list[tuple[str, Any]] = [
    ("data", ctypes.c_void_p),  # null for a number
    ("bytes", ctypes.c_int64),  # from its first byte to its last
    ("column_stride", ctypes.c_int64),
    ("strides", ctypes.c_int64 * MAX_OUTER),
    ("value", ctypes.c_float),  # a number
    ("reserved", ctypes.c_int32),
]


class ElementwiseTensor(ctypes.Structure):
    """One input or output: where it lies, or the value of a number."""

    _fields_ = _TENSOR_FIELDS


_ARGUMENT_FIELDS: list[tuple[str, Any]] = [
    ("columns", ctypes.c_int64),  # extent of the innermost dimension
    ("pieces_per_row", ctypes.c_int64),
    ("outer", ctypes.c_int64 * MAX_OUTER),  # extents
    ("wrap", ctypes.c_int64),  # length of the rows that make a long one, where an input is wrapped
    ("inputs", ElementwiseTensor * MAX_INPUTS),  # x, then the operands
    ("outputs", ElementwiseTensor * MAX_OUTPUTS),  # the main one first
]


class ElementwiseArguments(ctypes.Structure):
    """Everything one launch needs besides the stream."""

    _fields_ = _ARGUMENT_FIELDS


def declarations() -> str:
    """The structures as C++, with a check that both sides agree on their sizes."""
    return declare(((ElementwiseTensor, _TENSOR_FIELDS), (ElementwiseArguments, _ARGUMENT_FIELDS)))

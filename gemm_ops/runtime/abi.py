"""The argument block that Python fills and a kernel's host function reads, declared once.

    >>> block = GemmArguments(m=128, n=256, k=64)
    >>> print(c_declarations())
    struct OperandArgument {
    ...

The tables below are the only declaration: the ctypes structures are made from them, and so is the C++ text
that goes into every kernel's source.  All kernels of all families take the same block, so the launch path has
no case for the kernel at hand.  Strides are in elements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

#: How many operands and outputs one kernel may have; the block has room for that many.
MAX_OPERANDS = 16
MAX_OUTPUTS = 8

_C_NAMES: dict[Any, str] = {
    ctypes.c_void_p: "void*",
    ctypes.c_int64: "int64_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_float: "float",
}

_OPERAND_FIELDS: list[tuple[str, Any]] = [
    ("data", ctypes.c_void_p),  # null for a scalar given by value
    ("leading_dimension", ctypes.c_int64),  # of an auxiliary matrix: from row to row; unused otherwise
    ("column_stride", ctypes.c_int64),  # of an auxiliary matrix: from column to column, mostly 1
    ("batch_stride", ctypes.c_int64),  # from one problem of a batch to the next; 0 for an operand that all share
    ("value", ctypes.c_float),  # of a scalar given by value
    ("reserved", ctypes.c_int32),
]
_OUTPUT_FIELDS: list[tuple[str, Any]] = [
    ("data", ctypes.c_void_p),
    ("leading_dimension", ctypes.c_int64),
    ("column_stride", ctypes.c_int64),
    ("batch_stride", ctypes.c_int64),
]


class OperandArgument(ctypes.Structure):
    """One epilogue operand: a pointer, or the value of a scalar."""

    _fields_ = _OPERAND_FIELDS


class OutputArgument(ctypes.Structure):
    """One output matrix."""

    _fields_ = _OUTPUT_FIELDS


_LAST_CAPTURED_FIELDS: list[tuple[str, Any]] = [
    ("enabled", ctypes.c_int64),
    ("capture", ctypes.c_int64),  # the capture's id; 0 for none yet
    ("node", ctypes.c_void_p),
    ("overlapped", ctypes.c_int64),  # how many launches were made to overlap
]


class LastCaptured(ctypes.Structure):
    """The kernel that this process captured last; see ``cuda/dependent_launch.cuh``."""

    _fields_ = _LAST_CAPTURED_FIELDS


_GEMM_FIELDS: list[tuple[str, Any]] = [
    ("m", ctypes.c_int64),
    ("n", ctypes.c_int64),
    ("k", ctypes.c_int64),
    ("batch", ctypes.c_int64),  # how many problems; 1 where the kernel takes no batches
    ("a", ctypes.c_void_p),
    ("lda", ctypes.c_int64),
    ("batch_stride_a", ctypes.c_int64),
    ("b", ctypes.c_void_p),
    ("ldb", ctypes.c_int64),
    ("batch_stride_b", ctypes.c_int64),
    ("device", ctypes.c_int32),
    ("multiprocessors", ctypes.c_int32),
    ("swizzle", ctypes.c_int32),  # width of the raster over output tiles, in tiles
    ("reserved", ctypes.c_int32),
    ("last_captured", ctypes.POINTER(LastCaptured)),  # null: launches do not overlap
    ("operands", OperandArgument * MAX_OPERANDS),
    ("outputs", OutputArgument * MAX_OUTPUTS),  # the first is D
]


class GemmArguments(ctypes.Structure):
    """Everything one launch needs besides the workspace and the stream."""

    _fields_ = _GEMM_FIELDS


_PAD_FIELDS: list[tuple[str, Any]] = [
    ("source", ctypes.c_void_p),
    ("source_pitch", ctypes.c_int64),  # bytes from row to row
    ("source_batch_pitch", ctypes.c_int64),
    ("source_bytes", ctypes.c_int64),  # from the first byte of the first matrix to the last of the last
    ("destination", ctypes.c_void_p),
    ("destination_pitch", ctypes.c_int64),
    ("destination_batch_pitch", ctypes.c_int64),
    ("batch", ctypes.c_int64),
    ("rows", ctypes.c_int64),
    ("row_bytes", ctypes.c_int64),
    ("multiprocessors", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
]


class PadArguments(ctypes.Structure):
    """One copy into padded rows."""

    _fields_ = _PAD_FIELDS


_GEMM_STRUCTURES = (
    (OperandArgument, _OPERAND_FIELDS),
    (OutputArgument, _OUTPUT_FIELDS),
    (LastCaptured, _LAST_CAPTURED_FIELDS),
    (GemmArguments, _GEMM_FIELDS),
)


def c_declarations() -> str:
    """The structures of a GEMM as C++, with a check that both sides agree on their sizes."""
    return declare(_GEMM_STRUCTURES)


def pad_declarations() -> str:
    """The same of a copy into padded rows."""
    return declare(((PadArguments, _PAD_FIELDS),))


def declare(structures: Iterable[tuple[Any, list[tuple[str, Any]]]]) -> str:
    """Structures as C++, each with a check that both sides agree on its size: (class, its fields), inner ones first."""
    parts = []
    for structure, fields in structures:
        lines = [f"struct {structure.__name__} {{"]
        for name, kind in fields:
            if isinstance(kind, type) and issubclass(kind, ctypes.Array):
                element = _C_NAMES.get(kind._type_, kind._type_.__name__)
                lines.append(f"  {element} {name}[{kind._length_}];")
            elif kind in _C_NAMES:
                lines.append(f"  {_C_NAMES[kind]} {name};")
            else:
                lines.append(f"  {kind._type_.__name__}* {name};")
        lines.append("};")
        lines.append(f"static_assert(sizeof({structure.__name__}) == {ctypes.sizeof(structure)});")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"

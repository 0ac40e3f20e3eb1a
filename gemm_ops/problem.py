"""What is multiplied: extents, layouts and alignments, read off the tensors once.

    >>> problem = read_problem(x, weight.t())
    >>> problem.m, problem.n, problem.k, problem.b.layout
    (128, 4096, 1024, 'column')

Everything downstream (which family, which configuration, the kernel's argument block) works from a
:class:`Problem` and never looks at A and B again.  Extents and leading dimensions are in elements, alignments in
bytes.  A matrix is M x K, K x N or M x N; ``layout`` "row" means contiguous along its second extent, "column"
along its first, None that no kernel can address it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from epilogues.dtypes import DTYPES
from epilogues.errors import EpilogueError
from epilogues.reference import check_dense

from .errors import ProblemError

_SHORT = {dtype: name for name, dtype in DTYPES.items()}
#: What TMA and 16-byte vector accesses need of a pointer and of a row stride.
ACCESS_BYTES = 16


@dataclass(frozen=True)
class Matrix:
    """How one matrix lies in memory.

    Attributes:
        layout: "row", "column", or None.
        leading_dimension: elements between consecutive rows ("row") or columns ("column").
        misalignment: why 16-byte accesses cannot be used, in words; "" if they can.
    """

    layout: str | None
    leading_dimension: int
    misalignment: str = ""


def read_matrix(tensor: Tensor, rows: int, columns: int, row_stride: int, column_stride: int) -> Matrix:
    """The layout of a matrix given its strides; where two are possible, the one that is aligned.

    The stride of an extent of 1 means nothing: it is taken to be whatever suits.
    """
    size = tensor.element_size()
    found = Matrix(None, 0, f"neither of its strides ({row_stride}, {column_stride}) is 1")
    for layout, outer, inner, outer_stride, inner_stride in (
        ("row", rows, columns, row_stride, column_stride),
        ("column", columns, rows, column_stride, row_stride),
    ):
        if inner > 1 and inner_stride != 1:
            continue
        # of a single row any distance will do, so one that is aligned, and not shorter than the row
        padded = -(-inner * size // ACCESS_BYTES) * ACCESS_BYTES // size
        leading = padded if outer == 1 else outer_stride
        if outer > 1 and leading < inner:
            # an expanded tensor
            if found.layout is None:
                found = Matrix(None, 0, f"its elements overlap in memory (strides {row_stride}, {column_stride})")
            continue
        matrix = Matrix(layout, leading, _misalignment(tensor, leading, size))
        if not matrix.misalignment:
            return matrix
        if found.layout is None:
            found = matrix
    return found


def _misalignment(tensor: Tensor, leading: int, size: int) -> str:
    if leading * size % ACCESS_BYTES:
        return f"its leading dimension of {leading} elements is not a multiple of {ACCESS_BYTES} bytes"
    if (offset := address(tensor) % ACCESS_BYTES) != 0:
        return f"it starts {offset} bytes after a multiple of {ACCESS_BYTES} bytes"
    return ""


def address(tensor: Tensor) -> int:
    """Where the tensor begins; 0 for one without memory (fake, or inside vmap), which no kernel will see."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


@dataclass(frozen=True)
class Problem:
    """A GEMM: (M, K) by (K, N).

    Attributes:
        m, n, k: extents; M counts all leading dimensions of a together.
        m_shape: the leading dimensions of a, whose product is M.
        dtype: of A and B.
        element: its short name, or None for dtypes that no kernel takes.
        device: where A and B are.
        a, b: their layouts; None where B has batch dimensions of its own.
    """

    m: int
    n: int
    k: int
    m_shape: tuple[int, ...]
    dtype: torch.dtype
    element: str | None
    device: torch.device
    a: Matrix | None
    b: Matrix | None

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.m_shape, self.n)


def read_problem(a: Tensor, b: Tensor) -> tuple[Problem, Tensor]:
    """The problem, and A as the (M, K) matrix it stands for (a view wherever strides allow one).

    Args:
        a: (..., M, K), or (K,) for a single row.
        b: (K, N); or (..., K, N) with batch dimensions that broadcast against a's.

    Raises:
        ProblemError: shapes that do not multiply, mixed dtypes, two devices.
    """
    _check(a, b)
    k, n = b.shape[-2:]
    element = _SHORT.get(a.dtype)
    if b.ndim > 2:
        # as torch.matmul has it: of a single row nothing but the batch is left
        m_shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[-2:-1])
        return Problem(math.prod(m_shape), n, k, m_shape, a.dtype, element, a.device, None, None), a
    m_shape = tuple(a.shape[:-1])
    flat = a if a.ndim == 2 else a.reshape(math.prod(m_shape), k)
    m = flat.shape[0]
    layout_a = read_matrix(flat, m, k, *flat.stride())
    layout_b = read_matrix(b, k, n, *b.stride())
    return Problem(m, n, k, m_shape, a.dtype, element, a.device, layout_a, layout_b), flat


def _check(a: Tensor, b: Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise ProblemError(f"{name} should be a torch.Tensor, got {type(tensor).__name__}")
        try:
            check_dense(name, tensor)
        except EpilogueError as error:
            raise ProblemError(str(error)) from None
    shapes = f"a is {tuple(a.shape)}, b is {tuple(b.shape)}"
    if a.ndim < 1 or b.ndim < 2:
        hint = (
            " (for a vector b of shape (K,), give b[:, None], and take [..., 0] of the result)" if b.ndim == 1 else ""
        )
        raise ProblemError(f"expected a of shape (..., M, K) and b of shape (..., K, N): {shapes}{hint}")
    if a.shape[-1] != b.shape[-2]:
        raise ProblemError(
            f"the inner extents differ, a has K={a.shape[-1]} and b has K={b.shape[-2]}: {shapes} "
            "(a linear layer's weight of shape (N, K) is b.T)"
        )
    if b.ndim > 2:
        try:
            torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            raise ProblemError(f"the batch dimensions do not broadcast: {shapes}") from None
    if a.dtype != b.dtype:
        raise ProblemError(f"a and b should have one dtype, got {a.dtype} and {b.dtype}")
    if not a.dtype.is_floating_point:
        raise ProblemError(f"expected matrices of a floating-point dtype, got {a.dtype}")
    if a.device != b.device:
        raise ProblemError(f"a and b should be on one device, got {a.device} and {b.device}")

"""What is multiplied: extents, dtype and device, checked and read off the tensors once.

    >>> problem = read_problem(x, weight.t())
    >>> problem.m, problem.n, problem.k, problem.extents
    (128, 4096, 1024, (128,))

How the tensors lie in memory is the subject of :mod:`gemm_ops.addressing`.
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

_TAKEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHORT = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Problem:
    """GEMMs: (..., M, K) by (..., K, N), the leading dimensions being a batch.

    Attributes:
        m: the product of all leading dimensions of the output.
        n, k: extents.
        m_shape: the leading dimensions of the output: what torch.matmul gives before N.
        extents: the same with an M of its own, 1 where a is a vector.
        dtype: of A and B.
        element: its short name, or None for dtypes that no kernel takes.
        device: where A and B are.
    """

    m: int
    n: int
    k: int
    m_shape: tuple[int, ...]
    extents: tuple[int, ...]
    dtype: torch.dtype
    element: str | None
    device: torch.device

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.m_shape, self.n)


def read_problem(a: Tensor, b: Tensor) -> Problem:
    """The problem of two matrices.

    Args:
        a: (..., M, K), or (K,) for a single row.
        b: (K, N); or (..., K, N) with batch dimensions that broadcast against a's.

    Raises:
        ProblemError: shapes that do not multiply, mixed dtypes, two devices.
    """
    _check(a, b)
    k, n = b.shape[-2:]
    # as torch.matmul has it: of a single row nothing but the batch is left
    batch = tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    m_shape = (*batch, *a.shape[-2:-1])
    extents = m_shape if a.ndim > 1 else (*m_shape, 1)
    return Problem(math.prod(m_shape), n, k, m_shape, extents, a.dtype, _SHORT.get(a.dtype), a.device)


def read_tensor(name: str, x: Tensor) -> Problem:
    """What an elementwise call computes on: (..., N), without a product.

    Raises:
        ProblemError: no tensor, one without dimensions, or of a dtype that epilogues do not compute with.
    """
    if not isinstance(x, Tensor):
        raise ProblemError(f"{name} should be a torch.Tensor, got {type(x).__name__}")
    require_dense(name, x)
    if x.ndim < 1:
        raise ProblemError(f"expected {name} of shape (..., N), got a tensor without dimensions; give {name}[None]")
    _check_dtype(name, x)
    *lead, n = x.shape
    m_shape = tuple(lead)
    return Problem(math.prod(m_shape), n, 1, m_shape, m_shape or (1,), x.dtype, _SHORT.get(x.dtype), x.device)


def require_dense(what: str, tensor: Tensor) -> None:
    """Checks that a matrix or an output lies in memory element by element.

    Raises:
        ProblemError: for sparse, nested and quantized tensors.
    """
    try:
        check_dense(what, tensor)
    except EpilogueError as error:
        raise ProblemError(str(error)) from None


def _check(a: Tensor, b: Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise ProblemError(f"{name} should be a torch.Tensor, got {type(tensor).__name__}")
        require_dense(name, tensor)
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
    _check_dtype("matrices", a)
    if a.device != b.device:
        raise ProblemError(f"a and b should be on one device, got {a.device} and {b.device}")


def _check_dtype(what: str, tensor: Tensor) -> None:
    if tensor.dtype not in _TAKEN:
        taken = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TAKEN)
        raise ProblemError(f"expected {what} of a floating-point dtype ({taken}), got {tensor.dtype}")

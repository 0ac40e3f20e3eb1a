"""The gradients of the two matrices of a product, from the product's.

    >>> grad_x = gradient_of_a(grad, x.shape, weight.t(), fused)                # grad @ weight
    >>> grad_weight = gradient_of_b(grad, x, (k, n), fused, turned=True).t()    # grad.T @ x, contiguous

Contract: in the matrices' dtype, summed over batch dimensions in which a matrix is repeated.  Where grad mode is on,
and so the backward itself is recorded, PyTorch multiplies.  Else, for 16-bit matrices of which cuBLAS reads or writes
one slowly (an odd extent), the fused kernels do, which copy such a matrix into padded rows first: directly, or in a
graph by the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .elementwise_call import runs_kernels

#: Multiplies two matrices.
Product = Callable[[Tensor, Tensor], Tensor]

_ALIGNED_ELEMENTS = 8  # 16 bytes of 16-bit elements


def gradient_of_a(grad: Tensor, shape: Sequence[int], b: Tensor, fused: Product) -> Tensor:
    """The gradient of a.

    Args:
        grad: of the product, (..., M, N), or (..., N) where a is a vector.
        shape: of a.
        b: (..., K, N).
        fused: multiplies two matrices by a fused kernel.
    """
    if len(shape) == 1:
        grad = grad.unsqueeze(-2)
    found = _times(grad, b.mT, fused)
    # flattened, as no extent is to be told from the others: one may be 0
    return _summed(found, shape) if len(shape) > 1 else found.flatten(0, -2).sum_to_size(1, shape[0])[0]


def gradient_of_b(grad: Tensor, a: Tensor, shape: Sequence[int], fused: Product, *, turned: bool) -> Tensor:
    """The gradient of b.

    Args:
        grad: of the product, (..., M, N), or (..., N) where a is a vector.
        a: (..., M, K), or (K,).
        shape: of b, (..., K, N).
        fused: multiplies two matrices by a fused kernel.
        turned: whether b lies in memory as a linear layer's weight, (N, K); so does its gradient then.
    """
    if a.ndim == 1:
        a, grad = a.unsqueeze(0), grad.unsqueeze(-2)
    if len(shape) == 2 and a.ndim > 2:  # all batches share it: one product
        a, grad = a.flatten(0, -2), grad.flatten(0, -2)
    found = _times(grad.mT, a, fused).mT if turned else _times(a.mT, grad, fused)
    return _summed(found, shape)


def _summed(found: Tensor, shape: Sequence[int]) -> Tensor:
    """A gradient summed over the dimensions in which its matrix is repeated."""
    return found if found.shape == shape else found.sum_to_size(shape)


def _times(a: Tensor, b: Tensor, fused: Product) -> Tensor:
    recorded = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if recorded or not runs_kernels(a.device) or a.element_size() != 2 or not is_slow(a, b):
        return torch.matmul(a, b)
    return fused(a, b)


def is_slow(a: Tensor, b: Tensor) -> bool:
    """Whether cuBLAS has no more than slow kernels for the product: a row of some matrix does not begin at 16 bytes."""
    leading = (max(matrix.stride()[-2:]) for matrix in (a, b))
    return any(extent % _ALIGNED_ELEMENTS for extent in (*leading, b.shape[-1]))

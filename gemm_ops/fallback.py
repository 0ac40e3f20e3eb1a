"""The PyTorch reference backend: the same tree, computed operation by operation.

    >>> outputs = run_reference(tree, a, b, operands, transformed=False)

It takes every dtype, device, shape and layout that ``torch.matmul`` takes.  The accumulator is fp32 as in the
kernels (fp64 for fp64 inputs), so results agree with the fused ones to rounding.  On CUDA that is cuBLAS with an
fp32 output; where gradients are wanted, inside vmap, or for batches, PyTorch has no such call and the accumulator is
rounded to the inputs' dtype first, as in any unfused PyTorch computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from epilogues.reference import evaluate
from epilogues.tree import EpilogueTree

from .autocast import without_autocast

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def run_reference(
    tree: EpilogueTree, a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float], *, transformed: bool
) -> dict[str, Tensor]:
    """All outputs of the epilogue over ``a @ b``.

    Args:
        a, b: (..., M, K) and (..., K, N), as ``torch.matmul`` takes them.
        operands: by name, as :mod:`gemm_ops.operands` has checked them.
        transformed: whether autograd is to record the computation, or vmap to batch it.
    """
    compute = torch.float64 if a.dtype == torch.float64 else torch.float32
    # the matrices have autocast's dtype already; the accumulator and the epilogue are not to be rounded to it
    with without_autocast(a.device.type):
        accumulator = product(a, b, rounded=transformed).to(compute)
        return evaluate(tree, accumulator, operands, compute_dtype=compute, out_dtype=a.dtype)


def product(a: Tensor, b: Tensor, *, rounded: bool) -> Tensor:
    """``a @ b``, of 16-bit matrices in fp32 where PyTorch has that.

    Args:
        a, b: (..., M, K) and (..., K, N).
        rounded: whether it is to be in the matrices' dtype on devices: what autograd and vmap take.
    """
    if product_dtype(a, b, rounded=rounded) == a.dtype:
        return torch.matmul(a, b)
    if a.device.type == "cpu":
        return torch.matmul(a.float(), b.float())
    flat = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    return torch.mm(flat, b, out_dtype=torch.float32).reshape(*a.shape[:-1], b.shape[-1])


def product_dtype(a: Tensor, b: Tensor, *, rounded: bool) -> torch.dtype:
    """The dtype of :func:`product`."""
    if a.dtype not in _SIXTEEN_BITS:
        return a.dtype
    if a.device.type == "cpu":
        return torch.float32
    return a.dtype if rounded or b.ndim > 2 or a.device.type != "cuda" else torch.float32

"""Makes the copies that an addressing asks for.

>>> read = copy_matrix(x, addressing.a)            # of A or B: rows, or columns, that begin at multiples of 16 bytes

Contract with :mod:`gemm_ops.addressing.rules`: what is made here has the strides that are reckoned with there.  Batch
dimensions in which a tensor is repeated (a stride of 0) stay so; the rows of a matrix are always written out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from epilogues.tree import Kind

from .addressing import Placement
from .runtime.pad_rows import pad_rows


def copy_matrix(matrix: Tensor, placement: Placement) -> Tensor:
    """The copy of A (..., M, K) or B (..., K, N); its first element is where the kernel begins to read."""
    source = matrix if matrix.ndim > 1 else matrix[None]
    source = _once(source, source.ndim - 2)
    return pad_rows(source if placement.layout == "row" else source.transpose(-1, -2))


def copy_operand(operand: Tensor, kind: Kind, output_shape: Sequence[int]) -> Tensor:
    """The contiguous copy of an operand that has the output's number of dimensions."""
    dims = operand.ndim
    if kind is Kind.ROW:
        return _once(operand, dims - 1).contiguous()
    if kind is Kind.COLUMN:
        return operand.expand(*output_shape[:-1], 1).contiguous()
    rows = operand.expand(*operand.shape[:-2], *output_shape[-2:]) if dims > 1 else operand
    return _once(rows, dims - 2).contiguous()


def _once(tensor: Tensor, dims: int) -> Tensor:
    """One of what the first dimensions repeat."""
    for dim in range(dims):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor

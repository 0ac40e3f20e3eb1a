r"""The outputs of one call: which dtypes and layouts they have, and whether the caller's own buffers fit.

    >>> buffers, layouts = bind_outputs(declared, tree, problem, out={"D": d, "preact": p}, inputs=[a, b])

Contract: without ``out`` every output is a new contiguous tensor of shape (\\*m_shape, N).  With ``out`` the
caller gives a tensor for every output, of exactly that shape and of the output's dtype, rows of any distance; it
shares no memory with an input or with another output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from epilogues.dtypes import torch_dtype
from epilogues.tree import Cast, EpilogueTree, Store

from .errors import ProblemError
from .problem import ACCESS_BYTES, Matrix, Problem, address, read_matrix


def bind_outputs(
    declared: Sequence[Store],
    tree: EpilogueTree,
    problem: Problem,
    out: Tensor | Mapping[str, Tensor] | None,
    inputs: Sequence[Tensor],
) -> tuple[dict[str, Tensor], tuple[tuple[Matrix, str], ...]]:
    """The caller's buffers by name (empty if there are none), and layout and short dtype name of each output.

    Args:
        declared: the epilogue's outputs before they were resolved, in the tree's order (a resolved tree's own
            names may be another epilogue's).
        tree: resolved.

    Raises:
        ProblemError: ``out`` does not fit; says which output, what was expected and what came.
    """
    if out is None:
        return {}, tuple((_new_layout(problem, str(store.dtype)), str(store.dtype)) for store in tree.outputs)
    names = [store.name for store in declared]
    if not isinstance(out, (Tensor, Mapping)):
        raise ProblemError(f"out should be a tensor, or tensors by output name, got {type(out).__name__}")
    given = {names[0]: out} if isinstance(out, Tensor) else dict(out)
    if set(given) != set(names):
        raise ProblemError(f"out should have the outputs {', '.join(names)}; got {', '.join(map(str, given))}")
    buffers: dict[str, Tensor] = {}
    layouts = []
    for original, store in zip(declared, tree.outputs, strict=True):
        name, buffer = original.name, given[original.name]
        _check(name, buffer, _dtype(original, store, problem), problem)
        others = [*inputs, *buffers.values()]
        if any(overlap(buffer, other) for other in others):
            raise ProblemError(f"out[{name!r}] shares memory with an input or with another output")
        buffers[name] = buffer
        layouts.append((_given_layout(buffer, problem), str(store.dtype)))
    return buffers, tuple(layouts)


def _dtype(original: Store, store: Store, problem: Problem) -> torch.dtype:
    """What the output is stored as: of float64 matrices, float64 where the epilogue does not say."""
    if problem.dtype == torch.float64 and original.dtype is None and not isinstance(original.value, Cast):
        return torch.float64
    return torch_dtype(str(store.dtype))


def _check(name: str, buffer: Tensor, dtype: object, problem: Problem) -> None:
    expected = f"a tensor of shape {problem.output_shape}, dtype {dtype}, on {problem.device}"
    if not isinstance(buffer, Tensor):
        raise ProblemError(f"out[{name!r}] should be {expected}, got {type(buffer).__name__}")
    if (tuple(buffer.shape), buffer.dtype, buffer.device) != (problem.output_shape, dtype, problem.device):
        raise ProblemError(
            f"out[{name!r}] should be {expected}; got shape {tuple(buffer.shape)}, dtype {buffer.dtype}, "
            f"on {buffer.device}"
        )
    if any(stride == 0 and extent > 1 for extent, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        raise ProblemError(f"out[{name!r}] is expanded (strides {buffer.stride()}): several elements are one in memory")
    if buffer.is_neg():
        raise ProblemError(f"out[{name!r}] is a negated view of other memory")
    if buffer.requires_grad and torch.is_grad_enabled():
        raise ProblemError(f"out[{name!r}] requires grad, and out= does not go with gradients; use torch.no_grad()")


def _new_layout(problem: Problem, dtype: str) -> Matrix:
    """The layout of a contiguous output that PyTorch's allocator gives, which aligns more than is needed."""
    size = torch_dtype(dtype).itemsize
    if problem.m != 1 and problem.n * size % ACCESS_BYTES:
        return Matrix("row", problem.n, f"its rows of {problem.n} elements are not a multiple of {ACCESS_BYTES} bytes")
    # the distance to a second row that does not exist, aligned
    return Matrix("row", -(-problem.n * size // ACCESS_BYTES) * ACCESS_BYTES // size)


def _given_layout(buffer: Tensor, problem: Problem) -> Matrix:
    if buffer.ndim == 2:
        return read_matrix(buffer, problem.m, problem.n, *buffer.stride())
    try:
        flat = buffer.view(problem.m, problem.n)
    except RuntimeError:
        return Matrix(None, 0, "its leading dimensions cannot be counted as one")
    return read_matrix(flat, problem.m, problem.n, *flat.stride())


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory: exact for matrices of one row distance, by extents for others."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = _extent(one), _extent(other)
    if start >= other_end or other_start >= end:
        return False
    return not _in_other_columns(one, other, other_start - start)


def _in_other_columns(one: Tensor, other: Tensor, distance: int) -> bool:
    """Whether two matrices are different columns of one larger matrix, such as the halves of a buffer."""
    size = one.element_size()
    if one.ndim != 2 or other.ndim != 2 or size != other.element_size() or distance % size:
        return False
    row = one.stride(0)
    if other.stride(0) != row or one.stride(1) != 1 or other.stride(1) != 1:
        return False
    offset = distance // size % row  # the column of one's larger matrix that other begins in
    return one.shape[1] <= offset and offset + other.shape[1] <= row


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the byte after the last that the tensor can touch."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = address(tensor)
    return start, start + (last + 1) * tensor.element_size()

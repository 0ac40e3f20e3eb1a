r"""The outputs of one call: new ones, or the caller's own buffers, and whether these fit.

    >>> buffers = bind_outputs(declared, tree, problem, out={"D": d, "preact": p}, inputs=[a, b])

Contract: without ``out`` every output is a new contiguous tensor of shape (\\*m_shape, N).  With ``out`` the
caller gives a tensor for every output, of exactly that shape and of the output's dtype, with any strides; it shares
no memory with another output, nor with an input, unless it may be exactly one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from epilogues.dtypes import torch_dtype
from epilogues.tree import Cast, EpilogueTree, Store

from .addressing.views import address_of, pitch_of
from .errors import ProblemError
from .problem import Problem, require_dense


def bind_outputs(
    declared: Sequence[Store],
    tree: EpilogueTree,
    problem: Problem,
    out: Tensor | Mapping[str, Tensor] | None,
    inputs: Sequence[Tensor],
    *,
    in_place: bool = False,
) -> dict[str, Tensor]:
    """The caller's buffers by name, in the tree's order; empty if there are none.

    Args:
        declared: the epilogue's outputs before they were resolved, in the tree's order (a resolved tree's own
            names may be another epilogue's).
        tree: resolved.
        in_place: whether an output may be exactly an input.

    Raises:
        ProblemError: ``out`` does not fit; says which output, what was expected and what came.
    """
    if out is None:
        return {}
    names = [store.name for store in declared]
    if not isinstance(out, (Tensor, Mapping)):
        raise ProblemError(f"out should be a tensor, or tensors by output name, got {type(out).__name__}")
    if isinstance(out, Tensor) and len(names) > 1:
        raise ProblemError(
            f"out is one tensor, and the epilogue has the outputs {', '.join(names)}: give each by its name"
        )
    given = {names[0]: out} if isinstance(out, Tensor) else dict(out)
    if set(given) != set(names):
        got = ", ".join(map(str, given)) or "none"
        raise ProblemError(f"out should have the outputs {', '.join(names)}; got {got}")
    buffers: dict[str, Tensor] = {}
    for original, store in zip(declared, tree.outputs, strict=True):
        name, buffer = original.name, given[original.name]
        _check(name, buffer, _dtype(original, store, problem), problem)
        others = [*(each for each in inputs if not (in_place and is_same(buffer, each))), *buffers.values()]
        if any(overlap(buffer, other) for other in others):
            allowed = "; it may be exactly an input, but not overlap with one otherwise" if in_place else ""
            raise ProblemError(f"out[{name!r}] shares memory with an input or with another output{allowed}")
        buffers[name] = buffer
    return buffers


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same places."""
    return (one.dtype, one.shape, one.stride(), address_of(one)) == (
        other.dtype,
        other.shape,
        other.stride(),
        address_of(other),
    )


def _dtype(original: Store, store: Store, problem: Problem) -> torch.dtype:
    """What the output is stored as: of float64 matrices, float64 where the epilogue does not say."""
    if problem.dtype == torch.float64 and original.dtype is None and not isinstance(original.value, Cast):
        return torch.float64
    return torch_dtype(str(store.dtype))


def _check(name: str, buffer: Tensor, dtype: object, problem: Problem) -> None:
    expected = f"a tensor of shape {problem.output_shape}, dtype {dtype}, on {problem.device}"
    if not isinstance(buffer, Tensor):
        raise ProblemError(f"out[{name!r}] should be {expected}, got {type(buffer).__name__}")
    require_dense(f"out[{name!r}]", buffer)
    if (tuple(buffer.shape), buffer.dtype, buffer.device) != (problem.output_shape, dtype, problem.device):
        raise ProblemError(
            f"out[{name!r}] should be {expected}; got shape {tuple(buffer.shape)}, dtype {buffer.dtype}, "
            f"on {buffer.device}"
        )
    if any(stride == 0 and extent > 1 for extent, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        raise ProblemError(f"out[{name!r}] is expanded (strides {buffer.stride()}): several elements are one in memory")
    if _overlaps_itself(buffer):
        raise ProblemError(f"out[{name!r}] has rows that overlap in memory (strides {buffer.stride()})")
    if buffer.is_neg():
        raise ProblemError(f"out[{name!r}] is a negated view of other memory")
    if buffer.requires_grad and torch.is_grad_enabled():
        raise ProblemError(f"out[{name!r}] requires grad, and out= does not go with gradients; use torch.no_grad()")


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may be one in memory: exact for dimensions that nest, and for tensors of moderate size."""
    reach = 0  # the furthest element of the dimensions so far
    dims = sorted((stride, extent) for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1)
    for stride, extent in dims:
        if stride <= reach:
            offsets = _offsets(tensor)
            return offsets is None or offsets.unique().numel() < offsets.numel()
        reach += stride * (extent - 1)
    return False


_FEW_ELEMENTS = 2**20


def _offsets(tensor: Tensor) -> Tensor | None:
    """The distance of every element from the first, in elements; None if there are too many to list."""
    if tensor.numel() > _FEW_ELEMENTS:
        return None
    found = torch.zeros((), dtype=torch.int64, device="cpu")
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + torch.arange(extent, device="cpu") * stride
    return found.flatten()


def padded_pitch(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Elements from row to row of :func:`empty_padded`; 0 where that is contiguous."""
    pitch = pitch_of(shape[-1], dtype.itemsize)
    return 0 if pitch == shape[-1] else pitch


def empty_padded(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An uninitialised tensor whose rows begin at multiples of 16 bytes; a view of a wider one where they would not.

    >>> x = gemm_ops.empty_padded((4095, 4093), dtype=torch.bfloat16, device="cuda")
    >>> x.shape, x.stride()
    (torch.Size([4095, 4093]), (4096, 1))

    Raises:
        ProblemError: for no shape, or no floating-point dtype.
    """
    extents = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if not extents or any(isinstance(e, bool) or not isinstance(e, int) or e < 0 for e in extents):
        raise ProblemError(
            f"empty_padded: expected a shape of whole numbers, from 0 on, such as (4095, 4093), got {shape!r}"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ProblemError(f"empty_padded: expected a floating-point dtype such as torch.bfloat16, got {dtype!r}")
    *lead, columns = extents
    pitch = pitch_of(columns, dtype.itemsize)
    return torch.empty((*lead, pitch), dtype=dtype, device=device)[..., :columns]


def in_padded_rows(tensor: Tensor) -> Tensor:
    """A tensor in rows that begin at multiples of 16 bytes, as those of a kernel; a differentiable copy if need be."""
    columns = tensor.shape[-1]
    more = pitch_of(columns, tensor.element_size()) - columns
    return torch.nn.functional.pad(tensor, (0, more))[..., :columns] if more else tensor


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory: exact for matrices of one row distance and for tensors of moderate size."""
    if one.device != other.device or one.is_meta or not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = _extent(one), _extent(other)
    if start >= other_end or other_start >= end:
        return False
    if _in_other_columns(one, other, other_start - start):
        return False
    size, distance = one.element_size(), other_start - start
    offsets, others = _offsets(one), _offsets(other)
    if offsets is None or others is None or size != other.element_size() or distance % size:
        return True
    return bool(torch.isin(others + distance // size, offsets).any())


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
    start = address_of(tensor)
    return start, start + (last + 1) * tensor.element_size()

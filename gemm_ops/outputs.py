r"""The outputs of one call: which dtypes and layouts they have, and whether the caller's own buffers fit.

    >>> buffers, layouts = bind_outputs(["D", "preact"], tree, problem, out={"D": d, "preact": p}, inputs=[a, b])

Contract: without ``out`` every output is a new contiguous tensor of shape (\\*m_shape, N).  With ``out`` the
caller gives a tensor for every output, of exactly that shape and of the output's dtype, rows of any distance; it
shares no memory with an input or with another output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from epilogues.dtypes import torch_dtype
from epilogues.tree import EpilogueTree

from .errors import ProblemError
from .problem import ACCESS_BYTES, Matrix, Problem, read_matrix


def bind_outputs(
    names: Sequence[str],
    tree: EpilogueTree,
    problem: Problem,
    out: Tensor | Mapping[str, Tensor] | None,
    inputs: Sequence[Tensor],
) -> tuple[dict[str, Tensor], tuple[tuple[Matrix, str], ...]]:
    """The caller's buffers by name (empty if there are none), and layout and short dtype name of each output.

    Args:
        names: of the outputs, in the tree's order (a resolved tree's own labels may be another epilogue's).
        tree: resolved.

    Raises:
        ProblemError: ``out`` does not fit; says which output, what was expected and what came.
    """
    if out is None:
        return {}, tuple((_new_layout(problem, str(store.dtype)), str(store.dtype)) for store in tree.outputs)
    given = {names[0]: out} if isinstance(out, Tensor) else dict(out)
    if set(given) != set(names):
        raise ProblemError(f"out should have the outputs {', '.join(names)}; got {', '.join(map(str, given))}")
    buffers: dict[str, Tensor] = {}
    layouts = []
    for name, store in zip(names, tree.outputs, strict=True):
        buffer = given[name]
        _check(name, buffer, torch_dtype(str(store.dtype)), problem)
        others = [*inputs, *buffers.values()]
        if any(_overlap(buffer, other) for other in others):
            raise ProblemError(f"out[{name!r}] shares memory with an input or with another output")
        buffers[name] = buffer
        layouts.append((_given_layout(buffer, problem), str(store.dtype)))
    return buffers, tuple(layouts)


def _check(name: str, buffer: Tensor, dtype: object, problem: Problem) -> None:
    expected = f"a tensor of shape {problem.output_shape}, dtype {dtype}, on {problem.device}"
    if not isinstance(buffer, Tensor):
        raise ProblemError(f"out[{name!r}] should be {expected}, got {type(buffer).__name__}")
    if (tuple(buffer.shape), buffer.dtype, buffer.device) != (problem.output_shape, dtype, problem.device):
        raise ProblemError(
            f"out[{name!r}] should be {expected}; got shape {tuple(buffer.shape)}, dtype {buffer.dtype}, "
            f"on {buffer.device}"
        )


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


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = _extent(one), _extent(other)
    return start < other_end and other_start < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the byte after the last that the tensor can touch."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

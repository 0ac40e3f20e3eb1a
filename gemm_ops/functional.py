"""``matmul`` and ``linear`` with an epilogue: the functions people call.

    >>> y = matmul(a, b, scaled_gelu_residual, scale=s, bias=t, residual=r)
    >>> y = linear(x, weight, "gelu", bias=bias)

What may be given as an epilogue, and what comes of it, is in :mod:`gemm_ops.arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from epilogues import Epilogue

from .arguments import EpilogueLike, Outputs, as_epilogue, outputs_by_name, results_of, without_absent_bias
from .dispatch import Call, Decision, announce_fallback, bind_call, compute_unfused, decide, make_plan
from .errors import ProblemError
from .forcing import forced_backend
from .plan import find_plan, plan_key, remember_plan


def matmul(
    a: Tensor,
    b: Tensor,
    epilogue: EpilogueLike = None,
    *,
    out: Tensor | Mapping[str, Tensor] | None = None,
    padded_output: bool = False,
    **operands: Tensor | float,
) -> Outputs:
    """``epilogue(a @ b)`` in one kernel where the device has one for it.

        >>> y = matmul(a, b, "silu", bias=bias)

    Args:
        a: (..., M, K), or (K,); float16 or bfloat16 to be fused.
        b: (K, N), or (..., K, N), of a's dtype.
        epilogue: what is done to each element of the product.
        out: where to write: a tensor of the result's shape, with any strides, or one for each output by name.
        padded_output: whether new outputs are views of rows that begin at multiples of 16 bytes, so that the next
            GEMM reads them as they are, whatever N is.
        operands: the epilogue's operands.  Rows are (N,), columns (M,) or a's leading dimensions, matrices have
            the result's shape, scalars are numbers or 1-element tensors; all tensors on a's device.  Over batch
            dimensions they broadcast as in PyTorch: rows (..., 1, N), columns (..., M, 1), matrices (..., M, N).

    Returns:
        A tensor of shape (..., M, N), as ``torch.matmul`` has it, in the epilogue's output dtype (a's where it
        names none); a dictionary of such tensors if there are several outputs.

    Raises:
        ProblemError: shapes, dtypes or devices of a, b or out do not go together.
        EpilogueError: the operands are not the epilogue's.
        BuildError: the kernel does not compile.
    """
    if torch.compiler.is_compiling():
        return _outside_graphs()(a, b, epilogue, out, operands, padded_output)
    return _matmul(a, b, epilogue, out, operands, padded_output)


def _matmul(
    a: Tensor,
    b: Tensor,
    epilogue: EpilogueLike,
    out: Tensor | Mapping[str, Tensor] | None,
    operands: Mapping[str, Tensor | float],
    padded_output: bool,
) -> Outputs:
    chosen = as_epilogue(epilogue, operands.get("bias") is not None)
    key = _plan_key(a, b, chosen, operands, out, padded_output)
    if key is not None and (found := find_plan(key)) is not None:
        return results_of(found.run(a, b, operands, outputs_by_name(out)))
    call = _bind(a, b, chosen, out, operands, padded_output)
    decision = decide(call)
    announce_fallback(decision)
    plan = make_plan(call, decision)
    if plan is None:
        return results_of(compute_unfused(call, decision))
    if key is not None:
        remember_plan(key, plan)
    return results_of(plan.run(call.a, call.b, call.tensors, call.out))


_outside: Callable[..., Outputs] | None = None


def _outside_graphs() -> Callable[..., Outputs]:
    """``_matmul`` for a caller that torch.compile is tracing: a break in its graph, run as it is.

    Pointers, ctypes and the kernel cache are nothing to trace.  Made when first needed, because making it imports
    torch's compiler, which takes more than a second.
    """
    global _outside
    if _outside is None:
        _outside = torch.compiler.disable(_matmul)
    return _outside


def linear(
    x: Tensor,
    weight: Tensor,
    epilogue: EpilogueLike = None,
    *,
    out: Tensor | Mapping[str, Tensor] | None = None,
    padded_output: bool = False,
    **operands: Tensor | float,
) -> Outputs:
    """``epilogue(x @ weight.T)``: :func:`matmul` for a weight of shape (N, K), as ``F.linear`` takes it.

        >>> y = linear(x, layer.weight, "gelu", bias=layer.bias)

    Args:
        x: (..., K), any number of leading dimensions; their product is the M that operands refer to.
        weight: (N, K).

    Everything else is as in :func:`matmul`.
    """
    return matmul(x, transpose_weight(weight), epilogue, out=out, padded_output=padded_output, **operands)


def backend_for(
    a: Tensor,
    b: Tensor,
    epilogue: EpilogueLike = None,
    *,
    out: Tensor | Mapping[str, Tensor] | None = None,
    padded_output: bool = False,
    **operands: Tensor | float,
) -> Decision:
    """Which backend and kernel :func:`matmul` would use for these arguments, and why; computes nothing.

    >>> decision = backend_for(x, weight.T, "gelu", bias=bias)
    >>> decision.backend, decision.kernel
    ('sm90', 'sm90_pingpong_128x128x64_1x2')
    >>> decision.routes
    ('a: copied into padded rows first, as its leading dimension of 4093 elements is not a multiple of 16 bytes', ...)
    """
    return decide(_bind(a, b, as_epilogue(epilogue, operands.get("bias") is not None), out, operands, padded_output))


def transpose_weight(weight: Tensor) -> Tensor:
    """A linear layer's (N, K) weight as the (K, N) matrix of a product; a view."""
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        given = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ProblemError(f"expected a weight of shape (N, K), got {given}")
    return weight.t()


def _plan_key(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
    padded_output: bool,
) -> tuple[object, ...] | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not a.is_cuda:
        return None
    if torch.is_autocast_enabled("cuda"):
        return None
    return plan_key((a, b), epilogue, operands, out, (forced_backend(), padded_output))


def _bind(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    out: Tensor | Mapping[str, Tensor] | None,
    operands: Mapping[str, Tensor | float],
    padded_output: bool,
) -> Call:
    present = without_absent_bias(epilogue, operands)
    return bind_call(*_autocast(a, b), epilogue, present, out, padded_output=padded_output)


def _autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Under ``torch.autocast``, the matrices in its dtype, as ``F.linear`` has it."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a, b
    kind = a.device.type
    # asking whether it is enabled is an error for devices that have none, such as meta
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return a, b
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(  # type: ignore[return-value]
        matrix.to(dtype) if matrix.dtype in eligible and matrix.device.type == kind else matrix for matrix in (a, b)
    )

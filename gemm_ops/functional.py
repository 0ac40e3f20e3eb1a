"""``matmul`` and ``linear`` with an epilogue: the functions people call.

    >>> y = matmul(a, b, scaled_gelu_residual, scale=s, bias=t, residual=r)
    >>> y = linear(x, weight, "gelu", bias=bias)

What may be given as an epilogue, and what comes of it, is in :mod:`gemm_ops.arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from epilogues import Epilogue
from epilogues.compiling import untraced

from . import native
from .addressing.views import has_memory
from .arguments import EpilogueLike, Outputs, epilogue_of_call, results_of, without_absent_bias
from .dispatch import Decision
from .errors import ProblemError
from .gradients import product_needs
from .operators import describe, fill_given, flatten
from .product_call import cast_as_autocast, decide_product, multiply, multiply_by_operations
from .recording import multiply_recorded
from .symbolic import record_call, tracer_of
from .transforms import TRANSFORMED, are_transforms_active


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
        operands: the epilogue's operands.  Rows are (N,), columns (M,) of a 2-d a, else a's leading dimensions,
            matrices have the result's shape, scalars are numbers or 1-element tensors; all tensors on a's device.
            Over batch dimensions they broadcast as in PyTorch: rows (..., 1, N), columns (..., M, 1), matrices
            (..., M, N).

    Returns:
        A tensor of shape (..., M, N), as ``torch.matmul`` has it, in the epilogue's output dtype (a's where it
        names none); a dictionary of such tensors if there are several outputs.

    Raises:
        ProblemError: shapes, dtypes or devices of a, b or out do not go together.
        EpilogueError: the operands are not the epilogue's.
        BuildError: the kernel does not compile.
    """
    if out is None and not torch.compiler.is_compiling():
        warm = native.product(a, b, False, epilogue, padded_output, operands)
        if warm is not None:
            return warm
    if (tracer := tracer_of(a, b, *operands.values())) is not None:
        keywords = {"out": out, "padded_output": padded_output, **operands}
        return record_call(tracer, matmul, (a, b), epilogue, keywords)
    return _compute(a, b, epilogue, out, operands, padded_output)


def _compute(
    a: Tensor,
    b: Tensor,
    epilogue: EpilogueLike,
    out: Tensor | Mapping[str, Tensor] | None,
    operands: Mapping[str, Tensor | float],
    padded_output: bool,
) -> Outputs:
    """The call, of tensors and numbers."""
    if are_transforms_active():
        return _transformed(a, b, epilogue, out, operands, padded_output)
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return _traced(a, b, epilogue, out, operands, padded_output)
    chosen = epilogue_of_call(epilogue, operands)
    if not isinstance(epilogue, Epilogue):
        native.remember_name(epilogue, operands.get("bias") is not None, chosen)
    given = without_absent_bias(chosen, operands)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if out is None and has_memory(a) and has_memory(b):
            return results_of(multiply_recorded(*cast_as_autocast(a, b), chosen, given, padded_output))
        if torch.is_grad_enabled() and product_needs(a, b, given):  # by operations; refused, for out=
            return _transformed(a, b, epilogue, out, operands, padded_output)
    return results_of(multiply(a, b, chosen, given, out, padded_output))


# the compiler, which leaves a transform that it cannot trace to Python, would trace what that calls all the same
@untraced(TRANSFORMED)
def _transformed(
    a: Tensor,
    b: Tensor,
    epilogue: EpilogueLike,
    out: Tensor | Mapping[str, Tensor] | None,
    operands: Mapping[str, Tensor | float],
    padded_output: bool,
) -> Outputs:
    """The call operation by operation."""
    chosen = epilogue_of_call(epilogue, operands)
    given = without_absent_bias(chosen, operands)
    return results_of(multiply_by_operations(a, b, chosen, given, out, padded_output))


def _traced(
    a: Tensor,
    b: Tensor,
    epilogue: EpilogueLike,
    out: Tensor | Mapping[str, Tensor] | None,
    operands: Mapping[str, Tensor | float],
    padded_output: bool,
) -> Outputs:
    """The call as a graph has it; see :func:`gemm_ops.operators.describe`."""
    described = describe(epilogue, operands)
    return results_of(fill_given(multiply_described(a, b, described, operands, padded_output), out))


def multiply_described(
    a: Tensor,
    b: Tensor,
    described: tuple[str, tuple[str, ...], tuple[str, ...]],
    operands: Mapping[str, Tensor | float],
    padded_output: bool = False,
) -> dict[str, Tensor]:
    """The outputs by name of a call in a graph, of an epilogue as :func:`gemm_ops.operators.describe` gives it."""
    text, names, outputs = described
    a, b = cast_as_autocast(a, b)
    needs = ",".join(product_needs(a, b, operands)) if torch.is_grad_enabled() else ""
    flat = flatten(text, names, operands)
    if needs:
        found = torch.ops.gemm_ops.matmul(a, b, *flat, needs, padded_output)
    else:
        found = torch.ops.gemm_ops.matmul_inference(a, b, *flat, padded_output)
    return dict(zip(outputs, found, strict=False))


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
        x: (..., K), any number of leading dimensions.  Columns have these too, (..., 1) or as they broadcast to it;
            of a 2-d x they are (M,).
        weight: (N, K).

    Everything else is as in :func:`matmul`.
    """
    if out is None and not torch.compiler.is_compiling():
        warm = native.product(x, weight, True, epilogue, padded_output, operands)
        if warm is not None:
            return warm
    if (
        tracer := tracer_of(x, weight, *operands.values())
    ) is not None:  # here, for a graph is to have the parameter, not a view of it
        keywords = {"out": out, "padded_output": padded_output, **operands}
        return record_call(tracer, linear, (x, weight), epilogue, keywords)
    return _compute(x, transpose_weight(weight), epilogue, out, operands, padded_output)


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
    chosen = epilogue_of_call(epilogue, operands)
    given = without_absent_bias(chosen, operands)
    return decide_product(a, b, chosen, given, out, padded_output)


def transpose_weight(weight: Tensor) -> Tensor:
    """A linear layer's (N, K) weight as the (K, N) matrix of a product; a view."""
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        given = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ProblemError(f"expected a weight of shape (N, K), got {given}")
    return weight.t()

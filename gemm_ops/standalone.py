"""``apply``: an epilogue on a tensor that is there already, as one kernel.  What people call.

    >>> y = gemm_ops.apply(x, "gelu", bias=bias)
    >>> y = scaled_residual.elementwise(x, scale=s, residual=r)         # the same of a declared epilogue
    >>> gemm_ops.apply(x, "relu", out=x)                                # in place

x takes the accumulator's place: its last dimension is the N that rows run along, the product of the others the M.  What
can be said of operands and outputs is what :func:`gemm_ops.matmul` says.

A call goes to :mod:`gemm_ops.elementwise_call`; one that autograd records by way of :mod:`gemm_ops.recording`, one that
PyTorch traces as the operator of :mod:`gemm_ops.operators`.
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
from .elementwise_call import bind_elementwise, compute_by_operations, run_elementwise
from .forcing import require_no_kernel
from .gradients import needs_of
from .operators import describe, fill_given, flatten
from .recording import compute_recorded
from .symbolic import record_call, tracer_of
from .transforms import TRANSFORMED, are_transforms_active


def apply(
    x: Tensor,
    epilogue: EpilogueLike,
    /,
    *,
    out: Tensor | Mapping[str, Tensor] | None = None,
    **operands: Tensor | float,
) -> Outputs:
    """``epilogue(x)`` in one kernel that reads every tensor once and writes every output once.

        >>> y = gemm_ops.apply(x, "silu", bias=bias)

    Args:
        x: (..., N), of any strides; float16, bfloat16 or float32 to be fused.  Computed in fp32.
        epilogue: what is done to each element, as in :func:`gemm_ops.matmul`.
        out: where to write: a tensor of x's shape, with any strides, or one for each output by name.  It may be
            exactly x, or exactly an operand, but not overlap with one otherwise.
        operands: the epilogue's operands, as in :func:`gemm_ops.matmul`: rows (N,), columns of x's leading dimensions,
            matrices of x's shape, scalars; dimensions broadcast as in PyTorch.

    Returns:
        A tensor of x's shape, lying as ``torch.empty_like(x)``, in the epilogue's output dtype (x's where it names
        none); a dictionary of such tensors if there are several outputs.  Differentiable, with a backward of one
        kernel for most epilogues.

    Raises:
        ProblemError: x or out is no tensor that can be computed with.
        EpilogueError: the operands are not the epilogue's.
        BuildError: the kernel does not compile.
        UnsupportedProblemError: within ``use_backend("sm90")`` or ``"sm80"``, which here mean one kernel, whichever
            the device: none takes the call.
    """
    if out is None and not torch.compiler.is_compiling():
        warm = native.elementwise(x, epilogue, operands)
        if warm is not None:
            return warm
    if (tracer := tracer_of(x, *operands.values())) is not None:
        return record_call(tracer, apply, (x,), epilogue, {"out": out, **operands})
    transformed = are_transforms_active()
    if not transformed and (torch.compiler.is_compiling() or is_in_torch_dispatch_mode()):
        return _traced(x, epilogue, out, operands)
    if transformed:
        return _transformed(x, epilogue, out, operands)
    chosen = epilogue_of_call(epilogue, operands)
    if not isinstance(epilogue, Epilogue):
        native.remember_name(epilogue, operands.get("bias") is not None, chosen)
    given = without_absent_bias(chosen, operands)
    if isinstance(x, Tensor):
        if out is None and has_memory(x):
            return results_of(compute_recorded(x, chosen, given))
        if torch.is_grad_enabled() and needs_of(x, given):  # operation by operation; refused, for out=
            return _transformed(x, epilogue, out, operands)
    return results_of(run_elementwise(x, chosen, given, out))


# the compiler, which leaves a transform that it cannot trace to Python, would trace what that calls all the same
@untraced(TRANSFORMED)
def _transformed(
    x: Tensor, epilogue: EpilogueLike, out: Tensor | Mapping[str, Tensor] | None, operands: Mapping[str, Tensor | float]
) -> Outputs:
    """The call operation by operation."""
    chosen = epilogue_of_call(epilogue, operands)
    call = bind_elementwise(x, chosen, without_absent_bias(chosen, operands), out)
    require_no_kernel(TRANSFORMED)
    return results_of(compute_by_operations(call))


def _traced(
    x: Tensor, epilogue: EpilogueLike, out: Tensor | Mapping[str, Tensor] | None, operands: Mapping[str, Tensor | float]
) -> Outputs:
    """The call as a graph has it: one operator, and copies to what was given as ``out``."""
    text, names, outputs = describe(epilogue, operands)
    found = torch.ops.gemm_ops.apply(x, *flatten(text, names, operands))
    return results_of(fill_given(dict(zip(outputs, found, strict=True)), out))

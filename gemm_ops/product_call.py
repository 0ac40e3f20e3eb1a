"""One product with its epilogue, from tensors to outputs: by the plan of an earlier call, or decided anew.

    >>> outputs = multiply(a, b, epilogue, {"bias": bias})                 # by name; autograd does not hear of it

What people call is :mod:`gemm_ops.functional`; what autograd records, :mod:`gemm_ops.recording`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epilogues import Epilogue

from . import native
from .arguments import outputs_by_name
from .autocast import autocast_dtype
from .dispatch import Decision, announce_fallback, bind_call, compute_by_operations, decide, make_plan
from .elementwise_call import runs_kernels
from .forcing import asked, require_no_kernel
from .gradients import product_needs, storing_forward
from .plan import find_plan, plan_key, remember_plan
from .transforms import TRANSFORMED
from .tuner.tune import tune_if_asked
from .when_to_build import build_in_background


def multiply(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None = None,
    padded_output: bool = False,
) -> dict[str, Tensor]:
    """The outputs of ``epilogue(a @ b)`` by name.

    Raises:
        ProblemError, EpilogueError: whatever is wrong with the arguments.
        BuildError: if a kernel has to be built and cannot be.
        ValueError: for a value of ``GEMM_OPS_TUNE`` or ``GEMM_OPS_BUILD`` that means nothing.
    """
    key = None
    a, b = cast_as_autocast(a, b)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and runs_kernels(a.device):
        key = plan_key((a, b), epilogue, operands, out, (asked(), padded_output))
        if key is not None and (found := find_plan(key)) is not None:
            if out is None and not found.is_native:
                native.remember_plan(found, (a, b), epilogue, operands, padded_output)
            outputs: dict[str, Tensor] = found.run(a, b, operands, outputs_by_name(out))
            return outputs
    call = bind_call(a, b, epilogue, operands, out, padded_output=padded_output)
    postponed = tune_if_asked(call)
    decision = decide(call)
    announce_fallback(decision)
    if decision.awaited is not None:
        build_in_background(decision.awaited)
    plan = make_plan(call, decision)
    if plan is None:
        return compute_by_operations(call, transformed=not call.is_in_memory)
    if key is not None and not decision.for_now and not postponed:
        remember_plan(key, plan)
        if out is None:
            native.remember_plan(plan, (a, b), epilogue, operands, padded_output)
    return plan.run(call.a, call.b, call.tensors, call.out)


def multiply_by_operations(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
    padded_output: bool,
) -> dict[str, Tensor]:
    """The same by PyTorch operation by operation, so that whatever transforms PyTorch's operations transforms these.

    Raises:
        ProblemError, EpilogueError: whatever is wrong with the arguments, ``out`` beside gradients included.
        UnsupportedProblemError: if another backend is asked for by name.
    """
    call = bind_call(*cast_as_autocast(a, b), epilogue, operands, out, padded_output=padded_output)
    require_no_kernel(TRANSFORMED)
    return compute_by_operations(call, transformed=True)


def decide_product(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
    padded_output: bool,
) -> Decision:
    """How :func:`multiply` would compute a call, and where gradients are wanted its forward pass; computes nothing."""
    a, b = cast_as_autocast(a, b)
    call = bind_call(a, b, epilogue, operands, out, padded_output=padded_output)
    if torch.is_grad_enabled() and call.is_in_memory and (needs := product_needs(a, b, operands)):
        forward = storing_forward(epilogue, needs, a.dtype)
        with torch.no_grad():
            call = bind_call(a, b, forward, operands, None, padded_output=padded_output)
    return decide(call)


def cast_as_autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Under ``torch.autocast``, the matrices in its dtype, as ``F.linear`` has it."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a, b
    kind = a.device.type
    dtype = autocast_dtype(kind)
    if dtype is None:
        return a, b
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(  # type: ignore[return-value]
        matrix.to(dtype) if matrix.dtype in eligible and matrix.device.type == kind else matrix for matrix in (a, b)
    )

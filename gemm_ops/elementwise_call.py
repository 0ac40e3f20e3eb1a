"""An epilogue on a tensor that is there already, as one kernel: what people call.

    >>> y = gemm_ops.apply(x, "gelu", bias=bias)
    >>> y = scaled_residual.elementwise(x, scale=s, residual=r)         # the same of a declared epilogue
    >>> gemm_ops.apply(x, "relu", out=x)                                # in place

x takes the accumulator's place: its last dimension is the N that rows run along, the product of the others the M.  What
can be said of operands and outputs is what :func:`gemm_ops.matmul` says.

Layers: :func:`bind` reads and checks the tensors; :func:`find_walk` says whether a kernel can take them; then
:mod:`gemm_ops.elementwise` and :mod:`gemm_ops.runtime.elementwise` compute, or the PyTorch reference does, operation
by operation, said once with its reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype
from epilogues.reference import evaluate
from epilogues.tree import EpilogueTree

from .addressing.views import has_memory
from .announce import announce
from .build.cache import find_library
from .build.toolchain import find_toolchain
from .dispatch import forced_backend, resolve_tree
from .elementwise.layout import Layout, plan_layout, view_of
from .elementwise.spec import ElementwiseSpec
from .errors import ProblemError, ToolchainError, UnsupportedProblemError
from .fallback import without_autocast
from .functional import EpilogueLike, Outputs, as_epilogue, results_of, without_absent_bias
from .operands import BoundOperand, bind_operands
from .outputs import bind_outputs
from .problem import Problem, read_tensor
from .runtime.elementwise import launch
from .runtime.loading import is_loaded


@dataclass(frozen=True)
class ElementwiseCall:
    """One call with everything about it known but how it is computed."""

    epilogue: Epilogue
    tree: EpilogueTree  # resolved and simplified
    problem: Problem
    x: Tensor
    given: Mapping[str, Tensor | float]
    operands: tuple[BoundOperand, ...]
    out: dict[str, Tensor]  # the caller's outputs; empty: allocate
    differentiable: bool


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
        A tensor of x's shape and strides in the epilogue's output dtype (x's where it names none); a dictionary of such
        tensors if there are several outputs.

    Raises:
        ProblemError: x or out is no tensor that can be computed with.
        EpilogueError: the operands are not the epilogue's.
        BuildError: the kernel does not compile.
        UnsupportedProblemError: within ``use_backend("sm90")`` or ``"sm80"``, which here mean one kernel, whichever
            the device: none takes the call.
    """
    call = bind(x, as_epilogue(epilogue, operands.get("bias") is not None), operands, out)
    walk = find_walk(call)
    return results_of(_compute_unfused(call, walk) if isinstance(walk, str) else _compute(call, walk))


def bind(
    x: Tensor,
    epilogue: Epilogue,
    given: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
) -> ElementwiseCall:
    """Checks the arguments of a call and reads what there is to know of them.

    Raises:
        ProblemError, EpilogueError: whatever is wrong with them; nothing has been computed.
    """
    given = without_absent_bias(epilogue, given)
    problem = read_tensor("x", x)
    x = x.resolve_neg()
    operands = bind_operands(epilogue.tree, given, problem)
    tree = resolve_tree(epilogue.tree, operands, problem.element or "f32")
    tensors = [x, *(value for value in given.values() if isinstance(value, Tensor))]
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    buffers = bind_outputs(epilogue.tree.outputs, tree, problem, out, tensors, in_place=True)
    if buffers and differentiable:
        raise ProblemError("out= does not go with gradients: an argument requires grad; use torch.no_grad()")
    return ElementwiseCall(epilogue, tree, problem, x, given, operands, buffers, differentiable)


class Walk(NamedTuple):
    """How a call is computed: by which kernel, and how that walks through the tensors."""

    spec: ElementwiseSpec
    layout: Layout


def find_walk(call: ElementwiseCall) -> Walk | str:
    """The kernel of a call, or why none computes it, in words.  Builds nothing."""
    problem = call.problem
    if forced_backend() == "reference":
        return "asked for with use_backend"
    if call.differentiable:
        return "an argument requires grad, and standalone kernels have no backward pass yet"
    if not _runs_kernels(problem.device):
        return f"the tensors are on the device {str(problem.device)!r}, and kernels run on CUDA devices"
    if problem.element is None:
        return f"the kernels take float16, bfloat16 and float32, not {str(problem.dtype).removeprefix('torch.')}"
    operands = [operand.tensor for operand in call.operands]
    if not all(has_memory(tensor) for tensor in (call.x, *operands, *call.out.values()) if tensor is not None):
        return "a tensor has no memory of its own, being inside torch.vmap, or fake"
    shape = problem.output_shape
    # new ones lie as their likes on the meta device, and begin at multiples of more than a piece
    outputs = list(call.out.values()) or _new_outputs(call, torch.device("meta"))
    views = [view_of(call.x, shape), *(None if tensor is None else view_of(tensor, shape) for tensor in operands)]
    layout = plan_layout(shape, views, [view_of(output, shape) for output in outputs])
    if isinstance(layout, str):
        return layout
    major, minor = torch.cuda.get_device_capability(problem.device)
    spec = ElementwiseSpec.of(call.tree, problem.element, layout, f"{major}{minor}")
    if not is_loaded(spec) and find_library(spec) is None:
        try:
            find_toolchain()
        except ToolchainError as error:
            return f"the kernel is not built yet and cannot be: {error}"
    return Walk(spec, layout)


def _runs_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def _made_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device)


def _new_outputs(call: ElementwiseCall, device: torch.device) -> list[Tensor]:
    """Tensors that lie as x does, as those of PyTorch's own elementwise operators."""
    return [torch.empty_like(call.x, dtype=torch_dtype(str(store.dtype)), device=device) for store in call.tree.outputs]


def _compute(call: ElementwiseCall, walk: Walk) -> dict[str, Tensor]:
    outputs = list(call.out.values()) or _new_outputs(call, call.problem.device)
    operands = [operand.value if operand.tensor is None else operand.tensor for operand in call.operands]
    with _made_current(call.problem.device):
        launch(walk.spec, walk.layout, call.x, operands, outputs)
    return dict(zip(call.epilogue.outputs, outputs, strict=True))


def _compute_unfused(call: ElementwiseCall, reason: str) -> dict[str, Tensor]:
    problem, forced = call.problem, forced_backend()
    if forced not in ("auto", "reference"):
        raise UnsupportedProblemError(f"the backend {forced!r} cannot compute this: {reason}")
    # with gradients nothing is lost where there is no kernel to lose
    if forced == "auto" and call.x.numel() and (_runs_kernels(problem.device) or not call.differentiable):
        announce(f"computed by PyTorch operation by operation, not in one kernel: {reason}")
    compute = torch.float64 if problem.dtype == torch.float64 else torch.float32
    with without_autocast(problem.device.type):
        results = evaluate(
            call.epilogue.tree, call.x.to(compute), call.given, compute_dtype=compute, out_dtype=problem.dtype
        )
    for name, buffer in call.out.items():
        buffer.copy_(results[name])
    return call.out or results

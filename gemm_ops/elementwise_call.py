"""One elementwise call, from tensors to outputs: bind, find a kernel, launch.

    >>> outputs = run_elementwise(x, epilogue, {"bias": bias})              # by name

x takes the accumulator's place.  It is a tensor of its own (:func:`gemm_ops.apply`), or the fp32 product of a GEMM that
no kernel computes together with its epilogue (:mod:`gemm_ops.two_passes`); then outputs have the matrices' dtype where
the epilogue names none.

Layers: :func:`bind_elementwise` reads and checks the tensors; :func:`find_walk` says whether a kernel takes them; then
:mod:`gemm_ops.elementwise` and :mod:`gemm_ops.elementwise_plan` compute, or the PyTorch reference does, operation by
operation.  :func:`run_elementwise` says so once, with the reason; a backend asked for by name raises instead.  A call
that is alike an earlier one goes straight to that one's plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype
from epilogues.reference import evaluate
from epilogues.tree import EpilogueTree

from . import native
from .addressing.views import has_memory
from .announce import announce
from .arguments import outputs_by_name
from .autocast import without_autocast
from .elementwise.layout import Layout, plan_layout, view_of
from .elementwise.spec import ElementwiseSpec
from .elementwise_plan import ElementwisePlan
from .errors import ProblemError, ToolchainError, UnsupportedProblemError
from .forcing import forced_backend
from .operands import BoundOperand, bind_operands
from .outputs import bind_outputs
from .plan import find_plan, plan_key, remember_plan
from .problem import Problem, read_tensor
from .resolving import resolve_tree
from .when_to_build import NotBuilt, build_in_background, obstacle


@dataclass(frozen=True)
class ElementwiseCall:
    """One call with everything about it known but how it is computed.

    Attributes:
        epilogue: what is computed.
        tree: its tree, resolved and simplified.
        problem: the shape and dtype that outputs have and operands refer to.
        x: what takes the accumulator's place.
        x_dtype: its short dtype name; None for float64.
        given: the operands, as given.
        operands: the same, bound.
        out: the caller's outputs by name; empty: allocate.
    """

    epilogue: Epilogue
    tree: EpilogueTree
    problem: Problem
    x: Tensor
    x_dtype: str | None
    given: Mapping[str, Tensor | float]
    operands: tuple[BoundOperand, ...]
    out: dict[str, Tensor]

    @property
    def in_memory(self) -> dict[str, Tensor | float]:
        """The operands by name as memory holds them: with PyTorch's lazy negation carried out."""
        return {
            name: operand.value if operand.tensor is None else operand.tensor
            for name, operand in zip(self.epilogue.operands, self.operands, strict=True)
        }


def bind_elementwise(
    x: Tensor,
    epilogue: Epilogue,
    given: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
) -> ElementwiseCall:
    """Checks the arguments of a call and reads what there is to know of them.

    Raises:
        ProblemError, EpilogueError: whatever is wrong with them; nothing has been computed.
    """
    problem = read_tensor("x", x)
    x = x.resolve_neg()
    operands = bind_operands(epilogue.tree, given, problem)
    tree = resolve_tree(epilogue.tree, operands, problem.element or "f32")
    tensors = [x, *(value for value in given.values() if isinstance(value, Tensor))]
    buffers = bind_outputs(epilogue.tree.outputs, tree, problem, out, tensors, in_place=True)
    if buffers and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ProblemError("out= does not go with gradients: an argument requires grad; use torch.no_grad()")
    return ElementwiseCall(epilogue, tree, problem, x, problem.element, given, operands, buffers)


class Walk(NamedTuple):
    """How a call is computed: by which kernel, and how that walks through the tensors."""

    spec: ElementwiseSpec
    layout: Layout


def find_walk(call: ElementwiseCall) -> Walk | str:
    """The kernel of a call, or why none computes it, in words.  Builds nothing."""
    problem = call.problem
    if forced_backend() == "reference":
        return "asked for with use_backend"
    if not runs_kernels(problem.device):
        return f"the tensors are on the device {str(problem.device)!r}, and kernels run on CUDA devices"
    if call.x_dtype is None or problem.element is None:
        return f"the kernels take float16, bfloat16 and float32, not {str(problem.dtype).removeprefix('torch.')}"
    operands = [operand.tensor for operand in call.operands]
    if not all(has_memory(tensor) for tensor in (call.x, *operands, *call.out.values()) if tensor is not None):
        return "a tensor has no memory of its own, being inside torch.vmap, fake, or distributed"
    layout = lay_out(call)
    if isinstance(layout, str):
        return layout
    major, minor = torch.cuda.get_device_capability(problem.device)
    spec = ElementwiseSpec.of(call.tree, call.x_dtype, layout, f"{major}{minor}")
    try:
        reason = obstacle(spec, waited_for=forced_backend() != "auto")
    except ToolchainError as error:
        reason = f"the kernel is not built yet and cannot be: {error}"
    return Walk(spec, layout) if reason is None else reason


def lay_out(call: ElementwiseCall) -> Layout | str:
    """How a kernel walks through the tensors of a call, or why none can, in words; they may be on the meta device."""
    shape = call.problem.output_shape
    operands = [operand.tensor for operand in call.operands]
    # new ones lie as their likes on the meta device, and begin at multiples of more than a piece
    outputs = list(call.out.values()) or [
        torch.empty_like(call.x, dtype=torch_dtype(str(store.dtype)), device="meta") for store in call.tree.outputs
    ]
    views = [view_of(call.x, shape), *(None if tensor is None else view_of(tensor, shape) for tensor in operands)]
    return plan_layout(shape, views, [view_of(output, shape) for output in outputs])


def runs_kernels(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return device.type == "cuda"


def run_elementwise(
    x: Tensor,
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The outputs of an epilogue over x by name; autograd does not hear of it where a kernel computes.

    Raises:
        ProblemError, EpilogueError: whatever is wrong with the arguments.
        BuildError: if the kernel has to be built and cannot be.
        UnsupportedProblemError: if a backend is asked for by name, and none takes the call.
    """
    key = None
    if isinstance(x, Tensor) and runs_kernels(x.device):
        key = plan_key((x,), epilogue, operands, out, forced_backend(), in_place=True)
        if key is not None and (found := find_plan(key)) is not None:
            if out is None and not found.is_native:
                native.remember_plan(found, (x,), epilogue, operands, padded_output=False)
            outputs: dict[str, Tensor] = found.run(x, operands, outputs_by_name(out))
            return outputs
    call = bind_elementwise(x, epilogue, operands, out)
    walk = find_walk(call)
    if isinstance(walk, str):
        if isinstance(walk, NotBuilt) and walk.spec is not None:
            build_in_background(walk.spec)
        return _compute_unfused(call, walk)
    plan = ElementwisePlan(epilogue, call.tree, walk.spec, walk.layout, call.problem.device)
    if key is not None:
        remember_plan(key, plan)
        if out is None:
            native.remember_plan(plan, (x,), epilogue, operands, padded_output=False)
    return plan.run(call.x, call.in_memory, call.out)


def _compute_unfused(call: ElementwiseCall, reason: str) -> dict[str, Tensor]:
    forced = forced_backend()
    if forced not in ("auto", "reference"):
        raise UnsupportedProblemError(f"the backend {forced!r} cannot compute this: {reason}")
    if forced == "auto" and call.x.numel():
        announce(f"computed by PyTorch operation by operation, not in one kernel: {reason}")
    return compute_by_operations(call)


def compute_by_operations(call: ElementwiseCall) -> dict[str, Tensor]:
    """The outputs of a call by name, computed by PyTorch operation by operation."""
    dtype = call.problem.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    with without_autocast(call.problem.device.type):
        results = evaluate(call.epilogue.tree, call.x.to(compute), call.given, compute_dtype=compute, out_dtype=dtype)
    for name, buffer in call.out.items():
        buffer.copy_(results[name])
    return call.out or results

"""One call, from tensors to outputs: bind, decide, launch.

    >>> call = bind_call(a, b, epilogue, {"bias": bias}, out=None)
    >>> decision = decide(call)
    >>> decision.backend, decision.reason
    ('sm90', 'compute capability 9.0')
    >>> outputs = make_plan(call, decision).run(call.a, call.b, call.tensors, call.out)

The layers: ``problem``, ``operands`` and ``outputs`` read the tensors; :func:`decide` asks the families
(``kernels/selection``, ``addressing``) in order of preference, takes what was measured fastest (``tuner/advice``), and
falls back, with a reason, to cuBLAS and one kernel for the epilogue (``two_passes``), or to the reference backend; then
a plan launches the built kernels (``plan``, ``two_passes``), or :func:`compute_by_operations` runs ``fallback``.

Falling back is announced once per reason with a :class:`FallbackWarning`.  A backend asked for by name with
:func:`use_backend` never falls back: it raises.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype
from epilogues.tree import EpilogueTree

from .addressing import Addressing, Request
from .addressing.placement import describe
from .addressing.views import given_view, has_memory, new_view, read_request
from .announce import announce
from .build.buildable import Buildable
from .elementwise.spec import ElementwiseSpec
from .elementwise_call import Walk
from .errors import ProblemError, ToolchainError, UnsupportedProblemError
from .fallback import run_reference
from .forcing import forced_backend
from .kernels.selection import Selection, Target, problem_refusal, select_kernel
from .kernels.spec import KernelSpec
from .operands import BoundOperand, bind_operands
from .outputs import bind_outputs, in_padded_rows
from .plan import Plan
from .problem import Problem, read_problem
from .resolving import resolve_tree
from .tuner.advice import CUBLAS_ALONE, FUSED, TWO_PASSES, Advice, advise
from .two_passes import CublasAlone, OnePass, TwoPasses, find_alone, find_tail, make_unfused
from .variables import check_variables
from .when_to_build import NotBuilt, obstacle


@dataclass(frozen=True)
class Decision:
    """Which backend computes a call, and why.

    Attributes:
        backend: "skinny", "sm90", "sm80", "cublas" (PyTorch's product, then the epilogue in one kernel), or "reference"
            (PyTorch, operation by operation).
        kernel: the fused kernel configuration's name; None for other backends.
        reason: why this backend, in words.
        spec: the kernel, for :func:`gemm_ops.build_kernels`, of "cublas" that of the epilogue; None for the reference
            backend, and where cuBLAS computes all of it.
        addressing: how the tensors reach a fused kernel; None for other backends.
        routes: the same in words, a line for each tensor: as it is, at its own alignment, or copied first, and why.
        loss: whether not fusing loses something the user may want to know of.
        tail: how the epilogue of "cublas" is computed; None for other backends.
        for_now: whether another call may be decided otherwise, as this one's kernel is not built.
        awaited: that kernel, if it is to be built in the background.
    """

    backend: str
    kernel: str | None
    reason: str
    spec: KernelSpec | ElementwiseSpec | None = dataclasses.field(default=None, repr=False)
    addressing: Addressing | None = dataclasses.field(default=None, repr=False)
    routes: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    loss: bool = dataclasses.field(default=False, repr=False)
    tail: Walk | CublasAlone | None = dataclasses.field(default=None, repr=False)
    for_now: bool = dataclasses.field(default=False, repr=False)
    awaited: Buildable | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True)
class Call:
    """One call with everything about it known but the backend."""

    epilogue: Epilogue
    tree: EpilogueTree  # resolved and simplified
    problem: Problem
    a: Tensor
    b: Tensor
    given: Mapping[str, Tensor | float]
    operands: tuple[BoundOperand, ...]
    out: dict[str, Tensor]  # the caller's outputs; empty: allocate
    padded_output: bool  # whether new outputs have rows at multiples of 16 bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to multiply."""
        return 0 in (self.problem.m, self.problem.n, self.problem.k)

    @functools.cached_property
    def request(self) -> Request:
        """What the addressing of the tensors depends on; of a call that is not empty."""
        problem = self.problem
        if self.out:
            outputs = [given_view(buffer, problem.extents) for buffer in self.out.values()]
        else:
            sizes = [torch_dtype(str(store.dtype)).itemsize for store in self.tree.outputs]
            outputs = [new_view(problem.extents, problem.n, size, padded=self.padded_output) for size in sizes]
        operands = [(operand.facts.kind, operand.tensor) for operand in self.operands]
        return read_request(problem.extents, problem.n, problem.k, self.a, self.b, operands, outputs)

    @functools.cached_property
    def is_in_memory(self) -> bool:
        """Whether a kernel could read the tensors: they are not fake, and not inside ``torch.vmap``."""
        operands = [operand.tensor for operand in self.operands if operand.tensor is not None]
        return all(map(has_memory, (self.a, self.b, *operands, *self.out.values())))

    @property
    def tensors(self) -> dict[str, Tensor | float]:
        """The operands by name as they are in memory: with PyTorch's lazy negation carried out."""
        return {name: _plain(value) if isinstance(value, Tensor) else value for name, value in self.given.items()}


def bind_call(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    given: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
    *,
    padded_output: bool = False,
) -> Call:
    """Checks the arguments of a call and reads what there is to know of them.

    Raises:
        ProblemError, EpilogueError: whatever is wrong with them; nothing has been computed.
    """
    a, b = _plain(a), _plain(b)
    problem = read_problem(a, b)
    operands = bind_operands(epilogue.tree, given, problem)
    tree = resolve_tree(epilogue.tree, operands, problem.element or "f32")
    tensors = [a, b, *(value for value in given.values() if isinstance(value, Tensor))]
    buffers = bind_outputs(epilogue.tree.outputs, tree, problem, out, tensors)
    if buffers and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ProblemError("out= does not go with gradients: an argument requires grad; use torch.no_grad()")
    if not isinstance(padded_output, bool):
        raise TypeError(f"padded_output should be True or False, got {padded_output!r}")
    if buffers and padded_output:
        raise ProblemError("padded_output is of new outputs: it does not go with out=")
    return Call(epilogue, tree, problem, a, b, given, operands, buffers, padded_output)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor with PyTorch's lazy negation carried out, which is not in its memory."""
    return tensor.resolve_neg() if isinstance(tensor, Tensor) else tensor


def decide(call: Call) -> Decision:
    """Which backend computes the call.  Builds nothing.

    Raises:
        UnsupportedProblemError: if a backend is asked for by name and cannot take the call.
        ToolchainError: if a backend is asked for by name, its kernel is not built, and there is no compiler.
        ValueError: for a value of an environment variable that means nothing; see :mod:`.variables`.
    """
    forced = forced_backend()
    check_variables()
    if forced == "reference":
        return Decision("reference", None, "asked for with use_backend")
    if forced == "cublas":
        return _decide_two_passes(call, "asked for with use_backend", loss=False)
    advice = _find_advice(call, forced)
    found = advice if isinstance(advice, tuple) else _follow(call, advice, forced)
    if isinstance(found, Decision):
        return found
    reason, loss = found
    if forced != "auto":
        raise UnsupportedProblemError(f"the backend {forced!r} cannot compute this: {reason}")
    return _decide_two_passes(call, reason, loss=loss)


def _find_advice(call: Call, forced: str) -> Advice | tuple[str, bool]:
    """What to do where a fused kernel takes the call; or why none does, and whether something is lost by that."""
    problem = call.problem
    if problem.device.type != "cuda":
        return f"the tensors are on the device {str(problem.device)!r}, and kernels run on CUDA devices", True
    if not call.is_in_memory:
        return "a tensor has no memory of its own, being inside torch.vmap, fake, or distributed", True
    if refusal := problem_refusal(problem, len(call.operands), len(call.tree.outputs)):
        return refusal, not call.is_empty
    assert problem.element is not None
    target = target_of(problem.device)
    selection = _select(call.tree, problem.element, call.request, forced, target)
    if selection.spec is None:
        return selection.reason, True
    alone = find_alone(call) is not None
    return advise(call.tree, problem.element, call.request, selection, target, alone=alone, forced=forced)


def _follow(call: Call, advice: Advice, forced: str) -> Decision | tuple[str, bool]:
    """The decision for what is advised; or why there is no kernel, and whether something is lost by that."""
    awaited = None
    if advice.way in (TWO_PASSES, CUBLAS_ALONE):
        tail = find_tail(call)
        if not isinstance(tail, str):
            return Decision("cublas", None, advice.reason, tail.spec, tail=tail)
        awaited = tail if isinstance(tail, NotBuilt) else None
    elif advice.way != FUSED:
        return Decision("reference", None, advice.reason)
    fused = _decide_fused(call, advice, forced)
    if awaited is not None and isinstance(fused, Decision):
        return dataclasses.replace(fused, for_now=True, awaited=awaited.spec)
    return fused


def _decide_fused(call: Call, advice: Advice, forced: str) -> Decision | tuple[str, bool]:
    """The fused kernel; or why it cannot be had, and that something is lost by that."""
    spec = advice.spec
    try:
        if reason := obstacle(spec, waited_for=forced != "auto"):
            return reason, True
    except ToolchainError as error:
        if forced != "auto":
            raise
        return f"the kernel is not built yet and cannot be: {error}", True
    reason = advice.reason
    if advice.way != FUSED or not reason:
        capability = torch.cuda.get_device_capability(call.problem.device)
        reason = f"compute capability {capability[0]}.{capability[1]}"
    routes = describe_routes(call.epilogue, advice.addressing)
    return Decision(spec.config.family, spec.config.name, reason, spec, advice.addressing, routes)


def _decide_two_passes(call: Call, reason: str, *, loss: bool) -> Decision:
    """CuBLAS and one kernel for the epilogue, or PyTorch operation by operation where that is not possible."""
    tail = find_tail(call)
    for_now, awaited = isinstance(reason, NotBuilt), reason.spec if isinstance(reason, NotBuilt) else None
    if not isinstance(tail, str):
        return Decision("cublas", None, reason, tail.spec, tail=tail, loss=loss, for_now=for_now, awaited=awaited)
    if forced_backend() == "cublas":
        raise UnsupportedProblemError(f"the backend 'cublas' cannot compute this: {tail}")
    if isinstance(tail, NotBuilt) and not for_now:
        for_now, awaited = True, tail.spec
    return Decision("reference", None, reason, loss=loss, for_now=for_now, awaited=awaited)


@functools.lru_cache(maxsize=4096)
def _select(tree: EpilogueTree, element: str, request: Request, forced: str, target: Target) -> Selection:
    families = None if forced == "auto" else (forced,)
    return select_kernel(tree, element, request, target=target, families=families)


def describe_routes(epilogue: Epilogue, addressing: Addressing, a: str = "a", b: str = "b") -> tuple[str, ...]:
    """How each tensor of a call reaches the kernel, a line each."""
    named = [(a, addressing.a), (b, addressing.b)]
    named += zip((f"operand {name}" for name in epilogue.operands), addressing.operands, strict=True)
    named += zip((f"output {name}" for name in epilogue.outputs), addressing.outputs, strict=True)
    lines = [describe(placement, name) for name, placement in named]
    size = f"{addressing.m} x {addressing.n} x {addressing.k}"
    launches = math.prod(addressing.loops)
    if addressing.batch > 1 or launches > 1:
        often = f", in {launches} launches" if launches > 1 else ""
        lines.insert(0, f"{addressing.batch * launches} problems of {size}{often}")
    return tuple(lines)


@functools.cache
def multiprocessor_count(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def device_name(device: torch.device) -> str:
    """What the driver calls a CUDA device, such as "NVIDIA H200"; "" where there is none."""
    return str(torch.cuda.get_device_properties(device).name) if torch.cuda.is_available() else ""


def target_of(device: torch.device) -> Target:
    """What matters of a CUDA device."""
    return Target(torch.cuda.get_device_capability(device), multiprocessor_count(device), device_name(device))


def compute_by_operations(call: Call, *, transformed: bool) -> dict[str, Tensor]:
    """Computes a call with PyTorch operation by operation; outputs by name.

    Args:
        transformed: whether autograd is to record the operations, or vmap to batch them.
    """
    results = run_reference(call.epilogue.tree, call.a, call.b, call.given, transformed=transformed)
    for name, buffer in call.out.items():
        buffer.copy_(results[name])
    if call.padded_output:
        return {name: in_padded_rows(result) for name, result in results.items()}
    return call.out or results


def announce_fallback(decision: Decision) -> None:
    """Says once that a call is not fused, and why."""
    if decision.loss:
        two_passes = decision.backend == "cublas"
        how = "cuBLAS and a kernel for the epilogue" if two_passes else "the PyTorch reference backend"
        announce(f"computed by {how}, not fused: {decision.reason}")


def make_plan(call: Call, decision: Decision) -> Plan | TwoPasses | OnePass | None:
    """The plan of a call for what was decided, its kernel built and loaded if need be; None where there are no plans.

    Raises:
        BuildError: if the kernel has to be built and cannot be.
    """
    if decision.tail is not None:
        return make_unfused(call, decision.tail)
    if decision.addressing is None:
        return None
    return Plan(call, decision, multiprocessor_count(call.problem.device))

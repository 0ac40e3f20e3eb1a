"""Which kernels a product would use on a device that need not be there: what to build ahead of time.

    >>> x, weight = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    >>> found = foresee(x, weight.t(), builders.identity(), {}, Target((9, 0), 132))
    >>> [kernel.title for kernel in found.kernels]
    ['sm90_cooperative_128x256x64_2x1 bf16 row/column -> bf16, sm_90a']

Contract: the rules, and what was measured, are those of :mod:`gemm_ops.dispatch`, with the target's compute capability,
multiprocessors and name in place of a device's, for tensors on PyTorch's meta device, which begin at aligned addresses
as new tensors do.  Nothing is built, nothing computed, and CUTLASS is not imported.

Training is foreseen as it mostly goes: everything that is a tensor requires grad, the loss is one of all outputs or of
the main one, and gradients come in contiguous.  The backward's own steps run, on the meta device, and what they would
launch is written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epilogues import Epilogue, EpilogueError, builders
from epilogues.dtypes import dtype_name, torch_dtype
from epilogues.gradients.backward import ACCUMULATOR
from epilogues.tree import Store

from .build.buildable import Buildable
from .dispatch import Call, bind_call
from .elementwise.spec import ElementwiseSpec
from .elementwise_call import ElementwiseCall, bind_elementwise, lay_out
from .errors import ProblemError
from .gradients import Look, find_pass, storing_forward
from .kernels.families import CONFIGS
from .kernels.pad_spec import PadSpec
from .kernels.selection import Target, problem_refusal, select_kernel
from .outputs import empty_padded
from .product_gradients import is_slow
from .tuner.advice import BY_OPERATIONS, CUBLAS_ALONE, TWO_PASSES, advise
from .two_passes import find_alone

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Foreseen:
    """What was found out.

    Attributes:
        kernels: in the order of their first launch, each once.
        refusal: why no kernel computes the call as asked for, in words; "" if one does.
        notes: what else to know, such as why there are no gradients.
    """

    kernels: tuple[Buildable, ...]
    refusal: str = ""
    notes: tuple[str, ...] = ()


def foresee(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    target: Target,
    *,
    backend: str = "auto",
    training: bool = False,
    padded_output: bool = False,
) -> Foreseen:
    """The kernels of ``matmul(a, b, epilogue, **operands)``.

    Args:
        a, b: (M, K) and (K, N), on the meta device.
        operands: on the meta device, too, or numbers.
        backend: as for :func:`gemm_ops.use_backend`, but "reference", which has none.
        training: also those of the forward that is recorded, and of its backward.
        padded_output: as for ``matmul``.

    Raises:
        ProblemError, EpilogueError: whatever is wrong with the arguments.
    """
    if not (a.is_meta and b.is_meta and a.ndim == b.ndim == 2):
        raise ProblemError("kernels are foreseen for matrices (M, K) and (K, N) on the meta device")
    seer = _Seer(target, backend)
    with torch.no_grad():
        call = bind_call(a, b, epilogue, operands, None, padded_output=padded_output)
        refusal = seer.product(call, backend)
        if training and not refusal:
            try:
                seer.training(call)
            except EpilogueError as error:
                seer.note(f"there are no gradients: {error}")
    return Foreseen(tuple(seer.kernels.values()), refusal, tuple(seer.notes))


class _Seer:
    """Goes the ways of calls, and writes down the kernels."""

    def __init__(self, target: Target, backend: str) -> None:
        self.target = target
        self.backend = backend
        self.arch = "".join(map(str, target.capability))  # as the kernels without a family are built
        self.kernels: dict[str, Buildable] = {}
        self.notes: dict[str, None] = {}

    def add(self, kernel: Buildable) -> None:
        self.kernels.setdefault(kernel.key, kernel)

    def note(self, text: str) -> None:
        self.notes[text] = None

    def product(self, call: Call, backend: str) -> str:
        """Notes the kernels of a product as :func:`gemm_ops.dispatch.decide` finds them.

        Gives why there are none, in words; "" if there are.
        """
        if call.is_empty:
            return "an extent is 0, so there is nothing to compute"
        refusal = "" if backend == "cublas" else self._fused(call, backend)
        if refusal is None:
            return ""
        if backend in CONFIGS:
            return refusal
        if call.problem.element is not None and find_alone(call) is not None:
            return ""
        tail = self.elementwise(_tail(call))
        return tail and "; ".join(filter(None, (refusal, tail)))

    def _fused(self, call: Call, backend: str) -> str | None:
        """Notes the fused kernel of a call; else why another way is gone, "" where it is only faster."""
        problem = call.problem
        if refused := problem_refusal(problem, len(call.operands), len(call.tree.outputs)):
            return refused
        assert problem.element is not None
        families = None if backend == "auto" else (backend,)
        found = select_kernel(call.tree, problem.element, call.request, target=self.target, families=families)
        if found.spec is None or found.addressing is None:
            return found.reason
        alone = find_alone(call) is not None
        advice = advise(call.tree, problem.element, call.request, found, self.target, alone=alone, forced=backend)
        if advice.way == CUBLAS_ALONE or (advice.way == TWO_PASSES and not isinstance(lay_out(_tail(call)), str)):
            return ""
        if advice.way == BY_OPERATIONS:
            self.note(f"PyTorch computes it operation by operation: {advice.reason}")
            return None
        self.add(advice.spec)
        if advice.addressing.a.copy or advice.addressing.b.copy:
            self.add(PadSpec(self.arch))
        return None

    def elementwise(self, call: ElementwiseCall) -> str:
        """Notes the kernel of an elementwise call as :func:`gemm_ops.elementwise_call.find_walk` finds it.

        Gives why there is none, in words; "" if there is one.
        """
        if call.x_dtype is None or call.problem.element is None:
            return f"the kernels take float16, bfloat16 and float32, not {dtype_name(call.problem.dtype)}"
        layout = lay_out(call)
        if isinstance(layout, str):
            return layout
        self.add(ElementwiseSpec.of(call.tree, call.x_dtype, layout, self.arch))
        return ""

    def training(self, call: Call) -> None:
        """As :func:`gemm_ops.recording.multiply_recorded` and its backward."""
        tensors = [name for name, value in call.given.items() if isinstance(value, Tensor)]
        needs = (ACCUMULATOR, *(name for name in call.epilogue.operands if name in tensors))
        forward = storing_forward(call.epilogue, needs, call.a.dtype)
        recorded = bind_call(call.a, call.b, forward, call.given, None, padded_output=call.padded_output)
        if refused := self.product(recorded, self.backend):
            self.note(f"the forward that is recorded has no kernel: {refused}")
            return
        results = dict(
            zip(forward.outputs, _results(recorded.problem.output_shape, recorded.tree.outputs), strict=True)
        )
        outputs = call.epilogue.outputs
        for present in dict.fromkeys((outputs, outputs[:1])):
            self._backward(call, forward, needs, present, results)

    def _backward(
        self,
        call: Call,
        forward: Epilogue,
        needs: tuple[str, ...],
        outputs: tuple[str, ...],
        results: Mapping[str, Tensor],
    ) -> None:
        """The backward from some of the outputs; the tensors are on the meta device, where sums cost nothing."""
        whole = find_pass(forward, call.epilogue.outputs, needs, call.a.dtype, with_x=False)
        chosen = find_pass(forward, outputs, needs, call.a.dtype, with_x=False)
        if not chosen.reads <= whole.reads:
            return  # then the gradients that do not come count as zeros: the kernels of the whole
        saved: dict[tuple[str, str], Tensor] = {}
        for role, name in chosen.reads:
            value = (call.given if role == "operand" else results)[name]
            if isinstance(value, Tensor):
                saved[role, name] = value
        looks = {name: Look.of(value) if isinstance(value, Tensor) else value for name, value in call.given.items()}
        look = Look(call.problem.output_shape, call.a.dtype, call.a.device)
        grads = {name: torch.empty_like(results[name]) for name in outputs}

        def compute(x: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> Mapping[str, Tensor]:
            bound = bind_elementwise(x, epilogue, operands, None)
            if refused := self.elementwise(bound):
                self.note(f"a step of the backward has no kernel: {refused}")
            return dict(zip(epilogue.outputs, _results(bound.problem.output_shape, bound.tree.outputs), strict=True))

        grad = chosen.run(grads, saved, look, looks, compute).get(ACCUMULATOR)
        if grad is not None:
            turned = call.b.stride(-2) == 1 != call.b.stride(-1)
            self._fused_product(grad, call.b.mT)
            self._fused_product(*((grad.mT, call.a) if turned else (call.a.mT, grad)))

    def _fused_product(self, a: Tensor, b: Tensor) -> None:
        """A product of the backward, where that is not cuBLAS's; as :mod:`gemm_ops.product_gradients`."""
        if a.dtype not in _SIXTEEN_BITS or not is_slow(a, b):
            return
        # autograd's threads know of no backend that was asked for around the forward
        if refused := self.product(bind_call(a, b, builders.identity(), {}, None), "auto"):
            self.note(f"a product of the backward has no kernel: {refused}")


def _tail(call: Call) -> ElementwiseCall:
    """The epilogue over what cuBLAS gives, as :func:`gemm_ops.two_passes.find_tail` has it on a CUDA device."""
    problem = call.problem
    dtype = torch.float32 if call.a.dtype in _SIXTEEN_BITS else call.a.dtype
    x = torch.empty(problem.output_shape, dtype=dtype, device="meta")
    out: dict[str, Tensor] = {}
    if call.padded_output:
        for name, store in zip(call.epilogue.outputs, call.tree.outputs, strict=True):
            out[name] = empty_padded(problem.output_shape, dtype=torch_dtype(str(store.dtype)), device="meta")
    short = dtype_name(dtype) if problem.element is not None else None
    return ElementwiseCall(call.epilogue, call.tree, problem, x, short, call.given, call.operands, out)


def _results(shape: tuple[int, ...], stores: Sequence[Store]) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch_dtype(str(store.dtype)), device="meta") for store in stores]

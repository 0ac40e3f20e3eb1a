"""The contenders of one problem: our call and its peers, each as a function of the number of a copy of the inputs.

    >>> setting = make_setting(Problem(Shape(16, 4096, 4096), "bias_gelu", "decode"), copies=5, device="cuda")
    >>> contenders = make_contenders(setting, peers=("eager", "cublaslt", "mm"))
    >>> contenders["fused"].call(3)                         # on the fourth copy: {'D': tensor(...)}
    >>> contenders["cublaslt"].reason                       # why there is no call; "" where there is one

Ours is a :class:`gemm_ops.FusedLinear` in evaluation mode, with what it picks by itself.  A copy has the same numbers
as all others, in memory of its own: x, weight, vectors and matrices; layers have a weight each, as in a network.
Outputs are new at each call, as users have them, except for ``torch.mm``, which writes into one that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import epilogues as ep
import gemm_ops

from ..cases import Case
from ..eager import HAND_WRITTEN, named_outputs
from ..inputs import Inputs, make_inputs, placeholder_inputs
from ..shapes import Shape
from ..timing import Contender
from .suite import COMPILE, CUBLASLT, EAGER, FUSED, MISALIGNED, MM, ROUNDED_MM, Problem, rounded_up

DTYPE = "bf16"

#: epilogues that cuBLASLt has -> whether it is its GELU, which is the tanh form, or its ReLU
_CUBLASLT_GELU = {"bias_gelu": True}


@dataclass(frozen=True)
class Setting:
    """The tensors of one problem.

    Attributes:
        problem: the problem.
        epilogue: its epilogue.
        copies: the inputs, equal numbers in different memory.
        layers: one for each copy, with its weight and bias.
        rounded: of a misaligned shape, copies of x (M, K) and weight (N, K) with extents rounded up to multiples of 8.
    """

    problem: Problem
    epilogue: ep.Epilogue
    copies: tuple[Inputs, ...]
    layers: tuple[gemm_ops.FusedLinear, ...]
    rounded: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True)
class Proposal:
    """A contender, or why there is none.

    Attributes:
        call: on a copy; gives outputs by name, or the product where it is only that.
        is_product: whether it computes the product alone.
        reason: why it does not apply; "" if it does.
    """

    call: Contender | None
    is_product: bool = False
    reason: str = ""


def case_of(problem: Problem, device: str, seed: int = 0) -> Case:
    """The problem as a case of a sweep, which says what its inputs are."""
    shape = problem.shape
    return Case(shape.m, shape.n, shape.k, DTYPE, problem.epilogue, seed=seed, device=device)


def make_layer(epilogue: ep.Epilogue, inputs: Inputs) -> gemm_ops.FusedLinear:
    """A layer with the inputs' weight and bias, in evaluation mode."""
    n, k = inputs.b.shape
    bias = inputs.operands.get("bias")
    layer = gemm_ops.FusedLinear(k, n, bias is not None, "meta", inputs.b.dtype, epilogue=epilogue)
    layer.weight = nn.Parameter(inputs.b)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer.eval()


def decide(problem: Problem, device: str) -> gemm_ops.Decision:
    """Which backend and kernel our call uses; computes nothing."""
    epilogue = ep.builders.SUITE[problem.epilogue]()
    inputs = placeholder_inputs(case_of(problem, device), epilogue)
    layer = make_layer(epilogue, inputs)
    operands = _others(inputs) if layer.bias is None else {**_others(inputs), "bias": layer.bias}
    return gemm_ops.backend_for(inputs.a, layer.weight.t(), layer.epilogue, **operands)


def make_setting(problem: Problem, *, copies: int, device: str, seed: int = 0) -> Setting:
    """Draws the tensors of a problem, the same for the same seed."""
    epilogue = ep.builders.SUITE[problem.epilogue]()
    first = make_inputs(case_of(problem, device, seed), epilogue)
    inputs = (first, *(_copy(first) for _ in range(1, copies)))
    layers = tuple(make_layer(epilogue, one) for one in inputs)
    rounded: tuple[tuple[Tensor, Tensor], ...] = ()
    if problem.group == MISALIGNED:
        x, weight = _pair(rounded_up(problem.shape), device)
        rounded = ((x, weight), *((x.clone(), weight.clone()) for _ in range(1, copies)))
    return Setting(problem, epilogue, inputs, layers, rounded)


def bytes_per_call(problem: Problem) -> int:
    """What a call reads, in bytes."""
    return placeholder_inputs(case_of(problem, "meta"), ep.builders.SUITE[problem.epilogue]()).bytes


def make_contenders(setting: Setting, peers: Iterable[str]) -> dict[str, Proposal]:
    """Ours and the peers by name; those that do not apply have a reason instead of a call."""
    makers: dict[str, Callable[[Setting], Proposal]] = {
        EAGER: _eager,
        COMPILE: _compiled,
        CUBLASLT: _cublaslt,
        MM: _mm,
        ROUNDED_MM: _rounded_mm,
    }
    return {FUSED: _fused(setting), **{peer: makers[peer](setting) for peer in peers}}


def _fused(setting: Setting) -> Proposal:
    operands = [_others(inputs) for inputs in setting.copies]

    def call(index: int) -> dict[str, Tensor]:
        found = setting.layers[index](setting.copies[index].a, **operands[index])
        return named_outputs(setting.epilogue, found)

    return Proposal(call)


def _eager(setting: Setting) -> Proposal:
    function = HAND_WRITTEN[setting.problem.epilogue]

    def call(index: int) -> dict[str, Tensor]:
        inputs = setting.copies[index]
        return dict(zip(setting.epilogue.outputs, function(inputs, **inputs.operands), strict=True))

    return Proposal(call)


def _compiled(setting: Setting) -> Proposal:
    """Compiled at its first call.  What went before is forgotten: PyTorch compiles a function for a few shapes only."""
    by_hand = HAND_WRITTEN[setting.problem.epilogue]

    def compute(x: Tensor, weight: Tensor, operands: Mapping[str, Any]) -> tuple[Tensor, ...]:
        return by_hand(Inputs("linear", x, weight, {}), **operands)

    torch.compiler.reset()
    _be_quiet()
    compiled = torch.compile(compute, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)

    def call(index: int) -> dict[str, Tensor]:
        inputs = setting.copies[index]
        found = compiled(inputs.a, inputs.b, dict(inputs.operands))
        return dict(zip(setting.epilogue.outputs, found, strict=True))

    return Proposal(call)


def _cublaslt(setting: Setting) -> Proposal:
    name = setting.problem.epilogue
    if name not in _CUBLASLT_GELU:
        return Proposal(None, reason="cuBLASLt has no such epilogue")
    if not setting.copies[0].a.is_cuda:
        return Proposal(None, reason="cuBLASLt is for CUDA devices")

    def call(index: int) -> dict[str, Tensor]:
        inputs = setting.copies[index]
        found = torch._addmm_activation(inputs.operands["bias"], inputs.a, inputs.right, use_gelu=_CUBLASLT_GELU[name])
        return {"D": found}

    return Proposal(call)


def _mm(setting: Setting) -> Proposal:
    return _product([(inputs.a, inputs.b) for inputs in setting.copies])


def _rounded_mm(setting: Setting) -> Proposal:
    if not setting.rounded:
        return Proposal(None, reason="the shape is aligned")
    return _product(setting.rounded)


def _product(pairs: Sequence[tuple[Tensor, Tensor]]) -> Proposal:
    """``torch.mm`` of x (M, K) and weight (N, K) into a preallocated output."""
    x, weight = pairs[0]
    out = x.new_empty(x.shape[0], weight.shape[0])

    def call(index: int) -> Tensor:
        left, right = pairs[index]
        return torch.mm(left, right.t(), out=out)

    return Proposal(call, is_product=True)


def _others(inputs: Inputs) -> dict[str, Any]:
    """The operands that a call of a layer takes: all but the bias, which is the layer's own."""
    return {name: value for name, value in inputs.operands.items() if name != "bias"}


def _copy(inputs: Inputs) -> Inputs:
    operands = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.operands.items()}
    return replace(inputs, a=inputs.a.clone(), b=inputs.b.clone(), operands=operands)


def _pair(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return torch.randn(shape.m, shape.k, **options), torch.randn(shape.n, shape.k, **options) * shape.k**-0.5


def _be_quiet() -> None:
    """Inductor prints a table for every product that it tunes."""
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False

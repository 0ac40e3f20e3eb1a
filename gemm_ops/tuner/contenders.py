"""What is measured: a call's fused kernels, cuBLAS and one kernel, and PyTorch operation by operation.

    >>> contender = fused_contender(call, candidate, multiprocessors=132)
    >>> contender.run(call.b, {})                      # the outputs by name
    >>> find_fault(contender.run(call.b, poisoned_outputs(call)), expected)
    ''

Contract: a contender takes the weight that it is given, of which there are copies, and else the call's own tensors;
outputs are new ones, or those given.  All of them compute what the call does, with its rounding: plain PyTorch in 16
bits between operations is no contender.  The caller's outputs are never written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epilogues.dtypes import torch_dtype

from ..autocast import without_autocast
from ..dispatch import Call, Decision
from ..elementwise_call import Walk
from ..fallback import product_dtype, run_reference
from ..kernels.candidates import Candidate
from ..outputs import empty_padded
from ..plan import Plan
from ..two_passes import CublasAlone, make_unfused
from .records import BY_OPERATIONS, CUBLAS_ALONE, TWO_PASSES

#: How far an element may be from PyTorch's, relative to it and to the outputs' root mean square: four times what
#: bfloat16 rounds by.  Wrong kernels are wrong by far more; how exact a right one is, sweeps say.
_TOLERANCE = 2.0**-6
#: The share of a row or a column that may be further: comparisons and rounding inside an epilogue tip over.
_MOST_OFF = 0.05
_FEW_OFF = 2


@dataclass(frozen=True)
class Contender:
    """One way to compute a call.

    Attributes:
        name: what its time is kept by.
        run: computes the call with this weight, as b; into these outputs by name, or for {} into new ones.
    """

    name: str
    run: Callable[[Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]


def fused_contender(call: Call, candidate: Candidate, multiprocessors: int) -> Contender:
    """A fused kernel, which is loaded.

    Raises:
        BuildError: if it cannot be built or loaded.
    """
    config = candidate.spec.config
    decision = Decision(config.family, config.name, "", candidate.spec, candidate.addressing)
    plan = Plan(call, decision, multiprocessors)
    a, operands = call.a, call.tensors
    return Contender(candidate.name, lambda b, out: plan.run(a, b, operands, out))


def cublas_contender(call: Call, tail: Walk | CublasAlone) -> Contender:
    """CuBLAS, and one kernel for the epilogue if that needs one, which is loaded.

    Raises:
        BuildError: if it cannot be built or loaded.
    """
    plan = make_unfused(call, tail)
    a, operands = call.a, call.tensors
    name = CUBLAS_ALONE if isinstance(tail, CublasAlone) else TWO_PASSES
    return Contender(name, lambda b, out: plan.run(a, b, operands, out))


def rounds_once(call: Call) -> bool:
    """Whether PyTorch's product has the accumulator's precision, as that of the fused kernels has."""
    return product_dtype(call.a, call.b, rounded=False) == torch.float32


def by_operations(call: Call) -> Contender:
    """PyTorch operation by operation."""

    def run(b: Tensor, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        results = run_reference(call.epilogue.tree, call.a, b, call.given, transformed=False)
        for name, buffer in out.items():
            buffer.copy_(results[name])
        return out or results

    return Contender(BY_OPERATIONS, run)


def poisoned_outputs(call: Call) -> dict[str, Tensor]:
    """Outputs that lie as the call's own, or as its new ones would, full of NaN."""
    if call.out:
        found = {name: copy_of(buffer) for name, buffer in call.out.items()}
    else:
        make = empty_padded if call.padded_output else torch.empty
        found = {
            name: make(call.problem.output_shape, dtype=torch_dtype(str(store.dtype)), device=call.problem.device)
            for name, store in zip(call.epilogue.outputs, call.tree.outputs, strict=True)
        }
    for tensor in found.values():
        tensor.fill_(torch.nan)
    return found


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that lies as the tensor does: with its strides, as far from an address that is aligned."""
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        return torch.empty_like(tensor)
    size = tensor.element_size()
    shift = tensor.data_ptr() % 64 // size
    memory = torch.empty(reach + shift, dtype=tensor.dtype, device=tensor.device)
    memory[shift:].copy_(tensor.as_strided((reach,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), shift)


def find_fault(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What is wrong with outputs, in words; "" for nothing.

    Args:
        found: by name, (..., M, N) each; not written where still NaN.
        expected: PyTorch's.
    """
    for name, truth in expected.items():
        columns = truth.shape[-1]
        values, right = found[name].reshape(-1, columns).float(), truth.reshape(-1, columns).float()
        size = right.square().nanmean().sqrt()
        close = (values - right).abs() <= _TOLERANCE * (right.abs() + size)
        off = ~(close | (values == right) | (values.isnan() & right.isnan()))
        for what, along, other in (("rows", 1, columns), ("columns", 0, right.shape[0])):
            wrong = int((off.sum(along) > max(_FEW_OFF, _MOST_OFF * other)).sum())
            if wrong or (other <= _FEW_OFF and bool(off.any())):
                return f"{wrong or 'some'} {what} of {name} differ from PyTorch's"
    return ""


def computed(contender: Contender, call: Call) -> Mapping[str, Tensor]:
    """The outputs of a contender, into poisoned memory."""
    with without_autocast(call.problem.device.type):
        return contender.run(call.b, poisoned_outputs(call))

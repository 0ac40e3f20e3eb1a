"""The calls that ``tune`` measures: of each case its forward, and of training what else a fused kernel computes.

>>> [wanted.title for wanted in wanted_calls(cases, epilogues, training=True, padded=False)]
['513x1025x2049 bf16 bias_gelu', '513x1025x2049 bf16 bias_gelu recorded', ...]
>>> call = wanted.make(make_inputs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import epilogues as ep
from epilogues.gradients.backward import ACCUMULATOR
from gemm_ops.dispatch import Call, bind_call
from gemm_ops.gradients import storing_forward
from gemm_ops.product_gradients import is_slow

from .cases import Case
from .inputs import Inputs, placeholder_inputs
from .padded_inputs import in_rows, paddings


@dataclass(frozen=True)
class Wanted:
    """One call to be measured, whose tensors are made when it is its turn, and live no longer.

    Attributes:
        case: shape, dtype, device.
        epilogue: its epilogue.
        padded: whether x, weight and outputs lie in padded rows.
        kind: "forward"; "recorded", with what the backward reads; or a product of the backward, for "a" or "b".
    """

    case: Case
    epilogue: ep.Epilogue
    padded: tuple[bool, bool, bool]
    kind: str

    @property
    def title(self) -> str:
        """The call in words."""
        where = ", ".join(name for name, padded in zip(("x", "weight", "D"), self.padded, strict=True) if padded)
        kind = {"forward": "", "recorded": " recorded"}.get(self.kind, f" gradient of {self.kind}")
        return f"{self.case.shape} {self.case.dtype} {self.case.epilogue}{kind}" + (where and f", padded {where}")

    def make(self, fill: Callable[[Case, ep.Epilogue], Inputs]) -> Call:
        """The call, of tensors that ``fill`` makes."""
        inputs = fill(self.case, self.epilogue)
        a, weight = (in_rows(matrix, pad) for matrix, pad in zip((inputs.a, inputs.b), self.padded, strict=False))
        b = weight.t() if inputs.operation == "linear" else weight
        with torch.no_grad():
            if self.kind in ("forward", "recorded"):
                epilogue = self.epilogue if self.kind == "forward" else self._recorded(inputs, a.dtype)
                return bind_call(a, b, epilogue, inputs.operands, None, padded_output=self.padded[2])
            grad = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
            if not grad.is_meta:
                grad.normal_()
            turned = (grad.mT, a) if inputs.operation == "linear" else (a.mT, grad)
            return bind_call(*((grad, b.mT) if self.kind == "a" else turned), ep.builders.identity(), {}, None)

    def _recorded(self, inputs: Inputs, dtype: torch.dtype) -> ep.Epilogue:
        tensors = [name for name in self.epilogue.operands if isinstance(inputs.operands[name], Tensor)]
        return storing_forward(self.epilogue, (ACCUMULATOR, *tensors), dtype)


def wanted_calls(
    cases: Sequence[Case], epilogues: Mapping[str, ep.Epilogue], *, training: bool, padded: bool
) -> Iterator[Wanted]:
    """Every call that the cases ask for; ``training`` and ``padded``: as the options of these names."""
    kinds = ("forward", "recorded", "a", "b") if training else ("forward",)
    for case in cases:
        epilogue = epilogues[case.epilogue]
        nowhere = replace(case, device="meta")
        for places in paddings(case, epilogue, placeholder_inputs(nowhere, epilogue), padded):
            for kind in kinds:
                wanted = Wanted(case, epilogue, places, kind)
                if kind in ("forward", "recorded") or _is_fused(replace(wanted, case=nowhere).make(placeholder_inputs)):
                    yield wanted


def _is_fused(call: Call) -> bool:
    """Whether a product of the backward is not PyTorch's to compute."""
    return call.a.element_size() == 2 and is_slow(call.a, call.b)

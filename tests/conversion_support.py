"""What the tests of model conversion share: seeing fused calls happen, and comparing a model with its conversion."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops
from epilogues import Epilogue
from gemm_ops.conversion import sites

Inputs = tuple[Any, ...]


class FusedCalls:
    """The epilogues of the products that fused calls compute, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.epilogues: list[Epilogue] = []
        plain = sites.matmul

        def recording(a: Tensor, b: Tensor, epilogue: Epilogue, **operands: Any) -> Any:
            self.epilogues.append(epilogue)
            return plain(a, b, epilogue, **operands)

        monkeypatch.setattr(sites, "matmul", recording)

    def during(self, call: Callable[[], Any]) -> int:
        """How many there are while something runs."""
        before = len(self.epilogues)
        call()
        return len(self.epilogues) - before


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> FusedCalls:
    return FusedCalls(monkeypatch)


def main_output(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return result[0] if isinstance(result, tuple) else result.logits


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The gradients of every parameter, and of the inputs that have one, of a loss that weighs every output."""
    model.zero_grad()
    given = tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    output = main_output(model(*given))
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    (output.double() * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    found |= {f"input {i}": x.grad for i, x in enumerate(given) if x.is_floating_point()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def relative(found: Tensor, exact: Tensor) -> float:
    """The error relative to the norm of what is exact."""
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def in_double(inputs: Sequence[Any]) -> Inputs:
    return as_dtype(inputs, torch.float64)


def as_dtype(inputs: Sequence[Any], dtype: torch.dtype) -> Inputs:
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def check_agreement(model: nn.Module, fused: nn.Module, inputs: Inputs, dtype: torch.dtype) -> dict[str, float]:
    """Outputs and gradients of a model and its conversion, in a dtype, against the model in fp64.

    The conversion's error may be as large as the model's own, with room for the luck of single roundings.

    Returns:
        The errors of the conversion's output and of its worst gradient.
    """
    exact_model = copy.deepcopy(model).double()
    own, other = copy.deepcopy(model).to(dtype), copy.deepcopy(fused).to(dtype)
    given = as_dtype(inputs, dtype)
    room, floor = 1.5, 4 * torch.finfo(dtype).eps
    with torch.no_grad():
        exact = main_output(exact_model(*in_double(inputs)))
        errors = [relative(main_output(each(*given)), exact) for each in (own, other)]
    assert errors[1] <= room * errors[0] + floor, f"output: error {errors[1]:.2e}, unfused {errors[0]:.2e}"
    wanted = gradients(exact_model, in_double(inputs))
    plain, found = gradients(own, given), gradients(other, given)
    assert found.keys() == plain.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    worst = 0.0
    for name, gradient in wanted.items():
        if gradient.norm() < 1e-6 * largest:  # what is zero but for rounding, such as the bias of keys in attention
            continue
        mine, theirs = relative(found[name], gradient), relative(plain[name], gradient)
        assert mine <= room * theirs + floor, f"gradient of {name}: error {mine:.2e}, unfused {theirs:.2e}"
        worst = max(worst, mine)
    return {"output": errors[1], "gradient": worst}


def fuse_copy(model: nn.Module, **options: Any) -> tuple[nn.Module, gemm_ops.conversion.Report]:
    """The conversion of a copy, whose report is checked for what holds of every one."""
    before = copy.deepcopy(model.state_dict())
    fused, report = gemm_ops.fuse(model, **options)
    assert fused is not model and type(fused) is type(model)
    assert list(fused.state_dict()) == list(before)
    assert all(torch.equal(fused.state_dict()[name], value) for name, value in before.items())
    assert [type(module) for module in fused.modules()] == [type(module) for module in model.modules()]
    return fused, report


class Net(nn.Module):
    def __init__(self, fc: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6) if fc is None else fc
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(6)
        self.prelu = nn.PReLU()
        self.dropout = nn.Dropout(0.5)
        self.flag = False
        self.function = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.relu(x)


def check_calls(model: nn.Module, fused: nn.Module, x: Tensor, fused_calls: FusedCalls, expected: int = 0) -> None:
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == expected

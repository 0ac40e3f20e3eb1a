"""Products that PyTorch computes alone, called from C++: to the bit what they are through Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_calls import BF16
from native_support import computed_natively, through_python
from torch import Tensor

import epilogues as ep
import gemm_ops
from gemm_ops import product_call
from gemm_ops.two_passes import OnePass, find_alone


@pytest.fixture
def alone(fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with PyTorch's product in place of a kernel."""

    def make(call: Any, _: object) -> OnePass:
        found = find_alone(call)
        assert found is not None
        return OnePass(call, found)

    monkeypatch.setattr(product_call, "make_plan", make)
    return fake_kernels


@ep.epilogue
def added(acc, row: ep.Row):
    return acc + row


def inputs(shape: tuple[int, ...], seed: int, *, biased: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    x, weight = torch.randn(shape).to(BF16), torch.randn(24, shape[-1]).to(BF16)
    return x, weight, {"row": torch.randn(24).to(BF16)} if biased else {}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 16), (1, 16), (2, 3, 16), (2, 2, 3, 16)])
def test_inference(shape: tuple[int, ...], biased: bool, alone: Any) -> None:
    epilogue = added if biased else ep.builders.identity()
    x, weight, operands = inputs(shape, 0, biased=biased)
    gemm_ops.linear(x, weight, epilogue=epilogue, **operands)
    x, weight, operands = inputs(shape, 1, biased=biased)
    with through_python():
        expected = gemm_ops.linear(x, weight, epilogue=epilogue, **operands)
    with computed_natively(alone):
        found = gemm_ops.linear(x, weight, epilogue=epilogue, **operands)
    assert torch.equal(found, expected) and found.shape == (*shape[:-1], 24)
    truth = x.double() @ weight.double().t() + (operands["row"].double() if biased else 0.0)
    assert (found.double() - truth).norm() < 0.01 * truth.norm()


@pytest.mark.parametrize("way", ["as it is", "transposed", "every other row"])
def test_where_x_lies(way: str, alone: Any) -> None:
    _, weight, operands = inputs((6, 16), 0, biased=True)

    def make(seed: int) -> Tensor:
        torch.manual_seed(seed)
        if way == "transposed":
            return torch.randn(16, 6).to(BF16).t()
        return torch.randn(12, 16).to(BF16)[::2] if way == "every other row" else torch.randn(6, 16).to(BF16)

    gemm_ops.linear(make(0), weight, epilogue=added, **operands)
    with through_python():
        expected = gemm_ops.linear(make(1), weight, epilogue=added, **operands)
    with computed_natively(alone):
        assert torch.equal(gemm_ops.linear(make(1), weight, epilogue=added, **operands), expected)


def test_batches(alone: Any) -> None:
    a, b = torch.randn(3, 1, 5, 8).to(BF16), torch.randn(4, 8, 6).to(BF16)
    gemm_ops.matmul(a, b)
    with computed_natively(alone):
        assert torch.equal(gemm_ops.matmul(a, b), a @ b)


def test_gradients(alone: Any) -> None:
    """Outputs are no views, and gradients those of the Python path."""

    def step() -> list[Tensor]:
        x, weight, operands = inputs((2, 3, 16), 3, biased=True)
        wanted = [x.requires_grad_(), weight.requires_grad_(), operands["row"].requires_grad_()]
        y = gemm_ops.linear(x, weight, epilogue=added, row=wanted[2])
        assert not y._is_view() and y.requires_grad
        y.mul_(2)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)]

    with through_python():
        expected = step()
    step()
    for found, one in zip(step(), expected, strict=True):
        assert torch.equal(found, one)


def test_autocast_outside_changes_nothing(alone: Any) -> None:
    """What is multiplied has its dtype by then: autocast to another would change it."""
    x, weight, operands = inputs((5, 16), 0, biased=True)
    with through_python(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = gemm_ops.linear(x.float(), weight.float(), epilogue=added, **operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            found = gemm_ops.linear(x.float(), weight.float(), epilogue=added, **operands)
            assert found.dtype == expected.dtype == BF16 and torch.equal(found, expected)

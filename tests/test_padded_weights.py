"""Weights in padded rows: the same parameter to everything around it.

A CPU stands for the device where there is none.  On a GPU the values are computed by the reference backend, so that
nothing is built: what kernels make of padded weights is tested in test_gpu_layouts.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemm_ops
from gemm_ops import FusedLinear, modules


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What tensors are made on."""
    name = str(request.param)

    def reads(matrix: Tensor) -> bool:
        return matrix.ndim == 2 and matrix.device.type == "cpu" and matrix.element_size() == 2 and matrix.numel() > 0

    if name == "cpu":
        monkeypatch.setattr(modules, "_kernels_read", reads)
    with torch.device(name), gemm_ops.use_backend("reference"):
        yield name


def odd_layer(**keywords: Any) -> FusedLinear:
    return FusedLinear(63, 10, epilogue="gelu", dtype=torch.bfloat16, **keywords)


def is_padded(layer: FusedLinear) -> bool:
    assert layer.weight.shape == (10, 63)
    return layer.weight.stride() == (64, 1)


def test_evaluation_pads_and_training_does_not() -> None:
    layer = odd_layer()
    weight, values = layer.weight, layer.weight.detach().clone()
    assert not is_padded(layer)
    layer.eval()
    assert is_padded(layer) and layer.weight is weight and torch.equal(weight, values)
    # what follows the rows are zeros
    assert not weight.data.as_strided((10, 64), (64, 1))[:, 63:].any()
    layer.train()
    assert layer.weight.is_contiguous() and layer.weight is weight and torch.equal(weight, values)
    assert is_padded(odd_layer(padded_weight=True)) and not is_padded(odd_layer(padded_weight=False).eval())
    frozen = odd_layer().requires_grad_(False)
    assert is_padded(frozen.train())


def test_layers_that_need_no_padding_stay_as_they_are() -> None:
    for made in (
        FusedLinear(64, 10, dtype=torch.bfloat16),
        FusedLinear(63, 10, dtype=torch.float32),
        FusedLinear(63, 1, dtype=torch.bfloat16),
        FusedLinear(63, 10, dtype=torch.bfloat16, device="meta"),
    ):
        before = made.weight.data_ptr() if not made.weight.is_meta else 0
        made.eval()
        assert made.weight.is_contiguous() and (made.weight.is_meta or made.weight.data_ptr() == before)


def test_results_and_updates_are_those_of_a_contiguous_weight() -> None:
    layer, x = odd_layer().eval(), torch.randn(5, 63).bfloat16()
    plain = nn.Linear(63, 10, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())

    def agree() -> None:
        with torch.no_grad():
            expected = torch.nn.functional.gelu(plain(x).float())
            torch.testing.assert_close(layer(x).float(), expected, rtol=2e-2, atol=2e-2)

    agree()
    with torch.no_grad():
        for weight in (layer.weight, plain.weight):
            weight.mul_(2)
            weight.data.add_(0.25)
            weight[3] = 1
            weight.data[:, 62] = -1
    assert is_padded(layer)
    agree()


@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_training_steps_of_a_padded_weight(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    padded, plain = odd_layer(padded_weight=True), odd_layer(padded_weight=False)
    plain.load_state_dict(padded.state_dict())
    optimisers = [torch.optim.AdamW(layer.parameters(), lr=0.1, **options) for layer in (padded, plain)]
    x = torch.randn(5, 63).bfloat16()
    for _ in range(3):
        for layer, optimiser in zip((padded, plain), optimisers, strict=True):
            optimiser.zero_grad()
            layer(x).square().sum().backward()
            optimiser.step()
    assert is_padded(padded) and padded.weight.grad is not None and padded.weight.grad.is_contiguous()
    torch.testing.assert_close(padded.weight, plain.weight)


def test_fused_optimisers_take_layers_in_training_mode() -> None:
    torch.manual_seed(0)
    layer = odd_layer().eval().train()
    plain = odd_layer(padded_weight=False)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 63).bfloat16()
    for each in (layer, plain):
        optimiser = torch.optim.AdamW(each.parameters(), lr=0.1, fused=True)
        each(x).square().sum().backward()
        optimiser.step()
    torch.testing.assert_close(layer.weight, plain.weight)
    assert is_padded(layer.eval())


def test_it_is_laid_out_again_wherever_pytorch_gives_it_other_memory(device: str) -> None:
    layer = odd_layer().eval()
    values = layer.weight.detach().clone()
    copied = copy.deepcopy(layer)
    assert is_padded(copied) and torch.equal(copied.weight, values) and copied.weight is not layer.weight
    unpickled = pickle.loads(pickle.dumps(layer))
    assert is_padded(unpickled) and torch.equal(unpickled.weight, values)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert is_padded(torch.load(file, weights_only=False))
    converted = copy.deepcopy(layer).float().half()
    assert is_padded(converted) and converted.weight.dtype == torch.half
    emptied = odd_layer(device="meta").eval().to_empty(device=device)
    assert is_padded(emptied)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_both_ways(assign: bool) -> None:
    layer, plain = odd_layer().eval(), nn.Linear(63, 10, dtype=torch.bfloat16)
    state = layer.state_dict()
    assert set(state) == {"weight", "bias"} and state["weight"].shape == (10, 63)
    plain.load_state_dict(state, assign=assign)
    assert torch.equal(plain.weight, layer.weight)
    other = nn.Linear(63, 10, dtype=torch.bfloat16)
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert is_padded(layer) and torch.equal(layer.weight, other.weight)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"], state["weight"])


def test_shared_parameters_stay_shared() -> None:
    plain = nn.Linear(63, 10, dtype=torch.bfloat16).eval()
    values = plain.weight.detach().clone()
    fused = FusedLinear.from_linear(plain, epilogue="relu")
    assert is_padded(fused) and fused.weight is plain.weight and torch.equal(plain.weight, values)
    x = torch.randn(5, 63).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(fused(x).float(), torch.relu(plain(x)).float(), rtol=2e-2, atol=2e-2)


def test_padded_outputs() -> None:
    layer, x = odd_layer(padded_output=True).eval(), torch.randn(2, 5, 63).bfloat16()
    with torch.no_grad():
        y = layer(x)
        assert isinstance(y, Tensor) and y.shape == (2, 5, 10) and y.stride() == (80, 16, 1)
        assert torch.equal(y, odd_layer_like(layer)(x))
    assert "padded_output=True" in repr(layer)
    with pytest.raises(gemm_ops.ProblemError, match="padded_output is of new outputs"):
        gemm_ops.linear(x, layer.weight.detach(), padded_output=True, out=y)


def odd_layer_like(layer: FusedLinear) -> FusedLinear:
    made = odd_layer()
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize("n", [1, 5, 8, 10, 16])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 7), (2, 3, 7), (0, 7)])
def test_padded_outputs_have_the_values_of_others(shape: tuple[int, ...], n: int) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x, weight, bias = torch.randn(shape).to(dtype), torch.randn(n, 7).to(dtype), torch.randn(n).to(dtype)
        expected = gemm_ops.linear(x, weight, "gelu", bias=bias)
        found = gemm_ops.linear(x, weight, "gelu", bias=bias, padded_output=True)
        assert isinstance(found, Tensor) and isinstance(expected, Tensor)
        assert found.shape == expected.shape and torch.equal(found, expected)


def test_padded_outputs_are_differentiable_and_vmapped() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)

    def padded(x: Tensor, weight: Tensor) -> Tensor:
        result = gemm_ops.linear(x, weight, "tanh", padded_output=True)
        assert isinstance(result, Tensor)
        return result

    assert torch.autograd.gradcheck(padded, (x, weight))
    assert torch.autograd.gradcheck(padded, (x[0], weight))
    rows = torch.vmap(lambda row: padded(row, weight.detach()))(x.detach())
    torch.testing.assert_close(rows, torch.tanh(x.detach() @ weight.detach().t()))


@pytest.mark.parametrize("value", ["no", 1, None])
def test_options_are_checked(value: Any) -> None:
    with pytest.raises(TypeError, match="padded_output should be True or False, got"):
        FusedLinear(7, 5, padded_output=value)
    with pytest.raises(TypeError, match="padded_output should be True or False, got"):
        gemm_ops.matmul(torch.randn(3, 4), torch.randn(4, 5), padded_output=value)
    if value is not None:
        with pytest.raises(TypeError, match="padded_weight should be True, False or None, got"):
            FusedLinear(7, 5, padded_weight=value)
    assert "padded_weight=False" in repr(FusedLinear(7, 5, padded_weight=False))

"""PyTorch's compiled autograd, and its counter of operations, meet this package's nodes and operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.flop_counter import FlopCounterMode

import epilogues as ep
import gemm_ops
from gemm_ops import FusedLinear

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    layer(x).float().square().sum().backward()
    return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]


def gradients_compiled(layer: nn.Module, x: Tensor) -> list[Tensor]:
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        return gradients(layer, x)


@pytest.mark.parametrize("epilogue", ["gelu", None])
def test_again_and_again(epilogue: str | None) -> None:
    """The first backward is traced, the later ones find what was traced; each runs."""
    layer, x = FusedLinear(7, 5, epilogue=epilogue), torch.randn(3, 7)
    expected = gradients(layer, x)
    for _ in range(3):
        torch.testing.assert_close(gradients_compiled(layer, x), expected)


def test_recorded_natively(fake_kernels: Any) -> None:
    layer, x = FusedLinear(16, 8, epilogue="gelu", dtype=torch.bfloat16), torch.randn(6, 16).bfloat16()
    gradients(layer, x)
    expected = gradients(layer, x)
    for rows in (6, 6, 5, 5, 5):
        found = gradients_compiled(layer, x[:rows])
        if rows == 6:
            assert all(map(torch.equal, found, expected))
        else:
            torch.testing.assert_close(found, gradients(layer, x[:rows]))


def test_models_of_others_are_compiled_as_before() -> None:
    """What this package is told of every module that is registered, the compiler does not trace."""
    model, x = nn.Sequential(nn.Linear(7, 5), nn.GELU()), torch.randn(3, 7)

    def step() -> None:
        model(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7), (7,)])
def test_operations_are_counted_as_those_of_a_linear_layer(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    linear = nn.Linear(7, 5)
    found = []
    for layer in (nn.Sequential(linear, nn.GELU()), FusedLinear.from_linear(linear, epilogue="gelu")):
        with FlopCounterMode(display=False) as forward:
            y = layer(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        with FlopCounterMode(display=False) as inference, torch.no_grad():
            layer(x)
        found.append([counter.get_total_flops() for counter in (forward, backward, inference)])
    assert found[0] == found[1]
    assert found[1][0] == 2 * x.numel() * 5


def test_a_misspelt_operand_of_an_epilogue_by_name() -> None:
    x, weight = torch.randn(3, 7), torch.randn(5, 7)
    with pytest.raises(ep.EpilogueError, match="unknown operand bais; the epilogue 'gelu' takes bias alone"):
        gemm_ops.linear(x, weight, "gelu", bais=torch.randn(5))
    with pytest.raises(ep.EpilogueError, match="unknown operand scale; no epilogue takes bias alone"):
        gemm_ops.apply(x, None, scale=2.0)

"""``torch.fx.symbolic_trace`` of what holds a ``FusedLinear``, or calls this package: the graph computes the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from test_adapters import Wrapper
from torch import Tensor, fx, nn

import epilogues as ep
import gemm_ops
from gemm_ops import FusedLinear

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@ep.epilogue
def two_outputs(acc, bias: ep.Row):
    z = acc + bias
    return {"D": ep.gelu(z), "z": z}


class Block(nn.Module):
    """With the epilogue's operands and outputs, and functions beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = FusedLinear(6, 9, epilogue=two_outputs), FusedLinear(9, 6, epilogue=ep.builders.residual())
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        y = self.down(self.up(x)["D"], residual=x)
        z = gemm_ops.matmul(y, self.down.weight, two_outputs, bias=self.up.bias)["z"]
        return gemm_ops.apply(z @ self.up.weight, ep.builders.residual(), bias=self.scale, residual=y)


def compare(model: nn.Module, traced: fx.GraphModule, x: Tensor) -> None:
    for each in (traced, copy.deepcopy(traced)):
        torch.testing.assert_close(each(x), model(x))
    parameters = list(model.parameters())
    found, expected = (torch.autograd.grad(each(x).square().sum(), parameters) for each in (traced, model))
    torch.testing.assert_close(found, expected)


def test_a_layer_is_a_leaf() -> None:
    model = nn.Sequential(FusedLinear(6, 4, epilogue="gelu"), nn.Tanh())
    traced = fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert traced.get_submodule("0") is model[0]
    compare(model, traced, x := torch.randn(3, 6))
    torch.testing.assert_close(pickle.loads(pickle.dumps(traced))(x), model(x))


def test_operands_outputs_and_functions() -> None:
    torch.manual_seed(0)
    compare(model := Block(), fx.symbolic_trace(model), torch.randn(3, 6))


@pytest.mark.parametrize("epilogue", ["gelu", None, ep.builders.bias_activation("silu")], ids=str)
def test_functions_are_one_node_each(epilogue: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x):
            y = gemm_ops.linear(x, self.weight, epilogue, bias=self.bias, padded_output=True)
            y = gemm_ops.matmul(y, self.weight, epilogue, bias=self.bias)
            return gemm_ops.apply(y, epilogue, bias=self.bias)

    model = Model()
    traced = fx.symbolic_trace(model)
    targets = [node.target for node in traced.graph.nodes]
    assert all(targets.count(each) == 1 for each in (gemm_ops.linear, gemm_ops.matmul, gemm_ops.apply))
    compare(model, traced, torch.randn(3, 6))


def test_what_cannot_be_a_leaf() -> None:
    torch.manual_seed(0)
    layer, x = FusedLinear(6, 4, epilogue="gelu"), torch.randn(3, 6)
    compare(layer, fx.symbolic_trace(layer), x)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    compare(model := nn.Sequential(layer), fx.symbolic_trace(model), x)
    for inner in (FusedLinear(6, 5, epilogue="gelu", padded_output=True), FusedLinear(6, 5, bias=False)):
        compare(model := nn.Sequential(Wrapper(inner)), fx.symbolic_trace(model), x)

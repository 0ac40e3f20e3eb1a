"""``FusedLinear`` on the CPU: an ``nn.Linear`` to everything around it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_support import (
    DTYPES,
    RESIDUAL,
    SUITE,
    outputs_of,
    reads_residual,
    three_outputs,
)
from torch import nn
from torch.nn import functional as F

import epilogues as ep
from epilogues.errors import EpilogueError
from gemm_ops import FusedLinear, ProblemError

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


LAYERS: dict[str, Callable[[], FusedLinear]] = {
    "gelu": lambda: FusedLinear(6, 4, epilogue="gelu"),
    "no epilogue": lambda: FusedLinear(6, 4),
    "no bias": lambda: FusedLinear(6, 4, bias=False, epilogue="silu"),
    "several outputs": lambda: FusedLinear(6, 4, epilogue=SUITE["train_gelu"]()),
    "traced here": lambda: FusedLinear(6, 4, epilogue=three_outputs),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def same_results(one: nn.Module, other: nn.Module) -> bool:
    x = torch.randn(5, 6)
    first, second = outputs_of(one(x)), outputs_of(other(x))
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@each_layer
def test_layer_is_an_nn_linear(make: Callable[[], FusedLinear]) -> None:
    torch.manual_seed(3)
    layer = make()
    torch.manual_seed(3)
    plain = nn.Linear(6, 4, bias=layer.bias is not None)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert (layer.in_features, layer.out_features) == (6, 4)
    # the same numbers from the same seed
    for name, parameter in plain.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter)
    # both ways
    other = nn.Linear(6, 4, bias=layer.bias is not None)
    other.load_state_dict(layer.state_dict())
    again = make()
    assert not torch.equal(again.weight, layer.weight)
    again.load_state_dict(other.state_dict())
    assert same_results(again, layer)


def test_layer_computes_what_the_modules_did() -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    plain = nn.Sequential(nn.Linear(6, 4), nn.GELU())
    plain[0].load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(FusedLinear.from_linear(plain[0])(x), plain[0](x))  # type: ignore[arg-type]


def test_constructor_is_that_of_nn_linear() -> None:
    layer = FusedLinear(6, 4, False, "meta", torch.float16)
    assert layer.bias is None and layer.weight.device.type == "meta" and layer.weight.dtype == torch.float16
    layer = FusedLinear(in_features=6, out_features=4, bias=True, device=None, dtype=torch.bfloat16, epilogue="relu")
    assert layer.bias.dtype == torch.bfloat16 and layer.epilogue == ep.builders.bias_activation("relu")
    with pytest.raises(TypeError):
        FusedLinear(6, 4, True, None, None, "relu")  # type: ignore[misc]


def test_layer_without_bias() -> None:
    layer, x = FusedLinear(6, 4, bias=False, epilogue="relu"), torch.randn(5, 6)
    assert layer.bias is None and list(layer.state_dict()) == ["weight"]
    assert torch.equal(layer(x), F.relu(F.linear(x, layer.weight)))
    # an epilogue's bias is then an operand like others
    layer, bias = FusedLinear(6, 4, bias=False, epilogue=ep.builders.bias()), torch.randn(4)
    torch.testing.assert_close(layer(x, bias=bias), F.linear(x, layer.weight, bias))
    with pytest.raises(EpilogueError, match="missing operand bias"):
        layer(x)


def test_what_is_no_bias() -> None:
    for value in ("gelu", ep.builders.residual(), nn.GELU()):
        with pytest.raises(TypeError, match=r"bias should be True or False, got .*; an epilogue is a keyword"):
            FusedLinear(6, 4, value)  # type: ignore[arg-type]
    for value in (1, torch.tensor(True), 0, None):  # as nn.Linear has it
        assert (FusedLinear(6, 4, value).bias is None) == (nn.Linear(6, 4, value).bias is None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["relu", None])
@pytest.mark.parametrize("bias", [False, True])
def test_an_epilogue_may_be_set(name: str | None, bias: bool) -> None:
    layer, other = FusedLinear(6, 4, bias, epilogue="gelu"), FusedLinear(6, 4, bias, epilogue=name)
    layer.load_state_dict(other.state_dict())
    layer.epilogue = name
    assert layer.epilogue == other.epilogue and repr(layer) == repr(other) and same_results(layer, other)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert made.epilogue == other.epilogue and same_results(made, other)
    torch._dynamo.reset()
    compiled, x = torch.compile(layer, fullgraph=True, backend="eager"), torch.randn(3, 6)
    torch.testing.assert_close(compiled(x), other(x))
    layer.epilogue = ep.builders.bias_activation("tanh") if bias else ep.builders.activation("tanh")
    torch.testing.assert_close(compiled(x), torch.tanh(F.linear(x, layer.weight, layer.bias)))


def test_an_epilogue_that_cannot_be_set() -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    for value, error, words in (
        (3, TypeError, "epilogue should be an Epilogue, a name or None"),
        (nn.ReLU(), TypeError, "epilogue should be an Epilogue, a name or None"),
        ("galu", EpilogueError, "galu"),
        (reads_residual, ValueError, "no row operand called 'bias'"),
    ):
        with pytest.raises(error, match=words):
            layer.epilogue = value
        assert layer.epilogue == ep.builders.bias_activation("gelu") and not list(layer.children())


@pytest.mark.parametrize("name", ["relu", None])
def test_a_bias_that_comes_and_goes(name: str | None) -> None:
    layer, x = FusedLinear(6, 4, bias=False, epilogue=name), torch.randn(3, 6)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")

    def check() -> None:
        plain = F.linear(x, layer.weight, layer.bias)
        expected = plain if name is None else F.relu(plain)
        assert ("bias" in layer.epilogue.operands) == (layer.bias is not None)
        for call in (layer, compiled, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(call(x), expected)

    check()
    layer.bias = nn.Parameter(torch.randn(4))
    check()
    layer.bias = None
    check()
    layer.register_parameter("bias", nn.Parameter(torch.randn(4)))
    check()
    again = FusedLinear.from_linear(nn.Linear(6, 4), epilogue=name)
    again.bias = None
    torch.testing.assert_close(again(x), FusedLinear.from_linear(again, epilogue=name)(x))


def test_a_bias_that_the_epilogue_has_no_operand_for() -> None:
    x, residual = torch.randn(3, 6), torch.randn(3, 4)
    layer = FusedLinear(6, 4, bias=False, epilogue=reads_residual)
    layer.bias = nn.Parameter(torch.randn(4))
    with pytest.raises(ValueError, match=r"no row operand called 'bias' for it: add one, or .* set its bias to None"):
        layer(x, residual=residual)
    layer = FusedLinear(6, 4, epilogue=RESIDUAL)
    layer.bias = None
    with pytest.raises(EpilogueError, match="missing operand bias: the layer has no bias"):
        layer(x, residual=residual)
    bias = torch.randn(4)
    torch.testing.assert_close(layer(x, residual=residual, bias=bias), F.linear(x, layer.weight, bias) + residual)


def test_operands_of_a_layer() -> None:
    layer, x, residual = FusedLinear(6, 4, epilogue=RESIDUAL), torch.randn(2, 3, 6), torch.randn(2, 3, 4)
    torch.testing.assert_close(layer(x, residual=residual), F.linear(x, layer.weight, layer.bias) + residual)
    with pytest.raises(EpilogueError, match="missing operand residual"):
        layer(x)
    with pytest.raises(EpilogueError, match="unknown operand scale"):
        layer(x, residual=residual, scale=1.0)
    with pytest.raises(EpilogueError, match="operand bias: the layer gives its own"):
        layer(x, residual=residual, bias=torch.randn(4))
    with pytest.raises(ProblemError, match="K=5 and b has K=6"):
        layer(x[..., :5], residual=residual)


@pytest.mark.parametrize("epilogue", [reads_residual, ep.builders.activation("relu")], ids=str)
def test_a_bias_without_an_operand(epilogue: ep.Epilogue) -> None:
    with pytest.raises(ValueError, match=r"has no row operand called 'bias' for it: add one, or .* bias=False"):
        FusedLinear(6, 4, epilogue=epilogue)
    assert FusedLinear(6, 4, bias=False, epilogue=epilogue).epilogue is epilogue


def test_a_bias_of_another_kind() -> None:
    @ep.epilogue
    def column(acc, bias: ep.Column):
        return acc + bias

    with pytest.raises(ValueError, match="the epilogue column has no row operand called 'bias'"):
        FusedLinear(6, 4, epilogue=column)

    @ep.epilogue
    def automatic(acc, bias):
        return acc + bias

    layer, x = FusedLinear(6, 4, epilogue=automatic), torch.randn(5, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("epilogue", [3, nn.ReLU()], ids=["number", "module"])
def test_layer_of_no_epilogue(epilogue: Any) -> None:
    with pytest.raises(TypeError, match="epilogue should be an Epilogue, a name or None"):
        FusedLinear(6, 4, epilogue=epilogue)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_from_linear(bias: bool, training: bool) -> None:
    plain = nn.Linear(6, 4, bias=bias, dtype=torch.float64).train(training)
    plain.weight.requires_grad_(False)
    before = torch.get_rng_state()
    layer = FusedLinear.from_linear(plain, epilogue="tanh")
    assert torch.equal(torch.get_rng_state(), before), "drew random numbers"
    assert type(layer) is FusedLinear and layer.training == training
    assert layer.weight is plain.weight and layer.bias is plain.bias  # tied, not copied
    assert layer.weight.dtype == torch.float64 and layer.weight.device.type == "cpu"
    assert not layer.weight.requires_grad and (not bias or layer.bias.requires_grad)
    assert (layer.in_features, layer.out_features) == (6, 4)
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.tanh(plain(x)))
    with torch.no_grad():
        plain.weight.zero_()
    assert not layer.weight.any()


def test_from_linear_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"from_linear takes an nn\.Linear, got Conv2d"):
        FusedLinear.from_linear(nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no row operand called 'bias'"):
        FusedLinear.from_linear(nn.Linear(6, 4), epilogue=reads_residual)


@each_layer
def test_copies(make: Callable[[], FusedLinear]) -> None:
    """Of the layer alone and within a model; they share nothing, and compute the same."""
    layer = nn.Sequential(make()).eval()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False))
    for made in copies:
        assert type(made[0]) is FusedLinear and not made.training
        assert made[0].epilogue == layer[0].epilogue and made[0].weight.data_ptr() != layer[0].weight.data_ptr()
        assert same_results(made, layer)


def test_deepcopy_keeps_tied_parameters_tied() -> None:
    first = FusedLinear(6, 6, epilogue="relu")
    model = nn.ModuleList([first, FusedLinear.from_linear(first, epilogue="gelu")])
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight and copied[0].weight is not first.weight
    assert len(list(model.parameters())) == 2


def test_repr() -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    assert repr(layer) == "FusedLinear(in_features=6, out_features=4, bias=True, epilogue=bias_gelu)"
    assert "bias=False, epilogue=silu" in repr(FusedLinear(6, 4, bias=False, epilogue="silu"))


def test_meta_then_empty() -> None:
    layer = FusedLinear(6, 4, epilogue="relu", device="meta")
    x = torch.empty(2, 3, 6, device="meta")
    with torch.no_grad():
        assert layer(x).shape == (2, 3, 4) and layer(x).device.type == "meta"
    layer.to_empty(device="cpu").reset_parameters()
    source = FusedLinear(6, 4, epilogue="relu")
    layer.load_state_dict(source.state_dict())
    assert same_results(layer, source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to(dtype: torch.dtype) -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    weight = layer.weight.detach().clone()
    assert layer.to(dtype) is layer and layer.weight.dtype == layer.bias.dtype == dtype
    assert layer(torch.randn(5, 6, dtype=dtype)).dtype == dtype
    assert torch.equal(layer.weight, weight.to(dtype))
    assert FusedLinear(6, 4).half().bias.dtype == torch.float16
    with pytest.raises(ProblemError, match="should have one dtype"):
        layer.half()(torch.randn(5, 6))


def test_layers_in_a_training_loop() -> None:
    """A step of an optimiser goes down, and eval mode and no_grad change nothing about the values."""
    model = nn.Sequential(FusedLinear(6, 16, epilogue="gelu"), FusedLinear(16, 1))
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.9
    training = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), training)

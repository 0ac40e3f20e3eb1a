"""Adapters of peft on a ``FusedLinear``: what they compute unmerged is what they compute merged."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from gemm_ops import FusedLinear

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

K, N = 16, 24


@ep.epilogue
def scaled_relu(acc, scale: ep.Row, bias: ep.Row):
    return ep.relu(acc * scale + bias)


@ep.epilogue
def two_outputs(acc, bias: ep.Row):
    z = acc + bias
    return {"D": ep.gelu(z), "preact": ep.cast(z, torch.float32)}


class Net(nn.Module):
    """A layer with what its epilogue needs, as a model has it."""

    def __init__(self, layer: FusedLinear, **operands: Tensor) -> None:
        super().__init__()
        self.up, self.operands = layer, operands

    def forward(self, x: Tensor) -> Any:
        return self.up(x, **self.operands)


LAYERS: dict[str, Callable[[], Net]] = {
    "gelu": lambda: Net(FusedLinear(K, N, epilogue="gelu")),
    "no epilogue": lambda: Net(FusedLinear(K, N)),
    "no bias": lambda: Net(FusedLinear(K, N, bias=False, epilogue="silu")),
    "residual": lambda: Net(FusedLinear(K, N, epilogue=ep.builders.residual("gelu")), residual=torch.randn(2, 5, N)),
    "scaled": lambda: Net(FusedLinear(K, N, epilogue=scaled_relu), scale=torch.rand(N) + 1),
    "bias of the call": lambda: Net(
        FusedLinear(K, N, bias=False, epilogue=scaled_relu), scale=torch.rand(N), bias=torch.randn(N)
    ),
    "several outputs": lambda: Net(FusedLinear(K, N, epilogue=two_outputs)),
    "bfloat16": lambda: Net(FusedLinear(K, N, epilogue="gelu", dtype=torch.bfloat16)),
    "padded": lambda: Net(FusedLinear(K, 23, epilogue="gelu", padded_output=True, padded_weight=True)),
    "eager rounding": lambda: Net(
        FusedLinear(K, N, epilogue=ep.builders.bias_activation("gelu").with_rounding("eager"))
    ),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randomize(model: nn.Module) -> None:
    """Values for everything that an adapter trains: many begin as no change."""
    for name, parameter in model.named_parameters():
        if "up.base_layer" not in name and "up." in name:
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.3)


def adapted(net: nn.Module, config: Any = None, **options: Any) -> Any:
    config = config or peft.LoraConfig(r=4, lora_alpha=6, target_modules=["up"], **options)
    model = peft.get_peft_model(net, config)
    randomize(model)
    return model.eval()


def inputs(net: nn.Module) -> Tensor:
    return torch.randn(2, 5, K, dtype=next(net.parameters()).dtype)


def close(found: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)


@each_layer
def test_lora_before_and_after_merging(make: Callable[[], Net]) -> None:
    net = make()
    x, plain = inputs(net), copy.deepcopy(net)
    model = adapted(net)
    lora = net.up
    assert isinstance(lora, peft.tuners.lora.Linear) and type(lora).__name__ == "Linear"
    found, expected = model(x), plain(x)
    # what it should be, from the parameters
    with torch.no_grad():
        delta = lora.lora_B["default"].weight @ lora.lora_A["default"].weight
        plain.up.weight += (1.5 * delta).to(plain.up.weight.dtype)
    close(found, plain(x), x.dtype)
    with model.disable_adapter():
        base = model(x)
    merged = model.merge_and_unload()
    assert type(merged.up) is FusedLinear
    close(merged(x), found, x.dtype)
    close(base, expected, x.dtype)
    if isinstance(found, Tensor):
        assert (found - base).abs().max() > 0.05
        assert found.stride() == base.stride()


def test_gradients_reach_the_adapter_and_only_it() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    model, x = adapted(net).train(), torch.randn(7, K, requires_grad=True)
    model(x).square().sum().backward()
    lora, found_x = net.up, x.grad
    a, b = (getattr(lora, name)["default"].weight for name in ("lora_A", "lora_B"))
    base = lora.base_layer
    assert base.weight.grad is None and base.bias.grad is None
    wanted = torch.autograd.grad(F.gelu(F.linear(x, base.weight + b @ a * 1.5, base.bias)).square().sum(), (a, b, x))
    torch.testing.assert_close((a.grad, b.grad, found_x), wanted, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_bias_that_is_subtracted() -> None:
    net = Net(FusedLinear(K, N, epilogue=scaled_relu), scale=torch.rand(N))
    model, x = adapted(net, bias="all").train(), torch.randn(7, K)
    model(x).square().sum().backward()
    base, lora = net.up.base_layer, net.up
    a, b = (getattr(lora, name)["default"].weight for name in ("lora_A", "lora_B"))
    expected = F.relu(F.linear(x, base.weight + b @ a * 1.5) * net.operands["scale"] + base.bias)
    (wanted,) = torch.autograd.grad(expected.square().sum(), base.bias)
    torch.testing.assert_close(base.bias.grad, wanted, rtol=1e-4, atol=1e-4)


def test_several_adapters() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    model, x = adapted(net), torch.randn(4, K)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up"]))
    randomize(model)
    lora, base = net.up, net.up.base_layer

    def expected(*names: str) -> Tensor:
        weight = base.weight + sum(lora.get_delta_weight(name) for name in names)
        return F.gelu(F.linear(x, weight, base.bias))

    torch.testing.assert_close(model(x), expected("default"))
    model.set_adapter("other")
    torch.testing.assert_close(model(x), expected("other"))
    lora.set_adapter(["default", "other"])
    torch.testing.assert_close(model(x), expected("default", "other"), rtol=1e-4, atol=1e-5)
    # a batch whose rows have adapters of their own
    names = ["default", "__base__", "other", "default"]
    rows = [expected(*([] if name == "__base__" else [name]))[i] for i, name in enumerate(names)]
    torch.testing.assert_close(model(x, adapter_names=names), torch.stack(rows), rtol=1e-4, atol=1e-5)
    model.merge_adapter(["default"])
    weight = base.weight.clone()
    torch.testing.assert_close(model(x), F.gelu(F.linear(x, weight, base.bias)))
    model.unmerge_adapter()
    model.set_adapter("default")
    torch.testing.assert_close(model(x), expected("default"), rtol=1e-4, atol=1e-5)
    model.delete_adapter("other")
    assert type(model.unload().up) is FusedLinear
    torch.testing.assert_close(net(x), expected())


def test_dropout() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    model, x = adapted(net, lora_dropout=0.5).train(), torch.randn(4, K)
    torch.manual_seed(3)
    found = model(x)
    torch.manual_seed(3)
    dropped, lora = F.dropout(x, 0.5), net.up
    delta = lora.lora_B["default"](lora.lora_A["default"](dropped)) * 1.5
    torch.testing.assert_close(found, F.gelu(F.linear(x, lora.base_layer.weight, lora.base_layer.bias) + delta))


KINDS: dict[str, Callable[[], Any]] = {
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=["up"], use_dora=True),
    "DoRA with dropout": lambda: peft.LoraConfig(r=4, target_modules=["up"], use_dora=True, lora_dropout=0.5),
    "rank-stabilised": lambda: peft.LoraConfig(r=4, target_modules=["up"], use_rslora=True),
    "PiSSA": lambda: peft.LoraConfig(r=4, target_modules=["up"], init_lora_weights="pissa"),
    "with a bias": lambda: peft.LoraConfig(r=4, target_modules=["up"], lora_bias=True),
    "of a parameter": lambda: peft.LoraConfig(r=4, target_parameters=["up.weight"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=["up"]),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=["up"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_modules=["up"], total_step=10),
    "IA3": lambda: peft.IA3Config(target_modules=["up"], feedforward_modules=[]),
    "IA3, feed-forward": lambda: peft.IA3Config(target_modules=["up"], feedforward_modules=["up"]),
    "OFT": lambda: peft.OFTConfig(target_modules=["up"], oft_block_size=4),
    "BOFT": lambda: peft.BOFTConfig(target_modules=["up"], boft_block_size=4),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=["up"]),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["up"]),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=["up"]),
}


@pytest.mark.parametrize("make", [LAYERS["gelu"], LAYERS["no bias"]], ids=["gelu", "no bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_adapters(kind: str, make: Callable[[], Net]) -> None:
    net = make()
    if kind == "with a bias" and net.up.bias is None:
        pytest.skip("peft does not merge it")
    x = inputs(net)
    plain = net(x)
    model = adapted(net, KINDS[kind]())
    found = model(x)
    assert (found - plain).abs().max() > 0.01, "the adapter changes nothing"
    torch.testing.assert_close(model.merge_and_unload()(x), found, rtol=1e-3, atol=1e-4)


def test_what_could_not_be_merged_is_refused() -> None:
    for config in (
        peft.LoraConfig(r=4, target_modules=["up"], lora_bias=True),
        peft.IA3Config(target_modules=["up"], feedforward_modules=[]),
    ):
        model = adapted(Net(FusedLinear(K, N, epilogue=scaled_relu), scale=torch.rand(N)), config)
        with pytest.raises(ep.EpilogueError, match="does not just add its bias to the accumulator"):
            model(torch.randn(3, K))


def test_a_call_around_the_adapter_is_refused() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    model, x = adapted(net), torch.randn(3, K)
    layer = net.up.base_layer
    with pytest.raises(ep.EpilogueError, match="called by something other than its forward"):
        layer(x)
    model(x)
    with pytest.raises(ep.EpilogueError, match="unknown operand scale"):
        net.up(x, scale=1.0)
    with pytest.raises(ep.EpilogueError, match="the layer gives its own"):
        net.up(x, bias=torch.randn(N))
    model.unload()
    torch.testing.assert_close(layer(x), F.gelu(F.linear(x, layer.weight, layer.bias)))


def test_code_that_replaces_the_forward_is_refused() -> None:
    """As X-LoRA does, which then calls the layer itself."""
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    adapted(net)
    lora = net.up
    lora.forward = lambda x: lora.base_layer(x) + lora.lora_B["default"](lora.lora_A["default"](x))
    with pytest.raises(ep.EpilogueError, match="as X-LoRA does"):
        net(torch.randn(3, K))


def test_a_layer_within_twice_is_refused() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    adapted(net)
    net.up.lora_A["default"] = FusedLinear(K, 4, epilogue="relu")
    with pytest.raises(ep.EpilogueError, match="has 2 FusedLinear layers within"):
        net(torch.randn(3, K))


def test_a_layer_put_into_an_adapter_later() -> None:
    net = nn.Sequential()
    net.up = nn.Linear(K, N)
    model, x = adapted(net), torch.randn(3, K)
    before = model(x)
    net.up.base_layer = FusedLinear.from_linear(net.up.base_layer, epilogue="gelu")
    torch.testing.assert_close(model(x), F.gelu(before), rtol=1e-4, atol=1e-5)
    # and taken out again
    net.up.base_layer = nn.Linear(K, N)
    assert (model(x) < -0.2).any()


def test_an_adapter_on_an_adapter() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    adapted(net)
    x = torch.randn(3, K)
    inner = net.up
    outer = peft.tuners.lora.Linear(inner, "outer", peft.LoraConfig(r=2), r=2, lora_alpha=2)
    nn.init.normal_(outer.lora_B["outer"].weight)
    base = inner.base_layer
    delta = inner.get_delta_weight("default") + outer.get_delta_weight("outer")
    torch.testing.assert_close(outer(x), F.gelu(F.linear(x, base.weight + delta, base.bias)), rtol=1e-4, atol=1e-5)
    outer.merge()
    expected = F.gelu(F.linear(x, base.weight + inner.get_delta_weight("default"), base.bias))
    torch.testing.assert_close(outer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str) -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    model, x = adapted(net), torch.randn(3, K)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    torch.testing.assert_close(other(x), model(x))
    assert isinstance(other.base_model.model.up, peft.tuners.lora.Linear)
    with torch.no_grad():
        other.base_model.model.up.lora_B["default"].weight.zero_()
    layer = net.up.base_layer
    torch.testing.assert_close(other(x), F.gelu(F.linear(x, layer.weight, layer.bias)))
    torch.testing.assert_close(other.merge_and_unload()(x), other(x))


def test_saved_adapters(tmp_path: Any) -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    fresh = copy.deepcopy(net)
    model, x = adapted(net), torch.randn(3, K)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(loaded(x), model(x))


def test_compiled() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    model, x = adapted(net), torch.randn(3, K)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert net.up.lora_B["default"].weight.grad is not None
    model.merge_adapter()
    torch.testing.assert_close(compiled(x), net(x))


def test_a_layer_that_is_saved_whole_is_adapted_by_its_own_copy() -> None:
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    net.down = nn.Linear(N, K)
    config = peft.LoraConfig(r=4, target_modules=["down"], modules_to_save=["up"])
    model, x = peft.get_peft_model(net, config), torch.randn(3, K)
    model(x).sum().backward()
    torch.testing.assert_close(model(x), F.gelu(F.linear(x, *net.up.modules_to_save["default"].parameters())))


def test_without_a_fused_layer_peft_is_as_it_was() -> None:
    net = nn.Sequential()
    net.up = nn.Linear(K, N)
    adapted(net)
    assert type(net.up) is peft.tuners.lora.Linear


def test_the_merged_layer_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fused product, not a product and then an epilogue."""
    net = Net(FusedLinear(K, N, epilogue="gelu"))
    model, x = adapted(net), torch.randn(3, K)

    def fail(*args: Any, **keywords: Any) -> None:
        raise AssertionError("not fused")

    monkeypatch.setattr(gemm_ops.adapters, "apply", fail)
    with pytest.raises(AssertionError, match="not fused"):
        model(x)
    with model.disable_adapter():
        model(x)
    model.merge_adapter()
    model(x)

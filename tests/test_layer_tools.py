"""What people do to an ``nn.Linear`` works on a ``FusedLinear``: pruning, parametrisations, tying, hooks, saving."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from gemm_ops import FusedLinear

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def pruned(layer: FusedLinear) -> FusedLinear:
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert (layer.weight == 0).sum() == layer.weight.numel() // 2
    return layer


def parametrized(layer: FusedLinear) -> FusedLinear:
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


TOOLS: dict[str, Callable[[FusedLinear], nn.Module]] = {
    "pruning": pruned,
    "a parametrisation": parametrized,
    "weight norm": parametrizations.weight_norm,
    "spectral norm": lambda layer: parametrizations.spectral_norm(layer).eval(),
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("name", TOOLS)
def test_computed_weights(name: str) -> None:
    torch.manual_seed(0)
    layer, x = TOOLS[name](FusedLinear(6, 4, epilogue="gelu")), torch.randn(3, 6)
    for _ in range(2):
        torch.testing.assert_close(layer(x), F.gelu(F.linear(x, layer.weight, layer.bias)))
        layer(x).square().sum().backward()
        found = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        layer(x)  # pruning computes the weight anew with each call, and with it the graph
        F.gelu(F.linear(x, layer.weight, layer.bias)).square().sum().backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in layer.parameters()])
        layer.zero_grad()
        layer.double().float()  # what gives the parameters other memory leaves the tool in place


def test_pruning_can_be_made_permanent() -> None:
    layer, x = pruned(FusedLinear(6, 4, epilogue="relu")), torch.randn(3, 6)
    before = layer(x)
    prune.remove(layer, "weight")
    assert torch.equal(layer(x), before) and isinstance(layer.weight, nn.Parameter)


def test_tied_weights_stay_tied() -> None:
    embedding, layer = nn.Embedding(5, 6), FusedLinear(6, 5, bias=False, epilogue="relu")
    layer.weight = embedding.weight
    for change in (layer.eval, layer.train, layer.double):
        change()
        assert layer.weight is embedding.weight
    layer(torch.randn(3, 6, dtype=torch.float64)).sum().backward()
    assert embedding.weight.grad is not None


def test_hooks_run() -> None:
    layer, seen = FusedLinear(6, 5, epilogue="gelu"), []
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, result: seen.append("after"))
    layer.register_full_backward_hook(lambda module, before, after: seen.append("backward"))
    layer(torch.randn(3, 6, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_from_meta_to_file_and_back() -> None:
    layer = FusedLinear(6, 5, epilogue="gelu", device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assigned = FusedLinear(6, 5, epilogue="gelu", device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(3, 6)
    for other in (loaded, assigned):
        assert torch.equal(other(x), layer(x))
        result = torch.func.functional_call(other, dict(layer.named_parameters()), (x,))
        assert torch.equal(result, layer(x))

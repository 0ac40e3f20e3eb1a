"""``FusedLinear`` on a GPU under what people do to layers: pruning, saving, copies, checkpointing, other dtypes."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from test_layer_tools import TOOLS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gemm_ops import FallbackWarning, FusedLinear

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::gemm_ops.FallbackWarning")]

BF16 = torch.bfloat16
#: An odd K, whose weight lies in padded rows in evaluation mode.
M, N, K = 64, 72, 37


def make(**options: object) -> FusedLinear:
    torch.manual_seed(0)
    return FusedLinear(K, N, epilogue="gelu", device="cuda", dtype=BF16, **options)  # type: ignore[arg-type]


def inputs(dtype: torch.dtype = BF16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(M, K, device="cuda").to(dtype)


def unfused(layer: nn.Module, x: Tensor) -> Tensor:
    bias = layer.bias
    return F.gelu(F.linear(x, layer.weight, bias))  # type: ignore[arg-type]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check(layer: FusedLinear, x: Tensor) -> Tensor:
    """The layer is as exact as the computation in two steps; gives its result."""
    result = layer(x)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    exact = F.gelu(F.linear(x.double(), weight, bias))
    with torch.no_grad():
        assert distance(result.detach(), exact) <= 1.1 * distance(unfused(layer, x), exact) + 2.0**-12
    return result


# PyTorch's orthogonal parametrisation does not take bfloat16
@pytest.mark.parametrize("name", [name for name in TOOLS if name != "orthogonal"])
def test_computed_weights(name: str) -> None:
    layer, x = TOOLS[name](make()), inputs()
    assert isinstance(layer, FusedLinear)
    check(layer, x).float().square().sum().backward()
    found = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    layer(x)  # pruning computes the weight anew with each call, and with it the graph
    unfused(layer, x).float().square().sum().backward()
    for one, parameter in zip(found, layer.parameters(), strict=True):
        assert one is not None and parameter.grad is not None
        assert distance(one, parameter.grad.double()) < 2e-2


CHANGES: dict[str, Callable[[FusedLinear], FusedLinear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "to the CPU and back": lambda layer: layer.to("cpu").to("cuda"),
    "float and back": lambda layer: layer.float().to(BF16),
    "evaluation and back": lambda layer: layer.eval().train(),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CHANGES)
def test_copies_and_moves(name: str, training: bool) -> None:
    layer, x = make().train(training), inputs()
    with torch.no_grad():
        before = check(layer, x)
        changed = CHANGES[name](layer)
        assert torch.equal(check(changed, x), before)
    assert isinstance(changed.weight, nn.Parameter) and changed.weight.shape == (N, K)


def test_half() -> None:
    with torch.no_grad():
        check(make().half(), inputs(torch.float16))


def test_from_meta_to_file_and_back() -> None:
    layer = FusedLinear(K, N, epilogue="gelu", device="meta", dtype=BF16).to_empty(device="cuda")
    layer.reset_parameters()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assigned = FusedLinear(K, N, epilogue="gelu", device="meta", dtype=BF16)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    plain = nn.Linear(K, N, device="cuda", dtype=BF16)
    plain.load_state_dict(layer.eval().state_dict())
    back = FusedLinear.from_linear(plain, epilogue="gelu").eval()
    x = inputs()
    with torch.no_grad():
        expected = check(layer, x)
        for other in (loaded, assigned, back):
            assert torch.equal(other(x), expected)
        assert torch.equal(torch.func.functional_call(loaded, dict(layer.named_parameters()), (x,)), expected)


def test_checkpointing() -> None:
    layer = make()
    grads = []
    for run in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = inputs().requires_grad_()
        layer.zero_grad()
        run(x).float().square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for one, other in zip(*grads, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_an_optimizer_with_fused_kernels_trains_it() -> None:
    losses: dict[str, list[float]] = {}
    x, target = inputs(), torch.randn(M, N, device="cuda").sigmoid()
    for kind in ("fused", "plain"):
        layer = make()
        optimizer = torch.optim.AdamW(layer.parameters(), 1e-2, fused=True)
        found = []
        for _ in range(20):
            result = layer(x) if kind == "fused" else unfused(layer, x)
            loss = (result.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses[kind] = found
    assert losses["fused"][-1] < 0.8 * losses["fused"][0]
    torch.testing.assert_close(torch.tensor(losses["fused"]), torch.tensor(losses["plain"]), rtol=2e-2, atol=1e-3)


def test_what_is_not_fused_says_so_once() -> None:
    layer = FusedLinear(8, 8, epilogue="gelu", device="cuda", dtype=torch.float64)
    x = torch.randn(4, 8, device="cuda", dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        for _ in range(3):
            torch.testing.assert_close(layer(x), unfused(layer, x))
    assert sum(issubclass(warning.category, FallbackWarning) for warning in caught) <= 1

"""Warm calls in C++ give what they give through Python, to the bit: results, gradients, layers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from native_calls import BF16, CALLS, assert_same, calls, numbers, outputs_of, random
from native_support import FakePlan, computed_natively, through_python
from torch import Tensor, nn
from torch.nn.utils import prune

import epilogues as ep
import gemm_ops
from epilogues import Aux
from gemm_ops import FusedLinear


@ep.epilogue
def added(acc, residual: Aux):
    return ep.relu(acc) + residual


@pytest.mark.parametrize("by_python", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_inference(name: str, by_python: bool, fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePlan, "by_python", by_python)
    function, leading, epilogue, operands, keywords = calls()[name]
    function(*leading, epilogue, **operands, **keywords)
    others = calls()[name]
    with through_python():
        expected = function(*others[1], epilogue, **others[3], **keywords)
    with computed_natively(fake_kernels):
        found = function(*others[1], epilogue, **others[3], **keywords)
    assert_same(outputs_of(found), outputs_of(expected))


def step(call: tuple[Any, ...], needs: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Outputs and gradients of a call of which every tensor, or those named, require grad."""
    function, leading, epilogue, operands, keywords = call
    inputs = {str(place): tensor for place, tensor in enumerate(leading)}
    inputs |= {name: value for name, value in operands.items() if isinstance(value, Tensor)}
    wanted = {name: tensor for name, tensor in inputs.items() if not needs or name in needs}
    given = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in inputs.items()}
    first = [given.pop(str(place)) for place in range(len(leading))]
    results = outputs_of(function(*first, epilogue, **{**operands, **given}, **keywords))
    given |= {str(place): tensor for place, tensor in enumerate(first)}
    torch.manual_seed(0)
    total = sum((torch.randn(result.shape) * result.float()).sum() for result in results.values())
    grads = torch.autograd.grad(total, [given[name] for name in wanted])
    return {**{name: result.detach() for name, result in results.items()}, **dict(zip(wanted, grads, strict=True))}


@pytest.mark.parametrize("by_python", [False, True])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "padded"])
def test_gradients(name: str, by_python: bool, fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePlan, "by_python", by_python)
    step(calls()[name])
    again = calls()[name]
    with through_python():
        expected = step(again)
    with computed_natively(fake_kernels):
        found = step(again)
    assert_same(found, expected)


@pytest.mark.parametrize("needs", [("0",), ("1",), ("scale",), ("0", "alpha"), ("1", "offset", "residual")])
def test_gradients_of_some(needs: tuple[str, ...], fake_kernels: Any) -> None:
    call = calls()["everything"]
    step(call, needs)
    with through_python():
        expected = step(call, needs)
    with computed_natively(fake_kernels):
        assert_same(step(call, needs), expected)


def test_numbers_are_those_of_the_call(fake_kernels: Any) -> None:
    """A backward that reads a number reads that of its own forward, in steps and through Python."""
    x, weight, bias = random(6, 16, grad=True), random(8, 16), random(8)

    def gradient(alpha: float, create_graph: bool = False) -> Tensor:
        y = gemm_ops.linear(x, weight, numbers, bias=bias, alpha=alpha)
        return torch.autograd.grad(y.float().sum(), x, create_graph=create_graph)[0].detach()

    gradient(1.0)
    with computed_natively(fake_kernels, 4):
        found = [gradient(alpha, graph) for alpha in (0.25, 3.0) for graph in (False, True)]
    with through_python():
        expected = [gradient(alpha) for alpha in (0.25, 3.0)]
    for two, one in zip((found[:2], found[2:]), expected, strict=True):
        assert torch.equal(two[0], one)
        assert torch.allclose(two[1].float(), one.float(), rtol=0.02, atol=0.02)  # by PyTorch's operations


def test_missing_gradients(fake_kernels: Any) -> None:
    function, leading, epilogue, operands, _ = calls()["everything"]
    leading = tuple(tensor.requires_grad_() for tensor in leading)

    def gradient(name: str) -> list[Tensor]:
        results = function(*leading, epilogue, **operands)
        return list(torch.autograd.grad(results[name].float().sum(), leading))

    for name in ("D", "z"):
        gradient(name)
        with through_python():
            expected = gradient(name)
        with computed_natively(fake_kernels):
            found = gradient(name)
        assert all(map(torch.equal, found, expected))


def test_twice_differentiated(fake_kernels: Any) -> None:
    x, weight, bias = random(6, 16, grad=True), random(8, 16, grad=True), random(8, grad=True)

    def second() -> list[Tensor]:
        y = gemm_ops.linear(x, weight, "tanh", bias=bias)
        (first,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.float().square().sum(), [x, weight, bias]))

    expected = second()
    found = second()
    assert all(map(torch.equal, found, expected))


def test_layer(fake_kernels: Any) -> None:
    layer = FusedLinear(16, 8, epilogue="gelu", dtype=BF16)
    bare = FusedLinear(16, 8, bias=False, epilogue=added, dtype=BF16)
    x, other = random(6, 16), random(6, 8)
    for call in (lambda: layer(x), lambda: bare(x, residual=other)):
        first = call()
        with computed_natively(fake_kernels):
            found = call()
        assert torch.equal(found, first)
        assert found.grad_fn is not None
    with pytest.raises(ep.EpilogueError, match="operand bias: the layer gives its own"):
        layer(x, bias=random(8))
    with pytest.raises(ep.EpilogueError, match="residual"):
        bare(x)
    layer.bias = None
    layer(x)
    with computed_natively(fake_kernels):
        assert torch.equal(layer(x), torch.nn.functional.gelu(x.float() @ layer.weight.float().t()).to(BF16))


class Halved(FusedLinear):
    """A layer whose weight is made of its parameter, by a property that stands before it."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._parameters["weight"] / 2  # type: ignore[operator]


class Named(FusedLinear):
    pass


def test_a_layer_whose_weight_is_another(fake_kernels: Any) -> None:
    x = random(6, 16)
    halved = FusedLinear(16, 8, epilogue="relu", dtype=BF16)
    halved.__class__ = Halved
    for layer in (
        halved,
        torch.nn.utils.parametrizations.weight_norm(FusedLinear(16, 8, epilogue="relu", dtype=BF16)),
        prune.random_unstructured(FusedLinear(16, 8, epilogue="relu", dtype=BF16), "weight", 0.5),
    ):
        for _ in range(2):
            expected = torch.relu(x.float() @ layer.weight.float().t() + layer.bias.float())
            torch.testing.assert_close(layer(x).float(), expected, atol=0.02, rtol=0.02)
    layer = FusedLinear(16, 8, epilogue="relu", dtype=BF16)
    layer(x)
    layer.__dict__["weight"] = torch.zeros(8, 16, dtype=BF16)  # stands before the parameter, as it does to PyTorch
    assert torch.equal(layer(x), torch.relu(layer.bias).expand(6, 8))
    named = Named(16, 8, epilogue="relu", dtype=BF16)
    named(x)
    with computed_natively(fake_kernels):
        named(x)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast(dtype: torch.dtype, fake_kernels: Any) -> None:
    layer = FusedLinear(16, 8, epilogue="gelu")
    x = torch.randn(6, 16)

    def training_step() -> list[Tensor]:
        layer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            y = layer(x)
            assert y.dtype == dtype
            y.float().sum().backward()  # under autocast, which is not to touch the backward
        assert layer.weight.grad is not None and layer.bias.grad is not None
        return [y.detach(), layer.weight.grad.clone(), layer.bias.grad.clone()]

    training_step()
    with through_python():
        expected = training_step()
    with computed_natively(fake_kernels):
        found = training_step()
    assert all(map(torch.equal, found, expected))
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        first = layer(x)
        with computed_natively(fake_kernels):
            assert torch.equal(layer(x), first)


def test_saved_tensors_are_guarded_and_released(fake_kernels: Any) -> None:
    x, weight = random(6, 16, grad=True), random(8, 16, grad=True)
    gemm_ops.linear(x, weight, "gelu")
    with computed_natively(fake_kernels):
        y = gemm_ops.linear(x, weight, "gelu")
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().sum().backward()
    y = gemm_ops.linear(x, weight, "gelu")
    y.float().sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.float().sum().backward()


def test_hooks_on_saved_tensors(fake_kernels: Any) -> None:
    x, weight, bias = random(6, 16, grad=True), random(8, 16, grad=True), random(8, grad=True)

    def gradients() -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = gemm_ops.linear(x, weight, "gelu", bias=bias)
        return list(torch.autograd.grad(y.float().sum(), [x, weight, bias]))

    expected = gradients()
    with computed_natively(fake_kernels):
        assert all(map(torch.equal, gradients(), expected))

    def through_checkpoint() -> list[Tensor]:
        y = torch.utils.checkpoint.checkpoint(
            lambda x: gemm_ops.linear(x, weight, "gelu", bias=bias), x, use_reentrant=False
        )
        return list(torch.autograd.grad(y.float().sum(), [x, weight, bias]))

    assert all(map(torch.equal, through_checkpoint(), expected))


def test_a_failed_launch_says_what_failed(fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(6, 16, grad=True), random(8, 16)
    call = lambda: gemm_ops.linear(x, weight, "gelu")  # noqa: E731
    call()
    y = call()
    torch.autograd.grad(call().float().sum(), x)
    monkeypatch.setattr(FakePlan, "fails", 7)
    with pytest.raises(gemm_ops.LaunchError, match="code 7"):
        call()
    with pytest.raises(gemm_ops.LaunchError, match="code 7"):
        y.float().sum().backward()


def test_many_shapes_forget_the_first(fake_kernels: Any) -> None:
    weight = random(8, 16)
    for rows in range(1, 4200):
        gemm_ops.linear(torch.empty(rows, 16, dtype=BF16), weight)
    assert 0 < fake_kernels.counts()[0] <= 4096
    with computed_natively(fake_kernels):
        gemm_ops.linear(torch.empty(4199, 16, dtype=BF16), weight)


def test_threads(fake_kernels: Any) -> None:
    layer = FusedLinear(16, 8, epilogue="gelu", dtype=BF16)
    inputs = [random(rows, 16, grad=True) for rows in range(1, 9)]
    with through_python():
        expected = [torch.autograd.grad(layer(x).float().sum(), x)[0] for x in inputs]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(40):
            for place, x in enumerate(inputs):
                if not torch.equal(torch.autograd.grad(layer(x).float().sum(), x)[0], expected[place]):
                    wrong.append(place)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_trains_alike(fake_kernels: Any) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            FusedLinear(16, 32, epilogue="gelu", dtype=BF16), FusedLinear(32, 5, epilogue="silu", dtype=BF16)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(random(7, 16)).float().square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
        return found

    with through_python():
        expected = losses()
    with computed_natively(fake_kernels, 10):  # the first step of each layer is Python's
        assert losses() == expected


def test_what_tuning_changes_is_decided_anew(fake_kernels: Any) -> None:
    """A plan counts for one way of tuning, and none when results have come."""
    from gemm_ops.plan import forget_plans

    def compute() -> Tensor:
        return gemm_ops.linear(x, weight, "relu")

    x, weight = random(4, 8), random(6, 8)
    first = compute()
    with computed_natively(fake_kernels):
        compute()
    with gemm_ops.tuning("now"):
        with computed_natively(fake_kernels, calls=0):
            compute()
        with computed_natively(fake_kernels):
            compute()
    forget_plans()
    assert fake_kernels.counts()[:2] == (0, 0)
    with computed_natively(fake_kernels, calls=0):
        compute()
    with computed_natively(fake_kernels):
        assert torch.equal(compute(), first)

"""Warm calls in C++ give what they give through Python, to the bit; whatever is unlike goes through Python."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_support import FakePlan, computed_natively, through_python
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row, Scalar
from gemm_ops import FusedLinear, native

BF16 = torch.bfloat16


@ep.epilogue
def everything(acc, scale: Row, offset: Column, alpha: Scalar, residual: Aux):
    z = acc * scale + offset
    return {"D": ep.gelu(z) * alpha + residual, "z": ep.cast(z, "f32")}


@ep.epilogue
def scaled(acc, bias: Row, alpha: Scalar):
    return torch.tanh(acc + bias) * alpha


@ep.epilogue
def numbers(acc, bias: Row, alpha: Scalar):
    return ep.silu(acc * alpha + bias)


@ep.epilogue
def added(acc, residual: Aux):
    return ep.relu(acc) + residual


def random(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def calls() -> dict[str, tuple[Any, tuple[Tensor, ...], Any, dict[str, Any], dict[str, Any]]]:
    """By name: function, leading tensors, epilogue, operands, keywords."""
    bias, padded = {"bias": random(8)}, {"padded_output": True}
    whole = {
        "scale": random(8, dtype=torch.float32),
        "offset": random(6, 1),
        "alpha": random(1, dtype=torch.float32),
        "residual": random(6, 8),
    }
    strided = random(6, 64)[:, ::2][:, :16]
    return {
        "linear": (gemm_ops.linear, (random(6, 16), random(8, 16)), "gelu", bias, {}),
        "no bias": (gemm_ops.linear, (random(6, 16), random(8, 16)), None, {"bias": None}, {}),
        "matmul": (gemm_ops.matmul, (random(6, 16), random(16, 8)), "relu", bias, {}),
        "batched x": (gemm_ops.linear, (random(2, 3, 16), random(8, 16)), "silu", bias, {}),
        "batches": (gemm_ops.matmul, (random(2, 6, 16), random(2, 16, 8)), "relu", {"bias": random(2, 1, 8)}, {}),
        "vector": (gemm_ops.linear, (random(16), random(8, 16)), "gelu", bias, {}),
        "odd": (gemm_ops.linear, (random(5, 13), random(7, 13)), "gelu", {"bias": random(7)}, {}),
        "strided": (gemm_ops.linear, (strided, random(8, 16)), "gelu", bias, {}),
        "everything": (gemm_ops.linear, (random(6, 16), random(8, 16)), everything, whole, {}),
        "a number": (gemm_ops.linear, (random(6, 16), random(8, 16)), scaled, {**bias, "alpha": 0.5}, {}),
        "an integer": (gemm_ops.linear, (random(6, 16), random(8, 16)), scaled, {**bias, "alpha": 3}, {}),
        "apply": (gemm_ops.apply, (random(6, 8),), "gelu", bias, {}),
        "apply everything": (gemm_ops.apply, (random(6, 8),), everything, whole, {}),
        "apply strided": (gemm_ops.apply, (random(8, 6).t(),), "gelu", bias, {}),
        "padded": (gemm_ops.linear, (random(5, 16), random(7, 16)), "gelu", {"bias": random(7)}, padded),
    }


CALLS = tuple(calls())


def outputs_of(result: Any) -> dict[str, Tensor]:
    return result if isinstance(result, dict) else {"D": result}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        other = expected[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride()), name
        assert torch.equal(tensor, other), name


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


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_what_is_left_to_python(fake_kernels: Any) -> None:
    x, weight = random(6, 16), random(8, 16)
    linear = lambda x: gemm_ops.linear(x, weight, "gelu")  # noqa: E731
    expected = linear(x)
    with computed_natively(fake_kernels):
        linear(x)
    with computed_natively(fake_kernels, 0):
        with Counting() as mode:
            linear(x)
        assert any("gemm_ops" in name for name in mode.seen)
        assert torch.allclose(torch.func.vmap(linear)(x).float(), expected.float(), atol=0.02)
        with torch.autograd.forward_ad.dual_level():
            linear(x)
        assert torch.equal(linear(x.as_subclass(Subclass)).as_subclass(Tensor), expected)
        negative = torch.complex(torch.zeros(6, 16), -x.float()).conj().imag  # lazily negated
        assert negative.is_neg()
        gemm_ops.linear(x, weight, "gelu", out=torch.empty(6, 8, dtype=BF16))
        with pytest.raises(gemm_ops.ProblemError):
            linear(x[:, :-1])
        with pytest.raises(ep.EpilogueError, match="unknown operand other"):
            gemm_ops.linear(x, weight, "gelu", other=1.0)
        with pytest.raises(TypeError):
            gemm_ops.linear(x, weight, 3)
    layer = FusedLinear(16, 8, epilogue="gelu", dtype=BF16)
    layer(x)
    with computed_natively(fake_kernels, 0):
        graphs = [torch.fx.symbolic_trace(layer), torch.fx.symbolic_trace(nn.Sequential(layer))]
    assert all(torch.equal(graph(x), layer(x)) for graph in graphs)
    with computed_natively(fake_kernels), torch.device("cpu"):  # a function mode is of PyTorch's functions
        linear(x)
    with computed_natively(fake_kernels), torch.inference_mode():
        assert linear(x).is_inference()


def test_keys_tell_calls_apart(fake_kernels: Any) -> None:
    """Whatever decides how a call is computed makes another call of it."""
    x, weight, bias = random(6, 16), random(8, 16), random(8)
    gemm_ops.linear(x, weight, "gelu", bias=bias)
    memory = random(200)
    unlike = [
        (random(5, 16), weight, "gelu", bias),
        (random(16, 6).t(), weight, "gelu", bias),
        (memory[1:97].view(6, 16), weight, "gelu", bias),
        (x, random(16, 8).t(), "gelu", bias),
        (x, weight, "relu", bias),
        (x, weight, ep.builders.bias_activation("silu"), bias),
        (x, weight, "gelu", bias.float()),
        (x, weight, "gelu", bias[:1].expand(8)),
        (x.half(), weight.half(), "gelu", bias),
    ]
    for x, weight, epilogue, bias in unlike:
        with computed_natively(fake_kernels, 0):
            gemm_ops.linear(x, weight, epilogue, bias=bias)
        with computed_natively(fake_kernels):
            gemm_ops.linear(x, weight, epilogue, bias=bias)
    with gemm_ops.use_backend("sm90"), computed_natively(fake_kernels, 0):
        gemm_ops.linear(*unlike[0][:2], "gelu", bias=unlike[0][3])


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


def test_signatures_tell_what_choices_depend_on(fake_kernels: Any) -> None:
    signature = native.signature
    x, weight = random(6, 16), random(8, 16)
    gemm_ops.linear(x, weight)  # now tensors of the CPU are known
    base = signature(x, weight, None, 1.0)
    assert base == signature(random(6, 16), weight.clone(), None, 2.5), "of the same kind"
    unlike = [
        (random(5, 16), weight, None, 1.0),
        (random(1, 6, 16), weight, None, 1.0),
        (x.half(), weight, None, 1.0),
        (x, weight, random(8), 1.0),
        (x, weight, None, 1),
        (x, weight, None),
        (x, weight, None, random(1)),
    ]
    found = [base, *(signature(*values) for values in unlike)]
    for dtype in (BF16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.append(signature(x, weight, None, 1.0))
    assert all(isinstance(one, bytes) for one in found) and len(set(found)) == len(found)
    there = x.to("meta")
    for left in ((x.as_subclass(Subclass), weight), (x, True), (x, "text"), (x, there), (there, there), (3.0, x)):
        assert signature(*left) is None


def test_converted_models(fake_kernels: Any) -> None:
    """What a fused call found out of some shapes and dtypes holds for those alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.SiLU()).to(BF16)
    fused, _ = gemm_ops.fuse(model)
    x = random(6, 16)
    with torch.no_grad():
        expected = fused(x)
        with computed_natively(fake_kernels, 2):
            assert torch.equal(fused(x), expected)
        torch.testing.assert_close(expected, model(x), atol=0.02, rtol=0.02)
        for other in (random(5, 16), random(2, 3, 16), random(16)):
            assert fused(other).shape == model(other).shape
        with torch.autocast("cpu", dtype=torch.float16):
            assert fused(x).dtype == model(x).dtype == torch.float16
            assert fused(x).dtype == torch.float16
        assert torch.equal(fused(x), expected)
    fused(x).float().sum().backward()
    gradient = fused[0].weight.grad.clone()
    fused.zero_grad()
    with computed_natively(fake_kernels, 2):
        fused(x).float().sum().backward()
    assert torch.equal(fused[0].weight.grad, gradient)


def test_compiled_code_is_traced(fake_kernels: Any) -> None:
    layer = FusedLinear(16, 8, epilogue="gelu", dtype=BF16)
    x = random(6, 16)
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)


@pytest.fixture
def operators(fake_kernels: Any) -> Iterator[Any]:
    """The module, with the operators of graphs computed by it on the CPU too."""
    fake_kernels.register_operators("CPU")
    yield fake_kernels
    fake_kernels.forget_operators("CPU")


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("no bias", "an integer")])
def test_operators_of_graphs(name: str, operators: Any) -> None:
    """In a graph, with inductor's and the partitioner's part left out: the operators as they come."""
    function, leading, epilogue, _, keywords = calls()[name]

    def run(*leading: Tensor, **operands: Any) -> Any:
        return function(*leading, epilogue, **operands, **keywords)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    given = calls()[name][3]
    with torch.no_grad():
        compiled(*leading, **given)  # traced, and the plan is made
        expected = run(*leading, **given)
        with computed_natively(operators):
            found = compiled(*leading, **given)
    assert_same(outputs_of(found), outputs_of(expected))


def test_compiled_training(operators: Any) -> None:
    layer = FusedLinear(16, 8, epilogue="gelu", dtype=BF16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = random(6, 16)

    def gradients(call: Any) -> list[Tensor]:
        layer.zero_grad()
        call(x).float().sum().backward()
        assert layer.weight.grad is not None and layer.bias.grad is not None
        return [layer.weight.grad.clone(), layer.bias.grad.clone()]

    gradients(compiled)
    expected = gradients(layer)
    with computed_natively(operators, 2):  # the product, and the backward's pass
        found = gradients(compiled)
    assert all(map(torch.equal, found, expected))
    with gemm_ops.use_backend("reference"), computed_natively(operators, 0):
        gradients(compiled)


def test_the_module_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_OPS_NATIVE", "0")
    monkeypatch.setattr(native, "_started", False)
    monkeypatch.setattr(native, "_module", None)
    native.remember_plan(None, (), ep.builders.identity(), {}, False)
    assert not native._started

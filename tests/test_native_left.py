"""What warm calls in C++ leave to Python, what tells them apart, and how the compiler and conversion meet them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_calls import BF16, CALLS, assert_same, calls, numbers, outputs_of, random
from native_support import computed_natively
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import epilogues as ep
import gemm_ops
from epilogues import Scalar
from gemm_ops import FusedLinear, native


@ep.epilogue
def scaled_by(acc, alpha: Scalar):
    return torch.tanh(acc) * alpha


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


class Float(float):
    """A number of another class, as numpy's are."""


@pytest.mark.parametrize("grad", [False, True])
def test_numbers_and_tensors_of_other_classes_are_left_to_python(grad: bool, fake_kernels: Any) -> None:
    x, weight, bias = random(6, 16), random(8, 16), random(8)
    x.requires_grad_(grad)
    for other in (Float(0.5), bias.new_tensor([0.5]).as_subclass(Subclass)):
        expected = gemm_ops.linear(x, weight, numbers, bias=bias, alpha=0.5)
        with computed_natively(fake_kernels, 0):
            for _ in range(2):
                found = gemm_ops.linear(x, weight, numbers, bias=bias, alpha=other)
                assert torch.equal(found.as_subclass(Tensor), expected)
        fake_kernels.clear()
        for _ in range(2):
            gemm_ops.apply(x, scaled_by, alpha=other)
        if grad:
            found.sum().backward()

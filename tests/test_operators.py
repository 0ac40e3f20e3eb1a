"""``gemm_ops::apply`` as PyTorch sees it: opcheck, torch.compile without graph breaks, export, fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, EpilogueError, Row
from gemm_ops.operators import epilogue_of, flatten


@ep.epilogue
def scaled(acc, scale: Row, offset: Column, residual: Aux):
    z = acc * scale + offset
    return {"D": torch.tanh(z) + residual, "z": ep.cast(z, "f32")}


def operands_of(m: int, n: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"scale": torch.randn(n), "offset": torch.randn(m, 1), "residual": torch.randn(m, n)}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


CASES = {
    "several outputs": (scaled, operands_of(4, 6)),
    "numbers alone": (ep.builders.scale(), {"alpha": 0.5}),
    "no operands": (ep.builders.activation("gelu"), {}),
    "one operand": (ep.builders.bias_activation("relu"), {"bias": torch.randn(6)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_opcheck(name: str, grad: bool) -> None:
    epilogue, given = CASES[name]
    x = torch.randn(4, 6, requires_grad=grad)
    operands = {
        key: value.detach().clone().requires_grad_(grad) if isinstance(value, Tensor) else value
        for key, value in given.items()
    }
    arguments = flatten(epilogue.text, tuple(epilogue.operands), operands)
    torch.library.opcheck(torch.ops.gemm_ops.apply.default, (x, *arguments))


def test_what_an_operator_is_told() -> None:
    for epilogue in (scaled, ep.builders.dequantize() if hasattr(ep.builders, "dequantize") else scaled):
        assert epilogue_of(epilogue.text) == epilogue
    assert epilogue_of("activation gelu") == ep.builders.activation("gelu")
    assert epilogue_of("bias_activation gelu") == ep.builders.bias_activation("gelu")
    assert epilogue_of("activation ") == ep.builders.activation(None)
    with pytest.raises(EpilogueError):
        epilogue_of("activation galu")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_without_graph_breaks(backend: str, dynamic: bool) -> None:
    def forward(x: Tensor, scale: Tensor, offset: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        results = gemm_ops.apply(x, scaled, scale=scale, offset=offset, residual=residual)
        y = scaled.elementwise(x + 1, scale=scale, offset=offset, residual=residual)["D"]
        return gemm_ops.apply(y + results["z"], "silu", bias=bias)  # type: ignore[call-overload,no-any-return]

    compiled = torch.compile(forward, fullgraph=True, backend=backend, dynamic=dynamic)
    for m, n in ((4, 6), (5, 9), (7, 3)):
        operands = operands_of(m, n)
        given = [torch.randn(m, n), *operands.values(), torch.randn(n)]
        one = [tensor.clone().requires_grad_() for tensor in given]
        other = [tensor.clone().requires_grad_() for tensor in given]
        expected = forward(*one)
        result = compiled(*other)
        torch.testing.assert_close(result, expected)
        weights = torch.randn(m, n)
        (expected * weights).sum().backward()
        (result * weights).sum().backward()
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left.grad, right.grad)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), expected)


def test_compile_sees_another_epilogue() -> None:
    """A graph belongs to the epilogue it was made for."""
    compiled = torch.compile(lambda x, e: gemm_ops.apply(x, e), fullgraph=True, backend="eager")
    x = torch.randn(3, 5)
    for name in ("relu", "tanh", "relu"):
        torch.testing.assert_close(compiled(x, ep.builders.activation(name)), getattr(torch, name)(x))
        torch.testing.assert_close(compiled(x, name), getattr(torch, name)(x))


def test_compile_with_out_and_numbers() -> None:
    scale = ep.builders.scale()

    def forward(x: Tensor, out: Tensor) -> Any:
        return gemm_ops.apply(x, scale, alpha=0.25, out=out)

    x, out = torch.randn(3, 5), torch.full((3, 5), float("nan"))
    result = torch.compile(forward, fullgraph=True, backend="aot_eager")(x, out)
    torch.testing.assert_close(out, 0.25 * x)
    torch.testing.assert_close(result, out)


def test_compile_refuses_what_the_call_refuses() -> None:
    x, bias = torch.randn(3, 5), ep.builders.bias()
    compiled = torch.compile(lambda x, keywords: gemm_ops.apply(x, bias, **keywords), backend="eager")
    for keywords in ({}, {"bias": torch.randn(5), "gate": x}, {"bias": torch.randn(4)}):
        with pytest.raises(EpilogueError, match=r"bias|gate"):
            compiled(x, keywords)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, residual: Tensor) -> Any:
            return gemm_ops.apply(x, plus, residual=residual)

    @ep.epilogue
    def plus(acc, residual: Aux):
        return torch.relu(acc) + residual

    x, residual = torch.randn(4, 6), torch.randn(4, 6)
    rows = torch.export.Dim("rows")
    for strict in (False, True):
        exported = torch.export.export(
            Layer(), (x, residual), dynamic_shapes={"x": {0: rows}, "residual": {0: rows}}, strict=strict
        )
        targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
        assert torch.ops.gemm_ops.apply.default in targets
        again = torch.randn(9, 6), torch.randn(9, 6)
        torch.testing.assert_close(exported.module()(*again), torch.relu(again[0]) + again[1])


def test_fake_tensors_and_tracing() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(4, 6).bfloat16().t())
        operands = {name: mode.from_tensor(value.bfloat16()) for name, value in operands_of(6, 4).items()}
        results = gemm_ops.apply(x, scaled, **operands)
        assert isinstance(results, dict)
        assert results["D"].shape == (6, 4) and results["D"].dtype == torch.bfloat16
        assert results["z"].dtype == torch.float32 and results["z"].stride() == (1, 6)
    graph = make_fx(lambda x: gemm_ops.apply(x, "gelu"))(torch.randn(3, 5))
    assert torch.ops.gemm_ops.apply.default in [node.target for node in graph.graph.nodes]
    x = torch.randn(3, 5)
    torch.testing.assert_close(graph(x), torch.nn.functional.gelu(x), rtol=1e-5, atol=1e-6)


def test_meta_tensors() -> None:
    """The reference computes them, as PyTorch does, shapes alone."""
    result = gemm_ops.apply(torch.empty(4, 6, device="meta"), "relu", bias=torch.empty(6, device="meta"))
    assert isinstance(result, Tensor) and result.is_meta and result.shape == (4, 6)


TRANSFORMED = {
    "vmap": lambda f: lambda x: torch.func.vmap(f)(x),
    "grad": lambda f: lambda x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("kind", ["apply", "matmul"])
def test_transforms_of_torch_func_are_not_compiled_wrongly(kind: str, name: str) -> None:
    """No operator has rules for them: right where nothing is compiled or make_fx traces, refused by the compiler."""
    weight = torch.randn(5, 5)

    def call(x: Tensor) -> Any:
        return gemm_ops.apply(x, "silu") if kind == "apply" else gemm_ops.matmul(x, weight, "silu")

    def plain(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x if kind == "apply" else x @ weight)

    x = torch.randn(3, 5)
    transform = TRANSFORMED[name]
    expected = transform(plain)(x)
    torch.testing.assert_close(transform(call)(x), expected)
    torch.testing.assert_close(make_fx(transform(call))(x)(x), expected)
    with pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(transform(call), backend="eager", fullgraph=True)(x)


def declared(acc, residual: Aux):
    return torch.relu(acc) + residual


relu = ep.builders.activation("relu")


def in_context(x: Tensor) -> Any:
    with gemm_ops.use_backend("reference"):
        return gemm_ops.apply(x, "relu")


MADE_INSIDE = {
    "builder": (lambda x: gemm_ops.apply(x, ep.builders.residual("relu"), bias=x[0], residual=x), "made"),
    "function": (lambda x: gemm_ops.apply(x, ep.epilogue(declared), residual=x), "made"),
    "module": (lambda x: gemm_ops.apply(x, ep.epilogue(torch.nn.GELU())), "made"),
    "rounding": (lambda x: gemm_ops.apply(x, relu.with_rounding("eager")), "made"),
    "compute dtype": (lambda x: gemm_ops.apply(x, relu.with_compute_dtype(torch.bfloat16)), "made"),
    "cast": (lambda x: gemm_ops.apply(x, ep.builders.cast(torch.bfloat16, relu)), "made"),
    "context": (in_context, "entered"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_what_is_to_be_done_outside_of_what_is_compiled(name: str) -> None:
    call, done = MADE_INSIDE[name]
    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.compile(call, backend="eager")(x), call(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"cannot be {done} within what torch.compile compiles"):
        torch.compile(call, backend="eager", fullgraph=True)(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("kind", ["apply", "matmul", "layer"])
def test_transforms_are_left_to_python_by_a_compiler_that_may(kind: str, name: str) -> None:
    """Without ``fullgraph``: the transform runs as it does uncompiled."""
    if name == "grad" and torch.__version__ < "2.13":
        pytest.skip("this PyTorch fails on any graph break within torch.func.grad")
    weight, residual = torch.randn(5, 5), ep.builders.residual("gelu")
    layer = gemm_ops.FusedLinear(5, 5, epilogue=residual)
    calls = {
        "apply": lambda x: gemm_ops.apply(x, residual, bias=weight[0], residual=x),
        "matmul": lambda x: gemm_ops.linear(x, weight, residual, bias=weight[0], residual=x),
        "layer": lambda x: layer(x, residual=x),
    }
    call, x = TRANSFORMED[name](calls[kind]), torch.randn(3, 5)
    torch.testing.assert_close(torch.compile(call, backend="eager")(x), call(x))


@pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")
@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("kind", ["apply", "matmul", "layer"])
def test_a_backend_asked_for_is_not_ignored_in_transforms(kind: str, name: str) -> None:
    weight = torch.randn(5, 5)
    calls = {
        "apply": lambda x: gemm_ops.apply(x, "silu"),
        "matmul": lambda x: gemm_ops.matmul(x, weight, "silu"),
        "layer": gemm_ops.FusedLinear(5, 5, epilogue="silu"),
    }
    call, x = TRANSFORMED[name](calls[kind]), torch.randn(3, 5)
    expected = call(x)
    for backend in ("sm90", "sm80", "cublas"):
        with gemm_ops.use_backend(backend), pytest.raises(gemm_ops.UnsupportedProblemError, match=f"'{backend}' can"):
            call(x)
    for backend in ("auto", "reference"):
        with gemm_ops.use_backend(backend):
            torch.testing.assert_close(call(x), expected)


def test_out_is_checked_by_graphs_too() -> None:
    x, operands = torch.randn(4, 6), operands_of(4, 6)
    good = {"D": torch.empty(4, 6), "z": torch.empty(4, 6)}
    one = torch.empty(4, 6)
    bad = [
        ({"D": one, "z": one}, r"shares memory with .*another output"),
        (good | {"D": torch.empty(4, 6, dtype=torch.float16)}, "dtype"),
        (good | {"D": torch.empty(2, 4, 6)}, "shape"),
        ({"D": one}, "should have the outputs"),
        (one, "out is one tensor"),
        (good | {"z": torch.empty(4, 6, requires_grad=True)}, "does not go with gradients"),
    ]

    def call(x: Tensor, out: Any) -> Any:
        return gemm_ops.apply(x, scaled, out=out, **operands)

    compiled = torch.compile(call, backend="eager")
    for out, words in bad:
        with pytest.raises(gemm_ops.ProblemError, match=words):
            compiled(x, out)
    found = compiled(x, good)
    assert found["D"] is good["D"]
    torch.testing.assert_close(found, gemm_ops.apply(x, scaled, **operands))


def test_graphs_check_operands_when_they_are_made() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> Any:
            return gemm_ops.apply(x, "gelu", bias=bias)

    with pytest.raises(Exception, match="bias"):
        torch.export.export(Layer(), (torch.randn(5, 7), torch.randn(6)))
    with FakeTensorMode() as mode, pytest.raises(EpilogueError, match="bias"):
        gemm_ops.apply(mode.from_tensor(torch.randn(5, 7)), "gelu", bias=mode.from_tensor(torch.randn(6)))

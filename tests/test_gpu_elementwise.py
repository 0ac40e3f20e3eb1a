"""Standalone elementwise kernels on a GPU: operations, layouts, guards, huge tensors; gradients; tails of products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import MATRIX_WAYS, OUTPUT_WAYS, GuardedBuffer, lay_out
from operation_support import packs

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@ep.epilogue
def everything(acc, scale: Row, offset: Column, residual: Aux):
    z = acc * scale + offset
    return {"D": torch.relu(z) + residual, "z": ep.cast(z, "f32")}


def operands_of(shape: tuple[int, ...], way: str = "contiguous") -> dict[str, torch.Tensor]:
    *lead, n = shape
    return {
        "scale": torch.randn(n + 3, device="cuda").to(BF16)[3:],
        "offset": torch.randn(*lead, 1, device="cuda").to(BF16),
        "residual": lay_out(shape, way, device="cuda"),
    }


def check(x: torch.Tensor, operands: dict[str, torch.Tensor], results: Any) -> None:
    truth = everything.reference(x.double(), compute_dtype=torch.float64, keep_casts=False, **operands)
    for name, limits in (("D", {"rtol": 2.0**-7.9, "atol": 1e-5}), ("z", {"rtol": 2.0**-20, "atol": 1e-5})):
        torch.testing.assert_close(results[name].double(), truth[name], **limits)


def check_guarded(x: torch.Tensor, operands: dict[str, torch.Tensor], way: str, way_z: str) -> None:
    """The same into poisoned outputs that lie in these ways, and what is around them."""
    shape = tuple(x.shape)
    guarded = {
        "D": GuardedBuffer(shape, way, BF16, "cuda"),
        "z": GuardedBuffer(shape, way_z, torch.float32, "cuda"),
    }
    out = {name: one.view for name, one in guarded.items()}
    check(x, operands, gemm_ops.apply(x, everything, out=out, **operands))
    for one in guarded.values():
        one.check()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_operations(dtype: str) -> None:
    """Every row of the table, against what it is in fp64, beside what it is in fp32."""
    torch.manual_seed(0)
    element = {"bf16": BF16, "f16": torch.float16, "f32": torch.float32}[dtype]
    x, row = (torch.randn(shape, device="cuda").mul(3).to(element) for shape in ((200, 264), (264,)))
    for epilogue in packs(dtype):
        results = gemm_ops.apply(x, epilogue, row=row)
        single = epilogue.reference(x.float(), keep_casts=False, out_dtype=torch.float32, row=row)
        truth = epilogue.reference(x.double(), compute_dtype=torch.float64, keep_casts=False, row=row)
        assert isinstance(results, dict) and isinstance(single, dict) and isinstance(truth, dict)
        rounding = {"bf16": 2.0**-8.5, "f16": 2.0**-11.5, "f32": 2.0**-20}[dtype]
        for name, exact in truth.items():
            scale = exact[exact.isfinite()].norm().clamp(min=1e-30)
            errors = [
                (found.double() - exact)[exact.isfinite() & found.isfinite()].norm() / scale
                for found in (results[name], single[name])
            ]
            assert errors[0] <= rounding + 2 * errors[1], (epilogue.name, name, [error.item() for error in errors])


@pytest.mark.parametrize("way", MATRIX_WAYS)
def test_layouts(way: str) -> None:
    torch.manual_seed(0)
    for shape in ((129, 257), (64, 264), (1000, 7), (77, 33), (3, 5, 33), (1, 4099), (4099, 1)):
        x, operands = lay_out(shape, way, device="cuda"), operands_of(shape, way)
        check(x, operands, gemm_ops.apply(x, everything, **operands))
        if way in OUTPUT_WAYS:
            check_guarded(x, operands, way, way)


def test_tails_at_every_misalignment() -> None:
    torch.manual_seed(0)
    memory = torch.randn(4096, device="cuda").to(BF16)
    for columns in range(1, 40):
        for begin in range(8):
            x = memory[begin : begin + 3 * (columns + 5)].view(3, columns + 5)[:, :columns]
            check_guarded(x, operands_of((3, columns)), "contiguous", "off")


def test_in_place_and_in_a_graph() -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(300, 1001, device="cuda").to(BF16), torch.randn(1001, device="cuda").to(BF16)
    expected = torch.relu(x + bias)
    other = x.clone()
    assert gemm_ops.apply(x, "relu", bias=bias, out=x) is x
    torch.testing.assert_close(x, expected, rtol=1e-2, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemm_ops.apply(other, "relu", bias=bias)
    other.neg_()
    graph.replay()
    assert isinstance(captured, torch.Tensor)
    torch.testing.assert_close(captured, torch.relu(other + bias), rtol=1e-2, atol=1e-2)


def test_more_than_2_31_elements() -> None:
    x = torch.randn(66_000_001, 33, device="cuda", dtype=BF16)
    bias = torch.randn(33, device="cuda", dtype=BF16)
    result = gemm_ops.apply(x, "relu", bias=bias)
    assert isinstance(result, torch.Tensor)
    for rows in (slice(0, 5), slice(2**31 // 33 - 3, 2**31 // 33 + 3), slice(65_999_990, None)):
        torch.testing.assert_close(result[rows], torch.relu(x[rows] + bias), rtol=1e-2, atol=1e-2)


# Gradients, graphs of the compiler, and tails of products.


@ep.epilogue
def bias_gelu_gate(acc, bias: Row, gate: Aux):
    return ep.gelu(acc + bias, approximate="tanh") * gate


@pytest.mark.parametrize("shape", [(256, 512), (3, 65, 129)], ids=str)
def test_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(each, device="cuda").to(BF16) for each in (shape, shape[-1:], shape)]
    grad = torch.randn(shape, device="cuda").to(BF16)
    x, bias, gate = (tensor.clone().requires_grad_() for tensor in given)
    result = gemm_ops.apply(x, bias_gelu_gate, bias=bias, gate=gate)
    assert isinstance(result, torch.Tensor)
    result.backward(grad)
    exact = [tensor.double().requires_grad_() for tensor in given]
    bias_gelu_gate.reference(
        exact[0], compute_dtype=torch.float64, keep_casts=False, bias=exact[1], gate=exact[2]
    ).backward(grad.double())
    for one, other in zip((x, bias, gate), exact, strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == BF16
        error = (one.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < 2.0**-8, error.item()


def test_a_warm_backward_synchronises_nothing_and_can_be_captured() -> None:
    x = torch.randn(64, 1001, device="cuda", dtype=BF16, requires_grad=True)

    def step() -> torch.Tensor:
        result = gemm_ops.apply(x, "gelu")
        assert isinstance(result, torch.Tensor)
        return torch.autograd.grad(result, x, torch.ones_like(result))[0]

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, expected)


def test_compiled_by_inductor_without_graph_breaks() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        y = gemm_ops.apply(x @ weight.t(), bias_gelu_gate, bias=bias, gate=gate)
        return torch.sin(y).sum(-1)  # type: ignore[arg-type]

    torch.manual_seed(0)
    given = [torch.randn(each, device="cuda", dtype=BF16) for each in ((64, 32), (40, 32), (40,), (64, 40))]
    one, other = ([tensor.clone().requires_grad_() for tensor in given] for _ in range(2))
    expected, result = model(*one), torch.compile(model, fullgraph=True)(*other)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    expected.sum().backward()
    result.sum().backward()
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=5e-2, atol=5e-1)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "batch"])
def test_tail_of_a_product(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """cuBLAS, then one kernel: by name, and where no fused kernel takes the dtype."""
    torch.manual_seed(0)
    a, b = (torch.randn(shape, device="cuda").to(dtype) for shape in ((*lead, 33, 72), (*lead, 72, 41)))
    bias, gate = torch.randn(41, device="cuda").to(dtype), torch.randn(*lead, 33, 41, device="cuda").to(dtype)
    exact = bias_gelu_gate.reference(
        a.double() @ b.double(), compute_dtype=torch.float64, keep_casts=False, bias=bias, gate=gate
    )
    backends = ("cublas", "auto") if dtype == torch.float32 else ("cublas",)
    limit = {BF16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-10}[dtype]
    for backend in backends:
        with gemm_ops.use_backend(backend):
            assert gemm_ops.backend_for(a, b, bias_gelu_gate, bias=bias, gate=gate).backend == "cublas"
            for _ in range(2):  # planned, and by the plan
                out = torch.full((*lead, 33, 41), float("nan"), device="cuda", dtype=dtype)
                for given in ({}, {"out": out}, {"padded_output": True}):
                    result = gemm_ops.matmul(a, b, bias_gelu_gate, bias=bias, gate=gate, **given)  # type: ignore[arg-type]
                    assert isinstance(result, torch.Tensor) and result.dtype == dtype
                    error = (result.double() - exact).norm() / exact.norm()
                    assert error < limit, (backend, list(given), error.item())


def test_training_through_a_product() -> None:
    torch.manual_seed(0)
    layer = gemm_ops.FusedLinear(72, 41, epilogue="gelu", device="cuda", dtype=BF16)
    other = torch.nn.Linear(72, 41, device="cuda", dtype=torch.float64)
    other.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(33, 72, device="cuda").to(BF16).requires_grad_()
    y = x.detach().double().requires_grad_()
    result, exact = layer(x), torch.nn.functional.gelu(other(y))
    assert (result.double() - exact).norm() / exact.norm() < 2.0**-7
    weights = torch.randn(33, 41, device="cuda")
    (result * weights).sum().backward()
    (exact * weights.double()).sum().backward()
    for one, two in ((x, y), (layer.weight, other.weight), (layer.bias, other.bias)):
        assert one.grad is not None and two.grad is not None
        assert (one.grad.double() - two.grad).norm() / two.grad.norm() < 2.0**-6

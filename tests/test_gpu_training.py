"""Training on a GPU: fused forward, gradients beside PyTorch's own error, odd shapes, graphs, compile, GradScaler."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row
from gemm_ops import FallbackWarning, FusedLinear

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SHAPES = ((256, 264, 136), (129, 257, 65), (64, 1001, 333))


@ep.epilogue
def every_kind(acc, scale: Row, offset: Column, residual: Aux):
    return ep.gelu(acc * scale + offset, approximate="tanh") + residual


def eager(x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight) * scale + offset, approximate="tanh") + residual


def tensors(m: int, n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((m, k), (n, k), (n,), (m, 1), (m, n))
    return [(torch.randn(shape, device="cuda") * (k**-0.5 if shape == (n, k) else 1)).to(dtype) for shape in shapes]


def error(found: Tensor | None, exact: Tensor | None) -> float:
    assert found is not None and exact is not None and found.shape == exact.shape
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_as_exact_as_pytorchs(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = tensors(*shape, dtype)
    grad = torch.randn(shape[:2], device="cuda").to(dtype)
    leaves = {
        name: [tensor.to(kind).detach().clone().requires_grad_() for tensor in given]
        for name, kind in (("fused", dtype), ("eager", dtype), ("exact", torch.float64))
    }
    x, weight, scale, offset, residual = leaves["fused"]
    with warnings.catch_warnings():
        if dtype != torch.float32:
            warnings.simplefilter("error", FallbackWarning)
        result = gemm_ops.linear(x, weight, every_kind, scale=scale, offset=offset, residual=residual)
        assert isinstance(result, Tensor)
        result.backward(grad)
    eager(*leaves["eager"]).backward(grad)
    eager(*leaves["exact"]).backward(grad.double())
    for place, exact in enumerate(leaves["exact"]):
        fused, unfused = (error(leaves[name][place].grad, exact.grad) for name in ("fused", "eager"))
        assert fused <= 1.2 * unfused + 2.0**-12, (place, fused, unfused)


def test_the_forward_of_a_training_step_is_fused() -> None:
    layer = FusedLinear(136, 264, epilogue="gelu", device="cuda", dtype=BF16)
    x = torch.randn(200, 136, device="cuda", dtype=BF16, requires_grad=True)
    decision = gemm_ops.backend_for(x, layer.weight.t(), layer.epilogue, bias=layer.bias)
    assert decision.backend in ("sm90", "sm80") and decision.spec is not None
    assert len(decision.spec.tree.outputs) == 2, "the pre-activation is stored"


def test_a_step_in_a_cuda_graph() -> None:
    torch.manual_seed(0)
    layer = FusedLinear(136, 264, epilogue="gelu", device="cuda", dtype=BF16)
    x = torch.randn(200, 136, device="cuda", dtype=BF16)

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())))

    expected = [tensor.clone() for tensor in step()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for one, other in zip(captured, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        FusedLinear(136, 264, epilogue="gelu"), nn.LayerNorm(264), FusedLinear(264, 72, epilogue="silu")
    ).to("cuda", BF16)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    x = torch.randn(200, 136, device="cuda", dtype=BF16)
    expected = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
    for _ in range(3):  # graphs are recorded in the second round
        found = torch.autograd.grad(compiled(x).float().square().sum(), list(model.parameters()))
        for one, other in zip(found, expected, strict=True):
            assert error(one, other.double()) < 2e-2


def test_float16_with_a_scaler_trains_as_nn_linear() -> None:
    losses = {}
    for kind in ("fused", "plain"):
        torch.manual_seed(0)
        hidden = nn.Linear(64, 256)
        first = (
            FusedLinear.from_linear(hidden, epilogue="gelu") if kind == "fused" else nn.Sequential(hidden, nn.GELU())
        )
        model = nn.Sequential(first, nn.Linear(256, 8)).cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cuda")
        x = torch.randn(128, 64, device="cuda")
        target = torch.randint(8, (128,), device="cuda")
        found = []
        for _ in range(20):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item())
        losses[kind] = found
    assert losses["fused"][-1] < losses["fused"][0] / 2
    torch.testing.assert_close(torch.tensor(losses["fused"]), torch.tensor(losses["plain"]), rtol=5e-2, atol=2e-2)

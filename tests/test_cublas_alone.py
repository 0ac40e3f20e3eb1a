"""Epilogues that cuBLAS computes with the product, in one pass: which, and that results are PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from gemm_ops import dispatch
from gemm_ops.two_passes import CublasAlone, OnePass, find_alone


@ep.epilogue
def bias_last(acc, row: ep.Row):
    return acc + row


@ep.epilogue
def bias_first(acc, row: ep.Row):
    return row + acc


def tensors(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(each, device=device).to(dtype) for each in (shape, (8, 6), (6,))
    )


def one_pass(
    a: Tensor, b: Tensor, epilogue: ep.Epilogue, operands: dict[str, Any], out: Tensor | None = None
) -> Tensor:
    call = dispatch.bind_call(a, b, epilogue, operands, out)
    alone = find_alone(call)
    assert alone is not None
    return OnePass(call, alone).run(a, b, operands, call.out)["D"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_results_and_where_they_lie(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    contiguous, b, row = tensors(shape, dtype)
    outputs = (
        None,
        torch.empty(*shape[:-1], 6, dtype=dtype),
        torch.empty(*shape[:-1], 12, dtype=dtype)[..., ::2],
        torch.empty(6, *shape[:-1], dtype=dtype).movedim(0, -1),
    )
    for a in (contiguous, contiguous.mT.contiguous().mT):
        for epilogue, operands, added in (
            (ep.builders.identity(), {}, 0.0),
            (bias_last, {"row": row}, row.double()),
            (bias_first, {"row": row}, row.double()),
        ):
            truth = a.double() @ b.double() + added
            for out in outputs:
                if out is not None:
                    out.fill_(torch.nan)
                found = one_pass(a, b, epilogue, operands, out)
                error = (found.double() - truth).norm() / truth.norm()
                assert found.shape == truth.shape and error < torch.finfo(dtype).eps
                if out is None:
                    assert not found._is_view(), "autograd has rules for views"
                else:
                    assert found.data_ptr() == out.data_ptr() and torch.equal(found, out)


def test_batches_of_both() -> None:
    a, b = torch.randn(3, 1, 5, 8), torch.randn(4, 8, 6)
    assert torch.equal(one_pass(a, b, ep.builders.identity(), {}), a @ b)


def test_on_other_devices_the_product_is_in_fp32_first() -> None:
    a, b, row = tensors((5, 8), torch.bfloat16)
    assert gemm_ops.backend_for(a, b, bias_last, row=row).backend == "reference"
    with gemm_ops.use_backend("cublas"), pytest.raises(gemm_ops.UnsupportedProblemError):
        gemm_ops.matmul(a, b, bias_last, row=row)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(500, 8), (2, 50, 8), (1, 8)])
def test_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b, row = tensors(shape, dtype, "cuda")
    with gemm_ops.use_backend("cublas"):
        for epilogue, operands, expected in (
            (ep.builders.identity(), {}, torch.matmul(a, b)),
            (bias_last, {"row": row}, torch.addmm(row, a.reshape(-1, 8), b).reshape(*shape[:-1], 6)),
        ):
            decision = gemm_ops.backend_for(a, b, epilogue, **operands)
            assert decision.backend == "cublas" and isinstance(decision.tail, CublasAlone)
            for _ in range(2):
                assert torch.equal(gemm_ops.matmul(a, b, epilogue, **operands), expected)


@pytest.mark.gpu
def test_training_on_a_gpu() -> None:
    layer = gemm_ops.FusedLinear(64, 48, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 5, 64, device="cuda").bfloat16().requires_grad_()
    with gemm_ops.use_backend("cublas"):
        y = layer(x)
    y.mul_(2)  # which PyTorch refuses of a view that a function of ours makes
    y.sum().backward()
    assert x.grad is not None and layer.bias is not None
    twin = x.detach().requires_grad_()
    (F.linear(twin, layer.weight, layer.bias) * 2).sum().backward()
    assert twin.grad is not None and torch.allclose(x.grad, twin.grad, rtol=1e-2, atol=1e-2)

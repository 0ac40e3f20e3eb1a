"""Calls of every kind, for tests of the C++ path: fresh tensors each time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row, Scalar

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

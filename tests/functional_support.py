"""What the CPU tests of ``matmul``, ``linear`` and ``FusedLinear`` share."""

from __future__ import annotations

import torch
from torch import Tensor

import epilogues as ep
from epilogues import Aux, Row

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUITE = ep.builders.SUITE
RESIDUAL = ep.builders.residual()


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """The accumulator: fp32, or fp64 of fp64 matrices."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return torch.matmul(a.to(wide), b.to(wide))


def operands_for(epilogue: ep.Epilogue, m_shape: tuple[int, ...], n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {ep.Kind.ROW: (n,), ep.Kind.COLUMN: m_shape, ep.Kind.SCALAR: (1,), ep.Kind.AUX: (*m_shape, n)}
    return {name: torch.randn(shapes[kind]).to(dtype) for name, kind in epilogue.operands.items()}


def outputs_of(result: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return result if isinstance(result, dict) else {"D": result}


@ep.epilogue
def three_outputs(acc, bias: Row):
    z = acc + bias
    return {"D": ep.relu(z), "wide": ep.cast(z, "f32"), "half": ep.cast(acc, "f16")}


@ep.epilogue
def reads_residual(acc, residual: Aux):
    return acc + residual

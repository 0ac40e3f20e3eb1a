"""The unfused computation: what a user writes in plain PyTorch instead of a fused GEMM.

    >>> baseline = unfused("bias_gelu", load_epilogue("bias_gelu"))
    >>> baseline(inputs)
    {'D': tensor(..., dtype=torch.bfloat16)}

Fused results are judged against this, for their error and for their time, so it must be neither a straw man
nor out of reach: PyTorch's own functions on tensors of the input dtype, each rounding its result to that
dtype, a bias inside ``F.linear`` where the epilogue begins with one, and no casts that nobody would write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

import epilogues as ep

from .inputs import Inputs

#: One unfused computation: output name -> (M, N) tensor, the main output first.
Unfused = Callable[[Inputs], dict[str, Tensor]]


def _product(inputs: Inputs, bias: Tensor | None = None) -> Tensor:
    """A @ B, plus a bias of length N if there is one, in the dtype of A."""
    if inputs.operation == "linear":
        return F.linear(inputs.a, inputs.b, bias)
    product = torch.matmul(inputs.a, inputs.b)
    return product if bias is None else product + bias


def _identity(inputs: Inputs) -> tuple[Tensor, ...]:
    return (_product(inputs),)


def _bias_gelu(inputs: Inputs, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.gelu(_product(inputs, bias), approximate="tanh"),)


def _bias_gelu_erf(inputs: Inputs, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.gelu(_product(inputs, bias)),)


def _bias_silu(inputs: Inputs, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(_product(inputs, bias)),)


def _train_gelu(inputs: Inputs, bias: Tensor) -> tuple[Tensor, ...]:
    preactivation = _product(inputs, bias)
    return F.gelu(preactivation, approximate="tanh"), preactivation


def _residual(inputs: Inputs, scale: Tensor, bias: Tensor, alpha: float, residual: Tensor) -> tuple[Tensor, ...]:
    return ((_product(inputs) * scale + bias) * alpha + residual,)


def _gate(inputs: Inputs, bias: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(_product(inputs, bias)) * gate,)


def _dequant(inputs: Inputs, row_scale: Tensor, col_scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(_product(inputs) * row_scale[:, None] * col_scale + bias),)


#: name -> the epilogues of the suite by hand; outputs in the order of the epilogue's own
HAND_WRITTEN: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "identity": _identity,
    "bias_gelu": _bias_gelu,
    "bias_gelu_erf": _bias_gelu_erf,
    "bias_silu": _bias_silu,
    "train_gelu": _train_gelu,
    "residual": _residual,
    "gate": _gate,
    "dequant": _dequant,
}


def unfused(name: str, epilogue: ep.Epilogue) -> Unfused:
    """The unfused computation of an epilogue.

    For the suite it is written by hand.  For a user's epilogue it is ``torch.matmul`` in the input dtype and
    then the epilogue's own reference, which computes in float32 and rounds only where the tree says: less
    rounding and more traffic than eager code would have.  :func:`origin` says which it is.
    """
    by_hand = HAND_WRITTEN.get(name)

    def run(inputs: Inputs) -> dict[str, Tensor]:
        if by_hand is not None:
            return dict(zip(epilogue.outputs, by_hand(inputs, **inputs.operands), strict=True))
        product = torch.matmul(inputs.a, inputs.right)
        found = epilogue.reference(product, out_dtype=inputs.a.dtype, **inputs.operands)
        return named_outputs(epilogue, found)

    return run


def origin(name: str) -> str:
    """Where the unfused computation of an epilogue comes from, for the record."""
    return "eager PyTorch" if name in HAND_WRITTEN else "torch.matmul, then the epilogue's reference"


def named_outputs(epilogue: ep.Epilogue, found: object) -> dict[str, Tensor]:
    """Results as name -> tensor, whether they came as one tensor or as a dict."""
    if isinstance(found, Tensor):
        return {epilogue.outputs[0]: found}
    return cast("dict[str, Tensor]", found)

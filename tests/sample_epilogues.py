"""Epilogues that several tests compute."""

from __future__ import annotations

import torch

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar


@ep.epilogue
def every_kind(acc, scale: Row, offset: Column, alpha: Scalar, residual: Aux):
    return torch.tanh(acc * scale + offset) * alpha + residual


@ep.epilogue
def two_outputs(acc, bias: Row, gate: Aux):
    z = acc + bias
    return {"D": ep.silu(z) * gate, "z": ep.cast(z, "f32")}

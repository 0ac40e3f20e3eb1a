"""Ready-made epilogues that add what bypasses the layer: the residual stream, and branches parallel to it.

>>> y = gemm_ops.linear(hidden, down, layer_scale(), bias=bias, gamma=gamma, residual=x)        # ConvNeXt
"""

from __future__ import annotations

from typing import Any

from ..declare import Epilogue
from ..signature import Aux, Row, Scalar
from ..symbol import Symbol
from .names import activation_function, builder, named


@builder
def residual(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act(acc + bias[n]) + residual[m, n]."""
    act = activation_function(activation, **params)

    def residual(acc: Symbol, bias: Row, residual: Aux) -> Any:
        return act(acc + bias) + residual

    return Epilogue(residual, named("residual", activation))


@builder
def scaled_residual() -> Epilogue:
    """D = (acc * scale[n] + bias[n]) * alpha + residual[m, n]."""

    def scaled_residual(acc: Symbol, scale: Row, bias: Row, alpha: Scalar, residual: Aux) -> Any:
        return (acc * scale + bias) * alpha + residual

    return Epilogue(scaled_residual)


@builder
def residual_activation(activation: str | None = "relu", **params: Any) -> Epilogue:
    """D = act(acc + bias[n] + residual[m, n]), the order of ResNet: the activation after the sum."""
    act = activation_function(activation, **params)

    def residual_activation(acc: Symbol, bias: Row, residual: Aux) -> Any:
        return act(acc + bias + residual)

    return Epilogue(residual_activation, named("residual_then", activation))


@builder
def layer_scale() -> Epilogue:
    """D = (acc + bias[n]) * gamma[n] + residual[m, n] (CaiT, ConvNeXt, DINOv2)."""

    def layer_scale(acc: Symbol, bias: Row, gamma: Row, residual: Aux) -> Any:
        return (acc + bias) * gamma + residual

    return Epilogue(layer_scale)


@builder
def parallel_residual() -> Epilogue:
    """D = acc + bias[n] + branch[m, n] + residual[m, n]: attention and MLP side by side (GPT-J, PaLM, Falcon)."""

    def parallel_residual(acc: Symbol, bias: Row, branch: Aux, residual: Aux) -> Any:
        return acc + bias + branch + residual

    return Epilogue(parallel_residual)

"""Ready-made gated epilogues: one GEMM gives the gate, the other's epilogue multiplies by it.

>>> up = gemm_ops.linear(x, up_weight)
>>> y = gemm_ops.linear(x, gate_weight, gate("silu"), bias=bias, gate=up)        # SwiGLU
"""

from __future__ import annotations

from typing import Any

from ..declare import Epilogue
from ..signature import Aux, Row
from ..symbol import Symbol
from .names import activation_function, builder, named


@builder
def gate(activation: str | None = "silu", **params: Any) -> Epilogue:
    """D = act(acc + bias[n]) * gate[m, n].

    SwiGLU with "silu", GeGLU with "gelu" or "gelu_tanh", ReGLU with "relu", GLU with "sigmoid", bilinear with None.
    """
    act = activation_function(activation, **params)

    def gate(acc: Symbol, bias: Row, gate: Aux) -> Any:
        return act(acc + bias) * gate

    return Epilogue(gate, named("gate", activation))

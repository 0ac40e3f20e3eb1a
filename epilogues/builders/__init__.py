"""Ready-made epilogues.

    >>> from epilogues import builders
    >>> y = gemm_ops.linear(x, weight, builders.bias_activation("gelu"), bias=bias)

In the formulas m and n are the row and the column of the output, ``act`` is the activation asked for.  The
same call gives the same object.  Activations go by name, :data:`ACTIVATIONS` has them all: "identity" (or None),
"relu", "gelu", "gelu_tanh", "silu" (or "swish"), "quick_gelu", "mish", "elu", "hardswish", "tanh", "square" ...
Further arguments are those of the function of that name, such as ``negative_slope`` of leaky_relu.

========================  ====================================================================================
``pointwise``             identity, bias, activation, bias_activation, scale, alpha_beta, softcap, logit_scaling,
                          cast
``residuals``             residual, scaled_residual, residual_activation, layer_scale, parallel_residual
``gates``                 gate
``training``              train, activation_backward
``quantization``          dequantize, dequantize_per_tensor, dequantize_asymmetric, quantize
========================  ====================================================================================

An operand that a formula names and a model does not have may be given as a number where it is a scalar; to leave
out a bias, write the function: ``@epilogue`` is as short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..declare import Epilogue
from .gates import gate
from .names import ACTIVATIONS
from .pointwise import activation, alpha_beta, bias, bias_activation, cast, identity, logit_scaling, scale, softcap
from .quantization import (
    QUANTIZED,
    QuantizedRange,
    dequantize,
    dequantize_asymmetric,
    dequantize_per_tensor,
    quantize,
)
from .residuals import layer_scale, parallel_residual, residual, residual_activation, scaled_residual
from .training import activation_backward, train

__all__ = [
    "ACTIVATIONS",
    "QUANTIZED",
    "SUITE",
    "QuantizedRange",
    "activation",
    "activation_backward",
    "alpha_beta",
    "bias",
    "bias_activation",
    "cast",
    "dequantize",
    "dequantize_asymmetric",
    "dequantize_per_tensor",
    "gate",
    "identity",
    "layer_scale",
    "logit_scaling",
    "parallel_residual",
    "quantize",
    "residual",
    "residual_activation",
    "scale",
    "scaled_residual",
    "softcap",
    "train",
]

#: The epilogues of the benchmark suite, by the suite's names.
SUITE: dict[str, Callable[[], Epilogue]] = {
    "identity": identity,
    "bias_gelu": functools.partial(bias_activation, "gelu_tanh"),
    "bias_gelu_erf": functools.partial(bias_activation, "gelu"),
    "bias_silu": functools.partial(bias_activation, "silu"),
    "train_gelu": functools.partial(train, "gelu_tanh"),
    "residual": scaled_residual,
    "gate": functools.partial(gate, "silu"),
    "dequant": functools.partial(dequantize, "silu"),
}

"""Ready-made epilogues.

    >>> from epilogues import builders
    >>> y = gemm_ops.linear(x, weight, builders.bias_activation("gelu"), bias=bias)

In the formulas m and n are the row and the column of the output, ``act`` is the activation asked for.  The
same call gives the same object.  Activations go by name, :data:`ACTIVATIONS` has them all: "identity" (or None),
"relu", "gelu", "gelu_tanh", "silu" (or "swish"), "quick_gelu", "mish", "elu", "hardswish", "tanh", "square" ...
Further arguments are those of the function of that name, such as ``negative_slope`` of leaky_relu.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import functions as ep
from .declare import Epilogue
from .dtypes import dtype_name
from .errors import EpilogueError
from .signature import Aux, Column, Row, Scalar
from .symbol import Symbol
from .tree import Cast, EpilogueTree, Store

_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "identity": lambda x: x,
    "relu": ep.relu,
    "leaky_relu": ep.leaky_relu,
    "gelu": ep.gelu,
    "gelu_tanh": lambda x: ep.gelu(x, approximate="tanh"),
}
_ACTIVATIONS |= {
    name: getattr(ep, name)
    for line in (
        "silu swish quick_gelu mish relu6 hardtanh hardswish hardsigmoid elu selu celu softplus sigmoid logsigmoid",
        "tanh softsign tanhshrink hardshrink softshrink exp abs square sqrt sin cos erf",
    )
    for name in line.split()
}

#: The names that activations go by.
ACTIVATIONS = tuple(_ACTIVATIONS)


def _activation(name: str | None, **params: Any) -> Callable[[Any], Any]:
    name = "identity" if name is None else name
    function = _ACTIVATIONS.get(name)
    if function is None:
        raise EpilogueError(f"unknown activation {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    known = list(inspect.signature(function).parameters)[1:]
    unknown = [param for param in params if param not in known]
    if unknown:
        raise EpilogueError(f"activation {name} takes {', '.join(known) or 'no arguments'}, got {', '.join(unknown)}")
    return functools.partial(function, **params) if params else function


def _named(prefix: str, name: str | None) -> str:
    return prefix if name in (None, "identity") else f"{prefix}_{name}"


@functools.cache
def identity() -> Epilogue:
    """D = acc."""
    return Epilogue(lambda acc: acc, "identity")


@functools.cache
def bias() -> Epilogue:
    """D = acc + bias[n]."""

    def bias(acc: Symbol, bias: Row) -> Any:
        return acc + bias

    return Epilogue(bias)


@functools.cache
def activation(name: str | None, **params: Any) -> Epilogue:
    """D = act(acc)."""
    act = _activation(name, **params)
    return Epilogue(lambda acc: act(acc), name or "identity")


@functools.cache
def bias_activation(name: str | None, **params: Any) -> Epilogue:
    """D = act(acc + bias[n])."""
    act = _activation(name, **params)

    def bias_activation(acc: Symbol, bias: Row) -> Any:
        return act(acc + bias)

    return Epilogue(bias_activation, _named("bias", name))


@functools.cache
def residual(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act(acc + bias[n]) + residual[m, n]."""
    act = _activation(activation, **params)

    def residual(acc: Symbol, bias: Row, residual: Aux) -> Any:
        return act(acc + bias) + residual

    return Epilogue(residual, _named("residual", activation))


@functools.cache
def scaled_residual() -> Epilogue:
    """D = (acc * scale[n] + bias[n]) * alpha + residual[m, n]."""

    def scaled_residual(acc: Symbol, scale: Row, bias: Row, alpha: Scalar, residual: Aux) -> Any:
        return (acc * scale + bias) * alpha + residual

    return Epilogue(scaled_residual)


@functools.cache
def gate(activation: str | None = "silu", **params: Any) -> Epilogue:
    """D = act(acc + bias[n]) * gate[m, n]."""
    act = _activation(activation, **params)

    def gate(acc: Symbol, bias: Row, gate: Aux) -> Any:
        return act(acc + bias) * gate

    return Epilogue(gate, _named("gate", activation))


@functools.cache
def dequantize(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act(acc * row_scale[m] * col_scale[n] + bias[n])."""
    act = _activation(activation, **params)

    def dequantize(acc: Symbol, row_scale: Column, col_scale: Row, bias: Row) -> Any:
        return act(acc * row_scale * col_scale + bias)

    return Epilogue(dequantize, _named("dequantize", activation))


@functools.cache
def train(activation: str | None = "gelu_tanh", **params: Any) -> Epilogue:
    """D = act(preact) and preact = acc + bias[n], both stored; backward needs preact."""
    act = _activation(activation, **params)

    def train(acc: Symbol, bias: Row) -> Any:
        preact = acc + bias
        return {"D": act(preact), "preact": preact}

    return Epilogue(train, _named("train", activation))


def cast(dtype: torch.dtype | str, epilogue: Epilogue | None = None) -> Epilogue:
    """The same epilogue (acc itself if none is given), D rounded to and stored as ``dtype``."""
    return _cast(dtype_name(dtype), identity() if epilogue is None else epilogue)


@functools.cache
def _cast(dtype: str, epilogue: Epilogue) -> Epilogue:
    main, *others = epilogue.tree.outputs
    tree = EpilogueTree((Store(main.name, Cast(main.value, dtype)), *others))
    return Epilogue.from_tree(tree, f"{epilogue.name}_{dtype}")


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

"""Ready-made epilogues of the accumulator and its scales and bias: activations, scaling, capping, casts.

>>> y = gemm_ops.linear(x, weight, softcap(30.0))        # Gemma's logits
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from .. import functions as ep
from ..declare import Epilogue
from ..dtypes import dtype_name
from ..errors import EpilogueError
from ..operand_shapes import is_number
from ..signature import Aux, Row, Scalar
from ..source import short
from ..symbol import Symbol
from ..tree import Cast, Store
from .names import ACTIVATIONS, activation_function, builder, named, not_a_name


@builder
def identity() -> Epilogue:
    """D = acc."""
    return Epilogue(lambda acc: acc, "identity")


@builder
def bias() -> Epilogue:
    """D = acc + bias[n]."""

    def bias(acc: Symbol, bias: Row) -> Any:
        return acc + bias

    return Epilogue(bias)


@builder
def activation(name: str | None, **params: Any) -> Epilogue:
    """D = act(acc)."""
    act = activation_function(name, **params)
    return Epilogue(lambda acc: act(acc), name or "identity")


@builder
def bias_activation(name: str | None, **params: Any) -> Epilogue:
    """D = act(acc + bias[n])."""
    act = activation_function(name, **params)

    def bias_activation(acc: Symbol, bias: Row) -> Any:
        return act(acc + bias)

    return Epilogue(bias_activation, named("bias", name))


@builder
def scale(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act(alpha * acc): logits times a number (Cohere, Granite), a product scaled by 1 / sqrt(K)."""
    act = activation_function(activation, **params)

    def scale(acc: Symbol, alpha: Scalar) -> Any:
        return act(alpha * acc)

    return Epilogue(scale, named("scale", activation))


@builder
def alpha_beta(activation: str | None = None, **params: Any) -> Epilogue:
    """D = act(alpha * acc + beta * c[m, n]), as BLAS has it.

    Unlike in BLAS, c is read where beta is 0 too, so that its NaN and infinities then give NaN.
    """
    act = activation_function(activation, **params)

    def alpha_beta(acc: Symbol, alpha: Scalar, beta: Scalar, c: Aux) -> Any:
        return act(alpha * acc + beta * c)

    return Epilogue(alpha_beta, named("alpha_beta", activation))


@builder
def softcap(cap: float = 30.0) -> Epilogue:
    """D = cap * tanh(acc / cap), so that no logit is larger than the cap (Gemma 2: 30 for logits, 50 for scores).

    Raises:
        EpilogueError: if the cap is no positive, finite number.
    """
    if not is_number(cap) or not 0 < cap < math.inf:
        raise EpilogueError(f"softcap: expected a positive, finite number for the cap, got {short(cap)}")
    return Epilogue(lambda acc: ep.tanh(acc / cap) * cap, "softcap")


@builder
def logit_scaling() -> Epilogue:
    """D = acc * exp(log_scale) + logit_bias, the logits of CLIP (logit_bias = 0) and SigLIP."""

    def logit_scaling(acc: Symbol, log_scale: Scalar, logit_bias: Scalar) -> Any:
        return acc * ep.exp(log_scale) + logit_bias

    return Epilogue(logit_scaling)


def cast(dtype: torch.dtype | str, epilogue: Epilogue | None = None) -> Epilogue:
    """The same epilogue (acc itself if none is given), D rounded to and stored as ``dtype``.

    Raises:
        DtypeError: for dtypes other than float32, float16 and bfloat16.
        EpilogueError: if ``epilogue`` is none.
    """
    if epilogue is None:
        epilogue = identity()
    if not isinstance(epilogue, Epilogue):
        if isinstance(epilogue, str):
            name = epilogue if epilogue in ACTIVATIONS else "gelu"
            hint = f"; for an activation, write cast({short(dtype)}, builders.activation({name!r}))"
        else:
            hint = not_a_name(epilogue)
        given = f"{type(epilogue).__name__} {short(epilogue)}"
        raise EpilogueError(f"cast: expected an Epilogue, or None for the product itself, got {given}{hint}")
    return _cast(dtype_name(dtype), epilogue)


@functools.cache
def _cast(dtype: str, epilogue: Epilogue) -> Epilogue:
    main, *others = epilogue.tree.outputs
    tree = replace(epilogue.tree, outputs=(Store(main.name, Cast(main.value, dtype)), *others))
    return Epilogue.from_tree(tree, f"{epilogue.name}_{dtype}")

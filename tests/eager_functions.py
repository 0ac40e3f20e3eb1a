"""Every row of the operation table as people write it in PyTorch: one function that runs eagerly and is traced.

    >>> name, function = next(iter(eager_functions().items()))
    >>> function(torch.matmul(a, b), row)                       # eager
    >>> ep.epilogue(packed(...), rounding="eager")              # traced

``x`` is a tensor of a GEMM's result, ``y`` a tensor of the same dtype that broadcasts against it; numbers are Python's.
Where the result is a wider one, the fused output is it rounded to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from epilogues import Row
from epilogues.operations import OPERATIONS

Function = Callable[[Any, Any], Any]

# numbers that neither float16 nor bfloat16 have
_A, _B, _C = 0.3, 2.7, 1.1

_BINARY_WITH_NUMBER = ("add", "sub", "mul", "div", "fmod", "remainder", "pow", "xlogy", "copysign")
_NUMBER_FIRST = ("pow", "xlogy", "div", "mul", "remainder")

_FUNCTIONS: dict[str, Function] = {
    # rows that PyTorch spells in its own way
    "identity": lambda x, y: x * 1.0,
    "fma": lambda x, y: torch.addcmul(y, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, _A),
    "lerp_far": lambda x, y: torch.lerp(x, y, 0.7),
    "clamp": lambda x, y: torch.clamp(x, -_A, _B),
    "clamp_rows": lambda x, y: torch.clamp(x, y, y + 1.0),
    "where": lambda x, y: torch.where(x > _A, x, y),
    "where_number": lambda x, y: torch.where(x > y, x, _A),
    "leaky_relu": lambda x, y: F.leaky_relu(x, _A),
    "threshold": lambda x, y: F.threshold(x, _A, _B),
    "softplus": lambda x, y: F.softplus(x, _B, 15.0),
    "elu": lambda x, y: F.elu(x, _B),
    "celu": lambda x, y: F.celu(x, _B),
    "hardshrink": lambda x, y: F.hardshrink(x, _A),
    "softshrink": lambda x, y: F.softshrink(x, _A),
    "relu": lambda x, y: F.relu(x),
    "silu": lambda x, y: F.silu(x),
    "gelu_erf": lambda x, y: F.gelu(x),
    "gelu_tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x, y: x * torch.sigmoid(1.702 * x),
    "mish": lambda x, y: F.mish(x),
    "selu": lambda x, y: F.selu(x),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardswish": lambda x, y: F.hardswish(x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "softsign": lambda x, y: F.softsign(x),
    "tanhshrink": lambda x, y: F.tanhshrink(x),
    "logical_and": lambda x, y: torch.where((x > 0) & (y > 0), x, y),
    "logical_or": lambda x, y: torch.where((x > 0) | (y > 0), x, y),
    "logical_xor": lambda x, y: torch.where((x > 0) ^ (y > 0), x, y),
    "logical_not": lambda x, y: torch.where(~(x > _A), x, y),
    # what is made of several rows
    "inverse": lambda x, y: 1.0 / x,
    "number_over": lambda x, y: _B / x,
    "number_minus": lambda x, y: _B - x,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=_A),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=_A),
    "addcmul_value": lambda x, y: torch.addcmul(x, x, y, value=_A),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "addcdiv_value": lambda x, y: torch.addcdiv(x, y, x, value=_A),
    "cube": lambda x, y: x**3,
    "power_minus_2": lambda x, y: x**-2,
    "root": lambda x, y: x**0.5,
    "relu6": lambda x, y: F.relu6(x),
    "hardtanh": lambda x, y: F.hardtanh(x, -_A, _B),
    "mask": lambda x, y: x * (x > _A),
    "mask_float": lambda x, y: x * (y > 0).float(),
    "cast_inside": lambda x, y: x.float() * y + _A,
    "gelu_new": lambda x, y: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "chain": lambda x, y: F.gelu((x * _A + y) * _C, approximate="tanh") * _B - y,
    "soft_cap": lambda x, y: torch.tanh(x / 30.0) * 30.0,
    "deg2rad": lambda x, y: torch.deg2rad(x),
    "logit": lambda x, y: torch.logit(torch.sigmoid(x)),
    "logit_eps": lambda x, y: torch.logit(torch.sigmoid(x), eps=1e-3),
    "entr": lambda x, y: torch.special.entr(x),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y.abs()),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, x * y, reduction="none"),
}
#: Rows that give conditions, to be looked at through a selection.
_CONDITIONS = ("gt", "ge", "lt", "le", "eq", "ne", "isnan", "isinf", "isfinite")


def eager_functions() -> Mapping[str, Function]:
    """By name: at least one function for each row of the table, and more where numbers or compositions matter."""
    found: dict[str, Function] = {}
    for name, row in OPERATIONS.items():
        if name in _FUNCTIONS:
            continue
        call = getattr(torch, name)
        if name in _CONDITIONS:
            found.update(_conditions(name, call, row.arity))
        elif row.arity == 1:
            found[name] = lambda x, y, call=call: call(x)
        else:
            found[name] = lambda x, y, call=call: call(x, y)
            if name in _BINARY_WITH_NUMBER:
                found[f"{name}_number"] = lambda x, y, call=call: call(x, _A)
            if name in _NUMBER_FIRST:
                found[f"number_{name}"] = lambda x, y, call=call: call(_A, x)
    return {**found, **_FUNCTIONS}


def _conditions(name: str, call: Callable[..., Any], arity: int) -> dict[str, Function]:
    if arity == 1:
        return {name: lambda x, y: torch.where(call(x), x, y)}
    return {
        name: lambda x, y: torch.where(call(x, y), x, y),
        f"{name}_number": lambda x, y: torch.where(call(x, _A), x, y),
    }


def pack(functions: Mapping[str, Function], scale: float) -> Callable[..., dict[str, Any]]:
    """A function of the accumulator and a row whose outputs are these functions of ``acc * scale``."""

    def packed(acc: Any, row: Row) -> dict[str, Any]:
        x = acc * scale
        # the row is added to nothing, so that it is there even in a pack of functions that don't read it
        values = {name: function(x + row * 0.0, row) for name, function in functions.items()}
        first, *_ = functions
        return {"D" if name == first else name: value for name, value in values.items()}

    return packed


def packs(size: int = 8) -> dict[str, Mapping[str, Function]]:
    """All the functions in groups, as many as a kernel has outputs."""
    items = list(eager_functions().items())
    groups = [dict(items[start : start + size]) for start in range(0, len(items), size)]
    return {f"{next(iter(group))}-to-{list(group)[-1]}": group for group in groups}

"""The functions of ``torch`` and ``torch.nn.functional``, and methods of tensors, that work in an epilogue.

    >>> from epilogues.torch_signatures import CALLS
    >>> CALLS["leaky_relu"](acc, negative_slope=0.1)

:data:`CALLS` maps each of PyTorch's names to a Python function with PyTorch's arguments, by its names, in its order
and with its defaults; :mod:`epilogues.torch_calls` looks names up there.  Where a function and a method of one name
take their arguments in another order, the method is in :data:`METHODS`.  Losses come from :mod:`.torch_losses`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from . import functions as ep
from .errors import DtypeError, UnsupportedOperationError
from .functions.apply import check_number, is_conditional
from .operand_shapes import is_number
from .refusal_reasons import QUANTISED
from .refusals import refuse
from .source import explain, short, user_location
from .symbol import Symbol
from .torch_losses import LOSSES

CALLS: dict[str, Callable[..., Any]] = {**LOSSES}
METHODS: dict[str, Callable[..., Any]] = {}

#: Functions of one value, and what else PyTorch calls them: ``name alias ...``.
_UNARY = """
neg negative; abs absolute; sign sgn; floor; ceil; trunc fix; frac; reciprocal; square; sqrt; rsqrt; deg2rad; rad2deg
exp; exp2; expm1; log; log2; log10; log1p; erf; erfc; sin; cos; tan; asin arcsin; acos arccos; atan arctan
sinh; cosh; tanh; asinh arcsinh; acosh arccosh; atanh arctanh; sigmoid expit; logsigmoid log_sigmoid; softsign
tanhshrink; isnan; isinf; isfinite; isposinf; isneginf; signbit; logical_not; sinc; entr; ndtr; angle
"""
#: Functions of two values.
_BINARY = """
mul multiply; minimum; maximum; fmin; fmax; copysign; hypot; fmod; remainder mod; floor_divide floordiv; pow
float_power; atan2 arctan2; logaddexp; logaddexp2; xlogy; xlog1py; gt greater; ge greater_equal; lt less; le less_equal
eq; ne not_equal; logical_and; logical_or; logical_xor
"""
#: Functions of one value that can also write in place.
_INPLACE = "relu relu6 silu selu mish hardswish hardsigmoid"


def _names(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update(dict.fromkeys(names, call))
        return call

    return register


def _register(lines: str, template: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for entry in lines.replace("\n", ";").split(";"):
        names = entry.split()
        if names:
            _names(*names)(template(getattr(ep, names[0])))


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input: function(input)


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, other: function(input, other)


def _unary_inplace(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, inplace=False: function(input)


_register(_UNARY, _unary)
_register(_BINARY, _binary)
_register(_INPLACE.replace(" ", ";"), _unary_inplace)


# arithmetic


@_names("add")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _plus(input, other, alpha)


@_names("sub", "subtract")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return ep.sub(input, other) if _is_one(alpha) else _plus(input, other, -alpha)


@_names("rsub")
def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return ep.sub(other, input) if _is_one(alpha) else _plus(other, input, -alpha)


def _plus(input: Any, other: Any, alpha: Any) -> Any:
    """``input + alpha * other``, rounded once as PyTorch's kernel does."""
    if _is_one(alpha):
        return ep.add(input, other)
    return ep.add(input, other * alpha) if is_number(other) else ep.fma(other, alpha, input)


def _is_one(alpha: Any) -> bool:
    return is_number(alpha) and alpha == 1


@_names("div", "divide", "true_divide", "truediv")
def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return ep.floor_divide(input, other)
    if rounding_mode not in (None, "trunc"):
        raise UnsupportedOperationError(
            explain(f'div: expected rounding_mode None, "trunc" or "floor", got {rounding_mode!r}', user_location())
        )
    return ep.div(input, other) if rounding_mode is None else ep.trunc(ep.div(input, other))


@_names("pow", "float_power")
def _pow(input: Any, exponent: Any) -> Any:
    return ep.pow(input, exponent)


@_names("positive", "pos", "conj", "conj_physical", "resolve_conj", "resolve_neg")
def _positive(input: Any) -> Any:
    return input  # values are real


@_names("is_floating_point")
def _is_floating_point(input: Any) -> bool:
    return not is_conditional(input)


@_names("is_complex")
def _is_complex(input: Any) -> bool:
    return False


@_names("round")
def _round(input: Any, *, decimals: int = 0) -> Any:
    return ep.round(input, decimals)


@_names("addcmul")
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return ep.addcmul(input, tensor1, tensor2, value)


@_names("addcdiv")
def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return ep.addcdiv(input, tensor1, tensor2, value)


@_names("lerp")
def _lerp(input: Any, end: Any, weight: Any) -> Any:
    return ep.lerp(input, end, weight)


@_names("ldexp")
def _ldexp(input: Any, other: Any) -> Any:
    return ep.mul(input, ep.pow(2.0, other))


@_names("logit")
def _logit(input: Any, eps: Any = None) -> Any:
    return ep.logit(input, eps)


@_names("nan_to_num")
def _nan_to_num(input: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    if posinf is None or neginf is None:
        raise UnsupportedOperationError(
            explain(
                "nan_to_num without posinf and neginf",
                user_location(),
                why="PyTorch takes the largest value of the tensor's dtype, and a value of an epilogue has none: "
                "float32's would be infinite again where the output has 16 bits",
                instead="give them: nan_to_num(x, posinf=65504.0, neginf=-65504.0)",
            )
        )
    return ep.nan_to_num(input, nan, posinf, neginf)


# bounds


@_names("min")
def _min(input: Any, *others: Any, **keywords: Any) -> Any:
    return _of_two("min", ep.minimum, input, *others, **keywords)


@_names("max")
def _max(input: Any, *others: Any, **keywords: Any) -> Any:
    return _of_two("max", ep.maximum, input, *others, **keywords)


def _of_two(name: str, of_two: Callable[..., Any], *values: Any, **keywords: Any) -> Any:
    """torch.max(x, y) is the larger of two values; torch.max(x), and with a dim, is a reduction."""
    if "other" in keywords:
        values += (keywords.pop("other"),)
    if len(values) == 2 and not keywords and isinstance(values[1], Symbol | torch.Tensor):
        return of_two(*values)
    refuse(name)


@_names("clamp", "clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    return ep.clamp(input, min, max)


@_names("clamp_min")
def _clamp_min(input: Any, min: Any) -> Any:
    return ep.clamp(input, min=min)


@_names("clamp_max")
def _clamp_max(input: Any, max: Any) -> Any:
    return ep.clamp(input, max=max)


# activations


@_names("leaky_relu")
def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    return ep.leaky_relu(input, negative_slope)


@_names("prelu")
def _prelu(input: Any, weight: Any) -> Any:
    if isinstance(weight, torch.Tensor):
        refuse("prelu")
    return ep.prelu(input, weight)


@_names("hardtanh")
def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Any:
    return ep.hardtanh(input, min_val, max_val)


@_names("threshold")
def _threshold(input: Any, threshold: Any, value: Any, inplace: bool = False) -> Any:
    return ep.threshold(input, threshold, value)


@_names("gelu")
def _gelu(input: Any, *, approximate: str = "none") -> Any:
    return ep.gelu(input, approximate)


@_names("softplus")
def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    return ep.softplus(input, beta, threshold)


@_names("elu")
def _elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Any:
    return ep.elu(input, alpha)


@_names("celu")
def _celu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Any:
    return ep.celu(input, alpha)


@_names("hardshrink")
def _hardshrink(input: Any, lambd: Any = 0.5) -> Any:
    return ep.hardshrink(input, lambd)


@_names("softshrink")
def _softshrink(input: Any, lambd: Any = 0.5) -> Any:
    return ep.softshrink(input, lambd)


@_names("dropout", "dropout1d", "dropout2d", "dropout3d")
def _dropout(input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> Any:
    # torch.dropout calls `train` what torch.nn.functional.dropout calls `training`
    check_number("dropout", "p", p, is_number(p) and 0 <= p <= 1, "from 0 to 1")
    if training and train and p != 0:
        refuse("dropout")
    return input


@_names("alpha_dropout", "feature_alpha_dropout", "feature_dropout")
def _alpha_dropout(
    input: Any, p: Any = 0.5, training: bool = False, inplace: bool = False, *, train: bool = False
) -> Any:
    return _dropout(input, p, training or train)


@_names("rrelu")
def _rrelu(input: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    if training:
        refuse("rrelu")
    for bound in (lower, upper):
        if not is_number(bound):
            raise UnsupportedOperationError(
                explain(f"rrelu: expected numbers for lower and upper, got {short(bound)}", user_location())
            )
        check_number("rrelu", "lower and upper", bound, math.isfinite(bound), "finite")
    check_number("rrelu", "lower", lower, lower <= upper, f"no larger than upper, {upper}")
    return ep.leaky_relu(input, (lower + upper) / 2)


# conditions


@_names("where")
def _where(condition: Any, input: Any, other: Any) -> Any:
    return ep.where(condition, input, other)


METHODS["where"] = lambda input, condition, other: ep.where(condition, input, other)


@_names("masked_fill")
def _masked_fill(input: Any, mask: Any, value: Any) -> Any:
    return ep.masked_fill(input, mask, value)


@_names("heaviside")
def _heaviside(input: Any, values: Any) -> Any:
    return ep.heaviside(input, values)


def _bitwise(spelled: str, function: Callable[..., Any], *values: Any) -> Any:
    """The operators of bits, which on tensors of dtype bool are those of logic."""
    if not all(is_conditional(value) for value in values):
        refuse(spelled)
    return function(*values)


def _bits(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, other: _bitwise(f"__{name}__", function, input, other)


_names("and", "bitwise_and")(_bits("and", ep.logical_and))
_names("or", "bitwise_or")(_bits("or", ep.logical_or))
_names("xor", "bitwise_xor")(_bits("xor", ep.logical_xor))
_names("invert", "bitwise_not")(lambda input: _bitwise("__invert__", ep.logical_not, input))


# casts


@_names("to", "type")
def _to(input: Any, dtype: Any, non_blocking: bool = False, copy: bool = False) -> Any:
    # where a copy would lie, and when it is made, is no question of values
    if isinstance(dtype, torch.dtype) and dtype == torch.bool:
        return _bool(input)
    if isinstance(dtype, Symbol):
        refuse("type_as")
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedOperationError(
            explain(
                f"to: expected a dtype, got {type(dtype).__name__} {short(dtype)}",
                user_location(),
                why="an epilogue is traced once, before there are tensors or devices",
                instead="write x.to(torch.bfloat16), and place operands on the GEMM's device before the call",
            )
        )
    try:
        return ep.cast(input, dtype)
    except DtypeError as error:
        if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
            raise
        raise DtypeError(explain(f"to: {error}", user_location(), instead=QUANTISED)) from None


@_names("zeros_like")
def _zeros_like(input: Any, *, dtype: Any = None) -> Any:
    return _constant_like("zeros_like", input, dtype, 0.0)


@_names("ones_like")
def _ones_like(input: Any, *, dtype: Any = None) -> Any:
    return _constant_like("ones_like", input, dtype, 1.0)


def _constant_like(name: str, input: Any, dtype: Any, number: float) -> Any:
    """The number, which has a value's shape by itself."""
    if dtype is not None or not isinstance(input, Symbol) or is_conditional(input):
        given = "of a condition" if is_conditional(input) else "with a dtype"
        raise UnsupportedOperationError(
            explain(
                f"{name} {given}",
                user_location(),
                why="it is the number itself here, which has no dtype",
                instead=f"write the number, {number}, or torch.{name}(x) of a value x",
            )
        )
    return input.recorder.lift(number)


@_names("bool")
def _bool(input: Any) -> Any:
    return input if is_conditional(input) else ep.ne(input, 0.0)


for _name, _dtype in {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}.items():
    _names(_name)(functools.partial(lambda dtype, input: ep.cast(input, dtype), _dtype))

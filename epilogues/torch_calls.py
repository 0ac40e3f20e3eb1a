"""Which functions of ``torch`` and ``torch.nn.functional``, and methods of tensors, work in an epilogue.

    >>> @ep.epilogue
    ... def f(acc, bias: Row):
    ...     return torch.nn.functional.leaky_relu(torch.add(acc, bias, alpha=2), 0.1).clamp(max=6)

Contract
--------
* A name means the same as a function and as a method, and takes PyTorch's arguments: :data:`CALLS` maps each
  name to a Python function with PyTorch's signature.
* What writes in place is refused, as values never change: ``inplace=True`` (so ``nn.ReLU(inplace=True)`` too),
  methods whose name ends in ``_``, and ``out=``.
* What is random in training only is accepted in evaluation: dropout with ``training=False`` is the identity.
* Names that are not in the table raise what :mod:`epilogues.refusals` says of them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import functions as ep
from .errors import UnsupportedOperationError
from .refusals import refuse, refuse_in_place
from .source import explain, short, user_location
from .tracing import Symbol

CALLS: dict[str, Callable[..., Any]] = {}


def _names(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update(dict.fromkeys(names, call))
        return call

    return register


@_names("add")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return ep.add(input, _scaled(other, alpha))


@_names("sub", "subtract")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return ep.sub(input, _scaled(other, alpha))


@_names("rsub")
def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return ep.sub(other, _scaled(input, alpha))


def _scaled(value: Any, alpha: Any) -> Any:
    return value if isinstance(alpha, int | float) and alpha == 1 else ep.mul(value, alpha)


@_names("mul", "multiply")
def _mul(input: Any, other: Any) -> Any:
    return ep.mul(input, other)


@_names("div", "divide", "true_divide", "truediv")
def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        refuse("floor_divide" if rounding_mode == "floor" else rounding_mode)
    return ep.div(input, other)


@_names("neg", "negative")
def _neg(input: Any) -> Any:
    return ep.neg(input)


@_names("positive")
def _positive(input: Any) -> Any:
    return input


@_names("minimum")
def _minimum(input: Any, other: Any) -> Any:
    return ep.minimum(input, other)


@_names("maximum")
def _maximum(input: Any, other: Any) -> Any:
    return ep.maximum(input, other)


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


@_names("relu")
def _relu(input: Any, inplace: bool = False) -> Any:
    return ep.relu(input)


@_names("leaky_relu")
def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    return ep.leaky_relu(input, negative_slope)


@_names("silu")
def _silu(input: Any, inplace: bool = False) -> Any:
    return ep.silu(input)


@_names("gelu")
def _gelu(input: Any, *, approximate: str = "none") -> Any:
    return ep.gelu(input, approximate)


@_names("exp")
def _exp(input: Any) -> Any:
    return ep.exp(input)


@_names("sigmoid")
def _sigmoid(input: Any) -> Any:
    return ep.sigmoid(input)


@_names("tanh")
def _tanh(input: Any) -> Any:
    return ep.tanh(input)


@_names("dropout", "dropout1d", "dropout2d", "dropout3d")
def _dropout(input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> Any:
    # torch.dropout calls `train` what torch.nn.functional.dropout calls `training`
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
    return ep.leaky_relu(input, (lower + upper) / 2)


@_names("to", "type")
def _to(input: Any, dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedOperationError(
            explain(
                f"to: expected a dtype, got {type(dtype).__name__} {short(dtype)}",
                user_location(),
                why="an epilogue is traced once, before there are tensors or devices",
                instead="write x.to(torch.bfloat16), and place operands on the GEMM's device before the call",
            )
        )
    return ep.cast(input, dtype)


@_names("float")
def _float(input: Any) -> Any:
    return ep.cast(input, torch.float32)


@_names("half")
def _half(input: Any) -> Any:
    return ep.cast(input, torch.float16)


@_names("bfloat16")
def _bfloat16(input: Any) -> Any:
    return ep.cast(input, torch.bfloat16)


def call(name: str, args: Iterable[Any], keywords: dict[str, Any]) -> Any:
    """Calls the function of that name, or raises why it cannot be used in an epilogue."""
    plain = re.sub(r"^__(\w+?)__$", r"\1", name)
    plain = {"radd": "add", "rmul": "mul"}.get(plain, plain)
    function = CALLS.get(plain)
    if function is None:
        refuse(name)
    if keywords.get("out") is not None:
        refuse_in_place(
            f"{name} with out=", 'use the result; to store it, make it an output: return {"D": ..., "name": value}'
        )
    keywords.pop("out", None)
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as error:
        raise UnsupportedOperationError(
            explain(f"{plain}: {error}; in an epilogue it is {plain}{signature_text(plain)}", user_location())
        ) from None
    if bound.arguments.get("inplace"):
        refuse_in_place(
            f"{plain} with inplace=True",
            f"leave inplace out, of a module too, and go on with the result: z = F.{plain}(z)",
        )
    return function(*bound.args, **bound.kwargs)


def signature_text(name: str) -> str:
    """The arguments that a function of the table takes, as text."""
    parameters = inspect.signature(CALLS[name]).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    return f"({', '.join(shown)})"


def method(value: Symbol, name: str) -> Any:
    """What ``value.name`` is: a method that makes nodes, one that raises, or an error for properties.

    Raises:
        AttributeError: for private names, so that ``hasattr`` works.
        EpilogueError: for a property of tensors that symbols don't have, or a name tensors don't have.
    """
    if name.startswith("_"):
        raise AttributeError(f"a value of an epilogue has no attribute {name!r}")
    if name in CALLS or callable(getattr(torch.Tensor, name, None)):
        return functools.partial(_call_method, name, value)
    refuse(name)


def _call_method(name: str, value: Symbol, *args: Any, **keywords: Any) -> Any:
    return call(name, (value, *args), keywords)

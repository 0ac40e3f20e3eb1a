"""What an epilogue makes of a function of ``torch`` or ``torch.nn.functional``, and of a method of tensors.

    >>> @ep.epilogue
    ... def f(acc, bias: Row):
    ...     return torch.nn.functional.leaky_relu(torch.add(acc, bias, alpha=2), 0.1).clamp(max=6)

Contract
--------
* A name means the same as a function, a method and an operator, and takes PyTorch's arguments; the names are
  those of :mod:`epilogues.torch_signatures`, also with the prefixes of ``torch.special``.
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

from .errors import UnsupportedOperationError
from .outputs import one_value
from .refusals import refuse, refuse_in_place
from .source import explain, user_location
from .symbol import Symbol
from .torch_signatures import CALLS, METHODS

#: What the operators of tensors are called where the first operand is no symbol: ``tensor + symbol``.
_REFLECTED = {"radd": "add", "rmul": "mul", "rpow": "pow", "rand": "and", "ror": "or", "rxor": "xor"}


def call(name: str, args: Iterable[Any], keywords: dict[str, Any]) -> Any:
    """Calls the function of that name, or raises why it cannot be used in an epilogue."""
    plain = re.sub(r"^__(\w+?)__$", r"\1", name)
    plain = re.sub(r"^(special_|_(?=threshold))", "", _REFLECTED.get(plain, plain))
    function = CALLS.get(plain)
    if function is None:
        refuse(name)
    args = tuple(one_value(value) for value in args)
    if keywords.get("out") is not None:
        refuse_in_place(
            f"{name} with out=", 'use the result; to store it, make it an output: return {"D": ..., "name": value}'
        )
    keywords.pop("out", None)
    return _bound(plain, function, args, keywords)


def _bound(plain: str, function: Callable[..., Any], args: Iterable[Any], keywords: dict[str, Any]) -> Any:
    """Calls the function, in the words of PyTorch's caller where the arguments don't fit."""
    try:
        bound = _signature(function).bind(*args, **keywords)
    except TypeError as error:
        raise UnsupportedOperationError(
            explain(f"{plain}: {error}; in an epilogue it is {plain}{signature_text(function)}", user_location())
        ) from None
    if bound.arguments.get("inplace"):
        refuse_in_place(
            f"{plain} with inplace=True",
            f"leave inplace out, of a module too, and go on with the result: z = F.{plain}(z)",
        )
    return function(*bound.args, **bound.kwargs)


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def signature_text(function: Callable[..., Any]) -> str:
    """The arguments that a function of the table takes, as text."""
    parameters = _signature(function).parameters.values()
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
    if name in METHODS:
        return _bound(name, METHODS[name], (value, *args), keywords)
    return call(name, (value, *args), keywords)

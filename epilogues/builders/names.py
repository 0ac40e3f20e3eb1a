"""What all builders share: the names that activations go by, and that the same call gives the same object.

>>> activation_function("leaky_relu", negative_slope=0.2)(torch.tensor(-1.0))
tensor(-0.2000)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from .. import functions as ep
from ..compiling import MAKE_OUTSIDE, refuse_tracing, untraced
from ..declare import Epilogue
from ..errors import EpilogueError, did_you_mean
from ..source import short

_Arguments = ParamSpec("_Arguments")

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
_ACTIVATIONS["squared_relu"] = lambda x: ep.square(ep.relu(x))

#: The names that activations go by.
ACTIVATIONS = tuple(_ACTIVATIONS)


def activation_function(name: str | None, **params: Any) -> Callable[[Any], Any]:
    """The function of one value that an activation's name and parameters stand for.

    Raises:
        EpilogueError: for a name that is not in :data:`ACTIVATIONS`, or a parameter the activation doesn't have.
    """
    name = "identity" if name is None else name
    function = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if function is None:
        hint = did_you_mean(name, ACTIVATIONS) if isinstance(name, str) else not_a_name(name)
        raise EpilogueError(f"unknown activation {short(name)}; expected one of {', '.join(ACTIVATIONS)}{hint}")
    known = list(inspect.signature(function).parameters)[1:]
    unknown = [param for param in params if param not in known]
    if unknown:
        raise EpilogueError(f"activation {name} takes {', '.join(known) or 'no arguments'}, got {', '.join(unknown)}")
    return functools.partial(function, **params) if params else function


def not_a_name(value: object) -> str:
    """What to append to the error about a value that stands where a name or an epilogue should; "" if unknown."""
    if isinstance(value, Epilogue):
        return "; it is an epilogue already: call it inside a function of your own, decorated with @epilogues.epilogue"
    if str(getattr(value, "__module__", "")).startswith(__package__) and inspect.isfunction(value):
        return f"; call the builder: {value.__name__}(...)"
    if isinstance(value, torch.nn.Module) or (callable(value) and not isinstance(value, type)):
        return "; write what to compute as a function decorated with @epilogues.epilogue, which may call it"
    return ""


def named(prefix: str, name: str | None) -> str:
    """What an epilogue with an activation is called: ``bias_gelu``, or ``bias`` where it has none."""
    return prefix if name in (None, "identity") else f"{prefix}_{name}"


def builder(function: Callable[_Arguments, Epilogue]) -> Callable[_Arguments, Epilogue]:
    """A builder that makes each epilogue once: calls that say the same, defaults left out or not, give one object.

    Raises:
        EpilogueError: (the builder) for arguments that cannot be hashed, such as lists.
        TypeError: (the builder) for arguments that it does not take.
    """
    made = functools.cache(untraced(MAKE_OUTSIDE)(function))
    signature = inspect.signature(function)

    @functools.wraps(function)
    def build(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> Epilogue:
        refuse_tracing(MAKE_OUTSIDE)
        try:
            call = signature.bind(*args, **keywords)
        except TypeError as error:  # which does not say whose arguments they are
            parameters = signature.parameters.values()
            takes = ", ".join("**" * (each.kind is each.VAR_KEYWORD) + each.name for each in parameters)
            raise TypeError(f"{function.__name__}: {error}; it takes {takes or 'no arguments'}") from None
        call.apply_defaults()
        for value in (*call.args, *call.kwargs.values()):
            try:
                hash(value)
            except TypeError:
                raise EpilogueError(
                    f"{function.__name__}: expected names and numbers, got {type(value).__name__} {short(value)}"
                ) from None
        return made(*call.args, **call.kwargs)

    return build

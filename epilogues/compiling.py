"""Keeping PyTorch's compiler out of code that it cannot trace.

    >>> @untraced("make epilogues outside of what is compiled")
    ... def make(): ...

Where it may break a graph, the function and all it calls run as they do uncompiled; where it may not (``fullgraph``),
the compiler's error has the reason.  ``torch.compiler.disable`` alone takes more than a second to import, and is of use
only where the compiler is imported already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from .errors import EpilogueError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Of what makes epilogues.
MAKE_OUTSIDE = (
    "an epilogue cannot be made within what torch.compile compiles: make it outside, once, and use it there "
    "(gemm_ops takes an activation by its name there too)"
)


def refuse_tracing(reason: str) -> None:
    """Refuses to be traced by PyTorch's compiler, which then breaks the graph, or with ``fullgraph`` says so.

    Raises:
        EpilogueError: while it traces.
    """
    if torch.compiler.is_dynamo_compiling():
        raise EpilogueError(reason)


def untraced(reason: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A decorator of functions that PyTorch's compiler is not to trace, nor what they call."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        disabled: list[Callable[_Arguments, _Result]] = []

        @functools.wraps(function)
        def call(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
            refuse_tracing(reason)
            if "torch._dynamo" not in sys.modules:
                return function(*args, **keywords)
            if not disabled:
                disabled.append(torch.compiler.disable(function))
            return disabled[0](*args, **keywords)

        return call

    return decorate

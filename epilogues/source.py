"""Where in the user's code something happened, and error messages that say so.

    >>> from epilogues.source import explain, user_location
    >>> print(explain("sum communicates between elements", user_location(), instead="use torch.sum"))
    sum communicates between elements
      at model.py:12: return acc / acc.sum()
      instead: use torch.sum

The user's frame is the innermost one whose file is neither part of this package nor of PyTorch: a line in
the body of the epilogue, of a helper it calls, or, for a ready-made epilogue, the line that asked for it.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from .tree import SourceLocation

_NOT_THE_USER = (
    os.path.join(os.path.dirname(os.path.abspath(__file__)), ""),
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""),
    "<frozen ",
)


def user_location() -> SourceLocation | None:
    """The user's line that is running now; None where every frame belongs to this package or PyTorch."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if not file.startswith(_NOT_THE_USER) and not module.startswith("numpy."):
            text = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            return SourceLocation(file, frame.f_lineno, text)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def torch_module() -> str | None:
    """The torch.nn.modules file ("batchnorm") whose code is running on the user's behalf, if one is."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.nn.modules."):
            return str(module).removeprefix("torch.nn.modules.")
        frame = frame.f_back  # type: ignore[assignment]
    return None


def function_location(function: Callable[..., Any]) -> SourceLocation | None:
    """The line that a Python function starts on; None for callables that are not written in Python."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return SourceLocation(code.co_filename, code.co_firstlineno, text)


def explain(
    message: str,
    location: SourceLocation | None = None,
    *,
    why: str = "",
    instead: str = "",
) -> str:
    """An error message: what is wrong, then where, why, and what to do instead, each on its own line."""
    lines = [message]
    if location is not None:
        lines.append(f"  at {location}")
    if why:
        lines.append(f"  why: {why}")
    if instead:
        lines.append(f"  instead: {instead}")
    return "\n".join(lines)

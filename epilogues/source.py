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

import functools
import inspect
import itertools
import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame):
            return _location(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def running_text() -> str:
    """What the user's code is computing now: the source of the expression, or of its line before Python 3.11."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    if sys.version_info >= (3, 11):
        positions = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
        first, last, start, end = positions or (None, None, None, None)
        if first is not None and first == last and start is not None and end is not None:
            return text.encode()[start:end].decode(errors="replace")
    return text.strip()


def raised_at(error: BaseException) -> SourceLocation | None:
    """The user's line that an exception came through last."""
    found = None
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if _is_users(traceback.tb_frame):
            found = traceback
        traceback = traceback.tb_next
    return _location(found.tb_frame, found.tb_lineno) if found else None


def _is_users(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return not frame.f_code.co_filename.startswith(_NOT_THE_USER) and not module.startswith("numpy.")


def _location(frame: FrameType, line: int) -> SourceLocation:
    file = frame.f_code.co_filename
    return SourceLocation(file, line, linecache.getline(file, line, frame.f_globals).strip())


def torch_module() -> str | None:
    """The torch.nn.modules file ("batchnorm") whose code is running on the user's behalf, if one is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.nn.modules."):
            return str(module).removeprefix("torch.nn.modules.")
        frame = frame.f_back
    return None


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function behind a callable: a module's forward, what a wrapper wraps, an object's __call__."""
    plain: Any = function.forward if isinstance(function, torch.nn.Module) else function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = inspect.unwrap(plain)
    if not hasattr(plain, "__code__") and hasattr(getattr(plain, "__call__", None), "__code__"):  # noqa: B004
        plain = plain.__call__
    return plain


def function_location(function: Callable[..., Any]) -> SourceLocation | None:
    """The line that the user's function starts on; for a function of others, the user's line that uses it."""
    code = getattr(plain_function(function), "__code__", None)
    if code is None or code.co_filename.startswith(_NOT_THE_USER):
        return user_location()
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return SourceLocation(code.co_filename, code.co_firstlineno, text)


def short(value: Any, limit: int = 60) -> str:
    """The value's repr, on one line and of no more than ``limit`` characters."""
    try:
        text = repr(value)
    except Exception:  # an error about a wrong value has to get out: Python writes no integer of over 4300 digits
        text = f"<{type(value).__name__} that cannot be shown>"
    return shortened(" ".join(text.split()), limit)


def shortened(text: str, limit: int) -> str:
    """The text, no longer than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


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

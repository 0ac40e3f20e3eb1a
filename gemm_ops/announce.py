"""Warnings that are said once each, at the line that called into this package.

>>> announce("computed by PyTorch: ...")
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

from .errors import FallbackWarning

_announced: set[str] = set()
_NOT_THE_CALLER = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


def announce(text: str) -> None:
    """Warns with a :class:`FallbackWarning`, once in a process for each text."""
    if text not in _announced:
        _announced.add(text)
        warnings.warn(f"{text} (said once per reason)", FallbackWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """The ``stacklevel`` that makes :func:`announce` name the line that called into this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        level, frame = level + 1, frame.f_back
    return level

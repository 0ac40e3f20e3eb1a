"""``torch.autocast`` as products meet it: which dtype it asks for, and a context without it.

>>> autocast_dtype("cuda")                       # None where it is off
"""

from __future__ import annotations

import contextlib

import torch

#: Kinds of devices that have it; asked for once, for PyTorch 2.11's compiler does not trace the question.
_KINDS = frozenset(
    kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu") if torch.amp.is_autocast_available(kind)
)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype that matrices on devices of a kind are cast to; None where autocast is off."""
    # asking whether it is enabled is an error for devices that have none, such as meta
    if kind not in _KINDS or not torch.is_autocast_enabled(kind):
        return None
    dtype: torch.dtype = torch.get_autocast_dtype(kind)
    return dtype


def without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """A context in which operators keep the dtypes of their arguments."""
    # switching it off where it is off would take as long as a launch
    off = autocast_dtype(kind) is None
    return contextlib.nullcontext() if off else torch.autocast(kind, enabled=False)


def with_autocast(kind: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """A context with autocast to a dtype, or for None without it, whatever is on outside."""
    if kind not in _KINDS:
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=dtype, enabled=dtype is not None)

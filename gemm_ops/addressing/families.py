"""Asks the rules of a family.

>>> address("sm90", request)
Addressing(m=4095, n=4097, k=4093, batch=1, ...)
"""

from __future__ import annotations

from .placement import Addressing
from .skinny import SkinnyRules
from .sm80 import Sm80Rules
from .sm90 import Sm90Rules
from .views import INT_MAX, Request

_RULES = {"sm90": Sm90Rules, "sm80": Sm80Rules, "skinny": SkinnyRules}


def address(family: str, request: Request) -> Addressing | str:
    """How a family's kernels reach the tensors of a call; why they do not, in words, if they do not.

    Args:
        family: "skinny", "sm90" or "sm80".
        request: with extents of at least 1.
    """
    if max(request.n, request.k, *request.extents) > INT_MAX:
        return "an extent is larger than 2^31 - 1"
    return _RULES[family](request).address()

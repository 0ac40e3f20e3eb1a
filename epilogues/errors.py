"""What can be wrong with an epilogue, one exception class per kind of mistake.

    >>> import epilogues as ep
    >>> @ep.epilogue
    ... def bad(acc):
    ...     return acc / acc.sum(dim=-1, keepdim=True)
    Traceback (most recent call last):
    epilogues.errors.ReductionError: sum ... communicates between elements ...

Every message says what was expected, what came, where (the user's file and line, when there is one) and
what to do instead.  All classes derive from :class:`EpilogueError`, which is a :class:`ValueError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EpilogueError(ValueError):
    """Base class: the epilogue, or an operand given to it, is not one that can be computed."""


class ReductionError(EpilogueError):
    """An operation lets one output element depend on other elements (sum, softmax, matmul, reshape ...)."""


class BroadcastError(EpilogueError):
    """An operand's shape does not say, or contradicts, how it spreads over the (M, N) accumulator."""


class DtypeError(EpilogueError):
    """A dtype that the epilogue language does not compute with, load or store."""


class UnsupportedOperationError(EpilogueError):
    """An operation that is elementwise, or might be, but that the operation table does not hold."""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """What to append to the error about a name that is not known: "; did you mean gelu?", "" if none is close."""
    if not isinstance(given, str):
        return ""
    close = difflib.get_close_matches(given.lower(), list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""

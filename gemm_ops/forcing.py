"""What contexts ask for: a backend by name, and what of tuning counts.

>>> with gemm_ops.use_backend("reference"):
...     y = gemm_ops.linear(x, weight, "gelu", bias=bias)

Both are in one context variable, as plans are found by it, in C++ too: there by the identity of what it holds, which is
always one of :data:`ASKED`.  What tuning is has :mod:`gemm_ops.tuner`.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from epilogues.compiling import refuse_tracing

from .errors import UnsupportedProblemError

BACKENDS = ("auto", "skinny", "sm90", "sm80", "cublas", "reference")

#: What may be known by tuning; "": what ``GEMM_OPS_TUNE`` says.
TUNINGS = ("", "now", "known", "off")


class Asked(NamedTuple):
    """What holds in a context: one of :data:`BACKENDS` and one of :data:`TUNINGS`."""

    backend: str
    tuning: str


#: All there is; the first is what holds where nothing is asked for.
ASKED = tuple(itertools.starmap(Asked, itertools.product(BACKENDS, TUNINGS)))

_asked: contextvars.ContextVar[Asked] = contextvars.ContextVar("gemm_ops_asked", default=ASKED[0])


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the context, compute with this backend and no other.

        >>> with gemm_ops.use_backend("sm80"):
        ...     y = gemm_ops.linear(x, weight, "gelu", bias=bias)

    Args:
        backend: "skinny", "sm90" or "sm80", a fused kernel; "cublas", PyTorch's product and one kernel for the
            epilogue; "reference", PyTorch operation by operation; or "auto" for the default choice.

    Raises:
        EpilogueError: within what torch.compile compiles.
        ValueError: for any other name.  Calls inside raise :class:`UnsupportedProblemError` where the backend
            cannot take the problem, and :class:`BuildError` where its kernel cannot be built.
    """
    refuse_tracing(
        "use_backend cannot be entered within what torch.compile compiles: enter it around the compiled call"
    )
    if backend not in BACKENDS:
        raise ValueError(f"backend should be one of {', '.join(BACKENDS)}, got {backend!r}")
    with _asking(asked()._replace(backend=backend)):
        yield


@contextlib.contextmanager
def use_tuning(tuning: str) -> Iterator[None]:
    """Within the context, one of :data:`TUNINGS` holds; :func:`gemm_ops.tuning` is what people call."""
    with _asking(asked()._replace(tuning=tuning)):
        yield


@contextlib.contextmanager
def _asking(wanted: Asked) -> Iterator[None]:
    token = _asked.set(ASKED[ASKED.index(wanted)])  # the very object: it is told by its identity
    try:
        yield
    finally:
        _asked.reset(token)


def asked_variable() -> contextvars.ContextVar[Asked]:
    """The variable that holds one of :data:`ASKED`, the very object."""
    return _asked


def asked() -> Asked:
    """What holds here, a part of the key of every plan."""
    return _asked.get()


def forced_backend() -> str:
    """The backend that :func:`use_backend` asks for here, or "auto"."""
    return _asked.get().backend


def require_no_kernel(reason: str) -> None:
    """Refuses to compute a call operation by operation where a backend is asked for that would not.

    Args:
        reason: why no other backend can compute it.

    Raises:
        UnsupportedProblemError: within ``use_backend`` of "skinny", "sm90", "sm80" or "cublas".
    """
    forced = forced_backend()
    if forced not in ("auto", "reference"):
        raise UnsupportedProblemError(f"the backend {forced!r} cannot compute this: {reason}")

"""Asking for a backend by name, within a context.

>>> with gemm_ops.use_backend("reference"):
...     y = gemm_ops.linear(x, weight, "gelu", bias=bias)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from epilogues.compiling import refuse_tracing

from .errors import UnsupportedProblemError

BACKENDS = ("auto", "skinny", "sm90", "sm80", "cublas", "reference")

_forced: contextvars.ContextVar[str] = contextvars.ContextVar("gemm_ops_backend", default=BACKENDS[0])


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
    token = _forced.set(BACKENDS[BACKENDS.index(backend)])  # the very object: it is told by its identity
    try:
        yield
    finally:
        _forced.reset(token)


def backend_variable() -> contextvars.ContextVar[str]:
    """The variable that holds one of :data:`BACKENDS`, the very object."""
    return _forced


def forced_backend() -> str:
    """The backend that :func:`use_backend` asks for here, or "auto"."""
    return _forced.get()


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

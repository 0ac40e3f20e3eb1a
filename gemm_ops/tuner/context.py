"""What of tuning counts: measure now, use what is known, or the rules alone.

    >>> with gemm_ops.tuning("now"):            # before the real work, with its shapes
    ...     y = layer(x)
    >>> with gemm_ops.tuning("off"):
    ...     y = layer(x)                        # what the wave model chooses

"known", the default
    Results of this process, of earlier ones on this machine, and those that the package has.
"now"
    The same; and a product of a class that nothing was measured of is measured at its first call, which takes
    ``GEMM_OPS_TUNE_SECONDS`` (60), builds included, and says so.  Not while a CUDA graph is captured, and not of calls
    that :func:`gemm_ops.use_backend` sends elsewhere.  Kernels are built but with ``building("never")``: then those
    that are built are measured.
"off"
    The rules of :mod:`gemm_ops.kernels.selection` alone.

``GEMM_OPS_TUNE`` says what holds where no context does, and in the threads in which autograd computes gradients, which
know of no context.  It is read when a plan is made: what was called before stays as it was.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from epilogues.compiling import refuse_tracing

from ..forcing import TUNINGS, asked, use_tuning

WAYS = tuple(filter(None, TUNINGS))
DEFAULT = "known"
#: Seconds that tuning at a call may take where ``GEMM_OPS_TUNE_SECONDS`` says nothing.
DEFAULT_SECONDS = 60.0


@contextlib.contextmanager
def tuning(way: str) -> Iterator[None]:
    """Within the context, choose kernels this way.

        >>> with gemm_ops.tuning("now"):
        ...     y = layer(x)

    Args:
        way: "now", "known" or "off"; see the module's first page.

    Raises:
        EpilogueError: within what torch.compile compiles.
        ValueError: for any other way.
    """
    refuse_tracing("tuning cannot be entered within what torch.compile compiles: enter it around the compiled call")
    if way not in WAYS:
        raise ValueError(f"tuning should be one of {', '.join(WAYS)}, got {way!r}")
    with use_tuning(way):
        yield


def way_of_tuning() -> str:
    """What holds here: that of the context, else of ``GEMM_OPS_TUNE``, else "known".

    Raises:
        ValueError: for another value of ``GEMM_OPS_TUNE``.
    """
    way = asked().tuning or os.environ.get("GEMM_OPS_TUNE", "").lower() or DEFAULT
    if way not in WAYS:
        raise ValueError(f"GEMM_OPS_TUNE should be one of {', '.join(WAYS)}, got {way!r}")
    return way


def seconds_of_tuning() -> float:
    """How long tuning at a call may take, builds included: ``GEMM_OPS_TUNE_SECONDS``, else 60.

    Raises:
        ValueError: for a value that is no positive number.
    """
    text = os.environ.get("GEMM_OPS_TUNE_SECONDS", "")
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"GEMM_OPS_TUNE_SECONDS should be a positive number of seconds, got {text!r}")
    return seconds

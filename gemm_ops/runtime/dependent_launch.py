"""Whether kernels of ours that follow one another in a CUDA graph overlap: programmatic dependent launch.

    >>> with without_overlap():          # for the time of a kernel by itself
    ...     graph = capture(call)
    >>> overlapped_launches()            # in all that was captured by this process
    12

Contract: kernels get the address of one record per process, in which a captured launch leaves its node for the next;
``cuda/dependent_launch.cuh`` has the rule and what it gains.  ``GEMM_OPS_OVERLAP=off`` turns it off; it is read when
the first plan is made.  Results are the same either way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

from .abi import LastCaptured

WAYS = ("on", "off")

_record = LastCaptured()


@functools.cache
def pointer_to_record() -> ctypes._Pointer[LastCaptured]:
    """Where launches leave their nodes, for :class:`gemm_ops.runtime.abi.GemmArguments`.

    Raises:
        ValueError: for a value of ``GEMM_OPS_OVERLAP`` that means nothing.
    """
    _record.enabled = int(way_of_overlap() == "on")
    return ctypes.pointer(_record)


def way_of_overlap() -> str:
    """What ``GEMM_OPS_OVERLAP`` says: "on", the default, or "off".

    Raises:
        ValueError: for any other value.
    """
    way = os.environ.get("GEMM_OPS_OVERLAP", "").lower() or WAYS[0]
    if way not in WAYS:
        raise ValueError(f"GEMM_OPS_OVERLAP should be one of {', '.join(WAYS)}, got {way!r}")
    return way


@contextlib.contextmanager
def without_overlap() -> Iterator[None]:
    """Within the context, what this process captures does not overlap."""
    pointer_to_record()  # reads the environment, which is not to undo this later
    before, _record.enabled = _record.enabled, 0
    try:
        yield
    finally:
        _record.enabled = before


def overlapped_launches() -> int:
    """How many launches this process has captured so that they start while the one ahead ends."""
    return int(_record.overlapped)

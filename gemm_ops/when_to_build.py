"""When a kernel is built that a call would use: while the call waits, in the background, or not at all.

    >>> with gemm_ops.building("background"):
    ...     y = layer(x)                        # PyTorch computes until the kernel is there
    >>> with gemm_ops.building("never"):        # in production: what is not built is not going to be
    ...     y = layer(x)

``GEMM_OPS_BUILD`` says what holds where no context does; without it calls wait.  What is computed in its place is
what would be where there is no kernel (:func:`gemm_ops.backend_for` says so), announced once.

In the background one kernel is built at a time for every two cores, in the order they were asked for.  Kernels of a
backend that is asked for by name are waited for.  One that does not compile is tried once in a process.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Iterator

from epilogues.compiling import refuse_tracing

from .build.buildable import Buildable
from .build.cache import find_library
from .build.compiler import build_kernel, raise_failure, remember_failure
from .build.toolchain import find_toolchain
from .errors import BuildError
from .runtime.loading import is_loaded

WAYS = ("wait", "background", "never")

_way: contextvars.ContextVar[str] = contextvars.ContextVar("gemm_ops_building", default="")


@contextlib.contextmanager
def building(way: str) -> Iterator[None]:
    """Within the context, build kernels this way.

        >>> with gemm_ops.building("never"):
        ...     y = layer(x)

    Args:
        way: "wait", "background" or "never"; see the module's first page.

    Raises:
        EpilogueError: within what torch.compile compiles.
        ValueError: for any other way.
    """
    refuse_tracing("building cannot be entered within what torch.compile compiles: enter it around the compiled call")
    if way not in WAYS:
        raise ValueError(f"building should be one of {', '.join(WAYS)}, got {way!r}")
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


def way_of_building() -> str:
    """What holds here: that of the context, else of ``GEMM_OPS_BUILD``, else "wait".

    Raises:
        ValueError: for another value of ``GEMM_OPS_BUILD``: who meant "never" is not to wait for a compiler.
    """
    way = _way.get() or os.environ.get("GEMM_OPS_BUILD", "").lower() or WAYS[0]
    if way not in WAYS:
        raise ValueError(f"GEMM_OPS_BUILD should be one of {', '.join(WAYS)}, got {way!r}")
    return way


class NotBuilt(str):
    """Why a kernel is not used for now, in words.

    Attributes:
        spec: the kernel, if it is to be built in the background.
    """

    spec: Buildable | None = None

    @classmethod
    def yet(cls, spec: Buildable) -> NotBuilt:
        """Of a kernel that is to be built in the background."""
        found = cls("its kernel is being built in the background")
        found.spec = spec
        return found


def obstacle(spec: Buildable, *, waited_for: bool = False) -> str | None:
    """Why a kernel cannot be used now, in words; None if it can, being built if need be.  Builds nothing.

    Args:
        waited_for: whether it may not be built in the background.

    Raises:
        ToolchainError: if there is no compiler and the kernel is not built.
    """
    if is_loaded(spec) or find_library(spec) is not None:
        return None
    way = way_of_building()
    if way == "never":
        return NotBuilt('its kernel is not built, and gemm_ops.building or GEMM_OPS_BUILD says "never"')
    if way == "wait" or waited_for:
        find_toolchain()
        return None
    try:
        raise_failure(spec)
    except BuildError as error:
        return f"the kernel cannot be built: {str(error).splitlines()[0]}"
    find_toolchain()
    return NotBuilt.yet(spec)


_waiting: queue.SimpleQueue[Buildable] = queue.SimpleQueue()
_asked: set[str] = set()
_workers: list[threading.Thread] = []
_lock = threading.Lock()


def build_in_background(spec: Buildable) -> None:
    """Has a kernel built by and by, once in a process."""
    with _lock:
        if spec.key in _asked:
            return
        _asked.add(spec.key)
        _waiting.put(spec)
        if len(_workers) < max(1, len(os.sched_getaffinity(0)) // 2) and len(_workers) < len(_asked):
            # daemons, for a process that ends is not to wait for them; what they leave half done the cache sweeps
            worker = threading.Thread(target=_work, name=f"gemm_ops.building {len(_workers)}", daemon=True)
            _workers.append(worker)
            worker.start()


def _work() -> None:
    while True:
        spec = _waiting.get()
        try:
            build_kernel(spec, quiet=True)
        except BuildError as error:  # said by the next call that wants the kernel, see obstacle
            remember_failure(spec, error)

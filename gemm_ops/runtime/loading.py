"""Built libraries in this process: each loaded once, and built first if need be.

    >>> kernel = load_once(spec, lambda path: open_library(path, ("gemm_run", "gemm_status_text")))

Contract: two threads that want a kernel get the same one.  A library that does not load, as one of another machine's in
a cache that was carried over, is built here, once.
"""

from __future__ import annotations

import _ctypes
import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..build.buildable import Buildable
from ..build.cache import SOURCE, discard, find_library
from ..build.compiler import build_kernel, raise_failure, remember_failure
from ..errors import BuildError

T = TypeVar("T")

_loaded: dict[str, Any] = {}
_loading: dict[str, threading.Lock] = {}  # a lock for each kernel: no kernel waits for another's build


def is_loaded(spec: Buildable) -> bool:
    """Whether the kernel is loaded in this process."""
    return spec.key in _loaded


def load_once(spec: Buildable, load: Callable[[Path], T]) -> T:
    """What ``load`` makes of the kernel's library; the same for every call with this kernel.

    Args:
        load: raises OSError if the file at a path is not the library that it should be.

    Raises:
        BuildError: if the kernel cannot be built, or cannot be loaded even when freshly built.
    """
    found: T | None = _loaded.get(spec.key)
    if found is None:
        with _loading.setdefault(spec.key, threading.Lock()):
            found = _loaded.get(spec.key)
            if found is None:
                found = _loaded[spec.key] = _load(spec, load)
    return found


def _load(spec: Buildable, load: Callable[[Path], T]) -> T:
    raise_failure(spec)
    found: Path | None = build_kernel(spec)
    while found is not None:
        try:
            return load(found)
        except OSError:
            # not a library of this machine (a cache or a bundle carried over, a damaged disk): another place may have
            # one; else it is built here, once
            discard(found)
        found = find_library(spec)
    path = build_kernel(spec)
    try:
        return load(path)
    except OSError as error:
        failure = BuildError(f"the kernel built at {path} does not load: {error}", source=str(path.with_name(SOURCE)))
        remember_failure(spec, failure)
        raise failure from error


def open_library(path: Path, functions: Sequence[str]) -> ctypes.CDLL:
    """A library that has these functions.

    Raises:
        OSError: if it is none, or lacks one of them.
    """
    library = ctypes.CDLL(str(path))
    if missing := [name for name in functions if not hasattr(library, name)]:
        # closed, for the loader gives an open library again for the same path, whatever is there by then
        _ctypes.dlclose(library._handle)
        raise OSError(f"{path} has no {', '.join(missing)}")
    return library

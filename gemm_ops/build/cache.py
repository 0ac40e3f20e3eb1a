"""The folder of built kernels.

    >>> library = find_library(spec)         # None, or the path of a library that is complete
    >>> with build_slot(spec) as slot:       # this process builds; others that want it wait
    ...     ...  # write into slot.folder
    ...     slot.publish()

Layout, under ``cache_folder()``:

``kernels/<key>/kernel.so``     the library, with ``kernel.cu`` (its source) and ``build.json`` beside it
``locks/<key>.lock``            held by the process that builds the kernel
``building/…``                  work in progress; what a crash leaves is swept by the next build
``failed/<key>/``               source and compiler output of a build that failed, for the error to point at

``GEMM_OPS_BUNDLE`` names further folders with a ``kernels/`` in them, separated as in ``PATH``: bundles that were
unpacked (:mod:`.bundle`), or caches.  They are searched after the cache, in order, and never written to.

A kernel appears in ``kernels/`` by renaming a finished folder into place, so whatever is there is whole, however
a process died.  Locks are the operating system's and go with their process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from ..errors import ToolchainError
from .buildable import Buildable

LIBRARY = "kernel.so"
SOURCE = "kernel.cu"
RECORD = "build.json"

#: Names the folders that are searched after the cache.
BUNDLES = "GEMM_OPS_BUNDLE"

_STALE_AFTER = 24 * 3600.0

_unusable: set[Path] = set()  # libraries that do not load and cannot be removed


def cache_folder() -> Path:
    """``GEMM_OPS_CACHE``, else ``gemm-ops`` in the user's cache folder."""
    if override := os.environ.get("GEMM_OPS_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemm-ops"


def find_library(spec: Buildable) -> Path | None:
    """The built library of a kernel, if it is there: in the cache, or in an unpacked bundle."""
    for root in (cache_folder(), *bundle_folders()):
        if (path := library_in(root, spec.key)) is not None:
            return path
    return None


def library_in(root: Path, key: str) -> Path | None:
    """The library of a kernel in a folder laid out as the cache is; None if it is not there."""
    path = root / "kernels" / key / LIBRARY
    try:
        # an empty one is what a full disk or a copy that broke off leaves
        return path if path.is_file() and path.stat().st_size > 0 and path not in _unusable else None
    except OSError:  # a path that cannot be: building says so
        return None


def bundle_folders() -> tuple[Path, ...]:
    """The folders that ``GEMM_OPS_BUNDLE`` names; of one that holds no kernels it is said once."""
    value = os.environ.get(BUNDLES)
    return _read_bundle_folders(value) if value else ()


@functools.cache
def _read_bundle_folders(value: str) -> tuple[Path, ...]:
    folders = []
    for name in filter(None, value.split(os.pathsep)):
        folder = Path(name).expanduser().absolute()  # a process may change its folder
        folders.append(folder)
        fault = ""
        if not folder.exists():
            fault = "is not there"
        elif not folder.is_dir():
            fault = "is a file: unpack it with `python -m shape_sweeps unpack FILE --into FOLDER`, and name the folder"
        elif not (folder / "kernels").is_dir():
            fault = "has no folder `kernels`"
        if fault:
            warnings.warn(f"{BUNDLES}: {folder} {fault}", RuntimeWarning, stacklevel=2)
    return tuple(folders)


def discard(library: Path) -> None:
    """Puts a library that does not load out of use: out of the cache; a bundle's is passed over by this process."""
    if library.parent.parent == cache_folder() / "kernels":
        shutil.rmtree(library.parent, ignore_errors=True)
    if library.exists():
        _unusable.add(library)


@dataclass(frozen=True)
class BuildSlot:
    """The right to build one kernel, and a folder to do it in."""

    folder: Path
    target: Path
    failed: Path

    def publish(self) -> Path:
        """Moves the finished folder into place and gives the library's path."""
        shutil.rmtree(self.failed, ignore_errors=True)
        # fsync first: after a power loss the rename must not survive without the bytes
        with open(self.folder / LIBRARY, "rb") as library:
            os.fsync(library.fileno())
        os.rename(self.folder, self.target)
        _unusable.discard(self.target / LIBRARY)
        return self.target / LIBRARY

    def keep_failure(self, output: str) -> Path:
        """Keeps source and compiler output of a failed build outside ``kernels/`` and gives the source's path."""
        shutil.rmtree(self.failed, ignore_errors=True)
        self.failed.mkdir(parents=True)
        shutil.copy(self.folder / SOURCE, self.failed / SOURCE)
        (self.failed / "output.txt").write_text(output)
        return self.failed / SOURCE


def build_slot(spec: Buildable) -> contextlib.AbstractContextManager[BuildSlot | None]:
    """Waits for the right to build a kernel; gives None if another process has built it meanwhile.

    Raises:
        ToolchainError: if the cache folder cannot be written.
    """
    return open_slot(cache_folder(), spec.key, lambda: find_library(spec) is not None)


@contextlib.contextmanager
def open_slot(root: Path, key: str, is_there: Callable[[], bool]) -> Iterator[BuildSlot | None]:
    """Waits for the right to put a kernel into a folder laid out as the cache is; gives None if it is there by then.

    Raises:
        ToolchainError: if the folder cannot be written.
    """
    try:
        for name in ("kernels", "locks", "building", "failed"):
            (root / name).mkdir(parents=True, exist_ok=True)
        name = "locks"
        lock = filelock.FileLock(root / "locks" / f"{key}.lock")
        lock.acquire()
    except OSError as error:  # in words that are the same for all kernels, so that a report says them once
        reason = f"{name}: {error.strerror or error}"
        raise ToolchainError(
            f"the kernel cache {root} cannot be written ({reason}): point GEMM_OPS_CACHE to a folder that can"
        ) from error
    try:
        if is_there():
            yield None
            return
        _sweep(root / "building", key)
        folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=root / "building"))
        os.chmod(folder, 0o755)  # mkdtemp's 0700 would keep a shared cache from its other users
        try:
            target = root / "kernels" / key
            if target.exists():  # a folder without a library: somebody removed it by hand
                shutil.rmtree(target)
            yield BuildSlot(folder, target, root / "failed" / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def _sweep(folder: Path, key: str) -> None:
    """Removes what builds that died left behind: of this kernel all, for its lock is ours; of others what is old."""
    now = time.time()
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            if entry.name.startswith(f"{key}-") or now - entry.stat().st_mtime > _STALE_AFTER:
                shutil.rmtree(entry, ignore_errors=True)

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

A kernel appears in ``kernels/`` by renaming a finished folder into place, so whatever is there is whole, however
a process died.  Locks are the operating system's and go with their process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from ..errors import ToolchainError
from .buildable import Buildable

LIBRARY = "kernel.so"
SOURCE = "kernel.cu"
RECORD = "build.json"

_STALE_AFTER = 24 * 3600.0


def cache_folder() -> Path:
    """``GEMM_OPS_CACHE``, else ``gemm-ops`` in the user's cache folder."""
    if override := os.environ.get("GEMM_OPS_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemm-ops"


def find_library(spec: Buildable) -> Path | None:
    """The built library of a kernel, if it is there."""
    path = cache_folder() / "kernels" / spec.key / LIBRARY
    try:
        return path if path.is_file() else None
    except OSError:  # a path that cannot be: building says so
        return None


def discard(spec: Buildable) -> None:
    """Removes a kernel from the cache, such as one that does not load."""
    shutil.rmtree(cache_folder() / "kernels" / spec.key, ignore_errors=True)


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
        return self.target / LIBRARY

    def keep_failure(self, output: str) -> Path:
        """Keeps source and compiler output of a failed build outside ``kernels/`` and gives the source's path."""
        shutil.rmtree(self.failed, ignore_errors=True)
        self.failed.mkdir(parents=True)
        shutil.copy(self.folder / SOURCE, self.failed / SOURCE)
        (self.failed / "output.txt").write_text(output)
        return self.failed / SOURCE


@contextlib.contextmanager
def build_slot(spec: Buildable) -> Iterator[BuildSlot | None]:
    """Waits for the right to build a kernel; gives None if another process has built it meanwhile.

    Raises:
        ToolchainError: if the cache folder cannot be written.
    """
    root = cache_folder()
    try:
        for name in ("kernels", "locks", "building", "failed"):
            (root / name).mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / "locks" / f"{spec.key}.lock")
        lock.acquire()
    except OSError as error:
        raise ToolchainError(
            f"the kernel cache {root} cannot be written ({error}): point GEMM_OPS_CACHE to a folder that can"
        ) from error
    try:
        if find_library(spec) is not None:
            yield None
            return
        _sweep(root / "building", spec.key)
        folder = Path(tempfile.mkdtemp(prefix=f"{spec.key}-", dir=root / "building"))
        os.chmod(folder, 0o755)  # mkdtemp's 0700 would keep a shared cache from its other users
        try:
            target = root / "kernels" / spec.key
            if target.exists():  # a folder without a library: somebody removed it by hand
                shutil.rmtree(target)
            yield BuildSlot(folder, target, root / "failed" / spec.key)
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

"""Where results are kept, and found again.

    >>> remember([measured])                           # in this process, and in the user's file
    >>> find(measured.problem, measured.tree).best
    'sm90_pingpong_128x128x64_1x2 swizzle 4'

Places, the first that has a result counts:

1. this process, and the user's file, ``tuning/<device>.json`` in the cache folder, the newer of the two;
2. the package's own file of the device, ``gemm_ops/tuner/measured/<device>.json``.

Contract: a file is replaced as a whole, by renaming a finished one, under a lock: of processes that write at the same
time none loses the other's results.  One that is broken is said once and passed over; before it is written anew, it is
put aside as ``<device>.json.broken``.  Where the cache cannot be written, results count in this process, which is said
once.  What other processes write is seen by the plans that are made after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock

from ..build.cache import cache_folder
from ..printable import printable
from .classes import ProblemClass
from .records import Measured, RecordError, read_records, utc_now, write_records

_SHIPPED = Path(__file__).resolve().parent / "measured"

Key = tuple[ProblemClass, str]
Results = dict[Key, Measured]

_here: Results = {}  # of this process
_files: dict[Path, tuple[tuple[int, int], Results]] = {}  # by what tells that one has changed
_said: set[str] = set()
_lock = threading.RLock()


def file_name(device: str) -> str:
    """The file of a device, such as ``nvidia-h200.json``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def users_file(device: str) -> Path:
    """Where a user's results of a device are."""
    return cache_folder() / "tuning" / file_name(device)


def shipped_file(device: str) -> Path:
    """Where the package's results of a device are, if it has any."""
    return _SHIPPED / file_name(device)


def find(problem: ProblemClass, tree: str) -> Measured | None:
    """The result of exactly this class; None if nothing is known of it."""
    key = problem, tree
    for results in _places(problem.device):
        if (found := results.get(key)) is not None:
            return found
    return None


def all_of(device: str) -> Results:
    """Every result of a device, by class."""
    found: Results = {}
    for results in _places(device):
        found = {**results, **found}
    return found


def users_results(device: str) -> Results:
    """The results of a device of this process and of the user's file."""
    return next(iter(_places(device)))


def known_files() -> dict[Path, Results]:
    """Every file of results there is, the user's first, and what is in it."""
    folders = (cache_folder() / "tuning", _SHIPPED)
    return {path: _read(path) for folder in folders for path in sorted(folder.glob("*.json"))}


def remember(records: Iterable[Measured], *, quiet: bool = False) -> tuple[str, ...]:
    """Keeps results, in this process and in the user's file; those of the same classes are replaced.

    Gives why some are in no file, in words, which is said as well unless ``quiet``; () where all are.
    """
    unkept: list[str] = []
    by_device: dict[str, Results] = {}
    for record in records:
        by_device.setdefault(record.problem.device, {})[record.key] = record
    with _lock:
        for device, results in by_device.items():
            _here.update(results)
            path = users_file(device)
            try:
                merge_into(path, device, results)
            except OSError as error:
                reason = error.strerror or error
                unkept.append(f"what tuning found is not kept: {path} cannot be read or written ({reason})")
                if not quiet:
                    _say(unkept[-1])
    return tuple(unkept)


def forget() -> None:
    """Drops what this process remembers of its own; files stay."""
    with _lock:
        _here.clear()
        _files.clear()


def merge_into(path: Path, device: str, results: Results) -> None:
    """Adds results of a device to a file.  What of it cannot be understood is kept beside it.

    Raises:
        OSError: if it cannot be written, or is there and cannot be read, or is another device's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            path.read_bytes()  # what cannot be read is not to be replaced
        there = _read(path, put_aside=True)
        if others := {problem.device for problem, _ in there} - {device}:  # the names differ in signs alone
            raise OSError(f"it has results of the {others.pop()}, not of the {device}")
        text = write_records(device, {**there, **results}.values())
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)  # first: after a power loss the rename must not survive without the bytes
            os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep a shared cache from its other users
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def read_file(path: Path) -> tuple[Measured, ...]:
    """The results in a file.

    Raises:
        RecordError: if it is no such file, or one of its results is none; the message is one line.
        OSError: if it cannot be read.
    """
    try:
        records, faults = read_records(path.read_text(), utc_now())
    except UnicodeDecodeError as error:
        raise RecordError(f"no text: {error}") from error
    if faults:
        raise RecordError("; ".join(faults))
    return records


def _places(device: str) -> Iterator[Results]:
    users = _read(users_file(device))
    with _lock:
        here = {key: record for key, record in _here.items() if record.problem.device == device}
    # what another process measured after this one is in the file, and this one's in both
    yield {**here, **{key: record for key, record in users.items() if not _is_older(record, here.get(key))}}
    yield _read(shipped_file(device))


def _is_older(record: Measured, other: Measured | None) -> bool:
    return other is not None and record.date < other.date


def _read(path: Path, *, put_aside: bool = False) -> Results:
    """What a file has; nothing where it is not there, or broken."""
    try:
        state = path.stat()
    except OSError:  # mostly, nothing was measured
        return {}
    stamp = state.st_mtime_ns, state.st_size
    with _lock:
        if (found := _files.get(path)) is not None and found[0] == stamp and not put_aside:
            return found[1]
    aside = path.with_name(f"{path.name}.broken")
    try:
        # the package's files are right where a machine's clock is not, and their dates are compared with no others
        records, faults = read_records(path.read_text(), None if path.parent == _SHIPPED else utc_now())
    except OSError as error:
        _say(f"{path} is passed over: it cannot be read ({error})")
        return {}
    except (RecordError, UnicodeDecodeError) as error:
        if put_aside:
            os.replace(path, aside)
            _say(f"{path} is not what tuning writes ({error}): it is now {aside.name}")
        else:
            _say(f"{path} is passed over: it is not what tuning writes ({error})")
        return {}
    for fault in faults:
        _say(f"{path}: a result is passed over: {fault}")
    if faults and put_aside:
        shutil.copyfile(path, aside)
    results = {record.key: record for record in records}
    with _lock:
        _files[path] = stamp, results
    return results


def _say(text: str) -> None:
    """Warns, once in a process for each text."""
    if text not in _said:
        _said.add(text)
        warnings.warn(printable(text), RuntimeWarning, stacklevel=2)

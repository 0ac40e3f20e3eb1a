"""Where results go: regular files, devices, pipes, standard output.

    >>> output = prepare("sweep.json", "--json")        # before the sweep: can it be written?
    >>> output.write(text)                              # after it

A regular file is replaced as a whole, so that whoever reads it sees the old or the new one and never a part;
links are followed, and it is what they lead to that is replaced.  Anything else that a name can stand for (a
device, a named pipe) is written to and stays what it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from .cli import complain
from .errors import InputError, OutputError

#: "-" as a file name
STDOUT = "-"

# Why a folder may refuse a new file although a file in it can be written: its permissions, or a mount point.
_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


@dataclass(frozen=True)
class Output:
    """A place that was found to be writable.

    Attributes:
        option: which option names it.
        name: as the user wrote it.
        path: the file itself, links followed; :data:`STDOUT` for standard output.
        regular: whether it is, or will be, a regular file.
    """

    option: str
    name: str
    path: str
    regular: bool = False

    @property
    def is_stdout(self) -> bool:
        return self.path == STDOUT

    def write(self, data: str | bytes) -> None:
        """Writes all of it.

        Raises:
            OutputError: if that fails; a regular file is then as it was before.
        """
        if self.is_stdout:
            # what goes wrong here, shape_sweeps.streams remembers
            sys.stdout.write(data if isinstance(data, str) else data.decode())
            sys.stdout.flush()
            return
        content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        try:
            if self.regular:
                _replace(self.path, content)
            else:
                _write_through(self.path, content)
        except OSError as error:
            raise OutputError(f"{self.option}: cannot write {self.name!r}: {_reason(error)}") from error


def prepare(name: str, option: str) -> Output:
    """Finds out before a long sweep whether its result can be written after it.

    Raises:
        InputError: if not.
    """
    if not name:
        raise InputError(f"{option}: the name of the file is empty")
    if name == STDOUT:
        if getattr(sys.stdout, "missing", False):
            raise InputError(f"{option}: standard output is closed")
        return Output(option, name, STDOUT)
    try:
        return _examine(name, option)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise InputError(f"{option}: {name!r} cannot be written: {_reason(error)}") from error


def check_distinct(outputs: Sequence[Output]) -> None:
    """Two results in one file would leave the second only.

    Raises:
        InputError: if two outputs are the same.
    """
    taken: dict[str, Output] = {}
    for output in outputs:
        first = taken.setdefault(output.path, output)
        if first is not output:
            what = "standard output" if output.is_stdout else repr(output.name)
            raise InputError(f"{output.option}: {what} is taken by {first.option} {first.name}")


def write_or_complain(output: Output, make: Callable[[], str | bytes]) -> bool:
    """Writes one result; says so if it cannot be, so that others are written all the same."""
    try:
        output.write(make())
    except OutputError as error:
        complain(error)
        return False
    return True


def _examine(name: str, option: str) -> Output:
    try:
        status = os.stat(name)
    except FileNotFoundError:
        return _examine_new(name, option)
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise InputError(f"{option}: {name!r} is a folder")
    if stat.S_ISSOCK(mode) or stat.S_ISBLK(mode):
        what = "socket" if stat.S_ISSOCK(mode) else "disk"
        raise InputError(f"{option}: {name!r} is a {what}; results go to files, pipes and character devices")
    if _is_stream(status, sys.stdout):
        return Output(option, name, STDOUT)
    path = os.path.realpath(name)
    named = os.path.exists(path) and os.path.samestat(os.stat(path), status)
    if not named or _is_stream(status, sys.stderr):
        # a name such as /dev/fd/3, for a pipe or a file that has no name of its own; or others write to it, too
        named, path = False, name
    if stat.S_ISREG(mode):
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))  # neither truncated nor touched
    elif not os.access(path, os.W_OK):  # not opened: a pipe would wait for its reader
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return Output(option, name, path, regular=named and stat.S_ISREG(mode))


def _examine_new(name: str, option: str) -> Output:
    path = os.path.realpath(name)
    folder = os.path.dirname(path)
    if name.endswith(os.sep):
        raise InputError(f"{option}: {name!r} is the name of a folder")
    if not os.path.isdir(folder):
        raise InputError(f"{option}: {name!r}: there is no folder {folder!r}")
    # What a folder takes, only trying tells: /proc says that it is writable, and lengths of names are limited.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    os.unlink(path)
    return Output(option, name, path, regular=True)


def _is_stream(status: os.stat_result, stream: TextIO) -> bool:
    """Whether a file is where a stream goes, as /dev/stdout is: replacing it would lose the report."""
    try:
        return os.path.samestat(status, os.fstat(stream.fileno()))
    except (OSError, ValueError, AttributeError):
        return False


def _write_through(path: str, data: bytes, flag: int = os.O_APPEND) -> None:
    """Writes to what is there; creates nothing."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC | flag), "wb") as file:
        file.write(data)


def _replace(path: str, data: bytes) -> None:
    """Writes a whole file or nothing, with the mode of the one it replaces."""
    # a short name: that of the file itself may be as long as names can be
    temporary = os.path.join(os.path.dirname(path), f".shape-sweeps-{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _IN_PLACE:
            raise
        _write_through(path, data, os.O_TRUNC)
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):
                before = os.stat(path)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
                os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(data)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if not isinstance(error, OSError) or error.errno not in _IN_PLACE:
            raise
        _write_through(path, data, os.O_TRUNC)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__

"""Standard output and error that may be closed, full, or a pipe that nobody reads any more.

    >>> with guarded_streams() as stdout:
    ...     print("a report")
    >>> stdout.error                    # None, or why what was printed is lost

A sweep's result does not depend on who reads its report: a write that fails is remembered and not raised, and
what follows it is dropped.  The command line looks at it at its end.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class Stream:
    """A text stream to which writing never raises.

    Attributes:
        missing: whether there is no stream at all, as after ``>&-`` in a shell.
        error: the first error of writing; None as long as all is well.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.missing = stream is None
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        if self._stream is not None and self.error is None:
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError as error:
                    self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except (OSError, ValueError) as error:  # ValueError: somebody has closed it
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and self.error is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # somebody has closed it
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: Exception) -> None:
        self.error = error
        # The interpreter flushes at its exit what is left in the stream's buffer, and would complain.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self.flush()


@contextlib.contextmanager
def guarded_streams() -> Iterator[Stream]:
    """Standard output and error as :class:`Stream`; gives the one for standard output."""
    if sys.stdout is None or sys.stderr is None:
        _occupy()
    stdout, stderr = Stream(sys.stdout), Stream(sys.stderr)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, stdout), cast(TextIO, stderr)
    try:
        yield stdout
    finally:
        stdout.flush()
        stderr.flush()
        sys.stdout, sys.stderr = before


def _occupy() -> None:
    """Puts the null device where a standard stream is closed: the next file that is opened would be number 1,
    and receive what a compiler prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)

"""Running compilers, and stopping them when nobody waits for them any more.

    >>> compilers = Compilers()
    >>> code, output = compilers.run(["nvcc", "--version"], os.environ)
    >>> compilers.stop()                                # from another thread: what runs is killed, nothing new begins

Contract: nvcc starts programs of its own, which outlive it when it is killed alone; so each compiler has a process
group, which is killed as a whole.  That is done where the wait is interrupted (Ctrl-C, which the terminal does not send
to other groups), where the caller says so, and when the interpreter ends, for those that background threads wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()  # of the process


class StoppedError(Exception):
    """The compiler was stopped, or was not started: nothing is known of what it would have said."""


class Compilers:
    """Those of one caller, which may stop them all."""

    def __init__(self) -> None:
        self._own: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """The exit code of a command, and all it wrote.

        Raises:
            StoppedError: if :meth:`stop` was called before it ended.
            OSError: if it cannot be started.
        """
        with _lock:
            if self._stopped:
                raise StoppedError
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            _running.add(process)
            self._own.add(process)
        try:
            output, _ = process.communicate()
        except BaseException:
            _kill(process)
            process.wait()
            raise
        finally:
            with _lock:
                _running.discard(process)
                self._own.discard(process)
            assert process.stdout is not None
            process.stdout.close()
        if self._stopped:
            raise StoppedError
        return process.returncode, output

    def stop(self) -> None:
        """Kills what runs; whoever waits for it gets a :class:`StoppedError`."""
        with _lock:
            self._stopped = True
            running = list(self._own)
        for process in running:
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:  # else its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@atexit.register
def _kill_all() -> None:
    with _lock:
        running = list(_running)
    for process in running:
        _kill(process)

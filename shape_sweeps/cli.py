"""The entry of the command line: ``python -m shape_sweeps run``, ``benchmark``, ``tune``, ``explain`` and the others.

    >>> main(["run", "--quick"])
    0

It imports nothing that takes time before it is ready to be interrupted: PyTorch takes a second or more.  What
there is to choose is in :mod:`shape_sweeps.options`, what happens then in :mod:`shape_sweeps.commands`, and
what the exit codes mean in :data:`EXIT_CODES`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from .errors import InputError, ReportLost
from .streams import Stream, guarded_streams

OK, FAILURE, BAD_INPUT, INTERRUPTED, NO_READER, TERMINATED = 0, 1, 2, 130, 141, 143

EXIT_CODES = """\
exit codes:
  0    every case that ran passed, and at least one ran
  1    a case failed, or every case was skipped, so that nothing was checked
  2    bad input, or an output that cannot be written: one line on standard error says what and where
  130  interrupted (Ctrl-C; 143 by SIGTERM), after the report of what was done
  141  the reader of the report went away (as in "| head"); --json, --csv and --plot are written all the same
Cases that --max-seconds skips do not change it; the last line of the report counts them.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    Args:
        argv: the arguments after the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    terminated: list[int] = []
    with _terminable(terminated):
        try:
            with guarded_streams() as stdout:
                code = _main(arguments, stdout)
                stdout.flush()
                code = _after(stdout, code)
        except KeyboardInterrupt:  # between the lines
            code = INTERRUPTED
    return TERMINATED if terminated and code == INTERRUPTED else code


def complain(message: object) -> None:
    """One line on standard error."""
    from gemm_ops.printable import printable

    print(f"shape-sweeps: error: {printable(str(message))}", file=sys.stderr)


def _main(arguments: Sequence[str], stdout: Stream) -> int:
    try:
        with _interruptible():
            from . import commands, options
        chosen = options.parser().parse_args(arguments)
        if chosen.command == "list":
            return commands.list_choices()
        commands.check_variables()
        if chosen.command == "benchmark":
            return commands.benchmark(chosen, arguments, stdout)
        if chosen.command == "explain":
            return commands.explain(chosen)
        if chosen.command == "build":
            return commands.build(chosen)
        if chosen.command == "unpack":
            return commands.unpack(chosen)
        if chosen.command == "tune":
            return commands.tune(chosen)
        return commands.run(chosen, arguments, stdout)
    except InputError as error:
        complain(error)
        return BAD_INPUT
    except ReportLost:
        return FAILURE
    except KeyboardInterrupt:  # outside the sweep itself, which keeps what it has
        print("shape-sweeps: interrupted", file=sys.stderr)
        exec("")  # or the interpreter would end itself with SIGINT if the interrupt came through an exec, as imports do
        return INTERRUPTED
    except SystemExit as stop:  # --help has printed all there is to say
        return stop.code if isinstance(stop.code, int) else OK


def _after(stdout: Stream, code: int) -> int:
    """The exit code when everything is written, or could not be."""
    if stdout.error is None or code in (BAD_INPUT, INTERRUPTED):
        return code
    if isinstance(stdout.error, BrokenPipeError):
        return NO_READER
    complain(f"cannot write to standard output: {getattr(stdout.error, 'strerror', None) or stdout.error}")
    return BAD_INPUT


@contextlib.contextmanager
def _terminable(terminated: list[int]) -> Iterator[None]:
    """SIGTERM, by which schedulers end what has run too long, is an interrupt: reports are written, compilers stopped.

    Args:
        terminated: gets the signal's number.
    """
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """An interrupt of what is imported within ends the process at once, with one line.

    An exception would not do: raised in the middle of an import it may be swallowed by an extension module that
    imports others, or be printed as ignored by a callback of the import system.  There is nothing to save yet.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    terminable = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, terminable)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"shape-sweeps: interrupted\n")
    os._exit(INTERRUPTED)

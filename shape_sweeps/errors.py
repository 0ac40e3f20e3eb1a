"""What a user can get wrong on the command line, and what can go wrong with where results go."""

from __future__ import annotations


class InputError(ValueError):
    """The sweep that was asked for cannot be run as written.

    The message is one line that says what is wrong and where (which option, which item of it).  The command
    line prints it and exits with code 2.
    """


class OutputError(Exception):
    """A result cannot be written.  The message is one line that says which, and why."""


class ReportLost(Exception):
    """Nobody can read the report any more and there is no other output, so that going on is of no use."""


#: where a C++ exception of PyTorch begins to list its frames
_CPP_FRAMES = ("Exception raised from ", "\nframe #0:", "\nC++ CapturedTraceback")


def one_line(error: BaseException | str) -> str:
    """An error's text on one line, with the class of the exception in front where there is one, and without
    the frames of C++ that PyTorch appends.
    """
    text = str(error)
    for mark in _CPP_FRAMES:
        text = text.partition(mark)[0]
    text = " ".join(text.split())
    if isinstance(error, BaseException):
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text

"""What a user can get wrong on the command line."""

from __future__ import annotations


class InputError(ValueError):
    """The sweep that was asked for cannot be run as written.

    The message is one line that says what is wrong and where (which option, which item of it).  The command
    line prints it and exits with code 2.
    """


def one_line(error: BaseException | str) -> str:
    """An error's text on one line, with the class of the exception in front where there is one."""
    text = " ".join(str(error).split())
    if isinstance(error, BaseException):
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text

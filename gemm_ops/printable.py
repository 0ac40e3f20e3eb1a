r"""Text that goes to a terminal as it reads: control characters are written out.

    >>> printable("NVIDIA\x1b[2J H200\n")
    'NVIDIA\\x1b[2J H200\\n'

Names of devices, kernels and epilogues come from files that others may have written, and a terminal obeys what is in
them.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every character that ``repr`` escapes for not being printable, escaped as there."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def printable_lines(text: str) -> str:
    """The same of a text of several lines, whose ends stay."""
    return "\n".join(map(printable, text.split("\n")))

"""Everything that is refused, as one list: what, with which error, why, and what to do instead.

    >>> from epilogues.error_catalogue import catalogue, describe
    >>> [entry.instead for entry in catalogue() if entry.what == "transpose"]
    ["call transpose on the GEMM's result, or on the operand before giving it; ..."]
    >>> print(describe())
    ...

The list is read off the tables that the refusals themselves use: :mod:`epilogues.refusal_reasons` (functions, methods
and operators, while a function is traced) and :data:`epilogues.validation.RULES` (trees).  Messages about a single
call's arguments and about operands given to a call are not in it; they stand where these are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import EpilogueError, ReductionError, UnsupportedOperationError
from .refusal_reasons import (
    COMMUNICATING_BY_NAME,
    COMMUNICATING_BY_PATTERN,
    COMMUNICATION_HINTS,
    EXPLAINED_BY_NAME,
)
from .refusals import _AUGMENTED as AUGMENTED
from .refusals import refuse
from .validation import RULES


@dataclass(frozen=True)
class Refused:
    """One thing that is refused.

    Attributes:
        what: the name of a torch function, method or special method, a pattern of such names, or a rule's name.
        when: while a function is traced, or when a tree is validated.
        error: the class of the error.
        why: the reason; of a rule, what holds of every tree.
        hint: what to do instead; ``{op}`` stands for the name.
        group: the kind of communication between elements, if it is that.
    """

    what: str
    when: Literal["traced", "validated"]
    error: type[EpilogueError]
    why: str
    hint: str
    group: str = ""

    @property
    def instead(self) -> str:
        """What to do instead."""
        return self.hint.replace("{op}", self.what)


def catalogue() -> tuple[Refused, ...]:
    """All of them: what communicates between elements, what has another reason, writing in place, rules of trees."""
    return (*_communicating(), *_explained(), *_in_place(), *_rules())


def describe() -> str:
    """The catalogue as text; what is refused for the same reason, with the same hint, shares an entry."""
    alike: dict[tuple[object, ...], list[Refused]] = {}
    for entry in catalogue():
        alike.setdefault((entry.when, entry.error, entry.why, entry.hint, entry.group), []).append(entry)
    lines = []
    for first, *others in alike.values():
        names = ", ".join(entry.what for entry in (first, *others))
        lines.append(f"{names} ({first.group})" if first.group else names)
        lines.append(f"  {first.error.__name__}, when {first.when}")
        lines.append(f"  why: {first.why}")
        instead = first.hint.replace("{op}", "it") if others else first.instead
        lines.append(f"  instead: {instead}")
    return "\n".join(lines)


def _communicating() -> list[Refused]:
    found = [
        Refused(name, "traced", ReductionError, kind.why, COMMUNICATION_HINTS.get(name, kind.instead), kind.name)
        for name, kind in COMMUNICATING_BY_NAME.items()
    ]
    for pattern, kind in COMMUNICATING_BY_PATTERN:
        hint = kind.instead.replace("{op}", "it")
        found.append(Refused(pattern.pattern, "traced", ReductionError, kind.why, hint, kind.name))
    return found


def _explained() -> list[Refused]:
    return [
        Refused(name, "traced", UnsupportedOperationError, why, hint) for name, (why, hint) in EXPLAINED_BY_NAME.items()
    ]


def _in_place() -> list[Refused]:
    """Assignments to a value, which have no table: what their error says."""
    found = []
    for name in (*AUGMENTED, "setitem"):
        what = f"__{name}__"
        try:
            refuse(what)
        except UnsupportedOperationError as error:
            said = {start: rest for start, _, rest in (line.partition(": ") for line in str(error).splitlines())}
        found.append(Refused(what, "traced", UnsupportedOperationError, said["  why"], said["  instead"]))
    return found


def _rules() -> list[Refused]:
    return [Refused(rule.name, "validated", rule.error, rule.holds, rule.instead) for rule in RULES]

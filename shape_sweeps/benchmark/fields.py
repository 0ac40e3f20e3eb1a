"""Values of a JSON document that people may have damaged, read with the place in mind that each has there.

    >>> times = Field.of('{"times": {"peers": {"median_us": "soon"}}}')["times"]["peers"]
    >>> times["median_us"].time()
    Traceback (most recent call last):
    shape_sweeps.benchmark.fields.DamagedError: times.peers.median_us: "soon" is no time in microseconds
    >>> times["calls"]
    Traceback (most recent call last):
    shape_sweeps.benchmark.fields.DamagedError: times.peers: has no "calls"

Who reads the message has the file open: it names the place as `jq` does, and what is there in the file's own words.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

#: microseconds: beyond these, ratios of times are none
_LEAST_TIME, _MOST_TIME = 1e-6, 1e12
_MOST_WHOLE = 2**63
_SHOWN = 60  # characters of a value


class DamagedError(ValueError):
    """A document is not what it should be.  The message is one line that says what is wrong, and where in it."""


@dataclass(frozen=True)
class Field:
    """A value, and where it is; each of its methods gives it as what it should be, or raises :class:`DamagedError`."""

    value: Any
    place: str = ""

    @classmethod
    def of(cls, text: str) -> Field:
        """The whole of a document."""
        if not text.strip():
            raise DamagedError("is empty")
        try:
            return cls(json.loads(text))
        except json.JSONDecodeError as error:
            raise DamagedError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
        except RecursionError as error:
            raise DamagedError("is nested too deeply") from error
        except ValueError as error:  # of numbers alone: Python refuses to read one of thousands of digits
            raise DamagedError("has a number of thousands of digits") from error

    def fault(self, what: str) -> DamagedError:
        """The error that says so of this place."""
        return DamagedError(f"{self.place}: {what}" if self.place else what)

    def __getitem__(self, key: str) -> Field:
        found = self.object()
        if key not in found:
            raise self.fault(f"has no {json.dumps(key)}")
        return found[key]

    def object(self) -> dict[str, Field]:
        """The values of an object, by their keys."""
        if not isinstance(self.value, dict):
            raise self._is_no("object")
        return {key: Field(value, self._place_of(key)) for key, value in self.value.items()}

    def list(self) -> tuple[Field, ...]:
        """The elements of a list."""
        if not isinstance(self.value, list):
            raise self._is_no("list")
        return tuple(Field(value, f"{self.place}[{index}]") for index, value in enumerate(self.value))

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self._is_no("text")
        return self.value

    def one_of(self, known: Collection[str]) -> str:
        """A string that is one of these."""
        if self.text() not in known:
            raise self.fault(f"{self._shown} is none of {', '.join(known)}")
        return self.text()

    def truth(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.fault(f"{self._shown} is neither true nor false")
        return self.value

    def whole(self, least: int = 0, what: str = "whole number") -> int:
        """A whole number from ``least`` on."""
        if type(self.value) is not int or not least <= self.value < _MOST_WHOLE:
            raise self._is_no(f"{what} from {least} on")
        return self.value

    def number(self) -> float:
        """A number from 0 on."""
        if not _is_number(self.value) or not 0 <= self.value < _MOST_WHOLE:
            raise self._is_no("number from 0 on")
        return float(self.value)

    def time(self) -> float:
        """Microseconds that something took."""
        if not _is_number(self.value) or not _LEAST_TIME <= self.value < _MOST_TIME:
            raise self._is_no("time in microseconds")
        return float(self.value)

    @property
    def _shown(self) -> str:
        if isinstance(self.value, (dict, list)) and self.value:
            return "an object" if isinstance(self.value, dict) else "a list"
        text = json.dumps(self.value, ensure_ascii=False)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."

    def _is_no(self, what: str) -> DamagedError:
        return self.fault(f"{self._shown} is no {what}")

    def _place_of(self, key: str) -> str:
        if not (key.isidentifier() and key.isascii()):
            return f"{self.place}[{json.dumps(key)}]"
        return f"{self.place}.{key}" if self.place else key


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

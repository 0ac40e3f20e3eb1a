"""Numbers with units, three digits of each, as reports print them.

>>> in_bytes(134234112), in_time(1.93e-4), in_share(0.2949)
('134 MB', '193 us', '29%')
"""

from __future__ import annotations

from collections.abc import Sequence


def in_bytes(value: float) -> str:
    """Bytes, in powers of 1000."""
    return _scaled(value, 1.0, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def in_mebibytes(value: float) -> str:
    """Bytes in powers of 1024, as sizes of caches are given."""
    return f"{value / 2**20:.3g} MiB"


def in_rate(value: float, unit: str) -> str:
    """A rate per second, such as bytes (unit "B/s") or operations ("FLOP/s")."""
    return _scaled(value, 1.0, tuple(prefix + unit for prefix in ("", "k", "M", "G", "T", "P")))


def in_time(seconds: float) -> str:
    """Seconds, from nanoseconds up."""
    if seconds < 1e-9:
        return "under 1 ns" if seconds else "0 us"
    return _scaled(seconds, 1e-9, ("ns", "us", "ms", "s"))


def in_share(value: float) -> str:
    """A share of 1, in whole percent."""
    if 0 < value < 0.01:
        return "less than 1%"
    return f"{value:.0%}"


def in_number(value: float) -> str:
    """A number without a unit, three digits of it or all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def count(number: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``, ``2 copies``, ``2 launches``."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ch"):
        return f"{number} {noun}es"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"


def _scaled(value: float, smallest: float, units: Sequence[str]) -> str:
    value /= smallest
    place = 0
    while value >= 999.5 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.3g} {units[place]}"

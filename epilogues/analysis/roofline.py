"""The roofline: whether bytes or operations bound a computation, and the least time it can take.

    >>> place_on_roofline(operations=2 * 4096**3, bytes=134_234_112, peak=989e12, bandwidth=4.8e12)
    Roofline(intensity=1023.9..., ridge=206.0..., seconds=0.000138..., bound='compute')

``operations`` are floating-point operations, ``peak`` is how many a device does in a second, ``bandwidth`` how many
bytes it moves in one.  No computation is faster than the larger of operations / peak and bytes / bandwidth; below an
intensity of ridge = peak / bandwidth operations per byte the bytes decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Roofline:
    """Where a computation is on a device's roofline.

    Attributes:
        intensity: operations per byte moved; 0 where nothing is moved.
        ridge: the intensity at which the device's bytes and operations take equally long.
        seconds: the least time.
        bound: what decides that time.
    """

    intensity: float
    ridge: float
    seconds: float
    bound: Literal["compute", "memory"]


def place_on_roofline(*, operations: float, bytes: float, peak: float, bandwidth: float) -> Roofline:
    """Where a computation is on the roofline of a device; see the module's first page.

    Args:
        operations: floating-point operations.
        bytes: bytes moved to and from memory.
        peak: operations per second, more than 0.
        bandwidth: bytes per second, more than 0.
    """
    computing, moving = operations / peak, bytes / bandwidth
    return Roofline(
        intensity=operations / bytes if bytes else 0.0,
        ridge=peak / bandwidth,
        seconds=max(computing, moving),
        bound="compute" if computing > moving else "memory",
    )

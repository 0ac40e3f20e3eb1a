"""The environment's variables that say how calls are computed: whether what they say means something.

    >>> check_variables()           # with GEMM_OPS_TUNE=often
    ValueError: GEMM_OPS_TUNE should be one of now, known, off, got 'often'

Contract: whoever decides anew, and every command, asks here first, so that a variable that means nothing is refused at
once and everywhere, also where nothing would read it: on a CPU, or before the first capture.
"""

from __future__ import annotations

from .runtime.dependent_launch import way_of_overlap
from .tuner.context import seconds_of_tuning, way_of_tuning
from .when_to_build import way_of_building


def check_variables() -> None:
    """Reads them all.

    Raises:
        ValueError: which says the variable, and what it should be.
    """
    for read in (way_of_tuning, seconds_of_tuning, way_of_building, way_of_overlap):
        read()

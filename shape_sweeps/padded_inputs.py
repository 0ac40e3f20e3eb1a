"""Inputs whose rows begin at multiples of 16 bytes, and where these differ from contiguous ones.

>>> paddings(case, epilogue, placeholder_inputs(case, epilogue), padded=True)        # x, weight, outputs
[(False, False, False), (False, False, True), ...]
"""

from __future__ import annotations

import itertools

from torch import Tensor

import epilogues as ep
from gemm_ops.outputs import empty_padded, padded_pitch

from .cases import Case
from .inputs import Inputs, output_dtypes


def paddings(case: Case, epilogue: ep.Epilogue, inputs: Inputs, padded: bool) -> list[tuple[bool, bool, bool]]:
    """Whether x, weight and outputs lie in padded rows, contiguous first; of what is the same padded, not twice."""
    wide = any(padded_pitch((case.m, case.n), dtype) for dtype in output_dtypes(case, epilogue).values())
    ways = [(False, True) if padded and can else (False,) for can in (_pads(inputs.a), _pads(inputs.b), wide)]
    return [(a, b, output) for a, b, output in itertools.product(*ways)]


def in_rows(matrix: Tensor, padded: bool) -> Tensor:
    """The matrix, or a copy of it in padded rows."""
    if not padded:
        return matrix
    return empty_padded(matrix.shape, dtype=matrix.dtype, device=matrix.device).copy_(matrix)


def _pads(matrix: Tensor) -> bool:
    return padded_pitch(matrix.shape, matrix.dtype) != 0

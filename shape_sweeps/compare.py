r"""Is a fused result as right as it can be?  Errors, and the limits they are held to.

Truth t is the product of the inputs in float64, then the epilogue in float64 with its casts left out.  A
result y of dtype d (unit roundoff u = eps(d)/2) with n elements passes if

1. NaN and infinity are exactly where round_d(t) has them,
2. its relative error ||y - t|| / ||t|| (Frobenius) is at most

       max( unfused * (1 + s),  rounding + s * u + fp32 ),

3. its largest error max|y - t| is at most

       max( max|unfused - t|,  max|round_d(t) - t| + u * max|t| + max fp32 ).

The parts follow from dtypes, shape and epilogue:

* ``unfused``: the same error of the unfused PyTorch computation, in the same run on the same inputs.
* ``rounding`` = ||round_d(t) - t|| / ||t||: the error of the best result there is.
* ``fp32`` = 2 ||f(acc + e) - f(acc)|| / ||t|| + r * eps(float32): what accumulating and computing in float32
  may add.  e_ij = eps(float32) * |a_i| * |b_j|, with the Euclidean norms of the row of A and the column of
  B, is about five standard deviations of the error of summing K products one after another; f carries it
  through the epilogue, so an ill-conditioned epilogue gets a wider limit; r is the number of the epilogue's
  operations, each of which rounds once.  The 2: a value moved by e can be rounded away from t by e more.
* ``s`` = min(1, 6 / sqrt(n)): two independent sets of rounding errors of equal size differ by about
  1/sqrt(n) in their norms; 6 standard deviations make a false alarm less likely than 1e-8 per case.
* In 3, u * max|t| is what the functions of an epilogue may add: as much again as the store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import epilogues as ep
from epilogues.tree import Apply

from .eager import named_outputs
from .inputs import Inputs

#: The criteria in one line, for reports.
CRITERION = (
    "|y-t|/|t| <= max(unfused*(1+s), rounding + s*u + fp32) and"
    " max|y-t| <= max(unfused, rounding + u*max|t| + fp32);"
    " s = min(1, 6/sqrt(n)), u = eps/2 of the output dtype; NaN and inf as in the rounded truth;"
    " every element written, none outside"
)

_EPS32 = torch.finfo(torch.float32).eps
_CONFIDENCE = 6.0  # standard deviations


@dataclass(frozen=True)
class Truth:
    """The mathematical value of one output.

    Attributes:
        value: (M, N), float64.
        drift: (M, N), float64: twice the distance by which float32 accumulation may move each element.
        operations: how many operations of the epilogue round in float32.
    """

    value: Tensor
    drift: Tensor
    operations: int


@dataclass(frozen=True)
class Comparison:
    """One output of one run against the truth.

    Errors are Frobenius norms relative to the truth's (``error``) and largest absolute differences
    (``max_error``), each of the fused result, of the unfused one, and the limit for the fused one.
    """

    output: str
    layout: str
    dtype: str
    error: float
    unfused_error: float
    error_limit: float
    max_error: float
    unfused_max_error: float
    max_error_limit: float
    faults: tuple[str, ...]


def compute_truth(inputs: Inputs, epilogue: ep.Epilogue) -> dict[str, Truth]:
    """The mathematical value of every output, name -> truth."""
    a, b = inputs.a.double(), inputs.right.double()
    acc = a @ b

    def evaluate(acc: Tensor) -> dict[str, Tensor]:
        found = epilogue.reference(acc, compute_dtype=torch.float64, keep_casts=False, **inputs.operands)
        return named_outputs(epilogue, found)

    values = evaluate(acc)
    for name, value in values.items():
        if value.dtype != torch.float64:
            raise TypeError(f"output {name!r} of the float64 reference came as {value.dtype}")
    moved = evaluate(acc + _EPS32 * a.norm(dim=1)[:, None] * b.norm(dim=0))
    operations = sum(isinstance(node, Apply) for node in epilogue.tree.nodes)
    return {
        name: Truth(value, 2 * (moved[name] - value).abs().nan_to_num_(posinf=0.0), operations)
        for name, value in values.items()
    }


def compare(name: str, layout: str, fused: Tensor, unfused: Tensor, truth: Truth) -> Comparison:
    """One fused output (M, N) against the truth, next to the unfused one."""
    value = truth.value
    count = max(value.numel(), 1)
    slack = min(1.0, _CONFIDENCE / math.sqrt(count))
    roundoff = torch.finfo(fused.dtype).eps / 2
    rounded = value.to(fused.dtype)
    faults = _pattern_faults(fused, rounded)

    finite = rounded.isfinite()
    scale = _norm(torch.where(finite, value, 0.0))
    error, max_error = _errors(fused, value, finite, scale)
    unfused_error, unfused_max_error = _errors(unfused, value, finite, scale)
    rounding, max_rounding = _errors(rounded, value, finite, scale)
    drift = torch.where(finite, truth.drift, 0.0)
    largest = _largest(torch.where(finite, value, 0.0))
    own_rounding = truth.operations * _EPS32

    floor = rounding + slack * roundoff + _ratio(_norm(drift), scale) + own_rounding
    limit = _larger_of_finite(unfused_error * (1 + slack), floor)
    max_floor = max_rounding + roundoff * largest + _largest(drift) + own_rounding * largest
    max_limit = _larger_of_finite(unfused_max_error, max_floor)
    if not error <= limit:
        faults.append(f"relative error {error:.2e} exceeds {limit:.2e} (unfused: {unfused_error:.2e})")
    if not max_error <= max_limit:
        difference = torch.where(finite, fused.double() - value, 0.0).abs()
        row, column = divmod(int(difference.argmax()), value.shape[1])
        faults.append(
            f"largest error {max_error:.2e} exceeds {max_limit:.2e} (unfused: {unfused_max_error:.2e}),"
            f" at row {row}, column {column}: {float(fused[row, column]):.6g} instead of"
            f" {float(value[row, column]):.6g}"
        )
    return Comparison(
        output=name,
        layout=layout,
        dtype=str(fused.dtype).removeprefix("torch."),
        error=error,
        unfused_error=unfused_error,
        error_limit=limit,
        max_error=max_error,
        unfused_max_error=unfused_max_error,
        max_error_limit=max_limit,
        faults=tuple(faults),
    )


def worst(comparisons: Sequence[Comparison]) -> Comparison | None:
    """The comparison that comes closest to its limit or exceeds it by most; None if there is none."""

    def nearness(comparison: Comparison) -> float:
        ratios = (
            _ratio(comparison.error, comparison.error_limit),
            _ratio(comparison.max_error, comparison.max_error_limit),
        )
        return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)

    return max(comparisons, key=nearness, default=None)


def _pattern_faults(fused: Tensor, rounded: Tensor) -> list[str]:
    """NaN, +inf and -inf must be where the rounded truth has them."""
    faults = []
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(fused) != test(rounded)
        count = int(wrong.sum())
        if count:
            row, column = (int(index) for index in wrong.nonzero()[0])
            got, expected = float(fused[row, column]), float(rounded[row, column])
            faults.append(
                f"{what} differs from the truth in {count} elements, the first at row {row}, column {column}:"
                f" {got:.6g} instead of {expected:.6g}"
            )
    return faults


def _errors(result: Tensor, value: Tensor, finite: Tensor, scale: float) -> tuple[float, float]:
    """Relative Frobenius error and largest absolute error, over the elements where the truth is finite."""
    difference = torch.where(finite, result.double() - value, 0.0)
    return _ratio(_norm(difference), scale), _largest(difference)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _ratio(part: float, whole: float) -> float:
    """The quotient of two errors or norms, where nothing of nothing is nothing."""
    if whole == 0.0:
        return 0.0 if part == 0.0 else math.inf
    return part / whole


def _larger_of_finite(unfused: float, floor: float) -> float:
    # An unfused computation that overflowed on the way excuses nothing.
    return max(unfused, floor) if math.isfinite(unfused) else floor

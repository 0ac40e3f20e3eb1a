"""Are the results that were timed right?  Every contender against float64, and ours against eager PyTorch.

    >>> outputs = run_poisoned(prepared)                    # what a graph writes is NaN before it runs
    >>> faults = check_ours(outputs, eager_outputs, truth)

Every element has to be written.  Errors are of the rows of :func:`checked_rows`: the first and the last of a large
output, where the product in float64 takes no longer than the rest.  Ours passes by the criteria of
:mod:`shape_sweeps.compare`: no larger than that of eager PyTorch in the same run, or than rounding explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import epilogues as ep

from ..compare import Truth, compare, compute_truth
from ..graph_timing import GRAPH, Prepared
from ..inputs import Inputs

#: rows that are compared at most, half of them the first and half the last
ROWS = 256


def checked_rows(rows: int) -> Tensor:
    """The numbers of the rows that are compared."""
    if rows <= ROWS:
        return torch.arange(rows)
    return torch.cat((torch.arange(ROWS // 2), torch.arange(rows - ROWS // 2, rows)))


def run_poisoned(prepared: Prepared) -> dict[str, Tensor]:
    """The outputs of a run by name, "product" of a product alone, that found them full of NaN.

    Of a graph they are in the same memory every time, and poisoned for certain.  Other calls have new ones, for which
    memory that was poisoned and given back is what the allocator has first.
    """
    outputs = _named(prepared.run())
    poisoned = list(outputs.values())
    if prepared.how != GRAPH:
        poisoned += [torch.empty_like(output) for output in outputs.values()]
    for output in poisoned:
        output.fill_(float("nan"))
    del outputs, poisoned
    return _named(prepared.run())


def truth_of(inputs: Inputs, epilogue: ep.Epilogue) -> dict[str, Truth]:
    """The outputs of a call in float64, of the rows that are compared."""
    rows = checked_rows(inputs.a.shape[0]).to(inputs.a.device)
    taken: dict[str, Any] = {
        name: value[rows] if epilogue.operands[name] in (ep.Kind.COLUMN, ep.Kind.AUX) else value
        for name, value in inputs.operands.items()
    }
    return compute_truth(replace(inputs, a=inputs.a[rows], operands=taken), epilogue)


def error_of(outputs: Mapping[str, Tensor], truth: Mapping[str, Truth]) -> float:
    """The error relative to the truth (Frobenius) of the output that has the largest; NaN if an element is not
    written.
    """
    errors = []
    for name, output in outputs.items():
        if not bool(output.isfinite().all()):
            return float("nan")
        value = truth[name].value
        taken = output[checked_rows(output.shape[0]).to(output.device)].double()
        errors.append(float((taken - value).norm() / value.norm()))
    return max(errors)


def product_error(product: Tensor, x: Tensor, weight: Tensor) -> float:
    """The same of a bare product of x (M, K) and weight (N, K)."""
    rows = checked_rows(x.shape[0]).to(x.device)
    value = x[rows].double() @ weight.t().double()
    return error_of({"product": product}, {"product": Truth(value, torch.zeros_like(value), 0)})


def check_ours(ours: Mapping[str, Tensor], eager: Mapping[str, Tensor], truth: Mapping[str, Truth]) -> list[str]:
    """What is wrong with our outputs; empty if nothing is."""
    faults = []
    for name, output in ours.items():
        unwritten = int((~output.isfinite()).sum())
        if unwritten:
            faults.append(f"{name}: {unwritten} of {output.numel()} elements are not finite, or were never written")
            continue
        rows = checked_rows(output.shape[0]).to(output.device)
        found = compare(name, "contiguous", output[rows], eager[name][rows], truth[name])
        faults += [f"{name}: {fault}" for fault in found.faults]
    return faults


def _named(found: object) -> dict[str, Tensor]:
    if isinstance(found, Tensor):
        return {"product": found}
    assert isinstance(found, dict), "contenders give a tensor, or tensors by name"
    return found

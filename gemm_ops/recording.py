"""An elementwise call that autograd records: a node of its own in PyTorch's graph.

    >>> results = compute_recorded(x, epilogue, {"bias": bias})
    >>> results["D"].sum().backward()

The same as the operator of :mod:`gemm_ops.operators`, for what is not traced: several times less host time.
Differentiable once and more often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.gradients.backward import ACCUMULATOR

from .elementwise_call import run_elementwise
from .gradients import gradients, keep, needs_of


def compute_recorded(x: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """The outputs of an epilogue over x by name; recorded where an argument requires grad and grad mode is on."""
    if not (torch.is_grad_enabled() and needs_of(x, operands)):
        return run_elementwise(x, epilogue, operands)
    names = tuple(name for name in epilogue.operands if isinstance(operands[name], Tensor))
    numbers = {name: operands[name] for name in epilogue.operands if name not in names}
    results = _Apply.apply(epilogue, numbers, names, x, *(operands[name] for name in names))
    return dict(zip(epilogue.outputs, results, strict=True))


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        epilogue, numbers, names, x, *tensors = arguments
        operands = {**numbers, **dict(zip(names, tensors, strict=True))}
        results = run_elementwise(x, epilogue, operands)
        keep(ctx, epilogue, x, operands, results)
        ctx.tensor_names = names
        return tuple(results[name] for name in epilogue.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = gradients(ctx, grads, compute_recorded)
        return None, None, None, found.get(ACCUMULATOR), *(found.get(name) for name in ctx.tensor_names)

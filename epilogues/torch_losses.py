"""The losses of ``torch.nn.functional`` that are elementwise when nothing is reduced.

    >>> @ep.epilogue
    ... def squared_error(acc, target: Aux):
    ...     return F.mse_loss(acc, target, reduction="none")

:data:`LOSSES` maps their names to functions with PyTorch's arguments, that compute the loss of each element as PyTorch
does; :mod:`epilogues.torch_signatures` takes them over.  With any other ``reduction``, the default too, they are
refused.  The losses that compare classes or whole samples are refused by :mod:`epilogues.refusals`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.nn import functional as F

from . import functions as ep
from .errors import EpilogueError
from .functions.apply import one_function
from .operand_shapes import is_number
from .refusals import refuse_elementwise_loss, refuse_reduction
from .source import explain, short, user_location


def mse_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean", weight: Any = None
) -> Any:
    """``(input - target) ** 2``."""
    _elements("mse_loss", reduction, size_average, reduce)
    return _weighted(_squared_error(input, target), weight)


def l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean", weight: Any = None
) -> Any:
    """``abs(input - target)``."""
    _elements("l1_loss", reduction, size_average, reduce)
    if weight is None:
        weight = _argument_of(F.l1_loss, "weight")  # PyTorch 2.13 doesn't hand it on
    return _weighted(ep.abs(ep.sub(input, target)), weight)


def smooth_l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean", beta: Any = 1.0
) -> Any:
    """The square of the difference up to ``beta``, its size beyond."""
    _elements("smooth_l1_loss", reduction, size_average, reduce)
    _number("smooth_l1_loss", "beta", beta, zero=True)
    if beta == 0:
        return ep.abs(ep.sub(input, target))
    return _smooth(input, target, beta)


def huber_loss(input: Any, target: Any, reduction: Any = "mean", delta: Any = 1.0, weight: Any = None) -> Any:
    """Half the square of the difference up to ``delta``, ``delta`` times its size beyond."""
    _elements("huber_loss", reduction)
    _number("huber_loss", "delta", delta, zero=False)
    return _weighted(_huber(input, target, delta), weight)


def binary_cross_entropy_with_logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    pos_weight: Any = None,
) -> Any:
    """``-(target * log(sigmoid(input)) + (1 - target) * log(1 - sigmoid(input)))``, without overflow."""
    _elements("binary_cross_entropy_with_logits", reduction, size_average, reduce)
    likelihood = ep.logsigmoid(input)
    if pos_weight is not None:
        likelihood = ep.mul(likelihood, ep.add(ep.mul(ep.sub(pos_weight, 1.0), target), 1.0))
    return _weighted(ep.sub(ep.mul(ep.sub(1.0, target), input), likelihood), weight)


def binary_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: Any = "mean"
) -> Any:
    """Refused: what PyTorch computes is more than the formula."""
    _elements("binary_cross_entropy", reduction, size_average, reduce)
    refuse_elementwise_loss(
        "binary_cross_entropy",
        why="PyTorch checks that every input is between 0 and 1, and bounds the gradient otherwise than the loss",
        instead='take the values before the sigmoid: F.binary_cross_entropy_with_logits(..., reduction="none")',
    )


def kl_div(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    log_target: bool = False,
) -> Any:
    """``target * (log(target) - input)``; ``input``, and with ``log_target`` the target, is a logarithm."""
    _elements("kl_div", reduction, size_average, reduce)
    if log_target:
        return ep.mul(ep.exp(target), ep.sub(target, input))
    return ep.sub(ep.xlogy(target, target), ep.mul(target, input))


def poisson_nll_loss(
    input: Any,
    target: Any,
    log_input: bool = True,
    full: bool = False,
    size_average: Any = None,
    eps: Any = 1e-8,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """``exp(input) - target * input``, or ``input - target * log(input + eps)``; ``full`` adds Stirling's term."""
    _elements("poisson_nll_loss", reduction, size_average, reduce)
    if log_input:
        loss = ep.sub(ep.exp(input), ep.mul(target, input))
    else:
        loss = ep.sub(input, ep.mul(target, ep.log(ep.add(input, eps))))
    if not full:
        return loss
    half_log = ep.mul(0.5, ep.log(ep.mul(2 * math.pi, target)))
    stirling = ep.add(ep.sub(ep.mul(target, ep.log(target)), target), half_log)
    return ep.add(loss, ep.where(ep.le(target, 1.0), 0.0, stirling))


def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: Any = 1e-6, reduction: Any = "mean"
) -> Any:
    """Refused: what PyTorch computes is more than the formula."""
    _elements("gaussian_nll_loss", reduction)
    refuse_elementwise_loss(
        "gaussian_nll_loss",
        why="PyTorch checks that no variance is negative, and bounds it without a trace in the gradient",
        instead="write the formula: 0.5 * (torch.log(var) + (input - target) ** 2 / var)",
    )


def soft_margin_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean"
) -> Any:
    """``log(1 + exp(-target * input))``."""
    _elements("soft_margin_loss", reduction, size_average, reduce)
    return ep.log1p(ep.exp(ep.mul(ep.neg(target), input)))


def margin_ranking_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: Any = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """``max(0, -target * (input1 - input2) + margin)``."""
    _elements("margin_ranking_loss", reduction, size_average, reduce)
    return ep.clamp(ep.add(ep.mul(ep.neg(target), ep.sub(input1, input2)), margin), min=0.0)


def hinge_embedding_loss(
    input: Any,
    target: Any,
    margin: Any = 1.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """``input`` where the target is 1, ``max(0, margin - input)`` where it is -1."""
    _elements("hinge_embedding_loss", reduction, size_average, reduce)
    apart = ep.where(ep.ne(target, 1.0), ep.clamp(ep.sub(margin, input), min=0.0), 0.0)
    return ep.add(apart, ep.where(ep.ne(target, -1.0), input, 0.0))


#: PyTorch's name -> the loss of each element
LOSSES: dict[str, Callable[..., Any]] = {
    loss.__name__: loss
    for loss in (
        mse_loss,
        l1_loss,
        smooth_l1_loss,
        huber_loss,
        binary_cross_entropy,
        binary_cross_entropy_with_logits,
        kl_div,
        poisson_nll_loss,
        gaussian_nll_loss,
        soft_margin_loss,
        margin_ranking_loss,
        hinge_embedding_loss,
    )
}


# PyTorch has a kernel for each of these three; the others it computes operation by operation, as they stand above.
# Of NaN the square is selected: its gradient is NaN, as PyTorch's, and that of the size 0


@one_function
def _squared_error(input: Any, target: Any) -> Any:
    return ep.square(ep.sub(input, target))


@one_function
def _smooth(input: Any, target: Any, beta: Any) -> Any:
    size = ep.abs(ep.sub(input, target))
    return ep.where(ep.ge(size, beta), size - 0.5 * beta, 0.5 * size * size / beta)


@one_function
def _huber(input: Any, target: Any, delta: Any) -> Any:
    size = ep.abs(ep.sub(input, target))
    return ep.where(ep.gt(size, delta), delta * (size - 0.5 * delta), 0.5 * size * size)


def _elements(name: str, reduction: Any, size_average: Any = None, reduce: Any = None) -> None:
    """Refuses every reduction; the older arguments say it where they are given."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise EpilogueError(
            explain(f'{name}: expected reduction="none", got reduction={short(reduction)}', user_location())
        )
    if reduction != "none":
        refuse_reduction(name, reduction)


def _weighted(loss: Any, weight: Any) -> Any:
    return loss if weight is None else ep.mul(loss, weight)


def _number(name: str, parameter: str, value: Any, *, zero: bool) -> None:
    if not is_number(value) or not (value > 0 or (zero and value == 0)):
        expected = "a number, 0 or larger" if zero else "a number larger than 0"
        raise EpilogueError(
            explain(f"{name}: expected {expected}, for {parameter}, got {short(value)}", user_location())
        )


def _argument_of(function: Callable[..., Any], name: str) -> Any:
    """An argument of a Python function that is running now, from its frame; None if it isn't running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)

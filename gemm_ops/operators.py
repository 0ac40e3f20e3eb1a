"""The operators that PyTorch's dispatcher, autograd, compiler and exporter see.

    >>> call = flatten(x, epilogue.text, tuple(epilogue.operands), {"bias": bias})
    >>> results = torch.ops.gemm_ops.apply(*call)            # the outputs in order

``gemm_ops::apply(Tensor x, Tensor[] operands, float[] numbers, str given, str epilogue) -> Tensor[]``

Contract
--------
* ``epilogue`` is a tree's JSON text, which a saved graph can carry anywhere, or "activation gelu",
  "bias_activation gelu": what a name stands for.
* ``given`` says of each operand, in the tree's order, whether it is the next of ``operands`` ("t") or of ``numbers``
  ("n").
* All outputs are new tensors that lie as x does.
* Differentiable once and more often: the backward is made of calls of the same operator (:mod:`gemm_ops.gradients`).

Where nothing is traced, calls of :func:`gemm_ops.apply` do not come by here: an operator written in Python costs more
than the rest of a warm call, and a recorded one several times as much as :mod:`gemm_ops.recording`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype
from epilogues.gradients.backward import ACCUMULATOR
from epilogues.tree import EpilogueTree

from .arguments import as_epilogue
from .elementwise_call import run_elementwise
from .gradients import gradients, keep

_LIBRARY = torch.library.Library("gemm_ops", "DEF")
_LIBRARY.define(
    "apply(Tensor x, Tensor[] operands, float[] numbers, str given, str epilogue) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Arguments(NamedTuple):
    """The arguments of ``gemm_ops::apply``."""

    x: Tensor
    operands: list[Tensor]
    numbers: list[float]
    given: str
    epilogue: str


def flatten(x: Tensor, text: str, names: Sequence[str], operands: Mapping[str, Tensor | float]) -> Arguments:
    """A call as the operator takes it.

    Args:
        text: the epilogue, as :func:`epilogue_of` reads it.
        names: its operands.
        operands: tensors or numbers by name.
    """
    tensors: list[Tensor] = []
    numbers: list[float] = []
    given = ""
    for name in names:
        value = operands[name]
        if isinstance(value, Tensor):
            tensors.append(value)
            given += "t"
        else:
            numbers.append(float(value))
            given += "n"
    return Arguments(x, tensors, numbers, given, text)


@functools.lru_cache(maxsize=4096)
def epilogue_of(text: str) -> Epilogue:
    """The epilogue that an operator is told of.

    Raises:
        EpilogueError: if the text names none.
    """
    if text.startswith("{"):
        return Epilogue.from_tree(EpilogueTree.from_json(text))
    builder, _, name = text.partition(" ")
    return as_epilogue(name or None, builder == "bias_activation")


def _unflatten(
    epilogue: Epilogue, operands: Sequence[Tensor], numbers: Sequence[float], given: str
) -> dict[str, Tensor | float]:
    """The operands by name."""
    tensors, values = iter(operands), iter(numbers)
    return {
        name: next(tensors) if way == "t" else next(values) for name, way in zip(epilogue.operands, given, strict=True)
    }


@torch.library.impl(_LIBRARY, "apply", "CompositeExplicitAutograd")
def _apply(x: Tensor, operands: list[Tensor], numbers: list[float], given: str, epilogue: str) -> list[Tensor]:
    chosen = epilogue_of(epilogue)
    with torch.no_grad():  # what autograd is to know, it knows by now
        results = run_elementwise(x, chosen, _unflatten(chosen, operands, numbers, given))
    return [results[name] for name in chosen.outputs]


@torch.library.register_fake("gemm_ops::apply", lib=_LIBRARY)
def _apply_fake(x: Tensor, operands: list[Tensor], numbers: list[float], given: str, epilogue: str) -> list[Tensor]:
    return [torch.empty_like(x, dtype=_dtype(store, x.dtype)) for store in epilogue_of(epilogue).tree.outputs]


def _dtype(store: Any, default: torch.dtype) -> torch.dtype:
    """The dtype that an output is stored in, of x's dtype where the epilogue names none."""
    name = EpilogueTree.output_dtype(store, "")
    return torch_dtype(name) if name else default


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, operands, numbers, given, text = inputs
    epilogue = epilogue_of(text)
    named = _unflatten(epilogue, operands, numbers, given)
    keep(ctx, epilogue, x, named, dict(zip(epilogue.outputs, output, strict=True)))
    ctx.tensor_names = tuple(name for name, way in zip(epilogue.operands, given, strict=True) if way == "t")
    # of an empty list PyTorch wants an empty list, of one of numbers nothing
    ctx.of_numbers = None if numbers else []


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    found = gradients(ctx, grads, _compute)
    return found.get(ACCUMULATOR), [found.get(name) for name in ctx.tensor_names], ctx.of_numbers, None, None


torch.library.register_autograd("gemm_ops::apply", _backward, setup_context=_setup_context, lib=_LIBRARY)


def _compute(x: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    found = torch.ops.gemm_ops.apply(*flatten(x, epilogue.text, tuple(epilogue.operands), operands))
    return dict(zip(epilogue.outputs, found, strict=True))

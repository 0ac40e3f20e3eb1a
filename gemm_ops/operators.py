"""The operators that PyTorch's dispatcher, autograd, compiler and exporter see.

    >>> call = flatten(x, epilogue, {"bias": bias})
    >>> results = torch.ops.gemm_ops.apply(*call)            # the outputs in order

``gemm_ops::apply(Tensor x, Tensor[] operands, float[] numbers, str given, str epilogue, int kept) -> Tensor[]``

Contract
--------
* ``epilogue`` is a tree's JSON text, which a saved graph can carry anywhere, or "activation gelu",
  "bias_activation gelu": what a name stands for.
* ``given`` says of each operand, in the tree's order, whether it is the next of ``operands`` ("t") or of ``numbers``
  ("n").
* All outputs are new tensors that lie as x does.  The first ``kept`` are the caller's; gradients come from those.
  What follows was stored for the backward.
* Differentiable once and more often: the backward is made of calls of the same operator (:mod:`gemm_ops.gradients`).

Where nothing is recorded or traced, calls of :func:`gemm_ops.apply` do not come by here: PyTorch's dispatcher costs
more than the rest of a warm call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype
from epilogues.gradients.backward import ACCUMULATOR
from epilogues.tree import EpilogueTree

from .arguments import as_epilogue
from .elementwise_call import bind_elementwise, compute_elementwise, find_walk
from .gradients import Pass, storing_forward

_LIBRARY = torch.library.Library("gemm_ops", "DEF")
_LIBRARY.define(
    "apply(Tensor x, Tensor[] operands, float[] numbers, str given, str epilogue, int kept) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Arguments(NamedTuple):
    """The arguments of ``gemm_ops::apply``."""

    x: Tensor
    operands: list[Tensor]
    numbers: list[float]
    given: str
    epilogue: str
    kept: int


def flatten(x: Tensor, text: str, names: Sequence[str], operands: Mapping[str, Tensor | float], kept: int) -> Arguments:
    """A call as the operator takes it.

    Args:
        text: the epilogue, as :func:`epilogue_of` reads it.
        names: its operands.
        operands: tensors or numbers by name.
        kept: how many of its outputs are the caller's.
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
    return Arguments(x, tensors, numbers, given, text, kept)


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
def _apply(
    x: Tensor, operands: list[Tensor], numbers: list[float], given: str, epilogue: str, kept: int
) -> list[Tensor]:
    chosen = epilogue_of(epilogue)
    with torch.no_grad():  # what autograd is to know, it knows by now
        call = bind_elementwise(x, chosen, _unflatten(chosen, operands, numbers, given), None)
        results = compute_elementwise(call, find_walk(call))
    return [results[name] for name in chosen.outputs]


@torch.library.register_fake("gemm_ops::apply", lib=_LIBRARY)
def _apply_fake(
    x: Tensor, operands: list[Tensor], numbers: list[float], given: str, epilogue: str, kept: int
) -> list[Tensor]:
    return [torch.empty_like(x, dtype=_dtype(store, x.dtype)) for store in epilogue_of(epilogue).tree.outputs]


def _dtype(store: Any, default: torch.dtype) -> torch.dtype:
    """The dtype that an output is stored in, of x's dtype where the epilogue names none."""
    name = EpilogueTree.output_dtype(store, "")
    return torch_dtype(name) if name else default


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, operands, numbers, given, text, kept = inputs
    epilogue = epilogue_of(text)
    named = _unflatten(epilogue, operands, numbers, given)
    needs = _needs(x, named)
    ctx.set_materialize_grads(False)
    ctx.given = given
    ctx.backward_pass = Pass(epilogue, epilogue.outputs[:kept], needs, x.dtype)
    ctx.reads = ctx.backward_pass.reads
    saved = {("x", ""): x, **{("operand", name): value for name, value in named.items() if isinstance(value, Tensor)}}
    saved |= {("output", name): value for name, value in zip(epilogue.outputs, output, strict=True)}
    saved = {key: value for key, value in saved.items() if key in ctx.reads}
    ctx.saved_keys = tuple(saved)
    ctx.save_for_backward(*saved.values())
    # of what is not read, the shape and the dtype are
    ctx.x_like = _like(x)
    ctx.operands_like = {name: _like(value) if isinstance(value, Tensor) else value for name, value in named.items()}
    ctx.output_dtypes = tuple(value.dtype for value in output[:kept])
    ctx.tensor_names = tuple(name for name, way in zip(epilogue.operands, given, strict=True) if way == "t")


def _needs(x: Tensor, operands: Mapping[str, Tensor | float]) -> tuple[str, ...]:
    """What gradients will be asked for."""
    named = {ACCUMULATOR: x, **operands}
    return tuple(name for name, value in named.items() if isinstance(value, Tensor) and value.requires_grad)


def _like(tensor: Tensor) -> Tensor:
    """One element that looks like the tensor."""
    return tensor.new_empty(()).expand(tensor.shape)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    whole: Pass = ctx.backward_pass
    given = dict(zip(whole.outputs, grads, strict=False))  # nothing comes of what was stored for the backward
    present = {name: grad for name, grad in given.items() if grad is not None}
    # of an empty list PyTorch wants an empty list, of one of numbers nothing
    of_numbers: list[None] | None = None if "n" in ctx.given else []
    if not present:
        return None, [None] * len(ctx.tensor_names), of_numbers, None, None, None
    chosen = replace(whole, outputs=tuple(present))
    if not chosen.reads <= ctx.reads:
        chosen = whole
        for name, dtype in zip(whole.outputs, ctx.output_dtypes, strict=True):
            if name not in present:
                present[name] = torch.zeros_like(ctx.x_like, dtype=dtype)
    saved = dict(zip(ctx.saved_keys, ctx.saved_tensors, strict=True))
    operands = {name: saved.get(("operand", name), like) for name, like in ctx.operands_like.items()}
    outputs = {name: value for (role, name), value in saved.items() if role == "output"}
    found = chosen.run(present, saved.get(("x", ""), ctx.x_like), operands, outputs, compute)
    return found.get(ACCUMULATOR), [found.get(name) for name in ctx.tensor_names], of_numbers, None, None, None


torch.library.register_autograd("gemm_ops::apply", _backward, setup_context=_setup_context, lib=_LIBRARY)


def compute(x: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """The outputs of an epilogue over x by name, by way of the operator."""
    call = flatten(x, epilogue.text, tuple(epilogue.operands), operands, len(epilogue.outputs))
    return dict(zip(epilogue.outputs, torch.ops.gemm_ops.apply(*call), strict=True))


def compute_differentiably(x: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """As :func:`compute`, with what the backward needs stored where that moves fewer bytes."""
    forward = storing_forward(epilogue, _needs(x, operands), x.dtype)
    call = flatten(x, forward.text, tuple(forward.operands), operands, len(epilogue.outputs))
    return dict(zip(epilogue.outputs, torch.ops.gemm_ops.apply(*call), strict=False))

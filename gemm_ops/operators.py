"""The operators that PyTorch's dispatcher, autograd, compiler and exporter see.

    >>> text, names, outputs = describe(epilogue, {"bias": bias})
    >>> results = torch.ops.gemm_ops.apply(x, *flatten(text, names, {"bias": bias}))            # the outputs in order

``gemm_ops::apply(Tensor x, Tensor[] operands, float[] numbers, str given, str epilogue) -> Tensor[]``
``gemm_ops::matmul(Tensor a, Tensor b, Tensor[] operands, float[] numbers, str given, str epilogue, str needs, bool
padded_output) -> Tensor[]``
``gemm_ops::matmul_inference``: the same without ``needs``

Contract
--------
* ``epilogue`` is a tree's JSON text, which a saved graph can carry anywhere, or "activation gelu",
  "bias_activation gelu": what a name stands for.
* ``given`` says of each operand, in the tree's order, whether it is the next of ``operands`` ("t") or of ``numbers``
  ("n").
* All outputs are new tensors: those of ``apply`` lie as x does, those of ``matmul`` are contiguous, or views of padded
  rows.
* ``needs`` names what gradients will be needed of ("accumulator,bias"); what the backward reads of the accumulator
  follows the caller's outputs.  "" for inference.
* Differentiable: the backward is made of calls of the same operators (:mod:`gemm_ops.gradients`).
* ``matmul_inference`` is not, and is what graphs have that record no gradients: an autograd kernel in Python takes half
  of the host's time of a call.

Where nothing is traced, calls do not come by here: an operator written in Python costs more
than the rest of a warm call, and a recorded one several times as much as :mod:`gemm_ops.recording`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epilogues import Epilogue, EpilogueError, builders
from epilogues.dtypes import torch_dtype
from epilogues.gradients.backward import ACCUMULATOR
from epilogues.tree import MAIN_OUTPUT, EpilogueTree

from . import native
from .addressing.views import pitch_of
from .arguments import EpilogueLike, as_epilogue, check_named_operands, outputs_by_name
from .autocast import without_autocast
from .elementwise_call import run_elementwise
from .errors import ProblemError
from .gradients import find_pass, gradients, keep, kept, needs_of, product_needs, storing_forward
from .operands import bind_operands
from .problem import read_problem, read_tensor
from .product_call import multiply
from .recording import compute_recorded, keep_product, multiply_fused, product_gradients

_LIBRARY = torch.library.Library("gemm_ops", "DEF")
_OPERANDS = "Tensor[] operands, float[] numbers, str given, str epilogue"
_LIBRARY.define(
    f"apply(Tensor x, {_OPERANDS}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def describe(
    epilogue: EpilogueLike, operands: Mapping[str, Tensor | float]
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """An epilogue as the operators are told of it, the names of its operands, and of its outputs.

    PyTorch's compiler traces this function, so it looks things up and no more.

    Raises:
        EpilogueError: an operand is missing or unknown.
    """
    if isinstance(epilogue, Epilogue):
        text, names, outputs = epilogue.text, tuple(epilogue.operands), epilogue.outputs
    else:
        check_named_operands(epilogue, operands)
        has_bias = operands.get("bias") is not None
        text = f"{'bias_activation' if has_bias else 'activation'} {epilogue or ''}"
        names, outputs = ("bias",) if has_bias else (), (MAIN_OUTPUT,)
    for name in names:
        if operands.get(name) is None:
            raise EpilogueError(f"operand {name} is missing; the epilogue has {', '.join(names)}")
    for name, value in operands.items():
        if name not in names and value is not None:
            raise EpilogueError(f"operand {name} is unknown; the epilogue has {', '.join(names) or 'none'}")
    return text, names, outputs


def flatten(
    text: str, names: Sequence[str], operands: Mapping[str, Tensor | float]
) -> tuple[list[Tensor], list[float], str, str]:
    """An epilogue and its operands as the operators take them: ``operands``, ``numbers``, ``given``, ``epilogue``.

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
    return tensors, numbers, given, text


def fill_given(results: dict[str, Tensor], out: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The results by name, copied to what was given as ``out``.

    Checks what :func:`gemm_ops.outputs.bind_outputs` does as far as a graph can: there are no addresses in it.

    Raises:
        ProblemError: where that is not what the results could have been written to.
    """
    if out is None:
        return results
    if isinstance(out, Tensor) and len(results) > 1:
        raise ProblemError(f"out is one tensor, and the epilogue has the outputs {', '.join(results)}")
    given = outputs_by_name(out)
    if set(given) != set(results):
        raise ProblemError(f"out should have the outputs {', '.join(results)}; got {', '.join(given) or 'none'}")
    buffers = list(given.values())
    for name, buffer in given.items():
        result = results[name]
        if buffer.shape != result.shape or buffer.dtype != result.dtype or buffer.device != result.device:
            raise ProblemError(f"out[{name!r}] should have the result's shape, dtype {result.dtype} and device")
        if sum(buffer is other for other in buffers) > 1:
            raise ProblemError(f"out[{name!r}] shares memory with another output")
        if torch.is_grad_enabled() and (buffer.requires_grad or result.requires_grad):
            raise ProblemError("out= does not go with gradients: an argument requires grad; use torch.no_grad()")
    for name, buffer in given.items():
        buffer.copy_(results[name])
    return dict(given)


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
    native.remember_text(epilogue, "", x.dtype, chosen)
    with torch.no_grad():  # what autograd is to know, it knows by now
        results = run_elementwise(x, chosen, _unflatten(chosen, operands, numbers, given))
    return [results[name] for name in chosen.outputs]


@torch.library.register_fake("gemm_ops::apply", lib=_LIBRARY)
def _apply_fake(x: Tensor, operands: list[Tensor], numbers: list[float], given: str, epilogue: str) -> list[Tensor]:
    chosen = epilogue_of(epilogue)
    bind_operands(chosen.tree, _unflatten(chosen, operands, numbers, given), read_tensor("x", x))
    return [torch.empty_like(x, dtype=_dtype(store, x.dtype)) for store in chosen.tree.outputs]


def _dtype(store: Any, default: torch.dtype) -> torch.dtype:
    """The dtype that an output is stored in, of x's dtype where the epilogue names none."""
    name = EpilogueTree.output_dtype(store, "")
    return torch_dtype(name) if name else default


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, operands, numbers, given, text = inputs
    epilogue = epilogue_of(text)
    named = _unflatten(epilogue, operands, numbers, given)
    whole = find_pass(epilogue, epilogue.outputs, needs_of(x, named), x.dtype)
    keep(ctx, whole, x, named, dict(zip(epilogue.outputs, output, strict=True)))
    _keep_names(ctx, epilogue, numbers, given)


def _keep_names(ctx: Any, epilogue: Epilogue, numbers: Sequence[float], given: str) -> None:
    ctx.tensor_names = tuple(name for name, way in zip(epilogue.operands, given, strict=True) if way == "t")
    # of an empty list PyTorch wants an empty list, of one of numbers nothing
    ctx.of_numbers = None if numbers else []


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    found = gradients(ctx, kept(ctx), grads, compute_in_graph)
    return found.get(ACCUMULATOR), [found.get(name) for name in ctx.tensor_names], ctx.of_numbers, None, None


torch.library.register_autograd("gemm_ops::apply", _backward, setup_context=_setup_context, lib=_LIBRARY)


def compute_in_graph(x: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """The outputs of an epilogue over x by name, as an operator that is recorded."""
    found = torch.ops.gemm_ops.apply(x, *flatten(epilogue.text, tuple(epilogue.operands), operands))
    return dict(zip(epilogue.outputs, found, strict=True))


_LIBRARY.define(
    f"matmul(Tensor a, Tensor b, {_OPERANDS}, str needs, bool padded_output) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _needs(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _call_of_matmul(
    dtype: torch.dtype,
    operands: list[Tensor],
    numbers: list[float],
    given: str,
    epilogue: str,
    needs: str,
    padded_output: bool,
) -> tuple[Epilogue, dict[str, Tensor | float], bool]:
    """What is computed, with what is stored for the backward; the operands; and whether outputs are padded."""
    chosen = epilogue_of(epilogue)
    return storing_forward(chosen, _needs(needs), dtype), _unflatten(chosen, operands, numbers, given), padded_output


@torch.library.impl(_LIBRARY, "matmul", "CompositeExplicitAutograd")
def _matmul(a: Tensor, b: Tensor, *arguments: Any) -> list[Tensor]:
    forward, operands, padded_output = _call_of_matmul(a.dtype, *arguments)
    *_, text, needs, _ = arguments
    native.remember_text(text, needs, a.dtype, forward)
    with torch.no_grad(), without_autocast(a.device.type):
        results = multiply(a, b, forward, operands, None, padded_output)
    return [results[name] for name in forward.outputs]


@torch.library.register_fake("gemm_ops::matmul", lib=_LIBRARY)
def _matmul_fake(a: Tensor, b: Tensor, *arguments: Any) -> list[Tensor]:
    forward, operands, padded_output = _call_of_matmul(a.dtype, *arguments)
    problem = read_problem(a, b)
    bind_operands(forward.tree, operands, problem)
    *lead, n = problem.output_shape
    outputs = []
    for store in forward.tree.outputs:
        dtype = _dtype(store, a.dtype)
        pitch = pitch_of(n, dtype.itemsize) if padded_output else n
        wide = a.new_empty((*lead, pitch), dtype=dtype)
        outputs.append(wide[..., :n] if padded_output else wide)
    return outputs


_LIBRARY.define(
    f"matmul_inference(Tensor a, Tensor b, {_OPERANDS}, bool padded_output) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_LIBRARY, "matmul_inference", "CompositeExplicitAutograd")
def _matmul_inference(a: Tensor, b: Tensor, *arguments: Any) -> list[Tensor]:
    *described, padded_output = arguments
    return _matmul(a, b, *described, "", padded_output)


@torch.library.register_fake("gemm_ops::matmul_inference", lib=_LIBRARY)
def _matmul_inference_fake(a: Tensor, b: Tensor, *arguments: Any) -> list[Tensor]:
    *described, padded_output = arguments
    return _matmul_fake(a, b, *described, "", padded_output)


def _setup_matmul(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b, operands, numbers, given, text, needs, _ = inputs
    epilogue = epilogue_of(text)
    named = _unflatten(epilogue, operands, numbers, given)
    wanted = product_needs(a, b, named)
    forward = storing_forward(epilogue, _needs(needs), a.dtype)
    results = dict(zip(forward.outputs, output, strict=True))
    keep_product(ctx, forward, epilogue.outputs, wanted, a, b, named, results)
    _keep_names(ctx, epilogue, numbers, given)


def product_in_graph(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices by a fused kernel, as an operator."""
    identity = builders.identity()
    found: list[Tensor] = torch.ops.gemm_ops.matmul_inference(a, b, *flatten(identity.text, (), {}), False)
    return found[0]


def _backward_matmul(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    grad_a, grad_b, found = product_gradients(ctx, grads, compute_in_graph, product_in_graph)
    of_operands = [found.get(name) for name in ctx.tensor_names]
    return grad_a, grad_b, of_operands, ctx.of_numbers, None, None, None, None


torch.library.register_autograd("gemm_ops::matmul", _backward_matmul, setup_context=_setup_matmul, lib=_LIBRARY)


def _native_apply(leading: tuple[Tensor, ...], *arguments: Any) -> tuple[Tensor, ...]:
    operands, numbers, given, text, _needs, _padded = arguments
    (x,) = leading
    return tuple(_apply(x, list(operands), list(numbers), given, text))


def _native_matmul(leading: tuple[Tensor, ...], *arguments: Any) -> tuple[Tensor, ...]:
    operands, numbers, *others = arguments
    return tuple(_matmul(*leading, list(operands), list(numbers), *others))


native.set_callbacks(compute_recorded, multiply_fused, (_native_apply, _native_matmul))

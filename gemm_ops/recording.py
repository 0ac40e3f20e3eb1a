"""Calls that autograd records: nodes of their own in PyTorch's graph.

    >>> results = multiply_recorded(x, weight.t(), epilogue, {"bias": bias})
    >>> results["D"].sum().backward()

The same as the operators of :mod:`gemm_ops.operators`, for what is not traced: several times less host time.

The forward of a product stores what its backward reads of the accumulator, mostly nothing or one matrix, as outputs
that nobody sees.  The backward is one elementwise kernel for the gradient of the product (and the terms of the
operands' gradients), one product for each matrix that requires grad, and sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epilogues import Epilogue, builders
from epilogues.gradients.backward import ACCUMULATOR
from epilogues.tree import MAIN_OUTPUT

from . import native
from .autocast import without_autocast
from .elementwise_call import run_elementwise, runs_kernels
from .gradients import (
    Compute,
    Look,
    find_pass,
    gradients,
    keep,
    kept,
    needs_of,
    product_needs,
    storing_forward,
)
from .product_call import multiply
from .product_gradients import Product, gradient_of_a, gradient_of_b


def compute_recorded(x: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """The outputs of an epilogue over x by name; recorded where an argument requires grad and grad mode is on."""
    needs = torch.is_grad_enabled() and needs_of(x, operands)
    if not needs:
        return run_elementwise(x, epilogue, operands)
    call = _Call.of(epilogue, needs, operands)
    results = _Apply.apply(call, x, *(operands[name] for name in call.names))
    if native.is_loaded() and runs_kernels(x.device):
        native.remember_recording(results[0].grad_fn, (x,), epilogue, operands, _finish)
    return dict(zip(epilogue.outputs, results, strict=True))


class _Call(NamedTuple):
    """What is not a tensor of a call, in one: PyTorch looks at every argument of a recorded function.

    Attributes:
        needs: what gradients are needed of.
        names: the names of the operands that are tensors.
        others: what else was given; whoever computes says what is amiss.
        padded_output: of a product.
    """

    epilogue: Epilogue
    needs: tuple[str, ...]
    names: tuple[str, ...]
    others: dict[str, Tensor | float]
    padded_output: bool = False

    @classmethod
    def of(
        cls,
        epilogue: Epilogue,
        needs: tuple[str, ...],
        operands: Mapping[str, Tensor | float],
        padded_output: bool = False,
    ) -> _Call:
        names = tuple([name for name in epilogue.operands if isinstance(operands.get(name), Tensor)])
        others = {name: value for name, value in operands.items() if name not in names}
        return cls(epilogue, needs, names, others, padded_output)

    def operands(self, tensors: Sequence[Tensor]) -> dict[str, Tensor | float]:
        return {**self.others, **dict(zip(self.names, tensors, strict=True))}


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        call, x, *tensors = arguments
        epilogue, operands = call.epilogue, call.operands(tensors)
        results = run_elementwise(x, epilogue, operands)
        keep(ctx, find_pass(epilogue, epilogue.outputs, call.needs, x.dtype), x, operands, results)
        ctx.tensor_names = call.names
        return tuple([results[name] for name in epilogue.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_finish(ctx, grads)


def _finish(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of x and of the tensors among the operands."""
    compute, _ = _backward_computes()
    found = gradients(ctx, kept(ctx), grads, compute)
    return found.get(ACCUMULATOR), *(found.get(name) for name in ctx.tensor_names)


def _backward_computes() -> tuple[Compute, Product]:
    """What the steps of a backward go through: directly, or as operators where compiled autograd traces it."""
    if torch.compiler.is_compiling():
        from .operators import compute_in_graph, product_in_graph  # which are made of what is here

        return compute_in_graph, product_in_graph
    return compute_recorded, multiply_fused


def multiply_recorded(
    a: Tensor, b: Tensor, epilogue: Epilogue, operands: Mapping[str, Tensor | float], padded_output: bool = False
) -> dict[str, Tensor]:
    """The outputs of ``epilogue(a @ b)`` by name; recorded where an argument requires grad and grad mode is on."""
    needs = torch.is_grad_enabled() and product_needs(a, b, operands)
    if not needs:
        return multiply(a, b, epilogue, operands, None, padded_output)
    call = _Call.of(epilogue, needs, operands, padded_output)
    results = _Multiply.apply(call, a, b, *(operands[name] for name in call.names))
    if native.is_loaded() and not padded_output and runs_kernels(a.device):
        native.remember_recording(results[0].grad_fn, (a, b), epilogue, operands, _finish_product)
    return dict(zip(epilogue.outputs, results, strict=False))  # what was stored for the backward comes after


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        call, a, b, *tensors = arguments
        epilogue, needs, names, _, padded_output = call
        operands = call.operands(tensors)
        forward = storing_forward(epilogue, needs, a.dtype)
        with without_autocast(a.device.type):  # the matrices have its dtype
            results = multiply(a, b, forward, operands, None, padded_output)
        if padded_output:
            results = {name: _no_view(tensor) for name, tensor in results.items()}
        keep_product(ctx, forward, epilogue.outputs, needs, a, b, operands, results)
        ctx.tensor_names = names
        return tuple([results[name] for name in forward.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *_finish_product(ctx, grads)


def _finish_product(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of a, of b and of the tensors among the operands."""
    grad_a, grad_b, found = product_gradients(ctx, grads, *_backward_computes())
    return grad_a, grad_b, *(found.get(name) for name in ctx.tensor_names)


def _no_view(tensor: Tensor) -> Tensor:
    """A new tensor's memory as a tensor that is no view: an output that is one, autograd does not let be changed."""
    if not tensor._is_view():
        return tensor
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def multiply_fused(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices by a fused kernel."""
    return multiply(a, b, builders.identity(), {})[MAIN_OUTPUT]


def keep_product(
    ctx: Any,
    forward: Epilogue,
    outputs: tuple[str, ...],
    needs: tuple[str, ...],
    a: Tensor,
    b: Tensor,
    operands: Mapping[str, Tensor | float],
    results: Mapping[str, Tensor],
) -> None:
    """Keeps in an autograd context what the backward of a product reads.

    Args:
        ctx: of an autograd node whose inputs and outputs the tensors are.
        forward: what was computed, with what was stored for the backward.
        outputs: those of its outputs that are the caller's.
        needs: what gradients are needed of.
        a, b: the matrices.
        operands: of the forward.
        results: the outputs, by name.
    """
    matrices = {"a": a} if b.requires_grad else {}
    matrices |= {"b": b} if a.requires_grad else {}
    whole = find_pass(forward, outputs, needs, a.dtype, with_x=False)
    keep(ctx, whole, Look(results[outputs[0]].shape, a.dtype, a.device), operands, results, matrices)
    ctx.shapes = a.shape, b.shape
    ctx.turned = b.stride(-2) == 1 != b.stride(-1)


def product_gradients(
    ctx: Any, grads: Sequence[Tensor | None], compute: Compute, fused: Product
) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
    """The gradients of a, of b, and those of operands by name; None where none is needed.

    Args:
        ctx: as :func:`keep_product` left it.
        grads: of the outputs, in order.
        compute: computes the epilogues of the backward.
        fused: multiplies two matrices by a fused kernel.
    """
    saved = kept(ctx)
    found = gradients(ctx, saved, grads, compute)
    product = found.get(ACCUMULATOR)
    if product is None:
        return None, None, found
    a, b, (shape_a, shape_b) = saved.get(("matrix", "a")), saved.get(("matrix", "b")), ctx.shapes
    grad_a = None if b is None else gradient_of_a(product, shape_a, b, fused)
    grad_b = None if a is None else gradient_of_b(product, a, shape_b, fused, turned=ctx.turned)
    return grad_a, grad_b, found

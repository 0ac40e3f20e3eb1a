"""A product by cuBLAS, then its epilogue in one kernel: where no fused kernel takes a call, or none is as fast.

    >>> tail = find_tail(call)
    >>> plan = make_unfused(call, tail)
    >>> outputs = plan.run(a, b, {"bias": bias}, out={})

Contract: what cuBLAS gives is in fp32 where PyTorch has that (16-bit matrices without batches), so that results are
those of a fused kernel; else in the matrices' dtype.  The epilogue is a
standalone kernel (:mod:`gemm_ops.elementwise_call`) with that product in the accumulator's place.  Where there is no
epilogue, or a bias alone, which cuBLAS adds before it rounds, there is no second pass: :class:`CublasAlone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epilogues.dtypes import dtype_name, torch_dtype
from epilogues.tree import Accumulator, Apply, Kind, Operand

from .autocast import without_autocast
from .elementwise_call import ElementwiseCall, Walk, find_walk
from .elementwise_plan import ElementwisePlan
from .fallback import product, product_dtype
from .native.form import BY_PYTHON, NativeForm
from .outputs import empty_padded
from .plan import made_current

if TYPE_CHECKING:
    from .dispatch import Call


@dataclass(frozen=True)
class CublasAlone:
    """An epilogue that cuBLAS computes with the product.

    Attributes:
        bias: the operand that is added to every row; "" for none.
    """

    bias: str = ""

    spec = None  # no kernel of ours


def find_tail(call: Call) -> Walk | CublasAlone | str:
    """How a product's epilogue is computed after it, or why it cannot be, in words.  Builds and computes nothing."""
    problem = call.problem
    if problem.element is None:
        return "the kernels take float16, bfloat16 and float32"
    if problem.device.type == "cuda" and call.is_in_memory and (alone := find_alone(call)) is not None:
        return alone
    dtype = product_dtype(call.a, call.b, rounded=False)
    x = torch.empty(problem.output_shape, dtype=dtype, device="meta")
    out = call.out or _padded_outputs(call, "meta")
    return find_walk(
        ElementwiseCall(call.epilogue, call.tree, problem, x, dtype_name(dtype), call.given, call.operands, out)
    )


def find_alone(call: Call) -> CublasAlone | None:
    """What cuBLAS computes with the product on a CUDA device, rounding once as a fused kernel does; or None."""
    tree = call.tree
    value, element = tree.outputs[0].value, call.problem.element
    if len(tree.outputs) > 1 or str(tree.outputs[0].dtype) != element or call.padded_output or tree.rounding != "once":
        return None
    if isinstance(value, Accumulator):
        return CublasAlone()
    if not isinstance(value, Apply) or value.operation != "add" or call.b.ndim != 2:
        return None
    others = [each for each in value.inputs if not isinstance(each, Accumulator)]
    if len(others) != 1 or not isinstance(bias := others[0], Operand) or bias.kind is not Kind.ROW:
        return None
    name = call.epilogue.tree.operands[bias.position].name
    given = call.given[name]
    fits = isinstance(given, Tensor) and given.dtype == call.a.dtype and given.shape == (call.problem.n,)
    return CublasAlone(name) if fits else None


def make_unfused(call: Call, tail: Walk | CublasAlone) -> TwoPasses | OnePass:
    """The plan of what :func:`find_tail` found."""
    return OnePass(call, tail) if isinstance(tail, CublasAlone) else TwoPasses(call, tail)


def _padded_outputs(call: Call, device: torch.device | str) -> dict[str, Tensor]:
    """New outputs with rows at multiples of 16 bytes, where the call asks for such; else none."""
    if not call.padded_output:
        return {}
    shape = call.problem.output_shape
    dtypes = [torch_dtype(str(store.dtype)) for store in call.tree.outputs]
    names = call.epilogue.outputs
    return {name: empty_padded(shape, dtype=dtype, device=device) for name, dtype in zip(names, dtypes, strict=True)}


class _Unfused(ABC):
    """A plan as :class:`gemm_ops.plan.Plan` is one, of what PyTorch multiplies: made once for a class of calls."""

    is_native = False
    #: of the epilogue, in order
    operand_names: tuple[str, ...]

    def native_form(self) -> NativeForm:
        """By Python: what PyTorch multiplies."""
        return BY_PYTHON

    def run_values(self, values: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The outputs in order, of a, b and the operands in order."""
        a, b, *operands = values
        return tuple(self.run(a, b, dict(zip(self.operand_names, operands, strict=True)), {}).values())

    @abstractmethod
    def run(
        self, a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float], out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Launches all of it on the current stream of the tensors' device.

        Args:
            a, b, operands: tensors as the plan was made for.
            out: the caller's outputs by name; empty to allocate.

        Raises:
            LaunchError: if the epilogue's kernel does not start.
        """


class OnePass(_Unfused):
    """cuBLAS alone: see :class:`CublasAlone`."""

    def __init__(self, call: Call, alone: CublasAlone) -> None:
        self.device = call.problem.device
        self.dtype = call.a.dtype
        self.shape = call.problem.output_shape
        self.bias = alone.bias
        self.output = call.epilogue.outputs[0]
        self.operand_names = tuple(operand.name for operand in call.epilogue.tree.operands)

    def native_form(self) -> NativeForm:
        """PyTorch's operator, called from C++."""
        bias = 2 + self.operand_names.index(self.bias) if self.bias else -1
        return NativeForm(0, dtypes=(self.dtype,), shape=tuple(self.shape), is_product=True, bias=bias)

    def run(
        self, a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float], out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        with made_current(self.device), without_autocast(self.device.type):
            given = out.get(self.output)
            fits = given is not None and given.is_contiguous()
            # not what PyTorch would allocate, which is a view of two dimensions, and autograd has rules for views
            result = given if given is not None and fits else torch.empty(self.shape, dtype=a.dtype, device=a.device)
            if self.bias:
                bias = operands[self.bias]
                assert isinstance(bias, Tensor)
                # not F.linear, which adds to what is rounded already where a is not contiguous
                torch.addmm(bias, a.reshape(-1, a.shape[-1]), b, out=result.view(-1, b.shape[-1]))
            else:
                torch.matmul(a, b, out=result)
        if given is not None and not fits:
            result = given.copy_(result)
        return {self.output: result}


class TwoPasses(_Unfused):
    """cuBLAS, then one kernel for the epilogue."""

    def __init__(self, call: Call, walk: Walk) -> None:
        problem = call.problem
        self.device = problem.device
        self.tail = ElementwisePlan(call.epilogue, call.tree, walk.spec, walk.layout, problem.device)
        self.operand_names = self.tail.operand_names
        self.padded_shape = problem.output_shape if call.padded_output else None

    def run(
        self, a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float], out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.padded_shape is not None:
            shape, device = self.padded_shape, self.device
            out = {name: empty_padded(shape, dtype=dtype, device=device) for name, dtype in self.tail.outputs}
        # the matrices have autocast's dtype already
        with made_current(self.device), without_autocast(self.device.type):
            return self.tail.run(product(a, b, rounded=False), operands, out)

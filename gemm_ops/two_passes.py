"""A product by cuBLAS, then its epilogue in one kernel: where no fused kernel takes a call, or none is as fast.

    >>> walk = find_tail(call)
    >>> plan = TwoPasses(call, walk)
    >>> outputs = plan.run(a, b, {"bias": bias}, out={})

Contract: what cuBLAS gives is in fp32 where PyTorch has that (16-bit matrices without batches), so that results are
those of a fused kernel; else in the matrices' dtype.  The epilogue is a
standalone kernel (:mod:`gemm_ops.elementwise_call`) with that product in the accumulator's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epilogues.dtypes import dtype_name, torch_dtype

from .autocast import without_autocast
from .elementwise_call import ElementwiseCall, Walk, find_walk
from .elementwise_plan import ElementwisePlan
from .fallback import product, product_dtype
from .native.form import BY_PYTHON, NativeForm
from .outputs import empty_padded
from .plan import made_current

if TYPE_CHECKING:
    from .dispatch import Call


def find_tail(call: Call) -> Walk | str:
    """The kernel for a product's epilogue, or why there is none, in words.  Builds and computes nothing."""
    problem = call.problem
    if problem.element is None:
        return "the kernels take float16, bfloat16 and float32"
    dtype = product_dtype(call.a, call.b, rounded=False)
    x = torch.empty(problem.output_shape, dtype=dtype, device="meta")
    out = call.out or _padded_outputs(call, "meta")
    return find_walk(
        ElementwiseCall(call.epilogue, call.tree, problem, x, dtype_name(dtype), call.given, call.operands, out)
    )


def _padded_outputs(call: Call, device: torch.device | str) -> dict[str, Tensor]:
    """New outputs with rows at multiples of 16 bytes, where the call asks for such; else none."""
    if not call.padded_output:
        return {}
    shape = call.problem.output_shape
    dtypes = [torch_dtype(str(store.dtype)) for store in call.tree.outputs]
    names = call.epilogue.outputs
    return {name: empty_padded(shape, dtype=dtype, device=device) for name, dtype in zip(names, dtypes, strict=True)}


class TwoPasses:
    """A plan as :class:`gemm_ops.plan.Plan` is one: made once for a class of calls."""

    is_native = False

    def __init__(self, call: Call, walk: Walk) -> None:
        problem = call.problem
        self.device = problem.device
        self.tail = ElementwisePlan(call.epilogue, call.tree, walk.spec, walk.layout, problem.device)
        self.padded_shape = problem.output_shape if call.padded_output else None

    def native_form(self) -> NativeForm:
        """By Python: what PyTorch multiplies."""
        return BY_PYTHON

    def run_values(self, values: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The outputs in order, of a, b and the operands in order."""
        a, b, *operands = values
        return tuple(self.run(a, b, dict(zip(self.tail.operand_names, operands, strict=True)), {}).values())

    def run(
        self, a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float], out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Launches both on the current stream of the tensors' device.

        Args:
            a, b, operands: tensors as the plan was made for.
            out: the caller's outputs by name; empty to allocate.

        Raises:
            LaunchError: if the kernel does not start.
        """
        if self.padded_shape is not None:
            shape, device = self.padded_shape, self.device
            out = {name: empty_padded(shape, dtype=dtype, device=device) for name, dtype in self.tail.outputs}
        # the matrices have autocast's dtype already
        with made_current(self.device), without_autocast(self.device.type):
            return self.tail.run(product(a, b, rounded=False), operands, out)

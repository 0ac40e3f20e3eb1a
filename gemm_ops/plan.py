"""What a repeated call reuses: its kernel, its argument block, the shapes of its outputs.

    >>> plan = find_plan(a, b, epilogue, operands, out, forced)   # None the first time
    >>> outputs = plan.run(a, b, operands, out)

A :class:`Plan` is made once for a call that goes to a kernel and is found again by everything that the decision
depends on: shapes, strides, dtypes, devices and 16-byte alignment of all tensors, the epilogue, and the backend
asked for.  Running it fills in pointers and launches; that is the whole host time of a warm call.

Only calls that a kernel computes on the tensors as they are have a plan: anything that copies an operand first,
computes a gradient, or is under autocast goes the long way through ``dispatch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype

from .kernels.spec import KernelSpec
from .outputs import overlap
from .runtime.abi import GemmArguments
from .runtime.library import load_kernel

if TYPE_CHECKING:
    from .dispatch import Call

_plans: dict[Any, Plan] = {}
_MOST_PLANS = 4096


class Plan:
    """A kernel made ready for one class of calls; see the module's first page."""

    def __init__(self, call: Call, spec: KernelSpec, multiprocessors: int) -> None:
        problem = call.problem
        assert problem.a is not None and problem.b is not None
        self.epilogue = call.epilogue  # also keeps its id from being given to another
        self.kernel = load_kernel(spec)
        self.device = problem.device
        self.operand_names = tuple(operand.name for operand in call.epilogue.tree.operands)
        self.outputs = tuple(
            (store.name, problem.output_shape, torch_dtype(dtype))
            for store, (_, dtype) in zip(call.epilogue.tree.outputs, call.output_layouts, strict=True)
        )
        block = GemmArguments(
            m=problem.m,
            n=problem.n,
            k=problem.k,
            lda=problem.a.leading_dimension,
            ldb=problem.b.leading_dimension,
            device=problem.device.index,
            multiprocessors=multiprocessors,
            swizzle=spec.config.swizzle,
        )
        for index, operand in enumerate(call.operands):
            if operand.facts.matrix is not None:
                block.operands[index].leading_dimension = operand.facts.matrix.leading_dimension
        for index, (matrix, _) in enumerate(call.output_layouts):
            block.outputs[index].leading_dimension = matrix.leading_dimension
        self.block = bytes(block)
        # asking an SM80 kernel already sets it up on the current device, which may not be the tensors'
        with torch.cuda.device(self.device):
            self.workspace_bytes = self.kernel.workspace_size(block)

    def run(
        self, a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float], out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Launches the kernel on the current stream of the tensors' device.

        Args:
            a, b, operands: tensors as the plan was made for.
            out: the caller's outputs by name; empty to allocate.

        Raises:
            LaunchError: if the kernel does not start.
        """
        block = GemmArguments.from_buffer_copy(self.block)
        block.a = a.data_ptr()
        block.b = b.data_ptr()
        for index, name in enumerate(self.operand_names):
            value = operands[name]
            if isinstance(value, Tensor):
                block.operands[index].data = value.data_ptr()
            else:
                block.operands[index].value = value
        outputs = out or {
            name: torch.empty(shape, dtype=dtype, device=self.device) for name, shape, dtype in self.outputs
        }
        for index, (name, _, _) in enumerate(self.outputs):
            block.outputs[index].data = outputs[name].data_ptr()
        if self.device.index == torch.cuda.current_device():
            self.kernel.launch(block, self.workspace_bytes, self.device)
        else:
            with torch.cuda.device(self.device):
                self.kernel.launch(block, self.workspace_bytes, self.device)
        return dict(outputs)


def plan_key(
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
    forced: str,
) -> tuple[object, ...] | None:
    """Everything that decides how a call is computed; None if it has to go the long way."""
    names = epilogue.operands
    if len(operands) != len(names):
        return None
    tensors: list[Tensor] = [a, b]
    numbers = 0
    for position, name in enumerate(names):
        value = operands.get(name)
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, float) or (
            isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        ):
            numbers |= 1 << position
        else:
            return None
    if out is not None:
        buffers = [out] if isinstance(out, Tensor) else _buffers(out, epilogue.outputs)
        if not all(isinstance(buffer, Tensor) for buffer in buffers) or len(buffers) != len(epilogue.outputs):
            return None
        for buffer in buffers:
            # what the long way refuses; where memory lies is in no key
            if any(overlap(buffer, tensor) for tensor in tensors):
                return None
            tensors.append(buffer)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if any(tensor.is_neg() for tensor in tensors):
        return None  # memory holds the opposite
    key: list[object] = [id(epilogue), forced, numbers, out is None]
    for tensor in tensors:
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15)
    return tuple(key)


def _buffers(out: Mapping[str, Tensor], names: tuple[str, ...]) -> list[Tensor]:
    """The outputs in order; none if they are not exactly those of the names."""
    if not isinstance(out, Mapping) or set(out) != set(names):
        return []
    return [out[name] for name in names]


def find_plan(key: tuple[object, ...]) -> Plan | None:
    """The plan of a key, if there is one."""
    return _plans.get(key)


def remember_plan(key: tuple[object, ...], plan: Plan) -> None:
    """Keeps a plan for the next call with this key."""
    if len(_plans) >= _MOST_PLANS:  # shapes without end, such as token counts: start over
        _plans.clear()
    _plans[key] = plan

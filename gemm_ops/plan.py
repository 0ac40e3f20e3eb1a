"""What a repeated call reuses: its kernel, its argument block, what to copy, the shapes of its outputs.

    >>> plan = find_plan(key)                                     # None the first time
    >>> outputs = plan.run(a, b, operands, out)

A :class:`Plan` is made once for a call that goes to a kernel and is found again by everything that the decision
depends on: shapes, strides, dtypes, devices and alignment of all tensors, the epilogue, and the backend
asked for.  Running it makes the copies that the addressing asks for, fills in pointers and launches; that is the whole
host time of a warm call.

Calls that compute a gradient or are under autocast have no plan and go the long way through ``dispatch``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype

from . import native
from .addressing import Placement
from .addressing.views import has_memory
from .copies import copy_matrix, copy_operand
from .kernels.spec import KernelSpec
from .native.form import BY_PYTHON, NativeForm, address_of_function, data_slots, slots
from .operands import spread
from .outputs import empty_padded, is_same, overlap, padded_pitch
from .runtime.abi import GemmArguments
from .runtime.dependent_launch import pointer_to_record
from .runtime.library import load_kernel

if TYPE_CHECKING:
    from .dispatch import Call, Decision

_plans: dict[Any, Any] = {}
_MOST_PLANS = 4096
_PLAIN = (Tensor, torch.nn.Parameter)


class Plan:
    """A kernel made ready for one class of calls; see the module's first page."""

    is_native = False

    def __init__(self, call: Call, decision: Decision, multiprocessors: int) -> None:
        spec, addressing = decision.spec, decision.addressing
        assert isinstance(spec, KernelSpec) and addressing is not None
        self.epilogue = call.epilogue  # also keeps its id from being given to another
        self.kernel = load_kernel(spec)
        self.problem = call.problem
        self.device = call.problem.device
        self.addressing = addressing
        self.padded_output = call.padded_output
        self.output_shape = call.problem.output_shape
        self.kinds = tuple(operand.facts.kind for operand in call.operands)
        self.operand_names = tuple(operand.name for operand in call.epilogue.tree.operands)
        self.outputs = tuple(
            (store.name, torch_dtype(str(resolved.dtype)))
            for store, resolved in zip(call.epilogue.tree.outputs, call.tree.outputs, strict=True)
        )
        self.is_plain = not addressing.copies and not addressing.loops
        block = GemmArguments(
            m=addressing.m,
            n=addressing.n,
            k=addressing.k,
            batch=addressing.batch,
            lda=addressing.a.leading,
            batch_stride_a=addressing.a.batch,
            ldb=addressing.b.leading,
            batch_stride_b=addressing.b.batch,
            device=self.device.index or 0,
            multiprocessors=multiprocessors,
            swizzle=spec.config.swizzle,
            last_captured=pointer_to_record(),
        )
        for index, placement in enumerate(addressing.operands):
            _fill(block.operands[index], placement)
        for index, placement in enumerate(addressing.outputs):
            _fill(block.outputs[index], placement)
        self.block = bytes(block)
        # asking an SM80 kernel already sets it up on the current device, which may not be the tensors'
        with made_current(self.device):
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
        if is_current(self.device):  # mostly, and asking costs less than switching
            return self._run(a, b, operands, out)
        with torch.cuda.device(self.device):
            return self._run(a, b, operands, out)

    def _run(
        self, a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float], out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        outputs = out if out else {name: self._new_output(dtype) for name, dtype in self.outputs}
        written = [outputs[name] for name, _ in self.outputs]
        values = [operands[name] for name in self.operand_names]
        if self.is_plain:
            self.kernel.launch(self._filled(a, b, values, written), self.workspace_bytes, self.device)
            return dict(outputs)
        problem, addressing = self.problem, self.addressing
        # the copies are held until all is launched, and freed in stream order
        a = copy_matrix(a, addressing.a) if addressing.a.copy else a
        b = copy_matrix(b, addressing.b) if addressing.b.copy else b
        for index, (placement, kind) in enumerate(zip(addressing.operands, self.kinds, strict=True)):
            value = values[index]
            if placement.copy and isinstance(value, Tensor):
                values[index] = copy_operand(spread(value, kind, problem), kind, problem.output_shape)
        for index, placement in enumerate(addressing.outputs):
            if placement.copy:
                written[index] = self._new_output(self.outputs[index][1])
        block = self._filled(a, b, values, written)
        for place in itertools.product(*map(range, addressing.loops)):
            self.kernel.launch(self._moved(block, place), self.workspace_bytes, self.device)
        for (name, _), temporary in zip(self.outputs, written, strict=True):
            if temporary is not outputs[name]:
                outputs[name].copy_(temporary)
        return dict(outputs)

    def native_form(self) -> NativeForm:
        """The launch, for :mod:`gemm_ops.native`; by Python where tensors are copied or launches many."""
        if not self.is_plain:
            return BY_PYTHON
        dtypes = tuple(dtype for _, dtype in self.outputs)
        pitches = {padded_pitch(self.output_shape, dtype) for dtype in dtypes} if self.padded_output else {0}
        if len(pitches) > 1:
            return BY_PYTHON
        matrices = ((GemmArguments.a.offset, 0), (GemmArguments.b.offset, 0))
        return NativeForm(
            function=address_of_function(self.kernel.run_function),
            takes_workspace=True,
            workspace_bytes=self.workspace_bytes,
            block=self.block,
            inputs=(*matrices, *slots(GemmArguments, "operands", len(self.operand_names))),
            outputs=data_slots(GemmArguments, "outputs", len(dtypes)),
            dtypes=dtypes,
            shape=tuple(self.output_shape),
            pitch=pitches.pop(),
        )

    def run_values(self, values: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The outputs in order, of a, b and the operands in order."""
        a, b, *operands = values
        return tuple(self.run(a, b, dict(zip(self.operand_names, operands, strict=True)), {}).values())

    def raise_failure(self, code: int) -> None:
        """Raises what a launch's code means."""
        self.kernel.raise_failure(code, GemmArguments.from_buffer_copy(self.block))

    def _new_output(self, dtype: torch.dtype) -> Tensor:
        if self.padded_output:
            return empty_padded(self.output_shape, dtype=dtype, device=self.device)
        return torch.empty(self.output_shape, dtype=dtype, device=self.device)

    def _filled(
        self, a: Tensor, b: Tensor, operands: Sequence[Tensor | float], outputs: Sequence[Tensor]
    ) -> GemmArguments:
        """The argument block with the tensors' pointers."""
        block = GemmArguments.from_buffer_copy(self.block)
        block.a = a.data_ptr()
        block.b = b.data_ptr()
        for index, value in enumerate(operands):
            if isinstance(value, Tensor):
                block.operands[index].data = value.data_ptr()
            else:
                block.operands[index].value = value
        for index, output in enumerate(outputs):
            block.outputs[index].data = output.data_ptr()
        return block

    def _moved(self, block: GemmArguments, place: tuple[int, ...]) -> GemmArguments:
        """The block at a place of the loops around launches."""
        addressing = self.addressing
        moved = GemmArguments.from_buffer_copy(block)
        moved.a += _distance(addressing.a, place)
        moved.b += _distance(addressing.b, place)
        for arguments, placements in ((moved.operands, addressing.operands), (moved.outputs, addressing.outputs)):
            for argument, placement in zip(arguments, placements, strict=False):
                if placement.way != "number":
                    argument.data += _distance(placement, place)
        return moved


def is_current(device: torch.device) -> bool:
    """Whether kernels of a device can be launched as it is."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def made_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels of a device can be launched."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)


def _fill(argument: Any, placement: Placement) -> None:
    argument.leading_dimension = placement.leading
    argument.column_stride = placement.column
    argument.batch_stride = placement.batch


def _distance(placement: Placement, place: tuple[int, ...]) -> int:
    """Bytes from a tensor's begin to a place of the loops."""
    return sum(step * stride for step, stride in zip(place, placement.loops, strict=True)) * placement.size


def plan_key(
    leading: Sequence[Tensor],
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    out: Tensor | Mapping[str, Tensor] | None,
    how: Hashable,
    *,
    in_place: bool = False,
) -> tuple[object, ...] | None:
    """Everything that decides how a call is computed; None if it has to go the long way.

    Args:
        leading: the tensors that come before the operands: a and b, or x.
        how: whatever else decides, such as the backend asked for.
        in_place: whether an output may be exactly an input.
    """
    names = epilogue.operands
    if len(operands) != len(names):
        return None
    tensors = list(leading)
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
        inputs = len(tensors)
        for buffer in buffers:
            # what the long way refuses; where memory lies is in no key
            for place, tensor in enumerate(tensors):
                allowed = in_place and place < inputs and is_same(buffer, tensor)
                if overlap(buffer, tensor) and not allowed:
                    return None
            tensors.append(buffer)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if any(tensor.is_neg() for tensor in tensors):
        return None  # memory holds the opposite
    key: list[object] = [id(epilogue), how, numbers, out is None]
    try:
        for tensor in tensors:
            if type(tensor) not in _PLAIN and not has_memory(tensor):
                return None
            # which 16-byte accesses are aligned, and of a standalone kernel 32 bytes of fp32
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 31)
    except RuntimeError:
        return None  # fake, or inside vmap
    return tuple(key)


def _buffers(out: Mapping[str, Tensor], names: tuple[str, ...]) -> list[Tensor]:
    """The outputs in order; none if they are not exactly those of the names."""
    if not isinstance(out, Mapping) or set(out) != set(names):
        return []
    return [out[name] for name in names]


def find_plan(key: tuple[object, ...]) -> Any:
    """What was remembered with a key; None if nothing was."""
    return _plans.get(key)


def remember_plan(key: tuple[object, ...], plan: object) -> None:
    """Keeps a plan, of a product or of a standalone kernel, for the next call with this key."""
    if len(_plans) >= _MOST_PLANS:  # shapes without end, such as token counts: start over
        _plans.clear()
    _plans[key] = plan


def forget_plans() -> None:
    """Drops all plans, here and in C++: whatever comes next is decided anew."""
    _plans.clear()
    native.forget()

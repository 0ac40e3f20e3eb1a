"""Kernels on the CPU, for tests of what happens around them: callbacks that read their argument block as kernels do."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from host_device import leave_native_out
from torch import Tensor

from epilogues.reference import evaluate
from gemm_ops import elementwise_call, native, plan, product_call, product_gradients, recording
from gemm_ops.dispatch import Call, Decision
from gemm_ops.elementwise.arguments import ElementwiseArguments
from gemm_ops.errors import LaunchError
from gemm_ops.fallback import run_reference
from gemm_ops.native.form import BY_PYTHON, NativeForm, address_of_function, data_slots, slots
from gemm_ops.outputs import padded_pitch
from gemm_ops.runtime.abi import GemmArguments


def tensor_at(address: int, like: Tensor) -> Tensor:
    """The tensor at an address that lies as another does."""
    reach = sum((extent - 1) * stride for extent, stride in zip(like.shape, like.stride(), strict=True)) + 1
    memory = (ctypes.c_char * (reach * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


class FakePlan:
    """A plan whose kernel is the reference; ``fails``: the code that its launches end with."""

    fails = 0
    by_python = False

    def __init__(self, epilogue: Any, leading: tuple[Tensor, ...], given: Any, outputs: dict[str, Tensor]) -> None:
        self.is_native = False
        self.epilogue, self.leading, self.given, self.outputs = epilogue, leading, dict(given), outputs
        self.product = len(leading) == 2
        self.block = GemmArguments if self.product else ElementwiseArguments
        kind = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self.function = (
            ctypes.CFUNCTYPE(*kind, ctypes.c_void_p)(self._launch)
            if self.product
            else (ctypes.CFUNCTYPE(*kind)(self._launch))
        )
        self.launches = 0

    def _launch(self, address: int, *_: object) -> int:
        if self.fails:
            return self.fails
        self.launches += 1
        block = self.block.from_address(address)
        operands = [*block.operands] if self.product else [*block.inputs][1:]
        starts = (block.a, block.b) if self.product else (block.inputs[0].data,)
        leading = [tensor_at(start, like) for start, like in zip(starts, self.leading, strict=True)]
        values = {
            name: tensor_at(argument.data, given) if isinstance(given, Tensor) else argument.value
            for (name, given), argument in zip(self._in_order().items(), operands, strict=False)
        }
        found = self._compute(leading, values)
        for (name, like), argument in zip(self.outputs.items(), block.outputs, strict=False):
            tensor_at(argument.data, like).copy_(found[name])
        return 0

    def _in_order(self) -> dict[str, Any]:
        return {name: self.given[name] for name in self.epilogue.operands}

    def _compute(self, leading: Any, values: dict[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            if self.product:
                return run_reference(self.epilogue.tree, *leading, values, transformed=True)
            (x,) = leading
            return evaluate(self.epilogue.tree, x.float(), values, compute_dtype=torch.float32, out_dtype=x.dtype)

    def native_form(self) -> NativeForm:
        if self.by_python:
            return BY_PYTHON
        names = self.epilogue.operands
        dtypes = tuple(output.dtype for output in self.outputs.values())
        first = next(iter(self.outputs.values()))
        arguments: dict[str, Any] = {"dtypes": dtypes, "outputs": data_slots(self.block, "outputs", len(dtypes))}
        if not self.product:
            inputs = slots(self.block, "inputs", 1 + len(names))
            block = bytes(ElementwiseArguments())
            return NativeForm(
                address_of_function(self.function), block=block, inputs=inputs, like_first=True, **arguments
            )
        matrices = ((GemmArguments.a.offset, 0), (GemmArguments.b.offset, 0))
        return NativeForm(
            address_of_function(self.function),
            takes_workspace=True,
            block=bytes(GemmArguments()),
            inputs=(*matrices, *slots(self.block, "operands", len(names))),
            shape=tuple(first.shape),
            pitch=0 if first.is_contiguous() else padded_pitch(first.shape, first.dtype),
            **arguments,
        )

    def run(self, *arguments: Any) -> dict[str, Tensor]:
        *leading, operands, out = arguments
        found = self._compute(leading, operands)
        for name, like in self.outputs.items():
            buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype) if not out else out[name]
            found[name] = buffer.copy_(found[name])
        return {name: found[name] for name in self.outputs}

    def run_values(self, values: tuple[Any, ...]) -> tuple[Tensor, ...]:
        count = len(self.leading)
        operands = dict(zip(self.epilogue.operands, values[count:], strict=True))
        return tuple(self.run(*values[:count], operands, {}).values())

    def raise_failure(self, code: int) -> None:
        raise LaunchError(f"{self.epilogue.name}: code {code}")


def _fake_plan(call: Call, _: object) -> FakePlan:
    tensors = {name: torch.empty((), dtype=dtype) for name, dtype in _dtypes(call).items()}
    shape = call.problem.output_shape
    outputs = {}
    for name, tensor in tensors.items():
        pitch = padded_pitch(shape, tensor.dtype) if call.padded_output else 0
        wide = torch.empty((*shape[:-1], pitch or shape[-1]), dtype=tensor.dtype)
        outputs[name] = wide[..., : shape[-1]]
    return FakePlan(call.epilogue, (call.a, call.b), call.given, outputs)


def _dtypes(call: Any) -> dict[str, torch.dtype]:
    from epilogues.dtypes import torch_dtype

    stores = zip(call.epilogue.outputs, call.tree.outputs, strict=True)
    return {name: torch_dtype(str(store.dtype)) for name, store in stores}


def _fake_elementwise(epilogue: Any, tree: Any, walk: Any, *_: object) -> FakePlan:
    call = walk
    outputs = {name: torch.empty_like(call.x, dtype=dtype) for name, dtype in _dtypes(call).items()}
    return FakePlan(epilogue, (call.x,), call.given, outputs)


class _Walk:
    def __init__(self, call: Any) -> None:
        self.spec = self.layout = call


@pytest.fixture(scope="session")
def extension() -> Any:
    """The C++ module, built for the tests' session."""
    return native.load()


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch, extension: Any) -> Iterator[Any]:
    """The module, with calls of 16-bit tensors on the CPU going to kernels as those on a GPU do."""
    extension.clear()
    monkeypatch.setattr(plan, "_plans", {})
    for module in (product_call, elementwise_call, recording, product_gradients):
        monkeypatch.setattr(module, "runs_kernels", lambda device: True)
    monkeypatch.setattr(product_call, "decide", lambda call: Decision("sm90", None, "a test"))
    monkeypatch.setattr(product_call, "make_plan", _fake_plan)
    monkeypatch.setattr(elementwise_call, "find_walk", _Walk)
    monkeypatch.setattr(elementwise_call, "ElementwisePlan", _fake_elementwise)
    yield extension
    extension.clear()


@contextlib.contextmanager
def through_python() -> Iterator[None]:
    """A context in which calls go through Python alone."""
    with pytest.MonkeyPatch.context() as patch:
        leave_native_out(patch)
        yield


@contextlib.contextmanager
def computed_natively(extension: Any, calls: int = 1) -> Iterator[None]:
    """A context in which so many calls are computed by the module."""
    before = extension.counts()[2]
    yield
    assert extension.counts()[2] - before == calls

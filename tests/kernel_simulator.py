"""A kernel in Python: reads its argument block as the real ones do, and insists on what the hardware insists on.

    >>> result = run_simulated(call, family="sm90")

It computes in fp32 from raw memory, by pointers, extents and strides alone, so that a plan that gets one of them wrong
gives wrong numbers here as it would on a GPU; and it fails where a pointer or a stride is not aligned as the access
that is compiled into the kernel wants it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from epilogues.dtypes import torch_dtype
from epilogues.reference import evaluate
from epilogues.tree import Kind
from gemm_ops import plan as plan_module
from gemm_ops.dispatch import Call, Decision
from gemm_ops.kernels.access import STRIDED, WHOLE
from gemm_ops.kernels.selection import Target, select_kernel
from gemm_ops.kernels.spec import KernelSpec
from gemm_ops.plan import Plan
from gemm_ops.runtime.abi import GemmArguments


def run_simulated(
    call: Call, family: str, monkeypatch: Any, *, target: tuple[int, int] = (9, 0)
) -> tuple[dict[str, Tensor], Decision]:
    """A call with tensors on the CPU, computed as a family's kernels would."""
    element = call.problem.element
    assert element is not None
    selection = select_kernel(call.tree, element, call.request, target=Target(target, 132), families=(family,))
    assert selection.spec is not None, selection.reason
    decision = Decision(family, selection.spec.config.name, "", selection.spec, selection.addressing)
    monkeypatch.setattr(plan_module, "load_kernel", SimulatedKernel)
    plan = Plan(call, decision, 132)
    return plan.run(call.a, call.b, call.tensors, call.out), decision


class SimulatedKernel:
    """Stands for ``gemm_ops.runtime.library.Kernel``."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.whole = spec.config.family == "sm90"

    def workspace_size(self, arguments: GemmArguments) -> int:
        return 0

    def launch(self, args: GemmArguments, workspace_bytes: int, device: torch.device) -> None:
        spec, access = self.spec, self.spec.access
        assert args.batch == 1 or access.batched
        for batch in range(args.batch):
            a = self._matrix(args.a, args.lda, args.batch_stride_a, batch, spec.layout_a, args.m, args.k, access.a)
            b = self._matrix(args.b, args.ldb, args.batch_stride_b, batch, spec.layout_b, args.k, args.n, access.b)
            operands = dict(self._operands(args, batch))
            results = evaluate(spec.tree, a.float() @ b.float(), operands, out_dtype=torch_dtype(spec.element))
            for index, (store, result) in enumerate(zip(spec.tree.outputs, results.values(), strict=True)):
                output, way, dtype = args.outputs[index], access.output(index), torch_dtype(str(store.dtype))
                self._check(output, way, dtype, args, writes=True)
                address = output.data + batch * output.batch_stride * dtype.itemsize
                step = output.column_stride if way == STRIDED else 1
                _memory(address, args.m, args.n, output.leading_dimension, step, dtype).copy_(result)

    def _matrix(
        self, data: int, leading: int, batch_stride: int, batch: int, layout: str, rows: int, columns: int, width: int
    ) -> Tensor:
        dtype = torch_dtype(self.spec.element)
        strides = (leading, 1) if layout == "row" else (1, leading)
        inner = columns if layout == "row" else rows
        unit = 16 if self.whole else width * dtype.itemsize
        assert data % unit == 0 and leading * dtype.itemsize % unit == 0 and batch_stride * dtype.itemsize % unit == 0
        assert leading > 0 or not self.whole, "TMA wants rows apart from each other"
        if not self.whole:
            assert inner % width == 0, "vectors are predicated by their first element"
            assert self.spec.config.stages == 2 or width * dtype.itemsize >= 4, "cp.async moves at least 4 bytes"
        address = data + batch * batch_stride * dtype.itemsize
        return _memory(address, rows, columns, *strides, dtype)

    def _operands(self, args: GemmArguments, batch: int) -> Iterator[tuple[str, Tensor | float]]:
        for index, operand in enumerate(self.spec.tree.operands):
            argument, dtype = args.operands[index], torch_dtype(str(operand.dtype))
            address = (argument.data or 0) + batch * argument.batch_stride * dtype.itemsize
            if operand.kind is Kind.SCALAR:
                number = argument.value if not argument.data else float(_memory(argument.data, 1, 1, 1, 1, dtype))
                yield operand.name, number
            elif operand.kind is Kind.ROW:
                if not self.whole:
                    width = self.spec.access.width * dtype.itemsize or 16
                    assert address % min(width, 16) == 0
                yield operand.name, _memory(address, 1, args.n, 0, 1, dtype)
            elif operand.kind is Kind.COLUMN:
                yield operand.name, _memory(address, args.m, 1, 1, 0, dtype)
            else:
                way = self.spec.access.operand(operand.position)
                self._check(argument, way, dtype, args, writes=False)
                step = argument.column_stride if way == STRIDED else 1
                yield operand.name, _memory(address, args.m, args.n, argument.leading_dimension, step, dtype)

    def _check(self, argument: Any, way: int, dtype: torch.dtype, args: GemmArguments, *, writes: bool) -> None:
        """What the access to an auxiliary matrix or an output needs."""
        if self.whole and way != WHOLE:
            return
        width = 16 if way == WHOLE else min(way * dtype.itemsize, 16)
        assert argument.data % width == 0
        assert argument.leading_dimension * dtype.itemsize % width == 0
        assert argument.batch_stride * dtype.itemsize % width == 0
        assert argument.leading_dimension > 0 or args.m == 1 or not self.whole
        if writes and args.n * dtype.itemsize % width:
            assert PADDING_MAY_BE_WRITTEN, "whole 16 bytes are written"


#: Set by a test whose outputs end in padding of their own.
PADDING_MAY_BE_WRITTEN = False


def _memory(address: int, rows: int, columns: int, row: int, column: int, dtype: torch.dtype) -> Tensor:
    """A matrix in raw memory."""
    reach = (rows - 1) * row + (columns - 1) * column + 1
    raw = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided((rows, columns), (row, column))

"""What the GPU tests share: cases, random inputs, truth in fp64, the unfused computation, guarded outputs.

A case is one epilogue on one problem with one backend.  Before the first test runs, the kernels of all selected
cases are built, in parallel (``tests/conftest.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from operation_support import CANCELLING

import epilogues as ep
import gemm_ops
from epilogues.operations import OPERATIONS
from epilogues.tree import Accumulator, Apply, Cast, Constant, Kind, Operand

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One problem: D = epilogue(a @ b); a layout is "row" if contiguous along the second extent, else "column"."""

    epilogue: ep.Epilogue = field(repr=False)
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    backend: str = "sm90"
    layout_a: str = "row"
    layout_b: str = "column"
    operand_dtypes: tuple[str, ...] = ()  # by position; the case's dtype where there is none
    numbers: bool = False  # scalars as Python numbers

    @property
    def name(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}"
        extra = "-".join(self.operand_dtypes)
        layouts = f"{self.layout_a[0]}{self.layout_b[0]}"
        number = "-number" if self.numbers else ""
        return (
            f"{self.epilogue.name}-{shape}-{self.dtype}-{layouts}-{self.backend}{'-' + extra if extra else ''}{number}"
        )


def cases(*found: Case) -> pytest.MarkDecorator:
    """A test of each of these, by name."""
    return pytest.mark.parametrize("case", found, ids=[case.name for case in found])


def random_matrix(rows: int, columns: int, layout: str, dtype: torch.dtype, device: str, scale: float) -> torch.Tensor:
    if layout == "row":
        return (torch.randn(rows, columns, device=device) * scale).to(dtype)
    return (torch.randn(columns, rows, device=device) * scale).to(dtype).t()


def make_inputs(case: Case, device: str = "cuda", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A, B and the operands; accumulators have a variance of one."""
    torch.manual_seed(seed)
    dtype = DTYPES[case.dtype]
    a = random_matrix(case.m, case.k, case.layout_a, dtype, device, 1.0)
    b = random_matrix(case.k, case.n, case.layout_b, dtype, device, case.k**-0.5)
    operands: dict[str, Any] = {}
    for operand in case.epilogue.tree.operands:
        position = operand.position
        name = case.operand_dtypes[position] if position < len(case.operand_dtypes) else case.dtype
        shape = {
            Kind.ROW: (case.n,),
            Kind.COLUMN: (case.m,),
            Kind.SCALAR: (1,),
            Kind.AUX: (case.m, case.n),
        }[operand.kind]
        tensor = torch.randn(shape, device=device).to(DTYPES[name])
        # a Python number is an fp32 value
        operands[operand.name] = (
            float(torch.randn(()).item()) if operand.kind is Kind.SCALAR and case.numbers else tensor
        )
    return a, b, operands


def truth(case: Case, a: torch.Tensor, b: torch.Tensor, operands: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every output in fp64, rounded nowhere but at explicit casts inside the tree."""
    accumulator = a.double() @ b.double()
    result = case.epilogue.reference(accumulator, compute_dtype=torch.float64, keep_casts=False, **operands)
    return result if isinstance(result, dict) else {"D": result}


def unfused(case: Case, a: torch.Tensor, b: torch.Tensor, operands: dict[str, Any]) -> dict[str, torch.Tensor]:
    """``torch.matmul`` and then one PyTorch operation per node, in the tensors' own dtypes."""
    accumulator = torch.matmul(a, b)
    values: dict[int, torch.Tensor] = {}
    tree = case.epilogue.tree
    for node in tree.nodes:
        if isinstance(node, Accumulator):
            value = accumulator
        elif isinstance(node, Operand):
            value = operands[node.name]
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value, dtype=accumulator.dtype, device=accumulator.device)
            elif node.kind is Kind.COLUMN:
                value = value.reshape(-1, 1)
        elif isinstance(node, Constant):
            value = torch.tensor(node.value, dtype=accumulator.dtype, device=accumulator.device)
        elif isinstance(node, Cast):
            value = values[id(node.value)].to(DTYPES[node.dtype])
        else:
            assert isinstance(node, Apply)
            inputs = [values[id(child)] for child in node.inputs]
            # PyTorch's promotion, except that minimum and maximum insist on one dtype
            common = inputs[0].dtype
            for tensor in inputs[1:]:
                common = torch.promote_types(common, tensor.dtype)
            value = OPERATIONS[node.operation].reference(*(tensor.to(common) for tensor in inputs))
        values[id(node)] = value
    return {
        store.name: values[id(store.value)].to(DTYPES[tree.output_dtype(store, case.dtype)]) for store in tree.outputs
    }


class GuardedOutputs:
    """Outputs in larger buffers of a known bit pattern: rows before and after, and between consecutive rows."""

    PATTERN: ClassVar[dict[int, int]] = {2: 0x5A5A, 4: 0x5A5A5A5A}

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.buffers: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        m, n = case.m, case.n
        self.window = (slice(2, 2 + m), slice(16, 16 + n))
        for store in case.epilogue.tree.outputs:
            dtype = DTYPES[case.epilogue.tree.output_dtype(store, case.dtype)]
            integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
            buffer = torch.full(
                (m + 4, -(-n // 16) * 16 + 32), self.PATTERN[dtype.itemsize], dtype=integer, device=device
            )
            view = buffer.view(dtype)[self.window]
            view.fill_(float("nan"))
            self.buffers[store.name], self.views[store.name] = buffer, view

    def check(self) -> None:
        for name, buffer in self.buffers.items():
            around = buffer.clone()
            pattern = self.PATTERN[buffer.element_size()]
            around[self.window] = pattern
            written = (around != pattern).nonzero()
            assert len(written) == 0, f"{name}: wrote outside of the output, first at {written[0].tolist()}"


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius, against fp64; infinite if a value is missing or not a number where it should be one."""
    difference = result.double() - expected
    if not torch.equal(torch.isfinite(result), torch.isfinite(expected)):
        return float("inf")
    finite = torch.isfinite(expected)
    size = expected[finite].norm().item()
    return difference[finite].norm().item() / size if size else difference[finite].norm().item()


def check_case(case: Case, guarded: bool = True) -> None:
    """Runs the case fused and compares: against fp64, no worse than unfused; nothing written outside."""
    a, b, operands = make_inputs(case)
    with gemm_ops.use_backend(case.backend):
        if guarded:
            outputs = GuardedOutputs(case)
            out: Any = outputs.views if len(outputs.views) > 1 else outputs.views["D"]
            gemm_ops.matmul(a, b, case.epilogue, out=out, **operands)
            results = outputs.views
        else:
            result = gemm_ops.matmul(a, b, case.epilogue, **operands)
            results = result if isinstance(result, dict) else {"D": result}
    expected, eager = truth(case, a, b, operands), unfused(case, a, b, operands)
    if guarded:
        outputs.check()
    for name, result in results.items():
        assert result.dtype == eager[name].dtype
        error, limit = relative_error(result, expected[name]), relative_error(eager[name], expected[name])
        # One rounding each leaves equal errors up to chance; fp32 results differ by the order of the additions.
        floor = 4 * torch.finfo(torch.float32).eps
        assert error <= limit * 1.02 + floor, f"{name}: error {error:.3e}, unfused {limit:.3e}"
        # no element is far off: a rounding of the result, the unfused computation's worst, and fp32 noise
        worst = (result.double() - expected[name]).abs().nan_to_num(0.0, 0.0).max().item()
        eager_worst = (eager[name].double() - expected[name]).abs().nan_to_num(0.0, 0.0).max().item()
        scale = expected[name].abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        unit = torch.finfo(result.dtype).eps
        assert worst <= max(eager_worst, unit * scale) * 1.05 + 1e-6, f"{name}: {worst:.3e} against {eager_worst:.3e}"


def check_operations(case: Case) -> None:
    """Runs a pack of operations on accumulators that are exact: what is left is the error of the device function."""
    torch.manual_seed(0)
    dtype = DTYPES[case.dtype]
    a = torch.randint(-4, 5, (case.m, case.k), device="cuda").to(dtype)
    b = torch.randint(-4, 5, (case.n, case.k), device="cuda").to(dtype)
    row = (torch.randn(case.n, device="cuda") * 3).to(dtype)
    accumulator = a.double() @ b.double().t()
    with gemm_ops.use_backend(case.backend):
        results = gemm_ops.linear(a, b, case.epilogue, row=row)
    single = case.epilogue.reference(accumulator.float(), keep_casts=False, out_dtype=torch.float32, row=row)
    truth = case.epilogue.reference(accumulator, compute_dtype=torch.float64, keep_casts=False, row=row)
    assert isinstance(results, dict) and isinstance(single, dict) and isinstance(truth, dict)
    for name, result in results.items():
        rounded = single[name].to(result.dtype)
        assert torch.equal(torch.isnan(result), torch.isnan(rounded)), f"{name}: NaN where PyTorch has none, or not"
        finite = torch.isfinite(rounded) & torch.isfinite(truth[name])
        error = (result.double() - truth[name]).abs()[finite]
        allowed = (rounded.double() - truth[name]).abs()[finite]
        unit = torch.finfo(result.dtype).eps * truth[name].abs()[finite]
        # a 16-bit result is the rounded one, or its neighbour; an fp32 result is good to a few units
        limit = allowed + (unit if result.dtype != torch.float32 else 4 * unit) + torch.finfo(result.dtype).tiny
        if result.dtype != torch.float32:
            limit += 2.0**-21  # of 16 bits: a few denormals of fp16, and the tails that 1 + erf(x) loses in PyTorch too
        elif name in CANCELLING or (name == "D" and case.epilogue.name.split("-to-")[0] in CANCELLING):
            limit += 2.0**-22 * 16  # inputs are up to about 16
        else:
            limit += 2.0**-51 * 16  # PyTorch's 1 + erf(x) and 1 + tanh(x) lose the tail in fp64 too
        beyond = (error > limit).sum().item()
        assert beyond == 0, f"{name}: {beyond} of {error.numel()} elements, by up to {(error - limit).max().item():.3e}"

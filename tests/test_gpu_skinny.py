"""Kernels for few rows on a GPU: every operation, operand kind and layout, depths that end anywhere, guards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import Case, cases, check_case, check_operations
from layouts import GuardedBuffer, lay_out
from operation_support import packs
from test_gpu_kernels import aux_kind, column_kind, row_kind, scalar_kind
from test_gpu_layouts import Layout, check, everything, forget_choices

import epilogues as ep
import gemm_ops
from gemm_ops.kernels import selection
from gemm_ops.kernels.config import SKINNY_CONFIGS, KernelConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built_cases")]

GELU = ep.builders.SUITE["bias_gelu"]


@cases(
    *(
        Case(epilogue, 11, 264, 40, dtype, "skinny")
        for dtype, output in (("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32"))
        for epilogue in packs(output)
    )
)
def test_every_operation(case: Case) -> None:
    check_operations(case)


@cases(
    *(
        Case(epilogue, 13, 392, 72, dtype, "skinny", operand_dtypes=(operand,))
        for epilogue in (row_kind, column_kind, scalar_kind, aux_kind)
        for dtype, operand in (("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"))
    ),
    Case(scalar_kind, 13, 392, 72, "bf16", "skinny", numbers=True),
    *(Case(build(), m, 1000, 2000, "bf16", "skinny") for build in ep.builders.SUITE.values() for m in (1, 8, 16)),
    *(Case(build(), 5, 520, 264, "f16", "skinny") for build in ep.builders.SUITE.values()),
)
def test_operand_kinds_and_suite(case: Case) -> None:
    check_case(case)


@cases(
    *(Case(GELU(), m, 264, 136, "bf16", "skinny") for m in (1, 2, 7, 8, 9, 15, 16)),
    *(Case(GELU(), 13, n, 136, "bf16", "skinny") for n in (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 4095, 4096)),
    # no step of 64, one, as many as warps, one more, two rounds and some
    *(Case(GELU(), 13, 100, k, "bf16", "skinny") for k in (8, 56, 64, 72, 504, 512, 520, 576, 1024, 4104, 16384)),
    *(Case(GELU(), 5, 100, k, "f16", "skinny") for k in (8, 56, 64, 72, 504, 512, 520, 576, 1024, 4104)),
)
def test_edges(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("k", [1, 3, 7, 9, 63, 65, 127, 511, 513, 1001, 4093])
@pytest.mark.parametrize("m", [1, 8, 13])
def test_depths_that_are_no_multiple_of_16_bytes(m: int, k: int) -> None:
    """Rows lie in multiples of 16 bytes; what is between them must not be used, and after the last not be read."""
    torch.manual_seed(0)
    pitch, n = -(-k // 8) * 8, 45
    rows = {}
    for name, count in (("a", m), ("b", n)):
        memory = torch.full((count * pitch,), float("nan"), device="cuda").bfloat16()
        rows[name] = memory.as_strided((count, k), (pitch, 1))
        rows[name].copy_(torch.randn(count, k, device="cuda"))
    guarded = {"D": GuardedBuffer((m, n), "contiguous", torch.bfloat16, "cuda")}
    with gemm_ops.use_backend("skinny"):
        result = gemm_ops.matmul(rows["a"], rows["b"].t(), None, out=guarded["D"].view)
    truth = rows["a"].double() @ rows["b"].double().t()
    assert (result.double() - truth).norm() / truth.norm() < 2.5e-3
    guarded["D"].check()


LAYOUTS = [
    Layout(15, 264, 136, out="contiguous"),
    Layout(16, 257, 136, residual="off", out="off"),
    Layout(9, 100, 72, residual="transposed", out="transposed"),
    Layout(13, 41, 72, a="padded", b="transposed padded", residual="every second", out="every second"),
    Layout(13, 41, 72, residual="one row"),
    Layout(13, 41, 72, residual="one column"),
    Layout(1, 50257, 64, residual="off", out="off"),
    Layout(1, 1, 8),
    Layout(16, 104, 72, batch_a=(3,), batch_b=(3,), batch_operands=(3,), out="contiguous"),
    Layout(16, 40, 56, batch_a=(2, 3), batch_b=(1, 3), a="batch inside", out="batch inside"),
    Layout(8, 24, 16, batch_a=(70_000,), batch_b=(70_000,), batch_operands=(70_000,)),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layout(case: Layout) -> None:
    a, b, operands = case.tensors()
    with gemm_ops.use_backend("skinny"):
        check(everything, a, b, operands, case.outputs())


@pytest.mark.parametrize("config", SKINNY_CONFIGS, ids=lambda config: config.name)
def test_rows_beyond_a_tile_are_computed_by_more_of_them(config: KernelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "choose_config", lambda *_: config)
    forget_choices()
    for m in (1, config.tile[0], config.tile[0] + 1, 5 * config.tile[0]):
        check_case(Case(GELU(), m, 100, 200, "bf16", "skinny"))
    monkeypatch.undo()
    forget_choices()


def test_two_runs_are_the_same_to_the_bit() -> None:
    a, b = lay_out((16, 4096), "contiguous", device="cuda"), lay_out((4096, 512), "transposed", device="cuda")

    def run() -> Any:
        with gemm_ops.use_backend("skinny"):
            return gemm_ops.matmul(a, b, "gelu")

    first = run()
    assert all(torch.equal(first, run()) for _ in range(20))

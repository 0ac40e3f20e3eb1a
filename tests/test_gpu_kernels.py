"""Fused kernels on a GPU: operations, operand kinds, dtypes, shapes, layouts, several outputs."""

from __future__ import annotations

import pytest
import torch
from gpu_support import Case, cases, check_case, check_operations
from operation_support import packs

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row, Scalar

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built_cases")]

BACKENDS = ("sm90", "sm80")


@cases(
    *(
        Case(epilogue, 200, 264, 40, dtype, backend)
        for backend in BACKENDS
        for dtype, output in (("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32"))
        for epilogue in packs(output)
    )
)
def test_operations(case: Case) -> None:
    check_operations(case)


@ep.epilogue
def row_kind(acc, row: Row):
    return acc * row + row


@ep.epilogue
def column_kind(acc, column: Column):
    return acc * column + column


@ep.epilogue
def scalar_kind(acc, scalar: Scalar):
    return acc * scalar + scalar


@ep.epilogue
def aux_kind(acc, aux: Aux):
    return acc * aux + aux


@cases(
    *(
        Case(epilogue, 129, 392, 72, dtype, backend, operand_dtypes=(operand,))
        for backend in BACKENDS
        for epilogue in (row_kind, column_kind, scalar_kind, aux_kind)
        for dtype, operand in (("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"))
    ),
    *(Case(scalar_kind, 129, 392, 72, "bf16", backend, numbers=True) for backend in BACKENDS),
)
def test_operand_kind(case: Case) -> None:
    check_case(case)


M_EDGES = (1, 7, 63, 64, 65, 127, 128, 129, 255, 257, 600)
N_EDGES = (8, 56, 64, 72, 120, 128, 136, 184, 192, 200, 248, 256, 264, 1000)
K_EDGES = (8, 16, 56, 64, 72, 120, 128, 136, 504, 1000)


@cases(
    *(Case(ep.builders.SUITE["bias_gelu"](), m, 264, 136, "bf16", b) for b in BACKENDS for m in M_EDGES),
    *(Case(ep.builders.SUITE["bias_gelu"](), 200, n, 136, "bf16", b) for b in BACKENDS for n in N_EDGES),
    *(Case(ep.builders.SUITE["bias_gelu"](), 200, 264, k, "bf16", b) for b in BACKENDS for k in K_EDGES),
    *(
        Case(ep.builders.SUITE["residual"](), m, n, 72, "bf16", b)
        for b in BACKENDS
        for m in (1, 65, 257)
        for n in (8, 136, 1000)
    ),
)
def test_tile_edges(case: Case) -> None:
    check_case(case)


@cases(
    *(
        Case(build(), m, n, k, dtype, backend)
        for backend in BACKENDS
        for build in ep.builders.SUITE.values()
        for m, n, k, dtype in ((1000, 3000, 2000, "bf16"), (129, 520, 264, "f16"))
    )
)
def test_suite(case: Case) -> None:
    check_case(case)


@cases(
    # one problem for each configuration of the wave model
    *(
        Case(ep.builders.SUITE["bias_gelu"](), *shape, "bf16", "sm90")
        for shape in ((4096, 4096, 512), (1000, 3000, 520), (1024, 4096, 512), (130, 4096, 512))
    ),
    *(Case(ep.builders.SUITE["bias_gelu"](), *shape, "bf16", "sm80") for shape in ((4096, 4096, 512), (130, 520, 512))),
)
def test_configurations(case: Case) -> None:
    check_case(case)


@cases(
    *(
        Case(ep.builders.SUITE["bias_gelu"](), 136, 264, 200, dtype, backend, layout_a, layout_b)
        for backend in BACKENDS
        for dtype in ("bf16", "f16")
        for layout_a in ("row", "column")
        for layout_b in ("row", "column")
    )
)
def test_layouts(case: Case) -> None:
    check_case(case)


@ep.epilogue
def chained(acc, bias: Row):
    z = acc + bias
    return {
        "D": ep.gelu(z, approximate="tanh"),
        "preact": ep.cast(z, "f32"),
        "half": ep.cast(ep.relu(z), "f16"),
    }


@ep.epilogue
def independent(acc, bias: Row, column: Column):
    return {"D": ep.relu(acc * column), "other": ep.silu(acc + bias)}


@ep.epilogue
def reads_main(acc, bias: Row):
    z = acc + bias
    return {"D": z, "activated": ep.silu(z), "raw": acc}


@ep.epilogue
def same_value_twice(acc):
    z = acc * acc
    return {"D": z, "copy": z, "wide": ep.cast(z, "f32")}


@ep.epilogue
def accumulator_out(acc, gate: Aux):
    return {"D": acc, "gated": ep.sigmoid(acc) * gate}


@ep.epilogue
def casts_inside(acc, bias: Row):
    z = ep.cast(acc, "bf16") + bias
    return ep.cast(z, "f16") * 3.0


@cases(
    *(
        Case(epilogue, *shape, dtype, backend)
        for backend in BACKENDS
        for epilogue in (chained, independent, reads_main, same_value_twice, accumulator_out)
        for shape, dtype in (((200, 264, 136), "bf16"), ((65, 136, 72), "f16"))
    )
)
def test_several_outputs(case: Case) -> None:
    check_case(case)


@cases(*(Case(casts_inside, 200, 264, 136, "bf16", backend) for backend in BACKENDS))
def test_casts_inside_round_where_the_tree_says(case: Case) -> None:
    """With small integers the accumulator is exact, so the fused result is the reference's to the bit."""
    torch.manual_seed(0)
    a = torch.randint(-4, 5, (case.m, case.k), device="cuda").bfloat16()
    b = torch.randint(-4, 5, (case.k, case.n), device="cuda").bfloat16()
    bias = (torch.randn(case.n, device="cuda") * 10).bfloat16()
    with gemm_ops.use_backend(case.backend):
        result = gemm_ops.matmul(a, b.t().contiguous().t(), case.epilogue, bias=bias)
    expected = case.epilogue.reference((a.double() @ b.double()).float(), out_dtype=torch.bfloat16, bias=bias)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(result, expected)
    # the case can fail: without the casts the result is another one
    assert not torch.equal(result, (((a.double() @ b.double()).float() + bias.float()) * 3.0).bfloat16())

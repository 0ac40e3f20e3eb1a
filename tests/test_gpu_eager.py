"""rounding="eager" on a GPU: fused and unfused agree to the bit.

With small integers in A and B the accumulator is exact, so what is compared is where and how values are rounded, and
the device functions, against PyTorch's own kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_functions import pack, packs
from gpu_support import DTYPES, Case
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row, Scalar

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built_cases")]

# accumulators are integers of up to a few thousands, which 16 bits do not all have
_LARGEST, _SCALE = 16, 1 / 256


def matrices(case: Case, largest: int = _LARGEST) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    dtype = DTYPES[case.dtype]
    a, b = (torch.randint(-largest, largest + 1, (e, case.k), device="cuda").to(dtype) for e in (case.m, case.n))
    return a, b


def assert_same_bits(name: str, fused: torch.Tensor, eager: torch.Tensor) -> None:
    eager = eager.to(fused.dtype)
    both_nan = fused.isnan() & eager.isnan()
    bits = {2: torch.int16, 4: torch.int32}[fused.element_size()]
    wrong = (fused.view(bits) != eager.view(bits)) & ~both_nan
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        got, expected = fused[tuple(first)].item(), eager[tuple(first)].item()
        pytest.fail(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements, first at {first}: {got!r} for {expected!r}"
        )


def by_name(results: Any) -> dict[str, torch.Tensor]:
    return results if isinstance(results, dict) else {"D": results}


def eager_case(group: str, dtype: str, backend: str) -> Case:
    function = pack(packs()[group], _SCALE)
    return Case(ep.epilogue(function, rounding="eager", name=group), 200, 264, 40, dtype, backend)


CASES = [
    *(eager_case(group, dtype, "sm80") for group in packs() for dtype in ("bf16", "f16")),
    *(eager_case(group, "bf16", "sm90") for group in packs()),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_row(case: Case) -> None:
    """The same Python function, traced and fused, and run by PyTorch."""
    a, b = matrices(case)
    row = (torch.randn(case.n, device="cuda") * 3).to(a.dtype)
    group = packs()[case.epilogue.name]
    with gemm_ops.use_backend(case.backend):
        fused = by_name(gemm_ops.linear(a, b, case.epilogue, row=row))
    eager = pack(group, _SCALE)(torch.matmul(a, b.t()), row)
    computed_here = by_name(case.epilogue.reference(torch.matmul(a, b.t()), row=row))
    wrong = []
    for name, result in fused.items():
        for what, other in (("eager", eager[name]), ("reference", computed_here[name])):
            try:
                assert_same_bits(f"{name} against {what}", result, other)
            except pytest.fail.Exception as failure:
                wrong.append(str(failure))
    assert not wrong, "\n".join(wrong)


def mixed(acc: Any, row: Row, column: Column, alpha: Scalar, aux: Aux) -> dict[str, Any]:
    scaled = (acc * 0.01 * alpha + row) * column
    return {
        "D": F.silu(scaled) + aux,
        "compared": torch.where(acc * 0.01 > alpha, scaled, aux),
        "over": scaled / alpha,
        "minus": alpha - scaled,
        "wide": (scaled - aux).float(),
    }


MIXED_EPILOGUE = ep.epilogue(mixed, rounding="eager")
#: dtypes of row, column and aux, and how the scalar is given
MIXED = {
    f"{'-'.join(dtypes)}-{scalar}": (dtypes, scalar)
    for dtypes in (("bf16", "bf16", "bf16"), ("f32", "bf16", "bf16"), ("bf16", "f16", "bf16"), ("bf16", "bf16", "f32"))
    for scalar in ("number", "0-dim bf16", "0-dim f32", "1-element f32")
}
BIASED = ep.builders.bias_activation("silu")
NARROW = ep.epilogue(lambda acc, row: (acc * 0.01 + row) * row - acc, compute_dtype=torch.bfloat16, name="narrow")


def mixed_operands(case: Case, dtypes: tuple[str, ...], scalar: str) -> dict[str, Any]:
    torch.manual_seed(1)
    row, column, aux = (
        torch.randn(shape, device="cuda").to(DTYPES[dtype])
        for shape, dtype in zip((case.n, case.m, (case.m, case.n)), dtypes, strict=True)
    )
    shape, _, dtype = scalar.partition(" ")
    tensor = torch.tensor(0.3 if shape == "0-dim" else [0.3], device="cuda", dtype=DTYPES.get(dtype))
    return {"row": row, "column": column, "alpha": 0.3 if shape == "number" else tensor, "aux": aux}


@pytest.fixture(scope="module")
def built_others() -> None:
    """The kernels of the tests below, built together."""
    a, b = matrices(MIXED_CASE)
    bias = torch.zeros(MIXED_CASE.n, device="cuda", dtype=a.dtype)
    with gemm_ops.use_backend("sm80"):
        wanted = [
            gemm_ops.backend_for(a, b.t(), MIXED_EPILOGUE, **mixed_operands(MIXED_CASE, dtypes, scalar))
            for dtypes, scalar in MIXED.values()
        ]
        for dtype in ("bf16", "f16"):
            half = [tensor.to(DTYPES[dtype]) for tensor in (a, b.t(), bias)]
            for rounding in ("eager", "eager_linear"):
                wanted.append(gemm_ops.backend_for(*half[:2], BIASED.with_rounding(rounding), bias=half[2]))
        wanted.append(gemm_ops.backend_for(a, b.t(), NARROW, row=bias))
    gemm_ops.build_kernels([decision.spec for decision in wanted if decision.spec is not None])


MIXED_CASE = Case(MIXED_EPILOGUE, 136, 200, 40)


@pytest.mark.usefixtures("built_others")
@pytest.mark.parametrize(("dtypes", "scalar"), MIXED.values(), ids=MIXED)
def test_promotion(dtypes: tuple[str, ...], scalar: str) -> None:
    """Operands of other dtypes, scalars as numbers and as tensors with and without a dimension."""
    a, b = matrices(MIXED_CASE)
    operands = mixed_operands(MIXED_CASE, dtypes, scalar)
    with gemm_ops.use_backend("sm80"):
        fused = gemm_ops.linear(a, b, MIXED_EPILOGUE, **operands)
    assert isinstance(fused, dict)
    eager = mixed(torch.matmul(a, b.t()), **{**operands, "column": operands["column"][:, None]})
    for name, result in fused.items():
        assert_same_bits(name, result, eager[name])


@pytest.mark.usefixtures("built_others")
@pytest.mark.parametrize("dtype", ("bf16", "f16"))
def test_linear_rounds_after_its_bias(dtype: str) -> None:
    # float16 has every integer up to 2048
    a, b = (tensor.to(DTYPES[dtype]) for tensor in matrices(MIXED_CASE, largest=40))
    bias = torch.randn(MIXED_CASE.n, device="cuda").to(a.dtype)
    with gemm_ops.use_backend("sm80"):
        after_bias = gemm_ops.linear(a, b, BIASED.with_rounding("eager_linear"), bias=bias)
        before_bias = gemm_ops.linear(a, b, BIASED.with_rounding("eager"), bias=bias)
    assert isinstance(after_bias, torch.Tensor) and isinstance(before_bias, torch.Tensor)
    assert_same_bits("F.linear", after_bias, F.silu(F.linear(a, b, bias)))
    assert_same_bits("torch.matmul", before_bias, F.silu(torch.matmul(a, b.t()) + bias))
    assert not torch.equal(after_bias, before_bias), "the case can tell the two apart"


@pytest.mark.usefixtures("built_others")
def test_compute_dtype() -> None:
    """Every operation's result rounded to bfloat16: sums and products as bfloat16 tensors have them."""
    a, b = matrices(MIXED_CASE)
    row = torch.randn(1, MIXED_CASE.n, device="cuda").bfloat16()
    acc = torch.matmul(a, b.t())
    with gemm_ops.use_backend("sm80"):
        fused = gemm_ops.linear(a, b, NARROW, row=row.reshape(-1))
    assert isinstance(fused, torch.Tensor)
    factor = torch.tensor(0.01, device="cuda", dtype=torch.bfloat16)  # a constant of the compute dtype
    assert_same_bits("bfloat16", fused, (acc * factor + row) * row - acc)

"""Inputs, eager baselines and the judgement of results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import epilogues as ep
from shape_sweeps import Case, load_epilogue
from shape_sweeps.cases import DTYPES
from shape_sweeps.catalogue import FORMULAS
from shape_sweeps.compare import Comparison, compare, compute_truth
from shape_sweeps.eager import HAND_WRITTEN, unfused
from shape_sweeps.inputs import Inputs, make_inputs, output_dtypes, placeholder_inputs


def setup(
    name: str, dtype: str = "bf16", m: int = 33, n: int = 65, k: int = 127, operation: str = "linear"
) -> tuple[Case, ep.Epilogue, Inputs]:
    epilogue = load_epilogue(name)
    case = Case(m, n, k, dtype, name, operation)
    return case, epilogue, make_inputs(case, epilogue)


def best(inputs: Inputs, epilogue: ep.Epilogue) -> dict[str, torch.Tensor]:
    """The correctly rounded outputs."""
    truth = compute_truth(inputs, epilogue)
    return {name: value.value.to(inputs.a.dtype) for name, value in truth.items()}


def judge(result: torch.Tensor, name: str = "bias_gelu", dtype: str = "bf16", **shape: int) -> Comparison:
    _, epilogue, inputs = setup(name, dtype, **shape)
    truth = compute_truth(inputs, epilogue)
    return compare("D", "contiguous", result, unfused(name, epilogue)(inputs)["D"], truth["D"])


def test_the_catalogue_is_the_suite() -> None:
    assert list(FORMULAS) == list(HAND_WRITTEN)
    assert set(FORMULAS) == set(ep.builders.SUITE)


@pytest.mark.parametrize("operation", ["linear", "matmul"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", list(HAND_WRITTEN))
def test_eager_baselines_compute_the_epilogue(name: str, dtype: str, operation: str) -> None:
    """Within what rounding each of at most six operations may do, with unit-variance intermediates."""
    case, epilogue, inputs = setup(name, dtype, operation=operation)
    outputs = unfused(name, epilogue)(inputs)
    truth = compute_truth(inputs, epilogue)
    assert tuple(outputs) == epilogue.outputs == tuple(truth)
    for output, value in outputs.items():
        assert value.shape == (33, 65)
        assert value.dtype == output_dtypes(case, epilogue)[output]
        exact = truth[output].value
        error = (value.double() - exact).norm() / exact.norm()
        assert error < 6 * torch.finfo(DTYPES[dtype]).eps / 2


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", list(HAND_WRITTEN))
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (33, 65, 127), (64, 1, 300)])
def test_the_best_possible_result_passes(name: str, dtype: str, shape: tuple[int, int, int]) -> None:
    _, epilogue, inputs = setup(name, dtype, *shape)
    truth, baseline = compute_truth(inputs, epilogue), unfused(name, epilogue)(inputs)
    for output, value in best(inputs, epilogue).items():
        found = compare(output, "contiguous", value, baseline[output], truth[output])
        assert found.faults == () and found.error <= found.error_limit


def test_limits_lie_within_reach_of_the_dtype() -> None:
    """Not below what rounding takes, and not above a few times the unit roundoff."""
    for dtype, torch_dtype in DTYPES.items():
        case, epilogue, inputs = setup("identity", dtype)
        found = judge(best(inputs, epilogue)["D"], "identity", dtype)
        roundoff = torch.finfo(torch_dtype).eps / 2
        accumulation = 10 * math.sqrt(case.k) * torch.finfo(torch.float32).eps
        assert found.error <= found.error_limit < roundoff + accumulation


@pytest.mark.parametrize("name", ["identity", "bias_gelu"])
def test_truncation_instead_of_rounding_is_found(name: str) -> None:
    _, epilogue, inputs = setup(name, m=128, n=128)
    truth = compute_truth(inputs, epilogue)["D"].value
    bits = truth.float().view(torch.int32) & ~0xFFFF  # the upper half of a float32 is a truncated bfloat16
    found = judge(bits.view(torch.float32).to(torch.bfloat16), name, m=128, n=128)
    assert any("relative error" in fault for fault in found.faults)


def test_a_slightly_wrong_result_is_found() -> None:
    _, epilogue, inputs = setup("bias_gelu")
    right = best(inputs, epilogue)["D"]
    assert judge(right).faults == ()
    assert any("relative error" in fault for fault in judge(right * 1.01).faults)


def test_one_wrong_element_is_found_and_located() -> None:
    _, epilogue, inputs = setup("bias_gelu")
    wrong = best(inputs, epilogue)["D"]
    wrong[7, 11] += 0.25
    (fault,) = [fault for fault in judge(wrong).faults if "largest error" in fault]
    assert "at row 7, column 11" in fault


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_found(value: float) -> None:
    _, epilogue, inputs = setup("bias_gelu")
    wrong = best(inputs, epilogue)["D"]
    wrong[32, 64] = value
    assert any("at row 32, column 64" in fault for fault in judge(wrong).faults)


def test_values_that_should_not_be_finite_are_expected() -> None:
    _, epilogue, inputs = setup("identity", "fp16")
    inputs.a[3] = 60000.0
    inputs.b[:5] = 1.0
    inputs.a[4, 0] = float("nan")
    truth = compute_truth(inputs, epilogue)["D"]
    right = truth.value.half()
    assert int(right.isinf().sum()) >= 5 and int(right.isnan().sum()) == 65
    assert compare("D", "contiguous", right, right, truth).faults == ()
    wrong = right.clone()
    wrong[3, 0] = 65504.0
    assert any("+inf differs" in fault for fault in compare("D", "contiguous", wrong, right, truth).faults)


def test_an_unfused_result_that_overflowed_excuses_nothing() -> None:
    _, epilogue, inputs = setup("bias_gelu")
    truth = compute_truth(inputs, epilogue)["D"]
    right = best(inputs, epilogue)["D"]
    overflowed = right.clone()
    overflowed[0, 0] = float("inf")
    assert compare("D", "contiguous", right, overflowed, truth).faults == ()
    assert compare("D", "contiguous", right * 1.5, overflowed, truth).faults


def test_inputs_are_of_the_case_and_accumulators_of_order_one() -> None:
    case, epilogue, inputs = setup("dequant", k=1000)
    again, other = make_inputs(case, epilogue), make_inputs(case, epilogue, repeat=1)
    assert torch.equal(inputs.a, again.a) and torch.equal(inputs.operands["bias"], again.operands["bias"])
    assert not torch.equal(inputs.a, other.a)
    assert 0.8 < float((inputs.a.double() @ inputs.right.double()).std()) < 1.2
    shapes = {name: tuple(value.shape) for name, value in inputs.operands.items()}
    assert shapes == {"row_scale": (33,), "col_scale": (65,), "bias": (65,)}


def test_scalars_are_numbers_away_from_zero() -> None:
    _, _, inputs = setup("residual")
    assert isinstance(inputs.operands["alpha"], float) and 0.5 <= inputs.operands["alpha"] <= 1.5
    assert tuple(inputs.operands["residual"].shape) == (33, 65)


def test_placeholders_look_like_inputs() -> None:
    case, epilogue, inputs = setup("residual", operation="matmul")
    empty = placeholder_inputs(case, epilogue)
    for ours, theirs in zip(
        (inputs.a, inputs.b, inputs.operands["residual"]),
        (empty.a, empty.b, empty.operands["residual"]),
        strict=True,
    ):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def test_operands_and_outputs_take_the_dtypes_an_epilogue_names() -> None:
    @ep.epilogue
    def mixed(acc: Any, bias: ep.Row) -> Any:
        z = acc + bias
        return {"D": z, "wide": z.to(torch.float32)}

    case = Case(3, 5, 7, "fp16", "mixed")
    assert output_dtypes(case, mixed) == {"D": torch.float16, "wide": torch.float32}

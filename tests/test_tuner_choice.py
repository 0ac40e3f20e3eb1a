"""What tuning makes calls do, without a device: candidates, classes, near results, advice."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from tuner_support import H200, call_on_h200, class_of, knowing, result_of

import epilogues as ep
import gemm_ops
from gemm_ops import dispatch
from gemm_ops.explain import Report
from gemm_ops.forcing import use_backend
from gemm_ops.kernels import candidates, families
from gemm_ops.kernels.candidates import find_candidate, rank_candidates
from gemm_ops.kernels.config import KernelConfig
from gemm_ops.kernels.selection import Target, select_kernel
from gemm_ops.tuner import known
from gemm_ops.tuner.advice import FUSED, TWO_PASSES, Advice, advise
from gemm_ops.tuner.classes import instructions_of, matrices_of, problem_class, tree_class
from gemm_ops.tuner.context import seconds_of_tuning, way_of_tuning
from gemm_ops.tuner.near import is_near
from gemm_ops.tuner.records import BY_OPERATIONS, CUBLAS_ALONE
from gemm_ops.two_passes import CublasAlone, find_alone

__all__ = ["knowing"]

SHAPE = (4096, 4096, 4096)
SLOWER = "sm90_cooperative_128x192x64_2x1 swizzle 1"


def ranked(m: int, n: int, k: int, target: Target = H200, most: int | None = None) -> tuple[candidates.Candidate, ...]:
    call = call_on_h200(m, n, k)
    return rank_candidates(call.tree, "bf16", call.request, target, most=most)


def advice_for(call: dispatch.Call, forced: str = "auto") -> Advice:
    selection = select_kernel(call.tree, "bf16", call.request, target=H200)
    alone = find_alone(call) is not None
    return advise(call.tree, "bf16", call.request, selection, H200, alone=alone, forced=forced)


@pytest.mark.parametrize("shape", [SHAPE, (1000, 3000, 2000), (64, 4096, 4096), (4095, 4097, 4093), (16, 64, 8)])
@pytest.mark.parametrize("target", [H200, Target((8, 0), 108)], ids=["sm90", "sm80"])
def test_the_first_candidate_is_the_choice_of_the_rules(shape: tuple[int, int, int], target: Target) -> None:
    call = call_on_h200(*shape)
    found = ranked(*shape, target)
    assert found[0].spec == select_kernel(call.tree, "bf16", call.request, target=target).spec
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert find_candidate(each.name, call.tree, "bf16", call.request, target) == each
    firsts = list({each.spec.key: each.expected for each in reversed(found)}.values())[::-1]
    assert firsts[1:] == sorted(firsts[1:])


def test_a_swizzle_is_another_candidate_of_the_same_kernel() -> None:
    found = ranked(*SHAPE)
    swizzles = [each.spec.config.swizzle for each in found if each.spec.key == found[0].spec.key]
    assert sorted(swizzles) == [1, 2, 4, 8]
    few = ranked(*SHAPE, most=2)
    assert len({each.spec.key for each in few}) == 2 and len(few) > 2
    assert len(ranked(64, 64, 512)) == len({each.spec.key for each in ranked(64, 64, 512)}), "one wave: any order"


def test_a_longer_table_means_more_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {each.name for each in ranked(*SHAPE)}
    more = KernelConfig("sm90", (64, 128, 64), (1, 1), "pingpong")
    monkeypatch.setitem(families.CONFIGS, "sm90", (*families.CONFIGS["sm90"], more))
    after = {each.name for each in ranked(*SHAPE)}
    assert before < after and all(
        name.startswith("sm90_pingpong_128x") or "64x128x64" in name for name in after - before
    )


def test_names_of_no_kernel_are_found_nowhere() -> None:
    call = call_on_h200(*SHAPE)
    for name in ("sm90_pingpong_8x8x8_1x1 swizzle 1", ranked(*SHAPE)[0].spec.config.name, "", "two passes"):
        assert find_candidate(name, call.tree, "bf16", call.request, H200) is None
    name = ranked(*SHAPE)[0].name
    assert find_candidate(name, call.tree, "bf16", call.request, H200, "sm80") is None


def test_classes() -> None:
    aligned, odd = class_of(call_on_h200(*SHAPE)), class_of(call_on_h200(4095, 4097, 4093))
    assert (aligned.layouts, aligned.access, aligned.extents) == ("row/column", "aligned", "4096 x 4096 x 4096")
    assert odd.access == "a padded, b padded, stores unaligned"
    trees = {name: tree_class(call_on_h200(*SHAPE, name).tree) for name in ("relu", "gelu", "silu")}
    assert (
        trees["relu"] == "-> bf16, 1 instructions" and trees["gelu"] == trees["silu"] == "-> bf16, 8 to 15 instructions"
    )


def test_problems_are_classed_by_the_families_that_take_any_extents() -> None:
    found = [families.general_families(capability) for capability in ((9, 0), (8, 6), (7, 5))]
    assert found == [("sm90", "sm80"), ("sm80",), ()]
    few = call_on_h200(8, 4097, 4096)  # the skinny kernel that takes it stores element by element
    assert select_kernel(few.tree, "bf16", few.request, target=H200).spec.config.family == "skinny"  # type: ignore[union-attr]
    assert class_of(few).access == "stores unaligned"
    batch = torch.empty(70_000, 8, 16, dtype=torch.bfloat16, device="meta")  # more than the grid of SM80 kernels has
    many = dispatch.bind_call(batch, batch.mT, ep.builders.identity(), {}, None)
    found_class = problem_class(many.request, "bf16", Target((8, 0), 108, "NVIDIA A100"))
    assert found_class is not None and (found_class.batch, found_class.m) == (70_000, 8)


# Near results.


@pytest.mark.parametrize(
    ("other", "near"),
    [
        ((8192, 4096, 4096), True),
        ((8200, 4096, 4096), False),
        ((2048, 4096, 4096), True),
        ((4096, 4200, 4200), True),
        ((4096, 4200, 4201), False),  # cuBLAS has other kernels there
        ((4096, 4608, 4096), False),
        ((8192, 4104, 4096), False),
    ],
)
def test_which_extents_are_near(other: tuple[int, int, int], near: bool) -> None:
    asked = class_of(call_on_h200(*SHAPE))
    found = dataclasses.replace(asked, m=other[0], n=other[1], k=other[2])
    assert is_near(asked, found) == near == is_near(found, asked)


def test_few_rows_are_near_to_fewer_only() -> None:
    asked = class_of(call_on_h200(64, 4096, 4096))
    assert is_near(asked, dataclasses.replace(asked, m=80)) and not is_near(asked, dataclasses.replace(asked, m=32))


def test_a_near_result_counts_where_the_model_does_not_think_worse_of_it(knowing: object) -> None:
    asked, measured = call_on_h200(4000, 4096, 4096), call_on_h200(*SHAPE)
    name = next(each.name for each in ranked(*SHAPE) if each.spec.config.cluster == (2, 1) and "pingpong" in each.name)
    known.remember([result_of(measured, {name: 180.0, "two passes": 200.0})])
    found = advice_for(asked)
    assert found.way == FUSED and found.spec.config.name in name
    assert found.reason.startswith("measured at 4096 x 4096 x 4096: 180.0 us, cuBLAS and one kernel 200.0 (2026-11-30")
    # the model expects this one to take far longer
    known.remember([result_of(measured, {"sm90_pingpong_64x32x128_1x1 swizzle 1": 180.0})])
    assert advice_for(asked).reason == ""
    # another number of waves: 32 x 33 tiles on 132 multiprocessors are 8, and 32 x 16 are 4
    known.remember([result_of(measured, {name: 180.0})])
    assert advice_for(call_on_h200(2048, 4096, 4096)).reason == ""


def test_what_classes_of_epilogues_have_in_common() -> None:
    for tree, matrices, least in (
        ("row -> bf16, 8 to 15 instructions", "-> bf16", 8),
        ("row, column, aux bf16, 2 aux f32 -> bf16+f32, 0 instructions", "aux bf16, 2 aux f32 -> bf16+f32", 0),
        ("-> f16, 1 instructions", "-> f16", 1),
    ):
        assert (matrices_of(tree), instructions_of(tree)) == (matrices, least)


def test_another_epilogues_kernel_is_taken_where_nothing_else_is_known(knowing: object) -> None:
    asked, first = call_on_h200(*SHAPE, "relu"), ranked(*SHAPE)[0].name
    assert tree_class(asked.tree) != tree_class(call_on_h200(*SHAPE).tree)
    name = next(each.name for each in ranked(*SHAPE) if each.spec.config.name not in first)
    known.remember([result_of(call_on_h200(*SHAPE), {name: 180.0, first: 190.0, "two passes": 170.0}, example="gelu")])
    found = advice_for(asked)
    assert (found.way, found.spec.config.name) == (FUSED, name.split()[0]), "what it says of PyTorch does not count"
    assert found.reason == "measured fastest with gelu (2026-11-30, NVIDIA H200)"
    assert advice_for(call_on_h200(4104, 4096, 4096, "relu")).reason == "", "of the very problem only"
    # the model expects this one to take far longer
    known.remember([result_of(call_on_h200(*SHAPE), {"sm90_pingpong_64x32x128_1x1 swizzle 1": 180.0})])
    assert advice_for(asked).reason == ""
    # its own result comes first
    known.remember([result_of(asked, {first: 150.0})])
    assert advice_for(asked).spec.config.name == first.split()[0]


def test_that_pytorch_is_faster_counts_near_by_only(knowing: object) -> None:
    fused = ranked(512, 4096, 4096)[0].name
    known.remember([result_of(call_on_h200(512, 4096, 4096), {fused: 30.0, "two passes": 25.0})])
    assert advice_for(call_on_h200(496, 4096, 4096)).way == TWO_PASSES
    assert advice_for(call_on_h200(392, 4096, 4096)).way == FUSED


# What calls do.


def test_the_measured_one_is_taken(knowing: object) -> None:
    call = call_on_h200(*SHAPE)
    first = ranked(*SHAPE)[0].name
    assert advice_for(call) == Advice(FUSED, ranked(*SHAPE)[0].spec, ranked(*SHAPE)[0].addressing)
    known.remember([result_of(call, {first: 200.0, SLOWER: 190.0, "two passes": 210.0})])
    found = advice_for(call)
    assert (found.way, found.spec.config.name, found.spec.config.swizzle) == (FUSED, SLOWER.split()[0], 1)
    assert found.reason == (
        "measured: 190.0 us, the model's choice 200.0, cuBLAS and one kernel 210.0 (2026-11-30, NVIDIA H200)"
    )
    with gemm_ops.tuning("off"):
        assert advice_for(call).reason == ""
    assert advice_for(call_on_h200(1000, 3000, 2000)).reason == "", "another class of problems"


def test_never_slower(knowing: object) -> None:
    call, first = call_on_h200(*SHAPE), ranked(*SHAPE)[0].name
    for way in (TWO_PASSES, BY_OPERATIONS):
        known.remember([result_of(call, {first: 200.0, way: 190.0})])
        found = advice_for(call)
        assert found.way == way and found.reason.startswith("measured: 190.0 us, the best fused kernel 200.0")
        assert advice_for(call, "sm90").way == FUSED, "who asks for it gets it"
        known.remember([result_of(call, {first: 200.0, way: 199.0})])
        assert advice_for(call).way == FUSED, "within 1 % one launch is better"


@ep.epilogue
def added(acc, row: ep.Row):
    return acc + row


@ep.epilogue
def turned(acc, row: ep.Row):
    return row + acc


@ep.epilogue
def multiplied(acc, row: ep.Row):
    return acc * row


@ep.epilogue
def added_column(acc, column: ep.Column):
    return acc + column


@ep.epilogue(rounding="eager")
def rounded_twice(acc, row: ep.Row):
    return acc + row


@ep.epilogue
def to_fp32(acc):
    return ep.cast(acc, "f32")


@ep.epilogue
def simplified(acc, row: ep.Row):
    return acc * 1.0 + row


def test_cublas_alone_is_for_what_it_computes(knowing: object) -> None:
    """Of a class of epilogues that cuBLAS may compute, and was measured faster at, some are ones that it does not."""

    def decision_for(epilogue: ep.Epilogue, **given: Any) -> dispatch.Decision:
        x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (4096, 4096))
        call = dispatch.bind_call(x, weight.t(), epilogue, given, None)
        there = dataclasses.replace(call, problem=dataclasses.replace(call.problem, device=torch.device("cuda", 0)))
        first = rank_candidates(call.tree, "bf16", call.request, H200)[0].name
        known.remember([result_of(there, {first: 200.0, CUBLAS_ALONE: 180.0})])
        return dispatch.decide(there)

    row = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    for epilogue, given in ((ep.builders.identity(), {}), (added, {"row": row}), (turned, {"row": row})):
        found = decision_for(epilogue, **given)
        assert found.backend == "cublas" and isinstance(found.tail, CublasAlone) and "cuBLAS" not in found.reason
        assert found.tail.bias == ("row" if given else "") and found.spec is None
        assert found.reason.startswith("measured: 180.0 us, the best fused kernel 200.0")
    for epilogue, given in (
        (multiplied, {"row": row}),
        (added, {"row": row.float()}),
        (added, {"row": row.expand(1, 4096)}),
        (added_column, {"column": row}),
        (rounded_twice, {"row": row}),
        (to_fp32, {}),
    ):
        assert decision_for(epilogue, **given).backend == "sm90", epilogue.name


def test_explain_tells_each_way_apart(knowing: object) -> None:
    """Of cuBLAS alone it says what cuBLAS computes, and nothing to an epilogue of the class that it does not."""

    def report_of(epilogue: ep.Epilogue, way: str) -> Report:
        x, weight = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
        row = {name: torch.empty(4096, dtype=torch.bfloat16, device="meta") for name in epilogue.operands}
        call = dispatch.bind_call(x, weight.t(), epilogue, row, None)
        first = rank_candidates(call.tree, "bf16", call.request, H200)[0].name
        known.remember([result_of(call, {first: 200.0, way: 180.0})])
        return epilogue.explain(*SHAPE, device="h200")

    numbers = "180.0 us, the best fused kernel 200.0"
    for epilogue in (ep.builders.identity(), added):
        report = report_of(epilogue, CUBLAS_ALONE)
        assert report.decision.headline.startswith("NOTHING TO FUSE: F.linear(x, weight")
        assert report.kernel.way == CUBLAS_ALONE and numbers in report.decision.reasons[-1]
    for epilogue, way, headline in (
        (simplified, CUBLAS_ALONE, "FASTER UNFUSED: cuBLAS computes all of it with the product"),
        (multiplied, TWO_PASSES, "FASTER IN TWO PASSES: cuBLAS, then one kernel for the epilogue"),
        (multiplied, BY_OPERATIONS, "FASTER UNFUSED: PyTorch, operation by operation"),
        (simplified, BY_OPERATIONS, "FASTER UNFUSED: PyTorch, operation by operation"),
    ):
        report = report_of(epilogue, way)
        assert report.decision.headline == headline
        assert report.decision.reasons[0].startswith(f"The default backend does so: measured: {numbers}")
        assert headline in str(report) and headline in report.to_markdown()
        assert "builds the kernel" not in str(report), "there is none to build"
        data = json.loads(report.to_json())
        assert data["decision"]["headline"] == headline and data["kernel"]["way"] == way
        assert data["kernel"]["reason"].startswith(f"measured: {numbers}")
    for epilogue, way in ((multiplied, CUBLAS_ALONE), (simplified, TWO_PASSES)):
        report = report_of(epilogue, way)
        assert report.kernel.way == FUSED and "180.0" not in str(report), "a way that this one has not"
        assert report.decision.headline.startswith("FUSE: ")
        assert any("fastest; measured: 200.0 us" in reason for reason in report.decision.reasons)


def test_what_remains_without_a_way(knowing: object) -> None:
    call = call_on_h200(*SHAPE)
    result = result_of(call, {"a": 100.5, TWO_PASSES: 101.0, BY_OPERATIONS: 100.0, CUBLAS_ALONE: 90.0})
    assert result.best == CUBLAS_ALONE
    rest = result.without(CUBLAS_ALONE)
    assert rest is not None and rest.order == ("a", BY_OPERATIONS, TWO_PASSES), "within 1 % one launch is better"
    assert rest.without("b") is rest and result_of(call, {TWO_PASSES: 1.0}).without(TWO_PASSES) is None


def test_kernels_that_are_gone_are_passed_over(knowing: object) -> None:
    call, first = call_on_h200(*SHAPE), ranked(*SHAPE)[0].name
    gone = "sm90_pingpong_8x8x8_1x1 swizzle 1"
    known.remember([result_of(call, {gone: 100.0, SLOWER: 190.0, first: 200.0})])
    assert advice_for(call).spec.config.name == SLOWER.split()[0]
    known.remember([result_of(call, {gone: 100.0})])
    assert advice_for(call).reason == ""
    known.remember([result_of(call, {gone: 100.0, "two passes": 150.0})])
    assert advice_for(call).way == TWO_PASSES


def test_the_decision_says_so(knowing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "obstacle", lambda spec, **_: None)
    call, first = call_on_h200(*SHAPE), ranked(*SHAPE)[0].name
    known.remember([result_of(call, {first: 200.0, SLOWER: 190.0, BY_OPERATIONS: 300.0})])
    found = dispatch.decide(call)
    assert (found.backend, found.kernel) == ("sm90", SLOWER.split()[0])
    assert "190.0 us, the model's choice 200.0, PyTorch by operations 300.0" in found.reason
    known.remember([result_of(call, {first: 200.0, BY_OPERATIONS: 150.0})])
    found = dispatch.decide(call)
    assert (found.backend, found.kernel, found.loss) == ("reference", None, False) and "150.0 us" in found.reason
    known.remember([result_of(call, {first: 200.0, TWO_PASSES: 150.0})])
    found = dispatch.decide(call)
    assert (found.backend, found.loss) == ("cublas", False) and found.tail is not None and "150.0 us" in found.reason
    with use_backend("sm90"):
        assert dispatch.decide(call).kernel == first.split()[0]
    with gemm_ops.tuning("off"):
        assert dispatch.decide(call).reason == "compute capability 9.0"


def test_explain_and_build_follow_the_results(knowing: object) -> None:
    from epilogues import builders
    from gemm_ops.foreseen import foresee

    call = call_on_h200(*SHAPE)
    known.remember([result_of(call, {SLOWER: 190.0, TWO_PASSES: 210.0})])
    report = builders.activation("gelu").explain(*SHAPE, device="h200")
    assert report.kernel.config is not None and report.kernel.config.name == SLOWER.split()[0]
    assert any("tuning found fastest; measured: 190.0 us" in reason for reason in report.decision.reasons)
    x, weight = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    assert SLOWER.split()[0] in foresee(x, weight.t(), call.epilogue, {}, H200).kernels[0].title
    known.remember([result_of(call, {SLOWER: 190.0, BY_OPERATIONS: 100.0})])
    found = foresee(x, weight.t(), call.epilogue, {}, H200)
    assert found.kernels == () and "PyTorch computes it operation by operation: measured: 100.0 us" in found.notes[0]
    report = builders.activation("gelu").explain(*SHAPE, device="h200")
    assert report.decision.headline == "FASTER UNFUSED: PyTorch, operation by operation"


# Contexts.


def test_the_way_is_the_contexts_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMM_OPS_TUNE")
    assert way_of_tuning() == "known"
    monkeypatch.setenv("GEMM_OPS_TUNE", "NOW")
    assert way_of_tuning() == "now"
    with gemm_ops.tuning("off"), use_backend("sm90"):
        assert way_of_tuning() == "off"
        with gemm_ops.tuning("known"):
            assert way_of_tuning() == "known"
        assert way_of_tuning() == "off"
    monkeypatch.setenv("GEMM_OPS_TUNE", "often")
    with pytest.raises(ValueError, match="GEMM_OPS_TUNE should be one of now, known, off, got 'often'"):
        advice_for(call_on_h200(*SHAPE))
    with pytest.raises(ValueError, match="tuning should be one of now, known, off, got ''"), gemm_ops.tuning(""):
        pass


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of_tuning() == 60
    monkeypatch.setenv("GEMM_OPS_TUNE_SECONDS", "2.5")
    assert seconds_of_tuning() == 2.5
    for text in ("-1", "0", "nan", "inf", "soon"):
        monkeypatch.setenv("GEMM_OPS_TUNE_SECONDS", text)
        with pytest.raises(ValueError, match=f"a positive number of seconds, got '{text}'"):
            seconds_of_tuning()


def test_a_plan_of_one_way_is_not_found_in_another() -> None:
    from gemm_ops.forcing import ASKED, asked

    assert asked() is ASKED[0]
    with gemm_ops.tuning("off"), use_backend("cublas"):
        assert asked() == ("cublas", "off") and any(asked() is each for each in ASKED)
    assert asked() is ASKED[0]

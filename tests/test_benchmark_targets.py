"""The targets of the benchmark, and geometric means, on made-up results."""

from __future__ import annotations

import dataclasses
import math

import pytest
from benchmark_support import made_up, sample

from shape_sweeps.benchmark.document import geomeans
from shape_sweeps.benchmark.results import (
    AMONG_PEERS,
    FAILED,
    Entry,
    Results,
    geomean,
)
from shape_sweeps.benchmark.suite import GROUPS, MISALIGNED, group_of, has_matrix_operand
from shape_sweeps.benchmark.targets import MET, MISSED, NOT_MEASURED, TARGETS, Limit, Outcome, judge
from shape_sweeps.catalogue import FORMULAS
from shape_sweeps.shapes import SUITE_DECODE, SUITE_LARGE, SUITE_MISALIGNED, Shape


def on_gpu(*entries: Entry) -> Results:
    return Results({"device": "cuda"}, entries=list(entries))


def outcome(results: Results, name: str) -> Outcome:
    (found,) = [one for one in judge(results) if one.target.name.startswith(name)]
    return found


LARGE, DECODE, ODD = SUITE_LARGE[0], SUITE_DECODE[0], SUITE_MISALIGNED[0]


def test_the_targets_are_those_of_the_suite() -> None:
    """The numbers, as they were set."""
    limits = [[(limit.what, limit.most, limit.value) for limit in target.limits] for target in TARGETS]
    assert limits == [
        [("geomean", True, 1.0), ("largest", True, 1.1)],
        [("geomean", False, 1.3)],
        [("geomean", False, 1.05)],
        [("geomean", True, 0.9)],
        [("geomean", False, 4.0)],
        [("geomean", True, 1.3)],
        [("least", False, 0.98)],
        [("", True, 1.0)],
    ]
    assert [target.entries_of_suite for target in TARGETS] == [16 * 6, 16 * 8, 16 * 8, 4, 8 * 8, 8 * 8, 24 * 8, 0]


def test_epilogues_without_matrices_are_told_by_their_operands() -> None:
    assert [name for name in FORMULAS if has_matrix_operand(name)] == ["residual", "gate"]


@pytest.mark.parametrize(
    ("times", "verdict", "values"),
    [
        ((100.0, 100.0), MET, (1.0, 1.0)),  # at the limit
        ((90.0, 110.0), MET, (math.sqrt(0.99), 1.1)),
        ((80.0, 110.1), MISSED, (math.sqrt(0.8808), 1.101)),  # a single case
        ((100.0, 100.4), MISSED, (math.sqrt(1.004), 1.004)),
    ],
)
def test_time_over_mm_is_of_the_mean_and_of_the_worst(
    times: tuple[float, float], verdict: str, values: tuple[float, float]
) -> None:
    entries = [made_up(shape, fused=time) for shape, time in zip((LARGE, DECODE), times, strict=True)]
    found = outcome(on_gpu(*entries), "aligned: time over torch.mm")
    assert found.verdict == verdict and found.values == pytest.approx(values) and found.measured == 2


def test_auxiliary_matrices_and_misaligned_shapes_do_not_count_against_mm() -> None:
    entries = [made_up(LARGE, "gate", fused=200.0), made_up(LARGE, "residual", fused=200.0), made_up(ODD, fused=200.0)]
    found = outcome(on_gpu(*entries, made_up(LARGE, fused=90.0)), "aligned: time over torch.mm")
    assert found.verdict == MET and found.values == pytest.approx((0.9, 0.9)) and found.measured == 1


def test_the_speedup_over_eager_is_of_every_epilogue_and_aligned_shapes() -> None:
    entries = [made_up(LARGE, "gate", eager=130.0), made_up(DECODE, "identity", eager=130.0), made_up(ODD, eager=999.0)]
    found = outcome(on_gpu(*entries), "aligned: speed-up over eager")
    assert found.verdict == MET and found.values == pytest.approx((1.3,)) and found.measured == 2
    entries[0].contestants["eager"].times[AMONG_PEERS] = sample(129.0)
    assert outcome(on_gpu(*entries), "aligned: speed-up over eager").verdict == MISSED


def test_the_best_fused_peer_is_the_fastest_that_ran() -> None:
    both = made_up(LARGE, compile=120.0, cublaslt=104.0)
    one = made_up(DECODE, compile=120.0)
    neither = made_up(SUITE_LARGE[1], "gate", eager=500.0)
    assert both.speedup_over_fused_peer == pytest.approx(1.04)
    assert one.speedup_over_fused_peer == pytest.approx(1.2) and neither.speedup_over_fused_peer is None
    found = outcome(on_gpu(both, one, neither), "aligned: speed-up over the best fused peer")
    assert found.verdict == MET and found.measured == 2
    assert "of 2 of the suite's 128 entries" in found.text
    assert outcome(on_gpu(both), "aligned: speed-up over the best fused peer").verdict == MISSED


def test_decode_is_judged_by_bias_gelu_alone() -> None:
    entries = [made_up(DECODE, fused=90.0), made_up(DECODE, "gate", fused=300.0), made_up(LARGE, fused=300.0)]
    found = outcome(on_gpu(*entries), "decode")
    assert found.verdict == MET and found.values == pytest.approx((0.9,)) and found.measured == 1


def test_misaligned_shapes_are_judged_by_the_rounded_up_product() -> None:
    entry = made_up(ODD, mm=500.0, rounded=100.0, fused=131.0, eager=524.0)
    assert entry.over_product == entry.over_rounded_mm == pytest.approx(1.31)
    results = on_gpu(entry)
    assert outcome(results, "misaligned: time").verdict == MISSED
    assert outcome(results, "misaligned: speed-up").verdict == MET
    assert outcome(results, "misaligned: speed-up").values == pytest.approx((4.0,))


def test_never_slower_is_of_the_worst_entry_of_all() -> None:
    entries = [made_up(LARGE, eager=200.0), made_up(ODD, eager=98.0)]
    assert outcome(on_gpu(*entries), "never slower").verdict == MET
    entries.append(made_up(DECODE, "dequant", eager=97.9))
    found = outcome(on_gpu(*entries), "never slower")
    assert found.verdict == MISSED and found.text.startswith("least 0.979 < 0.98")


def test_the_host_is_judged_by_the_slower_of_ours() -> None:
    times = {"F.linear": 20.0, "FusedLinear": 18.0, "FusedLinear, GELU": 20.0}
    results = dataclasses.replace(on_gpu(), host=times)
    assert outcome(results, "host").verdict == MET
    results.host["FusedLinear, GELU"] = 20.1
    assert outcome(results, "host").verdict == MISSED
    del results.host["FusedLinear, GELU"]
    results.host_reason = "no C++ compiler"
    found = outcome(results, "host")
    assert found.verdict == NOT_MEASURED and found.text == "no C++ compiler"
    del results.host["F.linear"]
    assert outcome(results, "host").verdict == NOT_MEASURED


def test_what_was_not_measured_says_why() -> None:
    results = on_gpu(made_up(LARGE, mm=None))
    assert outcome(results, "aligned: time over").text == "the peer was not measured"
    assert outcome(results, "misaligned: time over").text == "none of its shapes and epilogues was measured"
    assert {one.verdict for one in judge(results)} == {NOT_MEASURED}


def test_on_a_cpu_no_target_is_measured() -> None:
    results = on_gpu(made_up(LARGE, eager=500.0, fused=50.0))
    results.environment["device"] = "cpu"
    assert {(one.verdict, one.text) for one in judge(results)} == {(NOT_MEASURED, "needs a CUDA device")}


def test_a_wrong_result_has_no_ratio() -> None:
    entry = made_up(LARGE, eager=500.0, fused=50.0)
    entry.status = FAILED
    assert entry.over_mm is None and entry.speedup_over_eager is None
    assert {one.verdict for one in judge(on_gpu(entry))} == {NOT_MEASURED}


def test_ratios_are_of_one_series() -> None:
    entry = made_up(LARGE, mm=100.0, eager=300.0)
    entry.contestants["fused"].times[AMONG_PEERS] = sample(150.0)
    assert entry.over_mm == 1.0 and entry.speedup_over_eager == 2.0
    assert entry.ratio("eager", "mm") is None and entry.ratio("eager", "nobody") is None


@pytest.mark.parametrize(
    ("most", "value", "text"),
    [
        (True, 1.0, "mean 1.00 <= 1.00"),
        (True, 1.0004, "mean 1.0004 > 1.00"),
        (True, 1.2, "mean 1.20 > 1.00"),
        (False, 0.999, "mean 0.999 < 1.00"),
        (False, 1.3, "mean 1.30 >= 1.00"),
    ],
)
def test_numbers_are_printed_so_that_they_show_the_verdict(most: bool, value: float, text: str) -> None:
    assert Limit("mean", geomean, most, 1.0).describe(value) == text


def test_geometric_means() -> None:
    assert (
        geomean([2.0, 8.0]) == pytest.approx(4.0) and geomean([]) is None and geomean(iter([3.0])) == pytest.approx(3)
    )


def test_geometric_means_are_of_groups_and_epilogues() -> None:
    entries = [
        made_up(LARGE, fused=200.0, eager=400.0),
        made_up(SUITE_LARGE[1], fused=50.0, eager=400.0),
        made_up(LARGE, "gate", fused=800.0),
        made_up(ODD, rounded=100.0, mm=None, fused=120.0),
    ]
    means = geomeans(on_gpu(*entries))
    assert list(means) == ["large", MISALIGNED] and list(means["large"]) == ["bias_gelu", "gate", "all"]
    assert means["large"]["bias_gelu"]["over_mm"] == pytest.approx(1.0)
    assert means["large"]["bias_gelu"]["speedup_over_eager"] == pytest.approx(4.0)
    assert means["large"]["gate"]["speedup_over_eager"] is None
    assert means["large"]["all"]["over_mm"] == pytest.approx((2.0 * 0.5 * 8.0) ** (1 / 3))
    assert means[MISALIGNED]["all"]["over_rounded_mm"] == pytest.approx(1.2)


def test_groups_of_shapes() -> None:
    for group, shapes in GROUPS.items():
        assert {group_of(shape) for shape in shapes} == {group}
    own = {Shape(8, 4096, 1024): "decode", Shape(512, 4104, 1024): "medium", Shape(9000, 9000, 9000): "large"}
    own |= {Shape(512, 4097, 1024): "misaligned", Shape(1, 4096, 1023): "misaligned", Shape(1001, 4096, 512): "medium"}
    assert {shape: group_of(shape) for shape in own} == own

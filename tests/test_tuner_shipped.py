"""The results that the package has: readable, of kernels that there are, and what calls on that device follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuner_support import H200, knowing

import epilogues as ep
import gemm_ops
from gemm_ops.tuner import known
from gemm_ops.tuner.records import Measured, read_records
from shape_sweeps.shapes import SUITE_DECODE, SUITE_LARGE, SUITE_MEDIUM

__all__ = ["knowing"]

FILE = Path(gemm_ops.__file__).parent / "tuner" / "measured" / "nvidia-h200.json"


@pytest.fixture(scope="module")
def results() -> tuple[Measured, ...]:
    found, faults = read_records(FILE.read_text())
    assert not faults
    return found


def test_are_of_kernels_that_there_are(results: tuple[Measured, ...]) -> None:
    assert len(results) > 150 and len({result.key for result in results}) == len(results)
    for result in results:
        assert not result.strangers, result.key
        assert result.best in result.us and min(result.us.values()) > 1.0
        # a fused kernel is preferred within a per cent of the fastest; who left early was timed in fewer rounds
        assert result.us[result.best] <= 1.03 * min(result.us.values())
        assert result.problem.device == H200.name and result.versions["torch"] and result.date >= "2026-12"


@pytest.mark.parametrize("shape", [*SUITE_LARGE, *SUITE_MEDIUM, *SUITE_DECODE], ids=str)
def test_calls_follow_them(
    shape: object, knowing: Path, monkeypatch: pytest.MonkeyPatch, results: tuple[Measured, ...]
) -> None:
    """Every aligned shape of the suite was measured with bias + GELU, and is told so."""
    m, n, k = (int(extent) for extent in str(shape).split("x"))
    monkeypatch.setattr(known, "_SHIPPED", FILE.parent)
    report = ep.builders.SUITE["bias_gelu"]().explain(m, n, k, device="h200")
    assert report.kernel.reason.startswith("measured: ") and H200.name in report.kernel.reason
    assert report.kernel.config is not None
    found = [each for each in results if (each.problem.m, each.problem.n, each.problem.k) == (m, n, k)]
    assert any(each.best.startswith(f"{report.kernel.config.name} swizzle") for each in found)


def test_none_counts_where_tuning_is_off(knowing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_SHIPPED", FILE.parent)
    with gemm_ops.tuning("off"):
        assert ep.builders.SUITE["bias_gelu"]().explain(4096, 4096, 4096, device="h200").kernel.reason == ""


def test_reports_say_why_where_there_is_nothing_to_fuse(knowing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_SHIPPED", FILE.parent)
    report = ep.builders.identity().explain(4096, 11008, 4096, device="h200")
    assert report.decision.headline.startswith("NOTHING TO FUSE") and report.kernel.reason.startswith("measured: ")
    assert any(report.kernel.reason in reason for reason in report.decision.reasons)

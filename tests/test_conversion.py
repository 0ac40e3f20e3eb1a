"""``gemm_ops.fuse``: each pattern."""

from __future__ import annotations

import operator

import pytest
import torch
from conversion_cases import (
    CASES,
    ActivationModule,
    Elementwise,
    Gate,
    Layers,
    LayerScale,
    Residual,
    ScaleByNumber,
    each_case,
)
from conversion_support import FusedCalls, check_agreement, fuse_copy, fused_calls
from torch import nn
from torch.nn import functional as F

import gemm_ops
from gemm_ops.conversion.patterns import NAMES, Traits, classify
from gemm_ops.conversion.writing import writes

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@each_case
def test_pattern(kind: type[Layers], fused_calls: FusedCalls) -> None:
    model = kind().eval()
    fused, report = fuse_copy(model)
    (found,) = report.fused
    assert (found.path, found.k, found.n, found.method) == ("fc", 6, 6, "forward")
    assert (found.pattern, found.epilogue) == CASES[kind]
    x = torch.randn(2, 3, 6)
    assert fused_calls.during(lambda: fused(x)) == 1
    torch.testing.assert_close(fused(x), model(x))
    for dtype in (torch.float32, torch.bfloat16):
        check_agreement(model, fused, (x,), dtype)


@each_case
def test_pattern_without_bias(kind: type[Layers], fused_calls: FusedCalls) -> None:
    model = kind(bias=False).eval()
    fused, report = fuse_copy(model)
    assert len(report.fused) == 1
    x = torch.randn(5, 6)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 6), (0, 6), (2, 1, 3, 6)], ids=str)
def test_shapes_of_x(shape: tuple[int, ...], fused_calls: FusedCalls) -> None:
    """Also those whose rows could be columns."""
    for kind in (LayerScale, Gate):
        model, x = kind().eval(), torch.randn(shape)
        fused, _ = fuse_copy(model)
        assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1  # noqa: B023


def test_patterns_asked_for() -> None:
    model = nn.Sequential(Gate(), Residual(), ScaleByNumber(), ActivationModule(), Elementwise()).eval()

    def found(*names: str) -> list[tuple[str, str]]:
        return [(each.path, each.pattern) for each in fuse_copy(model, patterns=names)[1].fused]

    assert found("activation") == [("0.fc", "activation"), ("3.fc", "activation")]
    assert found("gate") == [("0.other", "gate")]
    assert found("residual", "elementwise") == [("1.fc", "residual"), ("4.fc", "elementwise")]
    assert found("scale") == [("2.fc", "scale")]
    _, report = gemm_ops.fuse(model, patterns="scale")
    assert "of the pattern 'residual', not asked for" in {each.path: each.reason for each in report.left}["1.fc"]
    with pytest.raises(ValueError, match=r"unknown pattern gates; expected some of activation, residual, scale, gate"):
        gemm_ops.fuse(model, patterns=["gates"])
    with pytest.raises(TypeError, match=r"fuse takes an nn\.Module, got int"):
        gemm_ops.fuse(3)  # type: ignore[arg-type]


def test_classification() -> None:
    assert classify(Traits("add", ("value",), False, 1)).name == "residual"
    assert classify(Traits("add", ("parameter",), False, 1)).name == "elementwise"
    assert classify(Traits("where", ("value", "value"), False, 1)).name == "elementwise"
    assert len(set(NAMES)) == len(NAMES) == 5
    assert writes("add_", {}) and writes(operator.iadd, {}) and writes(F.relu, {"inplace": True})
    assert not writes("__add__", {}) and not writes(F.relu, {"inplace": False}) and not writes("add", {"out": None})


ACTIVATIONS = (
    "ReLU ReLU6 GELU SiLU Mish ELU SELU CELU Hardswish Hardsigmoid Hardtanh LeakyReLU LogSigmoid Sigmoid Softplus",
    "Softsign Tanh Tanhshrink Hardshrink Softshrink RReLU",
)


@pytest.mark.parametrize("name", [name for line in ACTIVATIONS for name in line.split()])
def test_activations_of_pytorch(name: str, fused_calls: FusedCalls) -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), getattr(nn, name)()).eval(), torch.randn(5, 6)
    fused, _ = fuse_copy(model)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1


def test_activations_of_transformers(fused_calls: FusedCalls) -> None:
    """All but those with parameters, and the one that does nothing."""
    reason = "the package transformers is not installed (extra test)"
    table = pytest.importorskip("transformers.activations", reason=reason).ACT2FN
    names, x = [name for name in table if name not in ("linear", "prelu", "xielu")], torch.randn(5, 6)
    assert len(names) > 15
    for name in names:
        model = nn.Sequential(nn.Linear(6, 8), table[name])
        fused, _ = fuse_copy(model)
        assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1, name  # noqa: B023


def test_graph_modules(fused_calls: FusedCalls) -> None:
    model, x = torch.fx.symbolic_trace(Gate().eval()), torch.randn(5, 6)
    before = model(x)
    fused, report = gemm_ops.fuse(model, inplace=True)
    assert [each.pattern for each in report.fused] == ["activation + gate"]
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), before)) == 1

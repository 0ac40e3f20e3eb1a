"""What the tests of the report share: the suite's epilogues, a report, and a machine without kernels and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import epilogues as ep
from epilogues import Aux, Row
from gemm_ops.explain import Report

SUITE = {name: make() for name, make in ep.builders.SUITE.items()}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No kernel is built, whatever the machine has, and no CUDA device is there."""
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@ep.epilogue
def importable(acc, bias: Row, residual: Aux[torch.float32]):
    return ep.gelu(acc + bias) + residual


def residual(m: int = 4096, n: int = 4096, k: int = 4096, **keywords: Any) -> Report:
    return SUITE["residual"].explain(m, n, k, **keywords)

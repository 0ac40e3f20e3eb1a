"""What the tests of the report share: epilogues, a report, a machine without kernels and devices, PyTorch watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Counting(TorchDispatchMode):
    """Counts the bytes of tensors with dimensions that PyTorch's kernels read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or not isinstance(result, torch.Tensor) or result.ndim == 0:
            return result
        read = {
            (leaf.data_ptr(), leaf.dtype): leaf.numel() * leaf.element_size()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.ndim
        }
        self.found.append((sum(read.values()), result.numel() * result.element_size()))
        return result

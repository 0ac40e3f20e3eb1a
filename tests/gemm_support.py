"""What the CPU tests of ``gemm_ops`` share: trees, kernels of them, matrices that lie in some way, and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar
from epilogues.tree import EpilogueTree
from gemm_ops.kernels.config import SKINNY_CONFIGS, SM80_CONFIGS, SM90_CONFIGS
from gemm_ops.kernels.spec import KernelSpec


def resolved(epilogue: ep.Epilogue, element: str = "bf16", dtypes: Mapping[str, str] | None = None) -> EpilogueTree:
    """The epilogue's tree for matrices of one dtype; operands have that dtype too, but for those named."""
    given = dtypes or {}
    facts = {operand.name: (operand.kind, given.get(operand.name, element)) for operand in epilogue.tree.operands}
    return epilogue.tree.resolve(facts, element)


def spec_of(tree: EpilogueTree, family: str = "sm90", element: str = "bf16", arch: str = "") -> KernelSpec:
    """A kernel of a tree as ``linear`` asks for it: A by rows, B by columns."""
    swapped = next(config for config in SM90_CONFIGS if config.swapped)
    config, usual = {
        "sm90": (SM90_CONFIGS[0], "90a"),
        "swapped": (swapped, "90a"),
        "sm80": (SM80_CONFIGS[0], "80"),
        "skinny": (SKINNY_CONFIGS[-1], "90"),
    }[family]
    return KernelSpec(tree, config, element, "row", "column", arch or usual)


@ep.epilogue
def every_kind(acc, scale: Row, offset: Column, alpha: Scalar, residual: Aux):
    """All kinds of operands, two outputs of different dtypes, one of which reads the other."""
    z = acc * scale + offset
    return {"D": ep.gelu(z, approximate="tanh") * alpha + residual, "preact": ep.cast(z, "f32")}


def aligned(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    tensor = torch.empty(rows, columns, dtype=dtype)
    assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
    return tensor


def shifted(rows: int, columns: int, elements: int) -> Tensor:
    """Rows at an aligned distance that start a few elements after an aligned address."""
    wide = -(-(columns + elements) // 8) * 8
    return aligned(rows, wide)[:, elements : elements + columns]


def start(script: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Begins a script in a process of its own, in this folder, which may import the tests and the packages."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(run: subprocess.Popen[str]) -> str:
    """What a script prints; it must not fail."""
    output, errors = run.communicate()
    assert run.returncode == 0, errors
    return output

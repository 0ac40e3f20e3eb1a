"""SM90 kernels that compute the output's transpose, on a GPU: operand kinds, outputs, layouts, edges, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import Case, check_case, make_inputs
from layouts import GuardedBuffer, lay_out
from test_gpu_layouts import check, everything, only

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row, Scalar
from gemm_ops.kernels.config import SM90_CONFIGS, KernelConfig

pytestmark = pytest.mark.gpu

#: Those of the table, and one of each kind whether the table has it or not.
SWAPPED = list(
    dict.fromkeys(
        (
            KernelConfig("sm90", (32, 64, 128), (1, 1), "pingpong", swapped=True),
            KernelConfig("sm90", (128, 256, 64), (1, 2), "cooperative", swapped=True),
            *(config for config in SM90_CONFIGS if config.swapped),
        )
    )
)


@ep.epilogue
def every_kind(acc, scale: Row, offset: Column, alpha: Scalar, residual: Aux):
    z = (acc * scale + offset) * alpha
    return {"D": torch.relu(z) + residual, "z": ep.cast(z, "f32"), "half": ep.cast(z, "f16")}


def cases() -> list[Case]:
    suite = ep.builders.SUITE
    found = [Case(build(), 1000, 520, 264, "bf16") for build in suite.values()]
    found += [Case(every_kind, m, n, k, "f16") for m, n, k in ((8, 8, 8), (136, 264, 72), (40, 1000, 520))]
    found += [Case(suite["residual"](), m, 136, 72, "bf16") for m in (1, 7, 31, 33, 63, 65, 129, 159, 161, 321)]
    found += [Case(suite["gate"](), 72, n, 136, "bf16") for n in (8, 56, 64, 72, 120, 136, 1000)]
    return found + [Case(every_kind, 77, 136, 72, "bf16", layout_b=layout) for layout in ("row", "column")]


def build(config: KernelConfig) -> None:
    """All kernels of the configuration's cases, in parallel."""
    found: list[Any] = []
    for case in cases():
        a, b, operands = make_inputs(case)
        with gemm_ops.use_backend("sm90"):
            found.append(gemm_ops.backend_for(a, b, case.epilogue, **operands).spec)
    gemm_ops.build_kernels(list({spec.key: spec for spec in found}.values()))
    assert {spec.config.swapped for spec in found} == {True}


@pytest.mark.parametrize("config", SWAPPED, ids=lambda config: config.name)
def test_swapped(config: KernelConfig) -> None:
    with only(config):
        build(config)
        for case in cases():
            check_case(case)


@pytest.mark.parametrize("config", SWAPPED[:1], ids=lambda config: config.name)
def test_swapped_batches_and_guards(config: KernelConfig) -> None:
    torch.manual_seed(0)
    a, b = lay_out((3, 40, 72), "contiguous", device="cuda"), lay_out((3, 72, 104), "transposed", device="cuda")
    operands = {
        "scale": torch.randn(3, 1, 104, device="cuda").bfloat16(),
        "offset": torch.randn(3, 40, 1, device="cuda").bfloat16(),
        "residual": torch.randn(3, 40, 104, device="cuda").bfloat16(),
    }
    dtypes = {"D": torch.bfloat16, "z": torch.float32}
    guarded = {name: GuardedBuffer((3, 40, 104), "padded", dtype, "cuda") for name, dtype in dtypes.items()}
    with only(config), gemm_ops.use_backend("sm90"):
        check(everything, a, b, operands, guarded)

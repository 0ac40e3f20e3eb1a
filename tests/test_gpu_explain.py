"""The fusion decision report on the GPU that is there: its figures, a built kernel, the comparison script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_support import Case, make_inputs

import epilogues as ep
import gemm_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built_cases")]

CASE = Case(ep.builders.SUITE["bias_gelu"](), 200, 264, 136)


@pytest.mark.parametrize("case", [CASE], ids=[CASE.name])
def test_report_of_a_built_kernel(case: Case) -> None:
    a, b, operands = make_inputs(case)
    report = case.epilogue.explain(case.m, case.n, case.k, measure=True)
    assert report.device.name == torch.cuda.get_device_name()
    assert report.device.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert "bandwidth measured by copying" in report.device_note
    assert 1e11 < report.device.bandwidth < 2e13
    decision = gemm_ops.backend_for(a, b, case.epilogue, **operands)
    assert report.kernel.spec is not None and decision.spec is not None
    assert report.kernel.spec.key == decision.spec.key
    assert report.built is not None and 16 <= report.built.registers <= 255 and report.built.spilled == 0
    assert f"{report.built.registers} registers" in str(report)


@pytest.mark.parametrize("case", [CASE], ids=[CASE.name])
def test_comparison_script(case: Case, tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text(case.epilogue.explain(case.m, case.n, case.k).script)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "on cuda" in done.stdout and "no times" not in done.stdout


def test_report_and_script_of_a_standalone_kernel(tmp_path: Path) -> None:
    epilogue, m, n = CASE.epilogue, 200, 264
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    gemm_ops.apply(x, epilogue, bias=torch.randn(n, device="cuda", dtype=torch.bfloat16))
    report = epilogue.explain(m, n)
    assert report.kernel.library is not None, "not the kernel that the call has built"
    assert report.built is not None and 16 <= report.built.registers <= 255 and report.built.spilled == 0
    script = tmp_path / "compare.py"
    script.write_text(report.script)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "on cuda" in done.stdout and "unfused / fused" in done.stdout

"""The script that a report writes: it runs, compares, and finds what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from explain_support import SUITE, empty_cache, importable, residual  # noqa: F401
from gemm_support import every_kind

import epilogues as ep
from epilogues import Aux, Row
from gemm_ops.explain import Report
from gemm_ops.explain.script import find_origin

# -- the script ---------------------------------------------------------------------------------------------


def run_script(report: Report, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "compare.py").write_text(report.script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "compare.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_script_runs(tmp_path: Path) -> None:
    report = SUITE["train_gelu"].explain(4096, 4096, 4096)
    done = run_script(report, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train_gelu_tanh: 256 x 256 x 256, torch.bfloat16, on cpu" in done.stdout or "cuda" in done.stdout
    assert re.search(r"output D: error \S+ fused, \S+ unfused", done.stdout) and "output preact:" in done.stdout
    odd = run_script(every_kind.explain(4096, 4096, 4096, dtype="f16"), tmp_path, "33", "17", "65")
    assert odd.returncode == 0, odd.stderr
    assert "33 x 17 x 65" in odd.stdout


def test_the_script_of_an_epilogue_that_can_be_imported_imports_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text(
        "import epilogues as ep\nfrom epilogues import Row\n\n\n"
        "class Holder:\n    @ep.epilogue\n    def held(acc, bias: Row):\n        return ep.silu(acc + bias)\n"
    )
    code = (
        "import sys; sys.path.insert(0, 'elsewhere')\n"
        "import mine\nfrom gemm_ops.explain import explain\n"
        "print(explain(mine.Holder.held, 64, 64, 64, origin='mine:Holder.held').script)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "from mine import Holder as found\nepilogue = found.held\n" in made.stdout
    (tmp_path / "compare.py").write_text(made.stdout)
    done = subprocess.run(
        [sys.executable, "compare.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_epilogue_knows_where_it_is_imported_from() -> None:
    assert find_origin(importable) == f"{importable.__module__}:importable"
    assert find_origin(SUITE["residual"]) == ""
    renamed = ep.epilogue(importable, name="another")
    assert find_origin(renamed) == ""
    assert "from_json" in renamed.explain(8, 8, 8).script
    assert f"from {importable.__module__} import importable" in importable.explain(8, 8, 8).script


@pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")
def test_the_script_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import gemm_ops

    original = gemm_ops.linear
    script: dict[str, Any] = {"__name__": "comparison"}
    monkeypatch.setattr(sys, "argv", ["compare.py", "33", "65", "40"])
    exec(residual(33, 65, 40).script, script)
    with torch.no_grad():
        assert script["check"]()
        monkeypatch.setattr(gemm_ops, "linear", lambda *args, **named: original(*args, **named) * 1.02)
        assert not script["check"]()
    assert "TOO LARGE" in capsys.readouterr().out


def test_the_script_of_any_name_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "8", "8", "8"])
    for name in ('"""', "a\\", "{m}", "it's\nhere", "'''"):
        script: dict[str, Any] = {"__name__": "comparison"}
        exec(ep.Epilogue.from_tree(SUITE["gate"].tree, name).explain(8, 8, 8).script, script)
        assert script["epilogue"].name == name and script["epilogue"].tree == SUITE["gate"].tree


@pytest.mark.parametrize("rounding", ["once", "eager", "eager_linear"])
def test_the_script_accepts_every_rounding(rounding: str, tmp_path: Path) -> None:
    @ep.epilogue(rounding=rounding)
    def long(acc, bias: Row, residual: Aux):
        z = torch.tanh(acc + bias) * 1.7 + residual
        return torch.sigmoid(z * z - 0.3) * z

    done = run_script(long.explain(40, 48, 64), tmp_path)
    assert done.returncode == 0 and "TOO LARGE" not in done.stdout, done.stdout + done.stderr


def test_the_script_compares_where_results_are_finite(tmp_path: Path) -> None:
    @ep.epilogue
    def half_nan(acc):
        return torch.log(acc)

    report = half_nan.explain(40, 48, 64)
    done = run_script(report, tmp_path)
    assert done.returncode == 0 and re.search(r"\d+ of 1920 elements are finite and compared", done.stdout), done.stdout
    # a fused call that leaves the signs out has no NaN where there should be one
    wrong = report.script.replace(
        "    result = gemm_ops.linear(x, weight, epilogue, **operands)", "    result = (x @ weight.t()).abs().log()"
    )
    assert wrong != report.script
    (tmp_path / "wrong.py").write_text(wrong)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "TOO MANY" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments", [("1",), ("1", "2", "3", "4"), ("a", "2", "3"), ("-1", "2", "3"), ("1.5", "2", "3")]
)
def test_the_script_refuses_wrong_arguments(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_script(residual(), tmp_path, *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip() == f"compare.py: expected three extents M N K or nothing, got {' '.join(arguments)}"

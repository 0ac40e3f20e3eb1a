"""The report of a standalone chain: bad input, its three forms, its script, the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from explain_support import SUITE, Counting, empty_cache  # noqa: F401
from test_explain_chain import bias_gelu_residual, for_training, many

import epilogues as ep
import gemm_ops
from gemm_ops.explain import DEVICES, ChainReport, Report, explain
from gemm_ops.explain.chain import json_form
from gemm_ops.explain.units import count
from shape_sweeps import cli

# -- what is asked for wrongly ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((-1, 8), {}, r"m: expected a whole number from 0 to 2\^31 - 1, got -1"),
        ((8, True), {}, "n: expected a whole number"),
        ((8, 2**31), {}, "n: expected a whole number"),
        ((2**31 - 1, 2**31 - 1), {}, r"a problem of 2147483647 x 2147483647 has matrices of more than 2\^63 bytes"),
        ((8, 8), {"dtype": torch.float64}, "dtype torch.float64 has no place in an epilogue"),
        ((8, 8), {"device": "h300"}, "unknown device 'h300': expected one of h200, h100"),
        ((8, 8), {"measure": True, "device": "h200"}, "not on the figures of the H200 SXM"),
        ((8, 8), {"operand_dtypes": {"bais": "f32"}}, "unknown operand bais; the epilogue has bias, residual; did you"),
        ((8, 8), {"operand_dtypes": {"bias": "int8"}}, "operand bias: dtype 'int8' has no place"),
    ],
)
def test_bad_input_is_an_epilogue_error(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises(ep.EpilogueError, match=message) as error:
        bias_gelu_residual.explain(*arguments, **keywords)
    assert "\n" not in str(error.value)


def test_without_k_there_is_no_gemm_and_with_it_there_is() -> None:
    assert type(bias_gelu_residual.explain(8, 8)) is type(bias_gelu_residual.explain(8, 8, None)) is ChainReport
    assert type(bias_gelu_residual.explain(8, 8, 0)) is type(bias_gelu_residual.explain(8, 8, 8)) is Report
    ten = explain(bias_gelu_residual, 64, 64, cost=lambda name: 10)
    assert ten.instructions == 30


# -- forms --------------------------------------------------------------------------------------------------


def test_json_has_what_its_description_names() -> None:
    described = re.findall(r"^    ([a-z_]+) {2,}\S", json_form.__doc__ or "", re.M)
    for report in (bias_gelu_residual.explain(8192, 8192), for_training.explain(3, 5), many(17, 17).explain(8, 8)):
        data = json.loads(report.to_json())
        assert list(data) == described and data["version"] == 1
        assert data["problem"] == {"m": report.m, "n": report.n, "k": None, "dtype": "bf16"}
        assert data["traffic"]["unfused"] == sum(op["read"] + op["written"] for op in data["traffic"]["eager"])
        assert ep.EpilogueTree.from_json(json.dumps(data["epilogue"]["tree"])) == report.tree
        assert (data["kernel"] is None) == bool(data["refusal"]) == (data["registers"] is None)
        assert data["decision"]["reasons"] == list(report.decision.reasons)
        assert data["times"]["fused"]["expected"] == report.times.fused.expected
        assert data["source"] == report.source and data["script"] == report.script


def test_markdown_has_all_of_it() -> None:
    report = bias_gelu_residual.explain(8192, 8192)
    text = report.to_markdown()
    assert text.startswith("## bias\\_gelu\\_residual, standalone, M x N = 8192 x 8192, bf16, on H200 SXM (assumed)\n")
    assert text.splitlines()[2].startswith("**FUSE: one kernel in place of 3")
    assert text.count("```") % 2 == 0 and text.count("<details>") == text.count("</details>") == 2
    assert "```mermaid\nflowchart TD" in text and "```cpp\n// elementwise bf16" in text and "```python\n" in text
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(rows)) == 1, table


def test_text_is_short_and_narrow() -> None:
    text = str(bias_gelu_residual.explain(512, 512))
    assert len(text.splitlines()) < 75 and max(map(len, text.splitlines())) <= 110
    assert "GEMM" not in text and "K =" not in text


@pytest.mark.parametrize("device", DEVICES)
def test_every_epilogue_and_device_gives_every_form(device: str) -> None:
    for epilogue in SUITE.values():
        report = epilogue.explain(777, 1544, dtype=torch.float16, device=device)
        assert str(report).splitlines()[0].endswith(f"on {DEVICES[device].name}")
        assert report.to_markdown() and json.loads(report.to_json())["device"]["name"] == DEVICES[device].name
        major, minor = DEVICES[device].capability
        assert report.kernel.spec is not None and report.kernel.spec.arch == f"{major}{minor}"


def test_the_script_compares_and_finds_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "40", "48"])
    script: dict[str, Any] = {"__name__": "comparison"}
    exec(for_training.explain(8192, 8192).script, script)
    assert (script["M"], script["N"]) == (40, 48) and script["check"]()
    original = gemm_ops.apply

    def off(*args: Any, **given: Any) -> Any:
        return {name: value * 1.02 for name, value in original(*args, **given).items()}

    monkeypatch.setattr(gemm_ops, "apply", off)
    assert not script["check"]() and "TOO LARGE" in capsys.readouterr().out


def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text(many(3, 2).explain(64, 64).script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "compare.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run("7", "9")
    assert done.returncode == 0 and "many: 7 x 9, torch.bfloat16" in done.stdout, done.stdout + done.stderr
    wrong = run("7", "9", "11")
    assert wrong.returncode == 2
    assert wrong.stderr.strip() == "compare.py: expected two extents M N or nothing, got 7 9 11"


def test_plurals() -> None:
    assert [count(n, "launch") for n in (1, 2)] == ["1 launch", "2 launches"]


# -- the command line ---------------------------------------------------------------------------------------


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("text", "scaled_residual, standalone, M x N = 4096 x 4096, bf16, on H200 SXM\nFUSE: one kernel in place of 4"),
        ("markdown", "## scaled\\_residual, standalone"),
        ("json", '{\n "version": 1'),
        ("mermaid", "flowchart TD\n"),
        ("graphviz", "digraph epilogue {\n"),
        ("script", '"""scaled_residual, fused against eager PyTorch: M x N = 4096 x 4096'),
        ("source", "// elementwise bf16 pieces"),
    ],
)
@pytest.mark.parametrize("shape", ["4096x4096", "4096,4096"])
def test_formats(name: str, start: str, shape: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["residual", "--shape", shape, "--device", "h200", "--format", name]
    code, out, err = run_cli(capsys, *asked)
    assert (code, err) == (0, "") and out.startswith(start) and out.endswith("\n")
    code, nothing, _ = run_cli(capsys, *asked, "--output", str(tmp_path / "report"))
    assert code == 0 and nothing == "" and (tmp_path / "report").read_text() == out


def test_json_is_for_the_tensor_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "gate", "--shape", "7x0", "--dtype", "float32", "--format", "json")
    data = json.loads(out)
    assert code == 0 and data["problem"] == {"m": 7, "n": 0, "k": None, "dtype": "f32"}
    assert data["decision"]["choice"] == "empty"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["residual", "--shape", "1"], "or two, M,N, for a standalone kernel, got '1'"),
        (["residual", "--shape", "1x-2"], "expected three extents"),
        (["residual", "--shape", "1,4294967296"], "beyond 2**31 - 1"),
        (["residual", "--shape", "2147483647x2147483647"], "more than 2^63 bytes"),
        (["residual", "--shape", "1,2", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["residual", "--shape", "1,2", "--device", "h300"], "unknown device 'h300'"),
        (["residual", "--shape", "0,2", "--format", "source"], "no kernel takes this chain"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_cli(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("shape-sweeps: error: ") and message in err


def test_reports_are_data() -> None:
    report = bias_gelu_residual.explain(64, 64)
    assert report == bias_gelu_residual.explain(64, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.m = 3  # type: ignore[misc]

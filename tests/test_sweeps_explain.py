"""``python -m shape_sweeps explain``: formats, epilogues, files, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shape_sweeps import cli
from shape_sweeps.explain_command import parse_shape

RESIDUAL = ["explain", "residual", "--shape", "4096,4096,4096", "--device", "h200"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_begins_with_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *RESIDUAL)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "scaled_residual, M x N x K = 4096 x 4096 x 4096, bf16, on H200 SXM"
    assert lines[1].startswith("FUSE: ")


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("text", "scaled_residual, M x N x K"),
        ("markdown", "## scaled\\_residual"),
        ("json", '{\n "version": 1'),
        ("mermaid", "flowchart TD\n"),
        ("graphviz", "digraph epilogue {\n"),
        ("script", '"""scaled_residual, fused against eager PyTorch'),
        ("source", "// sm90_pingpong_128x128x64_1x2 bf16"),
    ],
)
def test_formats(name: str, start: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, *RESIDUAL, "--format", name)
    assert code == 0 and out.startswith(start) and out.endswith("\n")
    target = tmp_path / "report"
    code, nothing, _ = run(capsys, *RESIDUAL, "--format", name, "--output", str(target))
    assert code == 0 and nothing == "" and target.read_text() == out


def test_an_epilogue_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "explained_module.py").write_text(
        "import epilogues as ep\nfrom epilogues import Row\n\n\n"
        "@ep.epilogue\ndef mine(acc, bias: Row):\n    return ep.silu(acc + bias) * 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, _ = run(capsys, "explain", "explained_module:mine", "--shape", "64x72x80", "--dtype", "fp16")
    assert code == 0 and out.startswith("mine, M x N x K = 64 x 72 x 80, f16")
    code, script, _ = run(capsys, "explain", "explained_module:mine", "--shape", "64x72x80", "--format", "script")
    assert code == 0 and f"sys.path.append({str(tmp_path)!r})\nfrom explained_module import mine as found" in script


def test_json_is_for_the_shape_and_dtype_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "gate", "--shape", "7,8,0", "--dtype", "float32", "--format", "json")
    data = json.loads(out)
    assert code == 0 and data["problem"] == {"m": 7, "n": 8, "k": 0, "dtype": "f32"}
    assert data["decision"]["choice"] == "empty"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["residual"], "--shape"),
        (["--shape", "1,2,3"], "epilogue"),
        (["nosuch", "--shape", "1,2,3"], "unknown epilogue 'nosuch'"),
        (["no.such:module", "--shape", "1,2,3"], "there is no module"),
        (["residual", "--shape", "1"], "expected three extents M,N,K"),
        (["residual", "--shape", "1x2x3x4"], "expected three extents M,N,K"),
        (["residual", "--shape", "1,2,-3"], "expected three extents M,N,K"),
        (["residual", "--shape", "1,2,"], "expected three extents M,N,K"),
        (["residual", "--shape", "quick"], "expected three extents M,N,K"),
        (["residual", "--shape", "1,2,4294967296"], "beyond 2**31 - 1"),
        (["residual", "--shape", "1,2,3", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["residual", "--shape", "1,2,3", "--dtype", "bf16,fp16"], "expected one dtype"),
        (["residual", "--shape", "1,2,3", "--device", "h300"], "unknown device 'h300'"),
        (["residual", "--shape", "1,2,3", "--device", "h200", "--measure"], "bandwidth is measured on a CUDA device"),
        (["residual", "--shape", "1,2,3", "--format", "html"], "invalid choice"),
        (["residual", "--shape", "1,2,3", "--dtype", "fp32", "--format", "source"], "no kernel takes this problem"),
        (["residual", "--shape", "1,2,3", "--output", "/no/such/folder/file"], "there is no folder"),
        (["math:pi", "--shape", "1,2,3"], "not an epilogue"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "explain", *arguments)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("shape-sweeps: error: ") and message in err


@pytest.mark.parametrize("name", ["all", "nosuch", "", "gate,residual"])
def test_only_names_that_explain_takes_are_proposed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", name, "--shape", "64,64,64")
    assert code == 2 and f"unknown epilogue {name!r}: expected identity, bias_gelu," in err
    assert "dequant, or module:attribute" in err and "all," not in err.partition("expected")[2]
    code, _, err = run(capsys, "run", "--epilogues", "nosuch")
    assert code == 2 and "dequant, all, or module:attribute" in err


def test_close_names_are_proposed_and_capitals_taken(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", "residul", "--shape", "64,64,64")
    assert code == 2 and err.endswith("; did you mean residual?\n")
    code, out, _ = run(capsys, "explain", "gate", "--shape", "64,64,64", "--device", "H200", "--dtype", "BF16")
    assert code == 0 and out.splitlines()[0].endswith("bf16, on H200 SXM")


def test_shapes_are_read_either_way() -> None:
    assert parse_shape("1,2,3") == parse_shape("1x2x3") == parse_shape(" 1, 2 ,3") == (1, 2, 3)
    assert parse_shape("1,2") == parse_shape("1X2") == parse_shape("01, 2") == (1, 2, None)


def test_a_reader_that_goes_away_is_no_error_of_ours() -> None:
    command = f"{sys.executable} -m shape_sweeps explain residual --shape 8,8,8 --format json | head -c 5"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == '{\n "v' and done.stderr == "" and done.returncode in (0, 141)

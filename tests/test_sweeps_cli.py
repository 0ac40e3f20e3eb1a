"""The command line: runs, faults that are found, bad input, reports."""

from __future__ import annotations

import csv
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gemm_ops
from shape_sweeps import Case, cli, export, options, runner
from shape_sweeps.records import CaseRecord, Sweep

ONE = ["run", "--shapes", "33x65x127", "--dtypes", "bf16", "--epilogues", "bias_gelu", "--device", "cpu"]
ONE_CHECK = [*ONE, "--no-timing"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def faulty(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], None]) -> None:
    """Makes the fused linear compute what the reference does and then spoils its output."""

    def linear(x: Tensor, weight: Tensor, epilogue: Any, *, out: Any = None, **operands: Any) -> Any:
        result = epilogue.reference(x.float() @ weight.float().t(), out_dtype=x.dtype, **operands)
        if out is None:
            return result
        out.copy_(result)
        spoil(out)
        return out

    monkeypatch.setattr(runner.gemm_ops, "linear", linear)


# -- what is right passes, what is wrong is found ---------------------------------------------------------


def test_a_right_gemm_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    faulty(monkeypatch, lambda out: None)
    code, out, _ = run(capsys, *ONE_CHECK)
    assert code == 0
    assert out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


def _write_after_the_end(out: Tensor) -> None:
    end = out.storage_offset() + (out.shape[0] - 1) * out.stride(0) + out.shape[1]
    out.as_strided((1,), (1,), end)[0] = 1.0


def _write_before_the_start(out: Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() - 1)[0] = 1.0


def _leave_one_out(out: Tensor) -> None:
    bits = out.as_strided(out.shape, out.stride()).view(torch.int16)
    bits[32, 64] = 0x7FE5  # as it was before


def _slightly_wrong(out: Tensor) -> None:
    out.mul_(1.01)


def _one_nan(out: Tensor) -> None:
    out[5, 6] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_write_after_the_end, "1 elements outside the output written"),
        (_write_before_the_start, "1 elements outside the output written"),
        (_leave_one_out, "1 of 2145 elements were never written, the first at row 32, column 64"),
        (_slightly_wrong, "relative error"),
        (_one_nan, "NaN differs from the truth in 1 elements, the first at row 5, column 6"),
    ],
)
def test_faults_are_found_and_can_be_reproduced(
    spoil: Callable[[Tensor], None],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    faulty(monkeypatch, spoil)
    code, out, _ = run(capsys, *ONE_CHECK)
    assert code == 1
    assert expected in out
    assert "python -m shape_sweeps run --shapes 33x65x127 --dtypes bf16 --epilogues bias_gelu" in out
    assert out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_case_that_raises_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = gemm_ops.linear

    def linear(x: Tensor, *arguments: Any, **named: Any) -> Any:
        if x.shape[0] == 5:
            raise RuntimeError("a launch failed\nbadly")
        return original(x, *arguments, **named)

    monkeypatch.setattr(runner.gemm_ops, "linear", linear)
    code, out, _ = run(capsys, *ONE_CHECK[:2], "5x6x7,8x9x10", *ONE_CHECK[3:])
    assert code == 1
    assert "RuntimeError: a launch failed badly" in out
    assert out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_a_forced_backend_that_cannot_take_a_case_skips_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *ONE_CHECK, "--backend", "sm90")
    assert code == 1  # nothing was checked
    assert "UnsupportedProblemError" in out
    assert out.splitlines()[-1] == "0 passed, 0 failed, 1 skipped: nothing was checked"


def test_kernels_that_cannot_be_built_fail_their_cases_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def backend_for(a: Tensor, *arguments: Any, **named: Any) -> Any:
        spec = "bad" if a.shape[0] == 5 else "good"
        return type("Decision", (), dict(backend="sm90", kernel=spec, reason="a fake", spec=spec))()

    def build_kernels(specs: Any, *, jobs: Any = None, on_done: Any = None) -> None:
        assert sorted(specs) == ["bad", "good"] and jobs == 3
        on_done("good", 1.0, False)
        raise gemm_ops.BuildError("nvcc stopped with exit code 1")

    original = gemm_ops.linear

    def linear(x: Tensor, *arguments: Any, **named: Any) -> Any:
        if x.shape[0] == 5:
            raise gemm_ops.BuildError("nvcc stopped with exit code 1")
        return original(x, *arguments, **named)

    monkeypatch.setattr(runner.gemm_ops, "linear", linear)

    monkeypatch.setattr(runner.gemm_ops, "backend_for", backend_for)
    monkeypatch.setattr(runner.gemm_ops, "build_kernels", build_kernels)
    code, out, _ = run(capsys, *ONE_CHECK[:2], "5x6x7,8x9x10", *ONE_CHECK[3:], "--jobs", "3")
    assert code == 1
    assert "note: building 2 kernels: BuildError: nvcc stopped with exit code 1" in out
    assert out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_an_interrupt_leaves_a_valid_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    original = gemm_ops.linear

    def linear(x: Tensor, *arguments: Any, **named: Any) -> Any:
        if x.shape[0] == 8:
            raise KeyboardInterrupt
        return original(x, *arguments, **named)

    monkeypatch.setattr(runner.gemm_ops, "linear", linear)
    path = tmp_path / "sweep.json"
    code, out, _ = run(capsys, *ONE_CHECK[:2], "5x6x7,8x9x10,11x12x13", *ONE_CHECK[3:], "--json", str(path))
    assert code == 130
    assert out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped; interrupted, 2 of 3 cases not reached"
    document = json.loads(path.read_text())
    assert document["summary"] == dict(
        planned=3, passed=1, failed=0, skipped=0, skipped_by_time_limit=0, interrupted=True
    )


def test_the_time_limit_skips_the_rest_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *ONE_CHECK, "--max-seconds", "0")
    assert code == 1 and "time limit of 0 s" in out
    assert out.splitlines()[-1] == (
        "0 passed, 0 failed, 1 skipped: nothing was checked; 1 of 1 cases skipped by the time limit"
    )


def test_the_time_limit_after_a_case_that_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = gemm_ops.linear

    def linear(*arguments: Any, **named: Any) -> Any:
        time.sleep(1.1)  # twice a case
        return original(*arguments, **named)

    monkeypatch.setattr(runner.gemm_ops, "linear", linear)
    code, out, _ = run(capsys, *ONE_CHECK[:2], "5x6x7,8x9x10", *ONE_CHECK[3:], "--max-seconds", "2")
    assert code == 0
    assert out.splitlines()[-1] == "1 passed, 0 failed, 1 skipped; 1 of 2 cases skipped by the time limit"


def test_the_time_limit_does_not_hide_what_failed_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def backend_for(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no plan")

    monkeypatch.setattr(runner.gemm_ops, "backend_for", backend_for)
    code, out, _ = run(capsys, *ONE_CHECK, "--max-seconds", "0")
    assert code == 1 and out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


# -- timing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "header", "timed"),
    [
        ([], "not timed (on a CPU times say little; --timing takes them)", False),
        (["--no-timing"], "not timed", False),
        (["--timing"], "timed", True),
    ],
)
def test_a_cpu_is_timed_only_if_asked(
    arguments: list[str], header: str, timed: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "sweep.json"
    code, out, _ = run(capsys, *ONE, *arguments, "--json", str(path))
    assert code == 0 and out.splitlines()[0].endswith(f", {header}")
    assert (json.loads(path.read_text())["cases"][0]["timing"] is not None) is timed
    row = next(line for line in out.splitlines() if line.startswith("33x65x127")).split()
    assert (row[-3:-1] != ["-", "-"]) is timed


def test_the_columns_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *ONE)
    (legend,) = [line for line in out.splitlines() if line.startswith("error, unfused: ")]
    for column in ("limit: ", "eager/fused", "mm/fused", "-: "):
        assert column in legend


def test_help_explains_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["run", "--help"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        for number in ("0", "1", "2", "130", "141"):
            assert f"\n  {number}" in out
        assert "--max-seconds" in out


# -- reproducers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(33, 65, 127, "bf16", "bias_gelu"),
        Case(1, 4096, 1, "fp16", "residual", "matmul", 2**63 - 1, "reference", "cpu"),
        Case(7, 8, 9, "fp32", "sweeps_example:mine", "linear", 3, "sm80", "cpu"),
    ],
)
def test_a_reproducer_gives_the_same_case(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sweeps_example.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = shlex.split(case.reproducer())
    assert words[:3] == ["python", "-m", "shape_sweeps"]
    cases, epilogues = options.select(options.parser().parse_args(words[3:]))
    assert cases == (case,) and list(epilogues) == [case.epilogue]


# -- bad input --------------------------------------------------------------------------------------------

USER_MODULE = """
import torch
from epilogues import epilogue, Row

@epilogue
def mine(acc, bias: Row):
    return torch.relu(acc + bias) * 2.0

@epilogue
def unannotated(acc, bias):
    return acc + bias

def plain(acc):
    return acc

def make() -> "epilogues.Epilogue":
    return mine

class Class:
    pass

number = 3
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--shapes", "12x13"], "--shapes: '12x13'"),
        (["run", "--shapes", "quick,,1x2x3"], "--shapes: an item"),
        (["run", "--dtypes", "int8"], "--dtypes: unknown dtype 'int8'"),
        (["run", "--epilogues", "bias_jelu"], "--epilogues: unknown epilogue 'bias_jelu'"),
        (["run", "--epilogues", "no_such_module_here:x"], "cannot import 'no_such_module_here'"),
        (["run", "--epilogues", ":x"], "not of the form module:attribute"),
        (["run", "--epilogues", "sweeps_example:absent"], "has no attribute 'absent'"),
        (["run", "--epilogues", "sweeps_example:plain"], "is a function, not an epilogue"),
        (
            ["run", "--epilogues", "sweeps_example:unannotated"],
            "operand 'bias' of sweeps_example:unannotated",
        ),
        (
            ["run", "--epilogues", "sweeps_refused:bad"],
            "cannot import 'sweeps_refused' of sweeps_refused:bad: ReductionError",
        ),
        (["run", "--epilogues", "sweeps_raises:x"], "cannot import 'sweeps_raises'"),
        (["run", "--epilogues", "sweeps_raises_base:x"], "sweeps_raises_base.py:2)"),
        (["run", "--epilogues", "sweeps_exits:x"], "ends the program with exit code 7 (at "),
        (["run", "--epilogues", "sweeps_refused:good"], "sweeps_refused.py:6"),
        (["run", "--epilogues", "sweeps_missing:x"], "No module named 'no_such_module_here' (at "),
        (["run", "--epilogues", "./sweeps_example:mine"], "write sweeps_example:mine"),
        (["run", "--epilogues", "sweeps_example.py:mine"], "write sweeps_example:mine"),
        (["run", "--epilogues", "folder/sweeps_example.py:mine"], "write folder.sweeps_example:mine"),
        (["run", "--epilogues", ".sweeps_example:mine"], "'.sweeps_example' of .sweeps_example:mine is not the name"),
        (["run", "--epilogues", "sweeps_example:make"], "is a function that makes an epilogue, not an epilogue"),
        (["run", "--epilogues", "epilogues.builders:gate"], "mine = gate(...)"),
        (["run", "--epilogues", "epilogues:builders"], "is a module, not an epilogue"),
        (["run", "--epilogues", "sweeps_example:Class"], "is a class, not an epilogue"),
        (["run", "--epilogues", "sweeps_example:number"], "is of type int, not an epilogue"),
        (["run", "--shapes", "99999999999999999999x1x1"], "an extent beyond 2**31 - 1"),
        (["run", "--seed", "\u0663"], "--seed"),
        (["run", "--jobs", "\u0663"], "--jobs"),
        (["run", "--seed", "9" * 5000], "--seed"),
        (["run", "--max-seconds", "\u0663"], "--max-seconds"),
        (["run", "--max-seconds", "1_0"], "--max-seconds"),
        (["run", "--device", "cpu:5"], "--device: sweeps do not run on 'cpu:5'"),
        (["run", "--json="], "--json: the name of the file is empty"),
        (["run", "--csv="], "--csv: the name of the file is empty"),
        (["run", "--plot="], "--plot: the name of the file is empty"),
        (["run", "--json", "/proc/x"], "--json: '/proc/x' cannot be written"),
        (["run", "--csv", "a" * 300], "File name too long"),
        (["run", "--json", "no_such_folder_here/"], "is the name of a folder"),
        (["run", "--json", "taken_twice", "--csv", "./taken_twice"], "--csv: './taken_twice' is taken by --json"),
        (["run", "--device", "gpu"], "--device: 'gpu'"),
        (["run", "--device", "meta"], "--device"),
        (["run", "--operation", "conv"], "--operation"),
        (["run", "--backend", "sm70"], "--backend"),
        (["run", "--seed", "-1"], "--seed"),
        (["run", "--jobs", "0"], "--jobs"),
        (["run", "--max-seconds", "soon"], "--max-seconds"),
        (["run", "--json", "/no/such/folder/x.json"], "--json: '/no/such/folder/x.json'"),
        (["run", "--csv", "/"], "--csv: '/' is a folder"),
        (["run", "--json", "-", "--csv", "-"], "--csv: standard output"),
        (["run", "--no-such-option"], "--no-such-option"),
        (["explode"], "explode"),
        ([], "run|list"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "sweeps_example.py").write_text(USER_MODULE)
    (tmp_path / "sweeps_raises.py").write_text("raise SystemError('one\\ntwo')\n")
    (tmp_path / "sweeps_raises_base.py").write_text("\nraise BaseException('three')\n")
    (tmp_path / "sweeps_exits.py").write_text("import sys\nsys.exit(7)\n")
    (tmp_path / "sweeps_missing.py").write_text("import no_such_module_here\n")
    (tmp_path / "sweeps_refused.py").write_text(
        "from epilogues import epilogue, identity\ngood = epilogue(lambda acc: acc)\n\n"
        "@epilogue\ndef bad(acc):\n    return acc / acc.sum(dim=-1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("shape-sweeps: error: ") and err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    "spelling", ["fp16,fp32,bf16", "f16,f32,bf16", "float16,float32,bfloat16", "torch.float16,FP32,fp16,BF16"]
)
def test_dtypes_have_several_spellings(spelling: str) -> None:
    chosen, _ = options.select(options.parser().parse_args(["run", "--epilogues", "gate", "--dtypes", spelling]))
    assert list(dict.fromkeys(case.dtype for case in chosen)) == ["fp16", "fp32", "bf16"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *ONE[:-1], "cuda")
    assert code == 2 and "no CUDA device" in err


# -- reports ----------------------------------------------------------------------------------------------

CASE_KEYS = {
    *("id", "case", "status", "reason", "reproducer", "routes", "unfused"),
    *("errors", "comparisons", "timing", "seconds"),
}
COMPARISON_KEYS = {
    *("output", "layout", "dtype", "error", "unfused_error", "error_limit"),
    *("max_error", "unfused_max_error", "max_error_limit", "faults"),
}


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*ONE[:6], "train_gelu,gate", *ONE[7:], "--timing", "--json", "-"]
    code, out, err = run(capsys, *arguments)
    assert code == 0 and "2 passed" in err  # the report makes way for the document
    document = json.loads(out)
    assert set(document) == {*("schema", "environment", "command", "criterion", "summary", "notes", "cases")}
    assert document["schema"] == export.SCHEMA and document["command"] == arguments
    assert {"device", "device_name", "torch", "cuda", "python", "platform"} <= set(document["environment"])
    train, gate = document["cases"]
    assert set(train) == set(gate) == CASE_KEYS
    assert set(train["case"]) == set(Case.__dataclass_fields__)
    assert len(train["comparisons"]) == 4 and len(gate["comparisons"]) == 2
    assert all(set(comparison) == COMPARISON_KEYS for comparison in train["comparisons"])
    assert train["errors"] in train["comparisons"]
    assert set(train["routes"]) == {"contiguous", "padded"}
    assert set(train["routes"]["padded"]) == {"backend", "kernel", "reason"}
    timing = train["timing"]
    assert set(timing["contenders"]) == {"fused", "eager", "mm", "linear"}
    assert all(set(sample) == {"median_us", "iqr_us", "calls"} for sample in timing["contenders"].values())
    medians = {name: sample["median_us"] for name, sample in timing["contenders"].items()}
    assert timing["speedup_over_eager"] == pytest.approx(medians["eager"] / medians["fused"])
    for key in CASE_KEYS | COMPARISON_KEYS | set(document):
        assert key in (export.__doc__ or "")


def test_csv_has_one_line_per_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    code, _, _ = run(capsys, *ONE, "--timing", "--csv", str(path))
    assert code == 0
    with path.open(newline="") as file:
        (row,) = list(csv.DictReader(file))
    assert tuple(row) == export.CSV_COLUMNS
    assert row["status"] == "passed" and row["m"] == "33" and float(row["fused_us"]) > 0
    assert row["backend"] == "reference"


def test_errors_that_are_not_finite_are_null_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, _one_nan)
    from shape_sweeps import load_epilogue, run_sweep

    sweep = run_sweep([Case(33, 65, 127, "bf16", "bias_gelu")], {"bias_gelu": load_epilogue("bias_gelu")}, timing=False)
    document = json.loads(export.to_json(sweep, {}, []))
    assert document["cases"][0]["errors"]["error"] is None


def test_at_most_ten_commands_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from shape_sweeps.report import make_console, print_report

    records = [CaseRecord(Case(m, 1, 1, "bf16", "gate"), "failed", "why") for m in range(12)]
    print_report(make_console(), Sweep(records, planned=12))
    out = capsys.readouterr().out
    assert out.count("python -m shape_sweeps run") == 10 and "and 2 more failures" in out


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    for word in ("quick", "suite-misaligned", "4096x50257x768", "bias[n]", "torch.bfloat16", "sm90"):
        assert word in out


def test_a_users_epilogue_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sweeps_example.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run(
        capsys,
        "run",
        "--shapes",
        "9x10x11",
        "--epilogues",
        "sweeps_example:mine",
        "--device",
        "cpu",
        "--json",
        "-",
    )
    document = json.loads(out)
    assert code == 0 and [case["status"] for case in document["cases"]] == ["passed", "passed"]
    assert document["cases"][0]["unfused"] == "torch.matmul, then the epilogue's reference"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sweep_on_a_gpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs, guards, judgement and timing on the device; the reference backend, so nothing is built."""
    code, out, _ = run(capsys, "run", "--quick", "--device", "cuda", "--backend", "reference")
    assert code == 0, out
    assert out.splitlines()[-1] == "192 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize("operation", ["linear", "matmul"])
def test_the_quick_sweep_passes_in_time(operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    code, out, _ = run(capsys, "run", "--quick", "--device", "cpu", "--operation", operation)
    assert code == 0, out
    assert out.splitlines()[-1] == "192 passed, 0 failed, 0 skipped"
    assert "the PyTorch reference for 192 of 192 cases" in out
    assert time.monotonic() - began < 110

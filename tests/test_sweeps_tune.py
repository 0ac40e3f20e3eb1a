"""``python -m shape_sweeps tune``, as far as it goes without a device."""

from __future__ import annotations

import dataclasses
import io
import warnings
from pathlib import Path

import pytest
import torch
from rich.table import Table
from tuner_support import H200, call_on_h200, in_hours, knowing, result_of

from gemm_ops.tuner import known, tune
from gemm_ops.tuner.records import write_records
from shape_sweeps import cli, report, tune_command, tune_report

__all__ = ["knowing"]

KERNEL = "sm90_pingpong_128x128x64_1x2 swizzle 1"

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["tune", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_lists_candidates(knowing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["1000x3001x2000", "--epilogue", "bias_gelu", "--dtype", "bf16", "--dry-run", "--device", "h200"]
    code, out, err = run(capsys, *one, "--most", "2")
    lines = out.splitlines()
    assert (code, err) == (0, "") and "sm90_cooperative_128x192x64_2x1 swizzle" in lines[1]
    assert lines[-1].endswith("of 1 problem on the NVIDIA H200: 2 kernels, 2 to build")
    code, out, _ = run(capsys, *one, "--most", "1", "--training", "--padded")
    assert code == 0 and "of 6 problems" in out and "bias_gelu recorded" in out and "bias_gelu, padded D" in out
    assert "bias_gelu gradient of a" in out


@needs_no_gpu
def test_without_a_gpu_it_is_one_line(knowing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "64x64x64")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "no CUDA device here to measure on; --dry-run" in err
    code, out, err = run(capsys, "--export", "x.json")
    assert (code, out) == (2, "") and "nothing is known, and no CUDA device is here: name one with --device" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["64x64", "--dry-run"], "error: tune: '64x64' is neither a shape"),
        (["64x64x64", "--dry-run", "--device", "h300"], "--device: unknown device 'h300'"),
        (["--merge", "nowhere.json"], "--merge: 'nowhere.json': No such file or directory"),
        (["--merge", __file__], "no JSON"),
        (["--seconds", "soon"], "not a number of seconds"),
        (["--show", "--export", "/nowhere/x.json"], "--export"),
    ],
)
def test_bad_input(knowing: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_what_cannot_be_kept_is_an_error(
    knowing: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    file.write_text(write_records(H200.name, [result_of(call_on_h200(64, 64, 64), {"a": 1.0})]))
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "no folder"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        code, out, err = run(capsys, "--merge", str(file))
    assert (code, out) == (2, "") and "--merge" in err and err.count("\n") == 1
    assert "nvidia-h200.json cannot be read or written (Not a directory)" in err


@pytest.mark.parametrize("name", ["", "GPU\x1b[2J\n", "x" * 10_000])
def test_results_of_devices_without_a_name_are_not_merged(
    name: str, knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(write_records(name, [result_of(call_on_h200(64, 64, 64), {KERNEL: 1.0})]))
    code, out, err = run(capsys, "--merge", str(file))
    assert (code, out) == (2, "") and "device" in err and err.count("\n") == 1 and err.strip().isprintable()
    assert len(err) < 500 and not list((knowing / "tuning").glob("*"))


def test_results_of_dates_to_come_are_not_merged(
    knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, later = (result_of(call_on_h200(m, 64, 64), {KERNEL: 1.0}) for m in (64, 128))
    file = tmp_path / "results.json"
    file.write_text(write_records(H200.name, [here, dataclasses.replace(later, date="9999-12-31 23:59:59")]))
    code, out, err = run(capsys, "--merge", str(file))
    assert (code, out) == (2, "") and err.count("\n") == 1 and not known.users_results(H200.name)
    assert f"--merge: '{file}': result 2: the date of 128 x 64 x 64, bf16" in err and "is to come: 9999-12-31" in err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GEMM_OPS_TUNE", "1"),
        ("GEMM_OPS_TUNE_SECONDS", "soon"),
        ("GEMM_OPS_BUILD", "later"),
        ("GEMM_OPS_OVERLAP", "maybe"),
    ],
)
@pytest.mark.parametrize("command", [["run", "--quick"], ["explain", "gate", "--shape", "8,8,8"], ["tune", "--show"]])
def test_variables_that_mean_nothing(
    command: list[str], variable: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    code = cli.main(command)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and variable in err and err.count("\n") == 1


def test_results_are_merged_shown_and_exported(
    knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = (result_of(call_on_h200(m, 64, 64), {"a": 1.0, "b": 2.0}) for m in (64, 128))
    newer = dataclasses.replace(old, us={"a": 3.0, "b": 2.5}, best="b", date=in_hours(-0.01))
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(write_records(H200.name, [old, new]))
    second.write_text(write_records(H200.name, [newer]))
    code, out, _ = run(capsys, "--show")
    assert code == 0 and out.startswith("nothing is known yet")
    code, out, _ = run(capsys, "--merge", str(first), str(second))
    assert code == 0 and f"2 results in {first}: 2 new or newer, 0 known" in out
    assert f"1 result in {second}: 1 new or newer, 0 known" in out
    code, out, _ = run(capsys, "--merge", str(first))
    assert code == 0 and "0 new or newer, 2 known" in out and known.find(*old.key) == newer
    code, out, _ = run(capsys, "--show")
    assert code == 0 and "2 results in" in out and "64 x 64 x 64 bf16 row/column aligned" in out and "2.5" in out
    exported = tmp_path / "all.json"
    code, out, _ = run(capsys, "--export", str(exported), "--device", "h200")
    assert code == 0 and "wrote 2 results of the NVIDIA H200" in out
    assert known.read_file(exported) == (newer, new)


def test_shows_what_is_known_of_a_device(knowing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = result_of(call_on_h200(64, 64, 64), {KERNEL: 1.0})
    other = dataclasses.replace(here, problem=dataclasses.replace(here.problem, device="NVIDIA A100-SXM4-80GB", m=7))
    known.remember([here, other])
    code, out, _ = run(capsys, "--show")
    assert code == 0 and "64 x 64 x 64" in out and "7 x 64 x 64" in out
    code, out, _ = run(capsys, "--show", "--device", "h200")
    assert code == 0 and "64 x 64 x 64" in out and "A100" not in out and "a100" not in out
    code, out, _ = run(capsys, "--show", "--device", "a100-80")
    assert code == 0 and "7 x 64 x 64" in out and "64 x 64 x 64 " not in out.replace("7 x 64 x 64", "")
    code, out, _ = run(capsys, "--show", "--device", "h100")
    assert code == 0 and out.startswith("nothing is known yet of the NVIDIA H100")
    code, out, err = run(capsys, "--show", "--device", "h300")
    assert (code, out) == (2, "") and "--device: unknown device 'h300'" in err


def test_says_how_many_results_name_kernels_that_are_none(
    knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = result_of(call_on_h200(64, 64, 64), {KERNEL: 1.0, "two passes": 2.0, "by operations": 3.0})
    narrow = result_of(call_on_h200(63, 63, 63), {"sm80_128x128x32_2stages swizzle 8": 1.0})
    gone = result_of(call_on_h200(128, 64, 64), {KERNEL: 1.0, "sm90_pingpong_8x8x8_1x1 swizzle 1": 2.0})
    more = result_of(call_on_h200(256, 64, 64), {"cuBLAS twice": 2.0})
    file = tmp_path / "results.json"
    file.write_text(write_records(H200.name, [ours, narrow]))
    code, out, _ = run(capsys, "--merge", str(file), "--show")
    assert code == 0 and "2 results in" in out and "does not have" not in out
    file.write_text(write_records(H200.name, [ours, gone]))
    code, out, _ = run(capsys, "--merge", str(file))
    assert code == 0 and "; 1 of them names kernels that this version does not have, which count for nothing" in out
    known.remember([more])
    code, out, _ = run(capsys, "--show")
    assert code == 0 and "4 results in" in out and "; 2 of them name kernels that this version does not have" in out


def test_control_characters_in_files_do_not_reach_the_terminal(
    knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clear = "\x1b[2J\x07\x9b2J\u202e\nx"
    result = result_of(call_on_h200(64, 64, 64), {f"kernel {clear}": 1.0}, example=f"gelu{clear}", model=clear)
    file = tmp_path / "results.json"
    file.write_text(write_records(H200.name, [result]))
    code, out, err = run(capsys, "--merge", str(file), "--show")
    assert (code, err) == (0, "") and all(character.isprintable() or character == "\n" for character in out)
    assert r"kernel \x1b[2J\x07\x9b2J\u202e\nx" in out
    (kept,) = (tmp_path / "cache" / "tuning").glob("*.json")
    assert known.read_file(kept) == (result,), "files have names as they are"
    console = io.StringIO()
    tune_report.print_results(report._Console(file=console, width=200), [result])
    assert r"gelu\x1b[2J" in console.getvalue() and "\x1b[2J" not in console.getvalue()
    console = io.StringIO()
    report._Console(file=console, width=200).print("one\ntwo\x1b[3J three", soft_wrap=True)
    assert console.getvalue() == "one\ntwo\\x1b[3J three\n"


def test_no_character_of_a_name_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich drops some, makes spaces of a tab, and pictures of names between colons; all are shown as they are."""
    name, shown = "a\rb\x07c\x08d\x0be\x0cf\tg :x: h", r"a\rb\x07c\x08d\x0be\x0cf\tg :x: h"
    console = report.make_console()
    tune_report.print_candidates(console, [(name, name, 1.0, True)])
    tune_report.print_results(console, [result_of(call_on_h200(64, 64, 64), {name: 1.0}, example=name)])
    console.print(name)
    console.print(name, style="bold", soft_wrap=True)
    console.print(report.line_of(name, "bold"))
    table = Table("heading")
    table.add_row(name)
    console.print(table)
    out = capsys.readouterr().out
    assert out.count(shown) == 8, out


def test_a_dry_run_says_what_is_known(knowing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["64x64x64", "128x64x64", "--epilogues", "identity", "--dtypes", "bf16", "--dry-run", "--device", "h200"]
    whole, partial = (
        dataclasses.replace(result_of(call_on_h200(m, 64, 64), {KERNEL: 1.0}), tree="-> bf16, 0 instructions")
        for m in (64, 128)
    )
    known.remember([whole, dataclasses.replace(partial, dropped={"another": "not built"})])
    said = "64x64x64 bf16 identity: known, measured 2026-11-30 12:00:00; --again measures it anew"
    code, out, _ = run(capsys, *one)
    assert code == 0 and said in out.splitlines() and out.count("known, measured") == 1, "the other is gone on with"
    code, out, _ = run(capsys, *one, "--again")
    assert code == 0 and "known, measured" not in out


@pytest.fixture
def device(knowing: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU is a device to measure on, whose times are made up; gives what was measured, by name."""
    measured: list[str] = []

    def measure_task(task: tune.Task, seconds: float, **_: object) -> tune.Measured:
        measured.append(task.title)
        assert 0.3 <= seconds <= 5
        if task.problem.m == 13:
            raise RuntimeError("out of luck")
        names = [each.name for each in task.candidates]
        us = {name: 10.0 + place for place, name in enumerate(names)} | {"two passes": 20.0}
        return tune.Measured(task.problem, task.tree, us, names[0], names[0], date="2026-11-30 00:00:00", example="it")

    monkeypatch.setattr(tune_command, "choose_device", lambda options: "meta" if options.dry_run else "cpu")
    monkeypatch.setattr(tune, "refusal", lambda call: "")
    monkeypatch.setattr(tune, "target_of", lambda device: H200)
    monkeypatch.setattr(tune, "build_in_order", lambda kernels, **_: None)
    monkeypatch.setattr(tune, "measure_task", measure_task)
    return measured


ONE = ["--epilogues", "bias_gelu", "--dtypes", "bf16"]


def test_measures_each_class_once(device: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "64x64x64,128x64x64", "--epilogues", "bias_gelu,bias_silu", "--dtypes", "bf16")
    assert (code, err) == (0, "") and len(device) == 2, "both epilogues are of one class"
    assert out.splitlines()[-1] == "2 problems measured" and " 1.00" in out and " 2.00" in out and "best" in out
    assert len(known.users_results(H200.name)) == 2
    code, out, _ = run(capsys, "64x64x64", *ONE)
    assert code == 0 and len(device) == 2 and "not measured, 1 problem: it was measured before; --again" in out
    code, out, _ = run(capsys, "64x64x64", *ONE, "--again", "--seconds", "30")
    assert code == 0 and len(device) == 3


def test_what_was_not_built_in_time_is_measured_again(device: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "64x64x64", *ONE)
    (record,) = known.users_results(H200.name).values()
    known.remember([dataclasses.replace(record, dropped={"c": "not built", "d": "wrong"})])
    code, out, _ = run(capsys, "64x64x64", *ONE)
    assert code == 0 and len(device) == 2 and out.splitlines()[-1] == "1 problem measured"


def test_what_fails_costs_itself_only(device: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "13x64x64,64x64x64", *ONE)
    assert code == 1 and len(device) == 2 and "13x64x64 bf16 bias_gelu: RuntimeError: out of luck" in out
    assert out.splitlines()[-1] == "1 problem measured"


def test_time_is_up(device: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "64x64x64", *ONE, "--seconds", "0")
    assert code == 1 and not device and out.splitlines()[-1].startswith("0 problems measured, 1 not reached within 0 s")


def test_an_interrupt_keeps_what_was_measured(
    device: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = tune.measure_task

    def interrupted(task: tune.Task, seconds: float, **others: object) -> tune.Measured:
        if device:
            raise KeyboardInterrupt
        return measure(task, seconds, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(tune, "measure_task", interrupted)
    code, out, _ = run(capsys, "64x64x64,128x64x64", *ONE)
    assert code == 130 and out.splitlines()[-1] == "1 problem measured; interrupted, 1 not reached"
    assert len(known.users_results(H200.name)) == 1

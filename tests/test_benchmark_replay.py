"""What the benchmark wrote, read again with ``--replay``: the same tables, several files as one, bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_support import check_refused, made_up, made_up_results, run

from shape_sweeps.benchmark import document, tables
from shape_sweeps.errors import InputError
from shape_sweeps.shapes import SUITE_LARGE


def test_json_gives_back_what_it_was_made_from() -> None:
    results = made_up_results()
    assert document.from_json(document.to_json(results), "it") == results


def test_replay_needs_no_gpu_and_gives_the_same_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, again, picture = tmp_path / "run.json", tmp_path / "again.json", tmp_path / "run.svg"
    path.write_text(document.to_json(made_up_results()))
    options = ["--json", str(again), "--plot", str(picture), "--markdown", "-"]
    code, out, err = run(capsys, "benchmark", "--replay", str(path), *options)
    assert code == 0 and again.read_text() == path.read_text() and picture.read_bytes().startswith(b"<?xml")
    assert out == tables.to_markdown(made_up_results())  # the report goes to standard error, then
    assert "H200, torch 2.11, CUDA 13, 2026-11-30, bf16, cold L2 cache" in err
    assert "our launches not overlapping, up to 15" in err
    assert (
        "met          host time of an eager FusedLinear call over that of F.linear: 0.86 <= 1.00 (18.3 us, 21.4 us)"
        in err
    )
    assert "note: torch.compile, 1 entry: BackendCompilerFailed: no" in err
    assert "2 measured, 0 failed, 1 skipped, 189 of 192 not reached; targets: " in err


def test_replay_takes_a_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, part = tmp_path / "run.json", tmp_path / "part.json"
    path.write_text(document.to_json(made_up_results()))
    code, _, _ = run(capsys, "benchmark", "--replay", str(path), "--group", "decode", "--json", str(part))
    assert code == 0
    assert [entry.problem.epilogue for entry in document.from_json(part.read_text(), "it").entries] == ["gate"]


def test_several_runs_make_one_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = made_up_results(), made_up_results()
    first.entries = first.entries[:2]
    second.entries = [made_up(SUITE_LARGE[0], fused=50.0), made_up(SUITE_LARGE[1], fused=70.0)]
    second.host, second.notes = {}, ["another note"]
    merged = document.merge([first, second])
    times = {str(entry.problem): entry.time_us("fused") for entry in merged.entries}
    assert times == {"4096x4096x4096 bias_gelu": 50.0, "8192x8192x8192 bias_gelu": 70.0, "16x4096x4096 gate": 12.5}
    assert [entry.problem.group for entry in merged.entries] == ["large", "large", "decode"]
    assert merged.host == first.host and merged.notes == ["a note", "another note"] and merged.planned == 3
    overlapping = made_up_results()
    overlapping.settings["overlap"] = "on"
    with pytest.raises(InputError, match=r"cold, overlap off; .*, overlap on"):
        document.merge([first, overlapping])
    second.environment["device_name"] = "A100"
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, results in zip(paths, (first, second), strict=True):
        path.write_text(document.to_json(results))
    code, _, err = run(capsys, "benchmark", "--replay", str(paths[0]), "--replay", str(paths[1]))
    assert code == 2 and "H200, torch 2.11, cold, overlap off; A100, torch 2.11, cold, overlap off" in err


def test_small_entries_that_stay_in_the_cache_are_told_of() -> None:
    results = made_up_results()
    assert "2 entries so small that copies of the inputs stay in the L2 cache" in tables.notes(results)
    for entry in results.entries:
        entry.cold = True
    assert not [note for note in tables.notes(results) if "L2" in note]


def test_control_characters_of_a_file_are_written_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = made_up_results()
    results.environment["device_name"] = "H\x1b[2J200"
    results.notes.append("a\x1b]0;title\x07note")
    results.entries[0].kernel = "sm90\x07\x08\nforged"
    results.host, results.host_reason = {}, "no\rtime"
    path = tmp_path / "run.json"
    path.write_text(document.to_json(results))
    _, out, _ = run(capsys, "benchmark", "--replay", str(path))
    assert r"H\x1b[2J200" in out and r"a\x1b]0;title\x07note" in out and not set("\x1b\x07\x08\r") & set(out)
    assert r"sm90\x07\x08\nforged" in out and r"no\rtime" in out
    _, out, _ = run(capsys, "benchmark", "--replay", str(path), "--markdown", "-")
    assert out.startswith("Measured on ") and r"H\x1b[2J200" in out and "\x1b" not in out


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--replay", "no_such.json"], "--replay no_such.json: cannot be read: No such file or directory"),
        (["--replay", "text.json"], "--replay text.json: is not JSON"),
        (["--replay", "sweep.json"], "--replay sweep.json: expected a document of schema 'shape-sweeps-benchmark/1'"),
        (["--replay", "list.json"], "got None"),
        (["--replay", "empty.json"], "--replay empty.json: is empty"),
        (["--replay", "cut.json"], "--replay cut.json: is not JSON: "),
        (["--replay", "deep.json"], "--replay deep.json: is nested too deeply"),
        (["--replay", "digits.json"], "--replay digits.json: has a number of thousands of digits"),
        (["--replay", "binary.json"], "--replay binary.json: is no text in UTF-8 (from byte 1 on)"),
        (["--replay", "a\0b"], "no file can have that name"),
        (["--replay", "good.json", "--replay", "twice.json"], "--replay twice.json: is damaged: entries[1]: 4096x"),
        (["--replay", "good.json", "--warm"], "--warm: does not go with --replay"),
        (["--replay", "good.json", "--seconds-per-case", "1"], "--seconds-per-case: does not go with --replay"),
        (["--replay", "good.json", "--group", "medium"], "--replay: none of the entries"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    good = document.to_json(made_up_results())
    for name, text in {
        "good": good,
        "text": "not json",
        "sweep": '{"schema": "shape-sweeps/1"}',
        "list": "[]",
        "empty": "\n",
        "cut": good[:-300],
        "deep": "[" * 100000,
        "digits": good.replace('"median_us": 95.0', f'"median_us": {"9" * 5000}'),
        "twice": json.dumps({**json.loads(good), "entries": json.loads(good)["entries"][:1] * 2}),
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\xd8")
    check_refused(capsys, arguments, expected, tmp_path)


_FUSED = ("entries", 0, "contestants", "fused")
_TIME = (*_FUSED, "times", "peers", "median_us")
_AT_TIME = "entries[0].contestants.fused.times.peers.median_us"
_LEFT_OUT = object()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("entries",), {}, "entries: {} is no list"),
        (("entries",), _LEFT_OUT, 'has no "entries"'),
        (("entries", 1), "gate", 'entries[1]: "gate" is no object'),
        (("entries", 1, "m"), -5, "entries[1].m: -5 is no extent from 1 on"),
        (("entries", 1, "m"), True, "entries[1].m: true is no extent from 1 on"),
        (("entries", 1, "epilogue"), "no_such", 'entries[1].epilogue: "no_such" is none of identity, '),
        (("entries", 1, "group"), {"a": 1}, "entries[1].group: an object is no text"),
        (("entries", 1, "status"), "fine", 'entries[1].status: "fine" is none of measured, failed, skipped'),
        (("entries", 1, "cold"), "no", 'entries[1].cold: "no" is neither true nor false'),
        (("entries", 1, "seconds"), float("nan"), "entries[1].seconds: NaN is no number from 0 on"),
        (("entries", 1, "rounds"), [3], "entries[1].rounds: a list is no object"),
        (("entries", 1, "contestants"), "none", 'entries[1].contestants: "none" is no object'),
        ((*_FUSED, "error"), "small", 'entries[0].contestants.fused.error: "small" is no number from 0 on'),
        ((*_FUSED, "times", "peers"), 3, "entries[0].contestants.fused.times.peers: 3 is no object"),
        (_TIME, _LEFT_OUT, 'entries[0].contestants.fused.times.peers: has no "median_us"'),
        (_TIME, 0.0, f"{_AT_TIME}: 0.0 is no time in microseconds"),
        (_TIME, "soon\nor later", rf'{_AT_TIME}: "soon\nor later" is no time in microseconds'),
        (_TIME, 10**400, f"{_AT_TIME}: 1000"),
        (_TIME, 5e-324, f"{_AT_TIME}: 5e-324 is no time"),  # a ratio to it is infinite
        (("environment",), [], "environment: [] is no object"),
        (("settings",), None, "settings: null is no object"),
        (("summary", "planned"), 1.5, "summary.planned: 1.5 is no whole number from 0 on"),
        (("host", "F.linear"), [], 'host["F.linear"]: [] is no time in microseconds'),
        (("notes",), "a note", 'notes: "a note" is no list'),
        (("notes", 0), None, "notes[0]: null is no text"),
    ],
)
def test_what_is_damaged_is_said_in_plain_words_with_its_place(
    place: tuple[str | int, ...], value: object, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole: Any = json.loads(document.to_json(made_up_results()))
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    if value is _LEFT_OUT:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    path = tmp_path / "run.json"
    path.write_text(json.dumps(whole))
    code, out, err = run(capsys, "benchmark", "--replay", str(path))
    assert (code, out) == (2, "") and err.count("\n") == 1 and len(err) < 500
    assert err.startswith(f"shape-sweeps: error: --replay {path}: is damaged: {said}")

"""The benchmark from the command line: a run on the CPU, what goes wrong in it, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_support import check_refused, run

from shape_sweeps import graph_timing
from shape_sweeps.benchmark import contenders, document, runner, suite
from shape_sweeps.benchmark.contenders import Proposal, Setting
from shape_sweeps.benchmark.results import AMONG_PEERS, AMONG_PRODUCTS
from shape_sweeps.shapes import SUITE_LARGE, SUITE_MISALIGNED, parse_shapes

RUN = ["benchmark", "--device", "cpu", "--rounds", "2", "--seconds-per-case", "0.01"]
SMALL = [*RUN, "--shapes", "64x64x64,33x65x127", "--epilogues", "train_gelu,residual"]


def replace_call(monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[Setting, int], Any]) -> None:
    """Another call in the place of one contender's."""
    original = contenders.make_contenders

    def make_contenders(setting: Setting, peers: Any) -> dict[str, Proposal]:
        found = original(setting, peers)
        return {**found, name: Proposal(lambda index: call(setting, index))}

    monkeypatch.setattr(runner, "make_contenders", make_contenders)


# -- a run ------------------------------------------------------------------------------------------------


def test_a_run_on_the_cpu_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("run.json", "table.md", "run.png")}
    options = ["--json", str(files["run.json"]), "--markdown", str(files["table.md"]), "--plot", str(files["run.png"])]
    code, out, err = run(capsys, *SMALL, *options)
    assert code == 0 and not err, err
    assert out.splitlines()[-1] == "4 measured, 0 failed, 0 skipped; targets: 0 met, 0 MISSED, 8 not measured"
    assert "backend: reference for 4 of 4 entries" in out
    found = json.loads(files["run.json"].read_text())
    assert found["schema"] == document.SCHEMA and found["settings"]["cache"] == "warm"
    assert found["environment"]["torch"] == torch.__version__ and found["environment"]["time"]
    assert [entry["group"] for entry in found["entries"]] == ["decode", "decode", "misaligned", "misaligned"]
    for entry in found["entries"]:
        names = entry["contestants"]
        assert entry["status"] == "measured" and entry["backend"] == "reference" and entry["why"]
        assert 0 < names["fused"]["error"] <= names["eager"]["error"] * 1.05
        assert set(names["eager"]["times"]) == {AMONG_PEERS}
        product = "rounded-mm" if entry["group"] == "misaligned" else "mm"
        assert set(names[product]["times"]) == {AMONG_PRODUCTS}
        assert set(names["fused"]["times"]) == {AMONG_PRODUCTS, AMONG_PEERS} == set(entry["rounds"])
        assert entry["ratios"]["speedup_over_eager"] > 0
    assert found["entries"][0]["contestants"]["rounded-mm"]["reason"] == "the shape is aligned"
    assert {target["verdict"] for target in found["targets"]} == {"not measured"}
    markdown = files["table.md"].read_text()
    assert "| misaligned: M x N x K |" in markdown and "| 33 x 65 x 127 | reference |" in markdown
    assert files["run.png"].read_bytes().startswith(b"\x89PNG")


def test_a_cpu_takes_small_shapes_of_every_group_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *RUN, "--epilogues", "identity")
    assert code == 0 and "note: no CUDA device: small shapes instead of the suite's" in out
    for group in suite.GROUPS:
        assert f"\n{group}\n" in out


def test_calls_walk_through_copies_that_a_cache_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As on a GPU: a layer, x, operands and product of each copy, in memory of its own with the same numbers."""
    seen: list[Setting] = []
    original = runner.make_setting

    def make_setting(problem: suite.Problem, **named: Any) -> Setting:
        seen.append(original(problem, **named))
        return seen[-1]

    monkeypatch.setattr(runner, "make_setting", make_setting)
    monkeypatch.setattr(runner, "cache_bytes", lambda device: 2**16)
    path = tmp_path / "run.json"
    assert run(capsys, *SMALL, "--json", str(path))[0] == 0
    found = json.loads(path.read_text())
    assert found["settings"]["cache"] == "cold"
    for entry, setting in zip(found["entries"], seen, strict=True):
        assert entry["cold"] and entry["copies"] == len(setting.copies) == len(setting.layers) > 2
        tensors = [
            [inputs.a, layer.weight, layer.bias, *(v for v in inputs.operands.values() if isinstance(v, torch.Tensor))]
            for inputs, layer in zip(setting.copies, setting.layers, strict=True)
        ] + [list(pair) for pair in setting.rounded]
        addresses = [tensor.data_ptr() for copy in tensors for tensor in copy]
        shared = sum("bias" in inputs.operands for inputs in setting.copies)  # a layer's bias is its operand
        assert len(set(addresses)) == len(addresses) - shared
        for copy in setting.copies[1:]:
            assert torch.equal(copy.a, setting.copies[0].a) and torch.equal(copy.b, setting.copies[0].b)
        assert len(setting.rounded) == (entry["copies"] if entry["group"] == "misaligned" else 0)


def test_warm_calls_use_the_same_tensors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "cache_bytes", lambda device: 2**16)
    path = tmp_path / "run.json"
    code, out, _ = run(capsys, *SMALL, "--warm", "--json", str(path))
    found = json.loads(path.read_text())
    assert code == 0 and "every call uses the same tensors (warm)" in out and found["settings"]["cache"] == "warm"
    assert {(entry["copies"], entry["cold"]) for entry in found["entries"]} == {(1, False)}


def test_our_own_measure_of_slow_and_fast_is_kept_in_series() -> None:
    prepared = dict.fromkeys(("fused", "eager", "compile", "mm", "rounded-mm"))
    series = lambda shape: runner._series(suite.problems([shape], ["gate"])[0], prepared)  # type: ignore[arg-type] # noqa: E731
    aligned, odd = series(SUITE_LARGE[0]), series(SUITE_MISALIGNED[0])
    assert aligned == {AMONG_PRODUCTS: ["fused", "mm"], AMONG_PEERS: ["fused", "eager", "compile", "rounded-mm"]}
    # the product of odd extents is as slow as eager PyTorch: it is among the peers
    assert odd == {AMONG_PRODUCTS: ["fused", "rounded-mm"], AMONG_PEERS: ["fused", "eager", "compile", "mm"]}
    alone = runner._series(suite.problems([SUITE_LARGE[0]], ["gate"])[0], {"fused": None})  # type: ignore[dict-item]
    assert alone == {AMONG_PEERS: ["fused"]}


def test_a_wrong_result_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def wrong(setting: Setting, index: int) -> dict[str, torch.Tensor]:
        inputs = setting.copies[index]
        return {"D": (inputs.a @ inputs.b.t()) * 1.02}

    replace_call(monkeypatch, "fused", wrong)
    path = tmp_path / "run.json"
    code, out, _ = run(capsys, *RUN, "--shapes", "64x64x64", "--epilogues", "identity", "--json", str(path))
    assert code == 1 and "failed 64x64x64 identity: D: relative error 2." in out
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["status"] == "failed" and entry["ratios"]["speedup_over_eager"] is None


def test_a_result_that_is_not_finite_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hole(setting: Setting, index: int) -> dict[str, torch.Tensor]:
        inputs = setting.copies[index]
        product = inputs.a @ inputs.b.t()
        product[-1, -1] = float("nan")
        return {"D": product}

    replace_call(monkeypatch, "fused", hole)
    code, out, _ = run(capsys, *RUN, "--shapes", "600x8x8", "--epilogues", "identity")
    assert code == 1 and "1 of 4800 elements are not finite" in out


def test_a_peer_that_raises_costs_its_place_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(setting: Setting, index: int) -> object:
        raise RuntimeError("inductor\nlost its way")

    replace_call(monkeypatch, "compile", broken)
    code, out, _ = run(capsys, *SMALL, "--peers", "eager,compile,mm")
    assert code == 0 and "note: torch.compile, 4 entries: RuntimeError: inductor lost its way" in out
    assert "4 measured, 0 failed" in out


def test_ours_that_raises_fails_its_entry_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = contenders.make_layer

    def make_layer(epilogue: Any, inputs: Any) -> Any:
        if inputs.a.shape[0] == 33 and inputs.a.device.type == "cpu" and inputs.operands.get("scale") is not None:
            raise RuntimeError("no such layer")
        return original(epilogue, inputs)

    monkeypatch.setattr(contenders, "make_layer", make_layer)
    code, out, _ = run(capsys, *SMALL)
    assert code == 1 and "failed 33x65x127 residual: RuntimeError: no such layer" in out
    assert "3 measured, 1 failed, 0 skipped" in out


def test_without_memory_an_entry_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> Setting:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "make_setting", full)
    code, out, _ = run(capsys, *SMALL)
    assert code == 1 and "0 measured, 0 failed, 4 skipped" in out and "do not fit in memory" in out


def test_without_eager_ours_is_still_judged_by_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code, _, _ = run(capsys, *SMALL, "--peers", "mm", "--json", str(path))
    assert code == 0
    for entry in json.loads(path.read_text())["entries"]:
        eager = entry["contestants"]["eager"]
        assert eager["error"] > 0 and not eager["times"] and eager["reason"] == "not timed: not asked for"


def test_an_interrupt_leaves_a_valid_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    original = runner.make_setting

    def make_setting(problem: suite.Problem, **named: Any) -> Setting:
        if problem.epilogue == "residual":
            raise KeyboardInterrupt
        return original(problem, **named)

    monkeypatch.setattr(runner, "make_setting", make_setting)
    path = tmp_path / "run.json"
    code, out, _ = run(capsys, *SMALL, "--json", str(path))
    assert code == 130 and "1 measured, 0 failed, 0 skipped, 3 of 4 not reached" in out
    found = document.from_json(path.read_text(), "it")
    assert found.interrupted and found.planned == 4 and len(found.entries) == 1
    assert run(capsys, "benchmark", "--replay", str(path))[0] == 0


def test_shapes_need_no_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    given = ["--json", str(path), "--epilogues", "identity", "--shapes", "40x24x16", "--max-seconds", "0"]
    code, out, _ = run(capsys, "benchmark", "64x64x64,33x65x127", "40x24x16", *RUN[1:], *given)
    assert code == 1 and "3 of 3 not reached" in out
    code, out, err = run(capsys, "benchmark", "64x64")
    assert code == 2 and out == "" and "neither a shape" in err


def test_the_time_limit_leaves_out_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--max-seconds", "0")
    assert code == 1 and "note: ended after 0 s, as --max-seconds says" in out
    assert "0 measured, 0 failed, 0 skipped, 4 of 4 not reached" in out


def test_on_a_cpu_there_is_nothing_to_build(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--build-only")
    assert code == 0 and out.splitlines()[-1] == "0 built, 0 there already, 0 failed"


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--group", "tiny"], "--group: unknown group 'tiny': expected large, medium, decode, misaligned"),
        (["--epilogues", "bias_jelu"], "--epilogues: unknown epilogue of the suite 'bias_jelu'"),
        (["--epilogues", "mine:mine"], "--epilogues: unknown epilogue of the suite 'mine:mine'"),
        (["--peers", "jax"], "--peers: unknown peer 'jax': expected eager, compile, cublaslt, mm, rounded-mm, all, or"),
        (["--peers", "no-jax"], "--peers: unknown peer 'jax'"),
        (["--peers", "eager,,mm"], "--peers: an item"),
        (["--shapes", "12x13"], "--shapes: '12x13'"),
        (["--shapes", "0x64x64"], "--shapes: '0x64x64' has nothing to measure"),
        (["0x1x2"], "error: benchmark: '0x1x2' has nothing to measure"),
        (["64x64"], "error: benchmark: '64x64' is neither a shape MxNxK"),
        (["64x64x64,"], "error: benchmark: an item of the comma-separated list '64x64x64,' is empty"),
        (["64x64x64", "--shapes", "0x1x2"], "error: --shapes: '0x1x2' has nothing to measure"),
        (["--shapes", "64x64x64", "--group", "large,misaligned"], "--group: none of the shapes"),
        (["--rounds", "0"], "--rounds"),
        (["--seconds-per-case", "soon"], "--seconds-per-case"),
        (["--max-seconds", "-1"], "--max-seconds"),
        (["--device", "gpu"], "--device: 'gpu'"),
        (["--build-only", "--json", "x.json"], "--build-only: measures nothing, so that there is nothing for --json"),
        (["--plot", "x.xyz"], "--plot: expected a file name that ends in"),
        (["--json", "same", "--markdown", "same"], "--markdown: 'same' is taken by --json"),
        (["--json", "/no/such/folder/x"], "--json: '/no/such/folder/x'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(capsys, arguments, expected, tmp_path)


def test_peers_are_chosen_and_left_out() -> None:
    assert suite.parse_peers(["all"]) == tuple(suite.PEERS) == suite.parse_peers(["mm,all"])
    assert suite.parse_peers(["no-compile"]) == ("eager", "cublaslt", "mm", "rounded-mm")
    assert suite.parse_peers(["mm,eager"]) == ("eager", "mm")
    assert suite.parse_peers(["eager,mm", "no-mm"]) == ("eager",)


def test_problems_come_group_by_group() -> None:
    found = suite.problems(parse_shapes(["suite-misaligned", "suite-large", "64x64x64"]), ["gate", "identity"])
    assert [problem.group for problem in found] == ["large"] * 10 + ["decode"] * 2 + ["misaligned"] * 16
    assert str(found[0]) == "4096x4096x4096 gate" and str(found[1]) == "4096x4096x4096 identity"


def test_help_explains_exit_codes_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "benchmark", "--help")
    assert code == 0 and "no-compile" in out
    for number in ("0", "1", "2", "130", "141"):
        assert f"\n  {number}" in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ["--shapes", "256x512x512,129x257x255", "--epilogues", "bias_gelu", "--peers", "no-compile"]
    code, out, _ = run(capsys, "benchmark", *arguments, "--json", str(path))
    assert code == 0, out
    found = document.from_json(path.read_text(), "it")
    assert found.host and found.environment["driver"] and found.settings["cache"] == "cold"
    aligned, odd = found.entries
    assert aligned.cold is graph_timing.leaves_cache(
        aligned.copies, contenders.bytes_per_call(aligned.problem), graph_timing.cache_bytes("cuda")
    )
    for entry, names in (
        (aligned, ("fused", "eager", "cublaslt", "mm")),
        (odd, ("fused", "eager", "mm", "rounded-mm")),
    ):
        for name in names:
            assert entry.contestants[name].how == graph_timing.GRAPH, (name, entry.contestants[name].reason)
    assert aligned.speedup_over_fused_peer and odd.over_rounded_mm

"""How tuning measures and keeps: rounds, files, one problem from end to end; the device and its clock are told."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from gemm_support import resolved
from torch import Tensor
from tuner_support import H200, Told, call_on_h200, in_hours, knowing, result_of

import epilogues as ep
import gemm_ops
from gemm_ops import dispatch, plan, product_call
from gemm_ops.errors import BuildError
from gemm_ops.kernels.selection import Target
from gemm_ops.tuner import known, tune
from gemm_ops.tuner.classes import is_access, is_tree_class, problem_class, tree_class
from gemm_ops.tuner.contenders import Contender, by_operations, copy_of, find_fault, poisoned_outputs
from gemm_ops.tuner.measuring import LEAST_ROUNDS, MOST_ROUNDS, measure_in_rounds
from gemm_ops.tuner.records import RecordError, pick_best, read_records, write_records

__all__ = ["knowing"]

# Rounds.


def test_slow_ones_leave_early() -> None:
    told = Told({"a": 100.0, "b": 110.0, "c": 116.0, "d": 104.0})
    rounds = measure_in_rounds(list(told.us), told, 1e9, clock=told.clock)
    assert rounds.us == pytest.approx(told.us) and rounds.last == ("a", "d") and rounds.count == MOST_ROUNDS
    assert {name: told.asked.count(name) for name in told.us} == {"a": MOST_ROUNDS, "b": 9, "c": 3, "d": MOST_ROUNDS}
    assert told.asked[:8] == ["a", "b", "c", "d", "d", "c", "b", "a"], "all take turns, in alternating order"


def test_who_leaves_early_is_compared_in_its_own_rounds() -> None:
    """A device that gets warm is slower in the later rounds, which those who leave do not see."""

    class Warming(Told):
        def time(self, name: str) -> float:
            return super().time(name) * (0.9 if len(self.asked) <= 20 else 1.0)

    warming = Warming({"a": 100.0, "b": 108.0, "c": 120.0})
    rounds = measure_in_rounds(list(warming.us), warming, 1e9, clock=warming.clock)
    assert rounds.us == pytest.approx({"a": 100.0, "b": 108.0, "c": 120.0}, rel=1e-9)


def test_rounds_end_when_the_seconds_are_used_up() -> None:
    told = Told({"a": 125000.0, "b": 125000.0})
    assert measure_in_rounds(["a", "b"], told, 1.0, clock=told.clock).count == 4
    told = Told({"a": 1e5})
    assert measure_in_rounds(["a"], told, 0.0, clock=told.clock).count == LEAST_ROUNDS


def test_a_fused_kernel_is_preferred_to_several_and_has_to_beat_cublas_alone() -> None:
    assert pick_best({"k": 100.9, "two passes": 100.0}) == "k"
    assert pick_best({"k": 97.9, "cuBLAS alone": 100.0, "by operations": 150.0}) == "k"
    assert pick_best({"k": 98.1, "cuBLAS alone": 100.0, "by operations": 99.0}) == "by operations"
    assert pick_best({"k": 98.1, "j": 99.0, "cuBLAS alone": 100.0}) == "cuBLAS alone"
    assert pick_best({"k": 101.1, "two passes": 100.0}) == "two passes"
    assert pick_best({"by operations": 1.0}) == "by operations"


# Results, and where they are kept.


def test_results_are_what_they_were_in_a_file() -> None:
    record = dataclasses.replace(
        result_of(call_on_h200(4095, 4097, 4093), {"b": 2.0, "a": 3.0}), dropped={"c": "wrong"}, versions={"torch": "2"}
    )
    text = write_records(H200.name, [record])
    assert read_records(text) == ((record,), ()) and "4095 x 4097 x 4093, bf16" in text
    batch = dataclasses.replace(record, problem=dataclasses.replace(record.problem, batch=7))
    assert read_records(write_records(H200.name, [batch]))[0] == (batch,)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1, "device": "x"}', "[" * 100000])
def test_files_that_are_none(text: str) -> None:
    with pytest.raises(RecordError):
        read_records(text)


@pytest.mark.parametrize("name", ["", " ", "GPU\x1b[2J", "a\nb", "x" * 10_000, "\u2026!", "\ud800 H200", 7, None])
def test_devices_that_have_no_such_name(name: object) -> None:
    """A file is named after its device, and warnings, tables and reasons name it."""
    found = json.loads(write_records(H200.name, [result_of(call_on_h200(64, 64, 64), {"a": 1.0})]))
    with pytest.raises(RecordError, match="device") as error:
        read_records(json.dumps({**found, "device": name}))
    assert str(error.value).isprintable() and len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("problem", "3 x 4"),
        ("problem", "0 x 64 x 64, bf16, row/column, aligned"),
        ("problem", f"{'9' * 5000} x 64 x 64, bf16, row/column, aligned"),
        ("problem", "64 x 64 x 64, bf16, row/column, well\x1b[2J"),
        ("problem", "64 x 64 x 64, bf16, row/column, a padded, and more"),
        ("problem", "64 x 64 x 64, f64, row/column, aligned"),
        ("epilogue", None),
        ("epilogue", ""),
        ("epilogue", "-> bf16"),
        ("epilogue", "-> bf16, many instructions"),
        ("epilogue", "-> bf17, 1 instructions"),
        ("epilogue", "row row -> bf16, 1 instructions"),
        ("epilogue", "-> bf16, 1 instructions\n"),
        ("us", {}),
        ("us", {"a": -1}),
        ("us", {"a": "1"}),
        ("us", {"a": 10**400}),
        ("best", "z"),
        ("best", ["a"]),
        ("best", {}),
        ("date", "yesterday"),
        ("date", "2026-11-30T12:00:00Z"),
        ("date", None),
        ("date", "2026-13-01 00:00:00"),
        ("date", "\uff12026-11-30 12:00:00"),
    ],
)
def test_a_result_that_makes_no_sense_is_passed_over_alone(field: str, value: object) -> None:
    good, bad = (result_of(call_on_h200(m, 64, 64), {"a": 1.0}) for m in (64, 128))
    found = json.loads(write_records(H200.name, [good, bad]))
    found["results"][1][field] = value
    records, faults = read_records(json.dumps(found))
    assert records == (good,) and len(faults) == 1 and faults[0].startswith("result 2: ")
    assert faults[0].isprintable()


def test_a_result_of_a_date_to_come_is_passed_over(knowing: Path) -> None:
    """It would count before all that is measured until then."""
    soon, late = (
        result_of(call_on_h200(m, 64, 64), {"a": 1.0}, date=in_hours(hours)) for m, hours in ((64, 23), (128, 25))
    )
    path = known.users_file(H200.name)
    known.merge_into(path, H200.name, {each.key: each for each in (soon, late)})
    with pytest.warns(RuntimeWarning, match=rf"a result is passed over: .* 128 x .* is to come: {late.date}, while"):
        assert known.all_of(H200.name) == {soon.key: soon}
    with pytest.raises(RecordError, match=r"128 x 64 x 64, bf16.* is to come: .* this machine's clock says"):
        known.read_file(path)
    known.merge_into(known.shipped_file(H200.name), H200.name, {late.key: late})
    assert known.find(*late.key) == late, "the package is right where a clock is not"


def test_every_class_of_ours_reads_as_one() -> None:
    for epilogue in ep.builders.SUITE.values():
        built = epilogue()
        for dtype in ("bf16", "f16"):
            found = tree_class(resolved(built, dtype))
            assert is_tree_class(found), found
    for m, n, k in ((64, 64, 64), (63, 65, 67), (1, 1, 1), (8, 4097, 4096)):
        for target in (H200, Target((8, 0), 108, "NVIDIA A100")):
            call = call_on_h200(m, n, k)
            problem = problem_class(call.request, "bf16", target)
            assert problem is not None and is_access(problem.access), problem
    for text in ("a contiguous, b padded, loads by 1, stores back", "loads strided, loads unaligned"):
        assert is_access(text)


def test_results_are_found_again_by_other_processes(knowing: Path) -> None:
    record = result_of(call_on_h200(64, 64, 64), {"a": 1.0})
    known.remember([record])
    assert known.users_file(H200.name) == knowing / "tuning" / "nvidia-h200.json"
    known.forget()
    assert known.find(*record.key) == record
    other = dataclasses.replace(record, us={"a": 2.0}, date=in_hours(-0.01))
    known.merge_into(known.users_file(H200.name), H200.name, {other.key: other})  # as another process would
    assert known.find(*record.key) == other


def test_the_users_results_come_before_the_packages(knowing: Path) -> None:
    call = call_on_h200(64, 64, 64)
    shipped, own = result_of(call, {"a": 1.0}), result_of(call, {"a": 2.0}, date="2020-01-01 00:00:00")
    known.merge_into(known.shipped_file(H200.name), H200.name, {shipped.key: shipped})
    assert known.find(*shipped.key) == shipped and not known.users_results(H200.name)
    known.remember([own])
    assert known.find(*shipped.key) == own == known.all_of(H200.name)[own.key]


def test_a_broken_file_is_said_once_and_put_aside_when_written(knowing: Path) -> None:
    path = known.users_file(H200.name)
    path.parent.mkdir(parents=True)
    path.write_text("{ broken")
    record = result_of(call_on_h200(64, 64, 64), {"a": 1.0})
    with pytest.warns(RuntimeWarning, match="is passed over: it is not what tuning writes"):
        assert known.find(*record.key) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known.find(*record.key) is None
    with pytest.warns(RuntimeWarning, match=r"it is now nvidia-h200\.json\.broken"):
        known.remember([record])
    assert path.with_name("nvidia-h200.json.broken").read_text() == "{ broken"
    assert known.read_file(path) == (record,)


def test_what_cannot_be_read_is_not_replaced(knowing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = known.users_file(H200.name)
    old, new = (result_of(call_on_h200(m, 64, 64), {"a": 1.0}) for m in (64, 128))
    known.remember([old])
    known.forget()
    before = path.read_bytes()

    def refuse(self: Path, *args: object, **options: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.warns(RuntimeWarning, match=r"not kept: .* cannot be read or written"):
            (why,) = known.remember([new])
    assert "Permission denied" in why and path.read_bytes() == before
    assert not path.with_name(f"{path.name}.broken").exists()


def test_a_file_stays_that_of_its_device(knowing: Path) -> None:
    """Of names that give the same name of a file, the first has it: all in a file are of one device."""
    first = result_of(call_on_h200(64, 64, 64), {"a": 1.0})
    other = dataclasses.replace(first, problem=dataclasses.replace(first.problem, device="nvidia (h200)"))
    known.remember([first])
    with pytest.warns(RuntimeWarning, match="not kept"):
        (why,) = known.remember([other])
    assert "it has results of the NVIDIA H200, not of the nvidia (h200)" in why
    assert known.read_file(known.users_file(H200.name)) == (first,)


def test_what_is_not_understood_is_kept_beside_the_file(knowing: Path) -> None:
    path = known.users_file(H200.name)
    first, second, new = (result_of(call_on_h200(m, 64, 64), {"a": 1.0}) for m in (64, 128, 192))
    known.remember([first, second])
    found = json.loads(path.read_text())
    found["results"][0]["problem"] = "of a later version"
    path.write_text(json.dumps(found))
    with pytest.warns(RuntimeWarning, match="a result is passed over: result 1"):
        assert known.remember([new]) == ()
    assert len(known.read_file(path)) == 2
    assert "of a later version" in path.with_name(f"{path.name}.broken").read_text()


def test_where_nothing_can_be_written_results_count_here(knowing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (knowing.parent / "file").touch()
    monkeypatch.setenv("GEMM_OPS_CACHE", str(knowing.parent / "file"))
    record = result_of(call_on_h200(64, 64, 64), {"a": 1.0})
    with pytest.warns(RuntimeWarning, match="what tuning found is not kept"):
        known.remember([record])
    assert known.find(*record.key) == record


_WRITER = """
import dataclasses, sys
from gemm_ops.tuner import known
from gemm_ops.tuner.classes import ProblemClass
from gemm_ops.tuner.records import Measured
for m in range(20):
    problem = ProblemClass("a device", "bf16", "row/column", "aligned", m + 1, int(sys.argv[1]), 8)
    known.remember([Measured(problem, "-> bf16, 0 instructions", {"a": 1.0}, "a", date="2026-11-30 12:00:00")])
"""


def test_processes_do_not_lose_each_others_results(knowing: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(n)]) for n in (1, 2)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert len(known.all_of("a device")) == 40
    assert {path.name for path in (knowing / "tuning").iterdir()} <= {"a-device.json", ".a-device.json.lock"}


# Checks.


def test_wrong_outputs_are_told(knowing: Path) -> None:
    right = torch.randn(256, 128).bfloat16()
    assert find_fault({"D": right + right * 2**-8}, {"D": right}) == ""
    for fault in (lambda t: t[-1].zero_(), lambda t: t[:, -1].fill_(torch.nan), lambda t: t[64:, 64:].mul_(2)):
        wrong = right.clone()
        fault(wrong)
        assert "of D differ from PyTorch's" in find_fault({"D": wrong}, {"D": right})
    tipped = right.clone()
    tipped[::16, 5] += 1  # one in a row, 16 of 256 in a column
    assert find_fault({"D": tipped}, {"D": right}) != ""
    tipped = right.clone()
    tipped[range(5), range(5)] += 1
    assert find_fault({"D": tipped}, {"D": right}) == "", "comparisons tip over"
    assert find_fault({"D": torch.full((1, 1), torch.nan)}, {"D": torch.ones(1, 1)}) != ""


def test_copies_lie_as_the_tensor_does() -> None:
    memory = torch.randn(4096)
    for tensor in (memory[3:35].view(4, 8).t(), memory.as_strided((4, 8), (0, 1), 5), memory[:0]):
        copy = copy_of(tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.data_ptr() % 64 == tensor.data_ptr() % 64 or not tensor.numel()
        assert not tensor.numel() or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


# One problem.


@pytest.fixture
def task(knowing: Path, monkeypatch: pytest.MonkeyPatch) -> tune.Task:
    """Tensors on the CPU, with an H200's candidates, whose kernels are the reference; one is wrong, one not built."""
    x, weight = torch.randn(192, 64).bfloat16(), torch.randn(4096, 64).bfloat16()
    call = dispatch.bind_call(x, weight.t(), ep.builders.activation("gelu"), {}, None)
    monkeypatch.setattr(tune, "target_of", lambda device: H200)
    monkeypatch.setattr(tune, "multiprocessor_count", lambda device: H200.multiprocessors)
    monkeypatch.setattr(tune, "refusal", lambda call: "")
    monkeypatch.setattr(tune, "_is_there", lambda spec: spec.key != found.candidates[-1].spec.key)
    wrong: list[str] = []

    def fused(call: dispatch.Call, candidate: object, multiprocessors: int) -> Contender:
        name = candidate.name  # type: ignore[attr-defined]
        if name == wrong[1]:
            raise BuildError("it does not load\nmore")
        reference = by_operations(call)

        def run(b: Tensor, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            results = reference.run(b, out)
            if name == wrong[0]:
                results["D"][-3:] = 7.0
            return results

        return Contender(name, run)

    monkeypatch.setattr(tune, "fused_contender", fused)
    found = tune.plan_task(call)
    assert isinstance(found, tune.Task)
    names = [each.name for each in found.candidates]
    wrong += [names[1], names[2]]
    return found


def measure(task: tune.Task, us: Mapping[str, float], watch: tune.Watch | None = None) -> tune.Measured:
    def make(task: tune.Task, contenders: Sequence[Contender]) -> tuple[Told, dict[str, str]]:
        told.us |= {each.name: us.get(each.name, 100.0) for each in contenders}
        return told, {}

    told = Told({})
    return tune.measure_task(task, 1.0, watch=watch, make_stopwatch=make, clock=told.clock)


def test_a_problem_from_end_to_end(task: tune.Task) -> None:
    names = [each.name for each in task.candidates]
    found = measure(task, {names[3]: 50.0, names[1]: 1.0, names[2]: 1.0, names[-1]: 1.0})
    assert (found.best, found.model, found.problem, found.example) == (names[3], names[0], task.problem, "gelu")
    assert found.dropped[names[1]] == "wrong: 3 rows of D differ from PyTorch's"
    assert found.dropped[names[2]] == "it does not load" and found.dropped[names[-1]] == "not built"
    assert not {names[1], names[2], names[-1]} & set(found.us) and found.us["by operations"] == 100.0
    plan._plans["a plan"] = object()
    tune.keep([found])
    assert known.find(*task.key) == found and not plan._plans, "whatever was planned is decided anew"


def test_outputs_are_poisoned(task: tune.Task) -> None:
    (output,) = poisoned_outputs(task.call).values()
    assert output.shape == (192, 4096) and bool(output.isnan().all())


def test_a_call_is_measured_once(task: tune.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[dispatch.Call] = []
    capturing = True

    def tune_it(call: dispatch.Call) -> list[tune.Measured]:
        tuned.append(call)
        return [measure(task, {})] if len(tuned) == 1 else []

    monkeypatch.setattr(tune, "_tune", tune_it)
    monkeypatch.setattr(tune, "_tried", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert not tune.tune_if_asked(task.call) and not tuned, "known is not now"
    with gemm_ops.tuning("now"):
        assert tune.tune_if_asked(task.call) and not tuned, "not while a graph is captured"
        capturing = False
        with gemm_ops.use_backend("sm90"):
            assert not tune.tune_if_asked(task.call) and not tuned
        assert not tune.tune_if_asked(task.call) and len(tuned) == 1
        assert not tune.tune_if_asked(task.call) and len(tuned) == 1, "it is known now"
        known.users_file(H200.name).unlink()
        known.forget()
        assert not tune.tune_if_asked(task.call) and len(tuned) == 1, "whatever came of it"


def test_what_goes_wrong_in_tuning_is_not_the_calls(task: tune.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: dispatch.Call) -> list[tune.Measured]:
        raise torch.OutOfMemoryError("no room\nat all")

    monkeypatch.setattr(tune, "_tune", fail)
    monkeypatch.setattr(tune, "_tried", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with gemm_ops.tuning("now"), pytest.warns(RuntimeWarning, match="a call is not tuned: OutOfMemoryError: no room$"):
        assert not tune.tune_if_asked(task.call)


def test_calls_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dispatch.Call] = []
    monkeypatch.setattr(product_call, "tune_if_asked", lambda call: bool(asked.append(call)))
    with pytest.warns(gemm_ops.FallbackWarning):
        gemm_ops.linear(torch.randn(4, 8), torch.randn(6, 8), "relu")
    assert len(asked) == 1 and asked[0].problem.n == 6


def test_on_a_cpu_nothing_is_measured(knowing: Path) -> None:
    call = dispatch.bind_call(torch.randn(4, 8), torch.randn(8, 6), ep.builders.identity(), {}, None)
    assert "times are those of CUDA devices" in str(tune.plan_task(call))
    with gemm_ops.tuning("now"):
        assert not tune.tune_if_asked(call)


def test_builds_end_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch, task: tune.Task) -> None:
    order: list[str] = []

    def build(specs: Sequence[object], *, jobs: int, on_done: object, on_failed: object) -> None:
        for spec in specs:
            order.append(spec.key)  # type: ignore[attr-defined]
            on_done(spec, 1.0, False)  # type: ignore[operator]

    monkeypatch.setattr(tune, "build_kernels", build)
    tune.build_in_order([task.specs, task.specs])
    assert order == list(dict.fromkeys(order)) and len(order) == len(task.specs)
    order.clear()
    tune.build_in_order([task.specs], until=0.0)
    assert len(order) == 1
    with gemm_ops.building("never"):
        tune.build_in_order([task.specs])
    assert len(order) == 1

"""The report of a standalone chain: bytes by hand, times, the cache, what bounds it, registers, decisions."""

from __future__ import annotations

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
from gemm_support import every_kind
from measure_costs import count_special_calls
from test_gemm_compile import has_nvcc

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row, Scalar, analysis
from epilogues.operations import OPERATIONS
from epilogues.operations.costs import SPECIAL_CALLS
from epilogues.tree import Accumulator, Apply, EpilogueTree, Kind, Node, Operand, Store
from gemm_ops import elementwise_call
from gemm_ops.build.cache import LIBRARY, RECORD, cache_folder
from gemm_ops.explain import DEVICES, ChainReport, find_device
from gemm_ops.explain.estimate import HOST_CHAIN_SECONDS, KERNEL_SECONDS, special_cost

M, N = 24, 40


@ep.epilogue
def bias_gelu_residual(acc, bias: Row, residual: Aux):
    return ep.gelu(acc + bias, approximate="tanh") + residual


@ep.epilogue
def scaled(acc, scale: Row, offset: Column, alpha: Scalar):
    return (acc * scale + offset) * alpha


@ep.epilogue
def for_training(acc, bias: Row):
    z = acc + bias
    return {"D": ep.gelu(z, approximate="tanh"), "z": z, "wide": ep.cast(z, torch.float32)}


@ep.epilogue
def vectors(acc, scale: Row, offset: Column, alpha: Scalar):
    return acc * (ep.exp(scale) * alpha) + ep.tanh(offset * alpha)


def kernels(report: ChainReport) -> list[tuple[str, int, int]]:
    return [(kernel.name, kernel.read, kernel.written) for kernel in report.traffic.eager]


def words(report: ChainReport) -> str:
    return " ".join(report.decision.reasons)


# -- bytes, counted by hand ---------------------------------------------------------------------------------


def test_bias_gelu_residual_in_bf16() -> None:
    report = bias_gelu_residual.explain(M, N)
    matrix = 2 * M * N
    assert kernels(report) == [
        ("add", matrix + 2 * N, matrix),  # not part of an F.linear: there is none
        ("gelu_tanh", matrix, matrix),
        ("add", 2 * matrix, matrix),
    ]
    assert report.traffic.unfused_bytes == 7 * matrix + 2 * N
    assert report.traffic.fused_bytes == 3 * matrix + 2 * N
    assert report.traffic.saved_bytes == 4 * matrix


def test_a_float32_bias_makes_eager_intermediates_float32() -> None:
    report = bias_gelu_residual.explain(M, N, operand_dtypes={"bias": torch.float32})
    assert kernels(report) == [
        ("add", 2 * M * N + 4 * N, 4 * M * N),
        ("gelu_tanh", 4 * M * N, 4 * M * N),
        ("add", (4 + 2) * M * N, 4 * M * N),
        ("to(bf16)", 4 * M * N, 2 * M * N),
    ]
    assert report.traffic.fused_bytes == 3 * 2 * M * N + 4 * N


def test_a_float32_residual_is_wide_at_the_end_only() -> None:
    report = bias_gelu_residual.explain(M, N, operand_dtypes={"residual": torch.float32})
    assert kernels(report)[1:] == [
        ("gelu_tanh", 2 * M * N, 2 * M * N),
        ("add", (2 + 4) * M * N, 4 * M * N),
        ("to(bf16)", 4 * M * N, 2 * M * N),
    ]
    assert report.traffic.fused_bytes == (2 + 4 + 2) * M * N + 2 * N


def test_everything_in_float32() -> None:
    report = bias_gelu_residual.explain(M, N, dtype=torch.float32)
    assert report.traffic.unfused_bytes == 7 * 4 * M * N + 4 * N and report.kernel.spec is not None
    assert report.traffic.fused_bytes == 3 * 4 * M * N + 4 * N


def test_rows_columns_and_numbers() -> None:
    report = scaled.explain(M, N)
    matrix = 2 * M * N
    assert kernels(report) == [
        ("mul", matrix + 2 * N, matrix),
        ("add", matrix + 2 * M, matrix),
        ("mul", matrix, matrix),  # the number is an argument of the launch
    ]
    assert report.traffic.fused_bytes == 2 * matrix + 2 * N + 2 * M


def test_several_outputs() -> None:
    report = for_training.explain(M, N)
    assert kernels(report) == [
        ("add", 2 * M * N + 2 * N, 2 * M * N),
        ("gelu_tanh", 2 * M * N, 2 * M * N),
        ("to(f32)", 2 * M * N, 4 * M * N),
    ]
    assert report.traffic.fused_bytes == 2 * M * N + 2 * N + (2 + 2 + 4) * M * N
    assert report.decision.choice == "fuse" and report.kernel.spec is not None
    assert report.kernel.spec.outputs == ("pieces",) * 3
    # x and bias in short pieces of two registers, two outputs that wait in four each, gelu's own values, and the rest
    assert report.registers is not None and report.registers.needed == 2 * 2 + 2 * 4 + report.registers.live + 12


def test_a_tensor_that_nothing_reads_is_not_counted() -> None:
    tree = EpilogueTree((Store("D", Apply("exp", (Operand("p", Kind.AUX, 0, "bf16"),)), "bf16"),))
    found = analysis.count_chain_traffic(tree, M, N, "bf16")
    assert found.fused_bytes == found.unfused_bytes == 2 * 2 * M * N and found.saved_share == 0


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", ["bias_gelu_residual", "scaled", "for_training", "vectors", "every_kind", "gate"])
def test_eager_traffic_is_what_pytorch_really_moves(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison script's unfused computation, watched kernel by kernel."""
    found = {**SUITE, **globals()}[name]
    report = found.explain(M, N, dtype=dtype)
    script: dict[str, Any] = {"__name__": "comparison"}
    monkeypatch.setattr(sys, "argv", ["compare.py", str(M), str(N)])
    exec(report.script, script)
    inputs = script["make_inputs"](0)
    with torch.no_grad(), Counting() as counting:
        script["unfused"](*inputs)
    assert counting.found == [(kernel.read, kernel.written) for kernel in report.traffic.eager]


# -- times --------------------------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    report = bias_gelu_residual.explain(8192, 8192, device="h200")
    matrix = 2 * 8192 * 8192
    attained = 0.9 * 4.8e12
    assert report.times.fused.limit == pytest.approx((3 * matrix + 2 * 8192) / 4.8e12)
    assert report.times.fused.expected == pytest.approx(3e-6 + (3 * matrix + 2 * 8192) / attained)
    assert report.times.eager.expected == pytest.approx(9e-6 + (7 * matrix + 2 * 8192) / attained)
    assert report.times.fused.expected == pytest.approx(96e-6, rel=0.02)  # what is measured on an H200
    assert report.times.speedup == pytest.approx(report.times.eager.expected / report.times.fused.expected)
    assert report.decision.headline == (
        "FUSE: one kernel in place of 3, expected to take 58% less GPU time than eager PyTorch (226 us -> 96.2 us)"
    )
    assert "6 us are for 2 launches less" in words(report)


def test_the_cache_on_both_sides_of_its_size() -> None:
    """Three matrices of bf16 and a row: 6 M N + 2 N bytes."""
    device = find_device("a100-80")
    n = 1024
    most = (device.l2 - 2 * n) // (6 * n)
    inside, outside = (bias_gelu_residual.explain(m, n, device="a100-80") for m in (most, most + 1))
    assert inside.traffic.fused_bytes <= device.l2 < outside.traffic.fused_bytes
    assert inside.times.in_l2 and not outside.times.in_l2
    assert "fit in the L2 cache (40 MiB): between operations" in words(inside)
    assert "do not fit in the L2 cache (40 MiB)" in words(outside)
    assert "bound by the L2 cache's bandwidth" in words(inside) and "bound by memory bandwidth" in words(outside)
    assert inside.times.moving == pytest.approx(outside.times.moving / 2, rel=0.01)
    # the H200 has a larger one
    assert bias_gelu_residual.explain(most + 1, n, device="h200").times.in_l2


def test_what_is_to_be_gained_in_the_cache_is_said_by_the_figures() -> None:
    small, larger = (bias_gelu_residual.explain(m, m, device="h200") for m in (1024, 3072))
    assert small.times.in_l2 and larger.times.in_l2
    assert "mostly launches, and little is to be gained beyond them" in words(small)
    assert small.times.saved / 2 <= 2 * KERNEL_SECONDS
    assert "little is to be gained beyond" not in words(larger) and "So less is to be gained" in words(larger)


def test_the_cache_does_not_make_eager_pytorch_the_faster() -> None:
    """Four matrices do not fit where the three of each of its kernels do."""

    @ep.epilogue
    def total(acc, p: Aux, q: Aux):
        return acc + p + q

    report = total.explain(3072, 3072, device="h200")
    assert all(kernel.bytes <= report.device.l2 for kernel in report.traffic.eager) and not report.times.in_l2
    assert report.times.eager.expected == pytest.approx(6e-6 + 6 * 2 * 3072**2 / (0.9 * 4.8e12))
    assert report.times.speedup > 1.3


def test_intermediate_results_may_be_too_large_for_the_cache() -> None:
    wide = bias_gelu_residual.explain(3072, 3072, device="h200", operand_dtypes={"bias": "f32"})
    assert wide.times.in_l2 and max(kernel.bytes for kernel in wide.traffic.eager) > wide.device.l2
    assert "What eager PyTorch holds in between does not fit" in words(wide)
    assert "So less is to be gained" not in words(wide)


@pytest.mark.parametrize("rounding", ["once", "eager", "eager_linear"])
def test_every_rounding_and_compute_dtype(rounding: Any) -> None:
    report = bias_gelu_residual.with_rounding(rounding).explain(M, N)
    assert kernels(report) == kernels(bias_gelu_residual.explain(M, N))
    assert report.kernel.spec is not None and report.kernel.spec.tree.rounding == rounding
    assert any("bit-identical" in line for line in report.limitations) == (rounding == "once")
    narrow = bias_gelu_residual.with_compute_dtype(torch.bfloat16).explain(M, N)
    assert kernels(narrow) == kernels(bias_gelu_residual.explain(M, N))


def test_small_tensors_are_launches() -> None:
    small = bias_gelu_residual.explain(512, 512, device="h200")
    assert small.times.launch_dominates and "The launch dominates" in words(small)
    assert "What counts is the number of kernels, 1 instead of 3" in words(small)
    assert "The CPU takes about 29 us to launch the one kernel and 21 us for eager PyTorch" in words(small)
    assert "Tuning the computation will not make it faster." in words(small)
    assert "only moving fewer bytes will" not in words(small)
    large = bias_gelu_residual.explain(8192, 8192, device="h200")
    assert not large.times.launch_dominates and "The launch dominates" not in words(large)
    assert "The CPU takes" not in words(large)


def test_the_cpu_matters_where_both_ways_wait_for_it() -> None:
    """The one kernel's GPU time passes what the CPU takes for it before eager PyTorch's does."""
    waits = [
        m
        for m in (256, 1024, 1536, 2048, 2560, 8192)
        if "The CPU takes" in words(bias_gelu_residual.explain(m, m, device="h200"))
    ]
    assert waits == [256, 1024, 1536, 2048]
    report = bias_gelu_residual.explain(2560, 2560, device="h200")
    assert report.times.fused.expected < HOST_CHAIN_SECONDS and report.times.eager.expected > 3 * 7e-6


# -- what bounds the kernel ---------------------------------------------------------------------------------


def powers(times: int, function: Any = ep.exp, dtype: torch.dtype | None = None) -> ep.Epilogue:
    def chain(acc):
        for _ in range(times):
            acc = function(acc * 0.5)
        return acc if dtype is None else ep.cast(acc, dtype)

    return ep.epilogue(chain, name="chain")


def test_a_chain_of_few_operations_is_bound_by_bandwidth() -> None:
    report = bias_gelu_residual.explain(8192, 8192, device="h200")
    assert report.times.bound == "memory" and report.instructions == 14 and report.special_calls == 2
    assert report.times.work == 16 and report.times.roofline.intensity == pytest.approx(16 / 6, rel=1e-3)
    assert report.times.roofline.ridge == pytest.approx(67e12 / 2 / (0.9 * 4.8e12))
    assert "Tuning the computation will not make it faster; only moving fewer bytes will." in words(report)


def test_a_chain_of_many_transcendental_operations_is_bound_by_the_special_function_unit() -> None:
    report = powers(20).explain(8192, 8192, device="h200")
    assert report.instructions == 20 * (1 + 4) and report.special_calls == 20
    assert report.times.work == 20 * 8 and report.times.bound == "compute"
    seconds = 160 * 8192**2 / (67e12 / 2)
    assert report.times.computing == pytest.approx(seconds)
    assert report.times.fused.expected == pytest.approx(KERNEL_SECONDS + seconds)
    assert "bound by the special function unit" in words(report) and "20 calls of the special" in words(report)
    assert "Fewer or cheaper operations make it faster" in words(report) and "Tuning" not in words(report)
    assert report.decision.choice == "fuse"


def test_a_chain_of_many_plain_operations_is_bound_by_arithmetic() -> None:
    report = powers(80, lambda z: ep.maximum(z, 0.25) - 1).explain(8192, 8192, device="h200")
    assert report.special_calls == 0 and report.times.work == report.instructions == 240
    assert report.times.bound == "compute" and "bound by arithmetic" in words(report)
    assert "special function" not in str(report)


def test_the_special_function_unit_is_as_fast_but_additions_are_slower_on_an_a100() -> None:
    assert [special_cost(DEVICES[name]) for name in ("a100-80", "h100", "l40s", "b200")] == [4, 8, 8, 8]


def test_faster_functions_are_advised_where_they_would_help() -> None:
    advice = "Float32 outputs need the exact device functions"
    wide = powers(20, ep.sigmoid, torch.float32).explain(8192, 8192, device="h200")
    assert wide.times.bound == "compute" and advice in words(wide)
    assert f"as long as {20 * 16} additions in place of {wide.times.work}" in words(wide)
    assert advice not in words(powers(20, ep.sigmoid).explain(8192, 8192, device="h200"))  # has them already
    assert advice not in words(powers(1, ep.sigmoid, torch.float32).explain(8192, 8192, device="h200"))  # bytes decide
    assert advice not in words(powers(20, ep.log1p, torch.float32).explain(8192, 8192, device="h200"))  # there are none


def test_narrower_dtypes_are_advised_where_bytes_decide() -> None:
    advice = "16 bits in place of float32"
    wide = bias_gelu_residual.explain(8192, 8192, device="h200", operand_dtypes={"residual": "f32"})
    assert "with 16 bits in place of float32 for residual, one kernel would move 403 MB." in words(wide)
    everything = bias_gelu_residual.explain(8192, 8192, dtype="f32", device="h200")
    assert "float32 for x, residual and output D, one kernel would move 403 MB." in words(everything)
    assert advice not in words(bias_gelu_residual.explain(8192, 8192, device="h200"))
    # a row has no bytes that count, and a small tensor is launches
    assert advice not in words(bias_gelu_residual.explain(8192, 8192, device="h200", operand_dtypes={"bias": "f32"}))
    assert advice not in words(bias_gelu_residual.explain(64, 64, dtype="f32", device="h200"))


def test_the_table_of_special_calls_is_of_operations() -> None:
    assert set(SPECIAL_CALLS) <= set(OPERATIONS) and (OPERATIONS["gelu_erf"].cost.special_exact, 1) == (3, 1)
    assert analysis.fast_special_calls("gelu_erf") == 2 and analysis.exact_special_calls("relu") == 0


@pytest.mark.compile
def test_the_table_of_special_calls_is_what_nvcc_writes() -> None:
    if not os.environ.get("CI") and not has_nvcc():
        pytest.skip("no nvcc")
    assert {name: calls for name, calls in count_special_calls().items() if any(calls)} == SPECIAL_CALLS


# -- registers ----------------------------------------------------------------------------------------------


def many(inputs: int, kept: int, dtype: str = "f32") -> ep.Epilogue:
    """So many matrices, and so many values that are needed again at the end."""
    operands = [Operand(f"p{i}", Kind.AUX, i, dtype) for i in range(inputs)]
    value: Node = Accumulator()
    held: list[Node] = []
    for i in range(kept):
        value = Apply("tanh", (Apply("mul", (value, operands[i % inputs])),))
        held.append(value)
    total = held[-1]
    for i, one in enumerate(held):
        total = Apply("add", (Apply("mul", (total, one)), operands[i % inputs]))
    return ep.Epilogue.from_tree(EpilogueTree((Store("D", total, "bf16"),)), "many")


def test_registers_by_hand() -> None:
    use = bias_gelu_residual.explain(8192, 8192, device="h200").registers
    # three pieces of eight bf16 in four registers each, gelu's result, the residual and six values within gelu
    assert use is not None and (use.live, use.live_at, use.needed) == (8, "gelu_tanh", 3 * 4 + 8 + 12)
    assert (use.budget, use.blocks, use.warns) == (40, 12, False)
    text = " ".join(str(bias_gelu_residual.explain(8192, 8192, device="h200")).split())
    assert "about 32 of the 40 that a thread may have where 12 blocks of 128 threads" in text
    assert "At most 8 values of one element must be held at once (during gelu_tanh)" in text


def test_a_chain_with_very_many_inputs_and_values_warns() -> None:
    heavy, light = many(16, 200).explain(4096, 4096, device="h200"), many(16, 16).explain(4096, 4096, device="h200")
    assert heavy.registers is not None and light.registers is not None
    assert heavy.registers.warns and heavy.registers.needed > heavy.registers.budget == 255
    assert "Warning: about" in words(heavy) and "WARNING: it may spill." in str(heavy)
    assert not light.registers.warns and "Warning" not in words(light) and "WARNING" not in str(light)
    assert heavy.decision.choice == "fuse"


@pytest.mark.compile
@pytest.mark.parametrize(("kept", "spills"), [(16, False), (200, True)])
def test_the_warning_agrees_with_the_compiler(kept: int, spills: bool, tmp_path: Path) -> None:
    if not os.environ.get("CI") and not has_nvcc():
        pytest.skip("no nvcc")
    report = many(16, kept).explain(4096, 4096, device="h200")
    (tmp_path / "kernel.cu").write_text(report.source)
    headers = Path(gemm_ops.__file__).parent / "cuda"
    command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_90", f"-I{headers}", "-Xptxas=-v", "-cubin", "kernel.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    spilled = {int(found) for found in re.findall(r"(\d+) bytes spill stores", done.stderr)}
    assert (max(spilled) > 0) == spills and report.registers is not None and report.registers.warns == spills


# -- decisions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epilogue", "name"),
    [
        (ep.builders.activation("relu"), "relu"),
        (ep.builders.bias(), "add"),
        (ep.epilogue(lambda acc: torch.addcmul(acc, acc, acc), name="f"), "fma"),
        (ep.builders.cast("f32", ep.builders.identity()), "to(f32)"),
    ],
)
def test_one_operation_of_pytorch_is_no_gain(epilogue: ep.Epilogue, name: str) -> None:
    report = epilogue.explain(4096, 4096, device="h200")
    assert (report.decision.choice, report.decision.fuse) == ("nothing to fuse", False)
    assert report.decision.headline == f"NO GAIN: this is one operation of PyTorch, {name}: there is nothing to fuse"
    assert "PyTorch's own kernel does as well" in words(report)


def test_no_operation_is_no_gain_either() -> None:
    report = SUITE["identity"].explain(4096, 4096)
    assert report.decision.choice == "nothing to fuse" and report.decision.headline.startswith("NO GAIN: eager PyTorch")
    assert report.traffic.eager == ()
    for text in (str(report), report.to_markdown()):
        assert "Kernels of eager PyTorch" not in text and "Bytes and time" not in text and "4.8 TB/s" in text


@pytest.mark.parametrize(
    "shape", [(1, 1), (16, 1), (1, 4096), (512, 512), (8192, 8192), (2**31 - 1, 8), (8, 2**31 - 1)]
)
@pytest.mark.parametrize("dtype", ["bf16", torch.float16, "float32"])
def test_two_operations_or_more_are_fused(shape: tuple[int, int], dtype: Any) -> None:
    for epilogue in (bias_gelu_residual, scaled, for_training, every_kind, SUITE["dequant"]):
        report = epilogue.explain(*shape, dtype=dtype)
        assert report.decision.choice == "fuse" and report.decision.fuse and len(report.traffic.eager) >= 2
        assert str(report).splitlines()[1] == report.decision.headline and report.times.speedup > 1
        assert max(map(len, str(report).splitlines())) <= 120


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_extents(shape: tuple[int, int]) -> None:
    report = bias_gelu_residual.explain(*shape)
    assert report.decision.choice == "empty" and report.decision.headline.startswith(
        "NOTHING TO FUSE: the result has no"
    )
    assert report.traffic.unfused_bytes == report.traffic.fused_bytes == 0 == report.times.fused.expected
    assert report.kernel.spec is None and report.source == "" and "nothing to launch" in report.source_note
    for text in (str(report), report.to_markdown()):
        for wrong in ("Bytes and time", "0 us", "0 B", "and times"):
            assert wrong not in text, wrong
    json.loads(report.to_json())


def test_too_many_operands_are_not_possible() -> None:
    report = many(17, 17).explain(64, 64)
    assert report.decision.choice == "not possible" and "at most 17 inputs" in report.decision.headline
    assert report.kernel.spec is None and report.registers is None and "no C++ source" in str(report)


def test_the_kernel_is_the_one_that_a_call_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (8, 0))
    monkeypatch.setattr(elementwise_call, "runs_kernels", lambda device: True)
    for m, n in ((64, 72), (24, 41), (1, 64), (64, 1), (3, 5000), (3, 5001)):
        x = torch.zeros(m, n, dtype=torch.bfloat16)
        given = {"scale": torch.zeros(n).bfloat16(), "offset": torch.zeros(m).bfloat16(), "alpha": 2.0}
        walk = elementwise_call.find_walk(elementwise_call.bind_elementwise(x, scaled, given, None))
        found = scaled.explain(m, n, device="a100-80").kernel.spec
        assert isinstance(walk, elementwise_call.Walk) and found is not None and walk.spec.key == found.key, (m, n)


def test_a_built_kernel_is_found() -> None:
    spec = bias_gelu_residual.explain(64, 64).kernel.spec
    assert spec is not None
    folder = cache_folder() / "kernels" / spec.key
    folder.mkdir(parents=True)
    (folder / LIBRARY).write_text("a library")
    (folder / RECORD).write_text(json.dumps({"output": "ptxas info    : Used 38 registers"}))
    report = bias_gelu_residual.explain(64, 64)
    assert report.built is not None and report.built.registers == 38
    assert "built already" in str(report) and "38 registers a thread, no spills" in str(report)
    assert not any("builds the kernel" in line for line in report.limitations)
    assert "not built yet" in str(bias_gelu_residual.explain(64, 64, device="a100-80"))

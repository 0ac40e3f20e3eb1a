"""The fusion decision report: decisions, estimates, kernels, registers, coverage, and its three forms."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from explain_support import SUITE, empty_cache, importable, residual  # noqa: F401
from gemm_support import every_kind, resolved, spec_of

import epilogues as ep
from epilogues import Aux, Row, analysis
from epilogues.tree import Accumulator, Apply, Constant, EpilogueTree, Node, Store
from gemm_ops import ToolchainError, dispatch
from gemm_ops.build.cache import LIBRARY, RECORD, cache_folder
from gemm_ops.explain import DEVICES, explain, find_device
from gemm_ops.explain import kernel as kernel_module
from gemm_ops.explain.coverage import cover
from gemm_ops.explain.limitations import approximated, repeated_operations
from gemm_ops.explain.registers import carried_values, estimate_registers
from gemm_ops.explain.units import in_bytes, in_rate, in_share, in_time
from gemm_ops.kernels.config import SM80_CONFIGS, SM90_CONFIGS
from gemm_ops.kernels.spec import KernelSpec
from gemm_ops.lowering import visitor

# -- decisions ----------------------------------------------------------------------------------------------


def test_scaled_residual_at_4096() -> None:
    report = residual()
    assert report.decision.choice == "fuse" and report.decision.fuse
    lines = str(report).splitlines()
    assert lines[0] == "scaled_residual, M x N x K = 4096 x 4096 x 4096, bf16, on H200 SXM (assumed)"
    assert lines[1].startswith("FUSE: expected to take 29% less GPU time than eager PyTorch (274 us -> 194 us)")
    assert report.traffic.unfused_bytes == 402669568 and report.traffic.fused_bytes == 134234112
    assert report.times.fused.limit == pytest.approx(2 * 4096**3 / 989e12)
    assert "no CUDA device is here" in report.device_note
    assert report.kernel.config is not None and report.kernel.config.name == SM90_CONFIGS[1].name


def test_an_expensive_gemm_with_a_cheap_epilogue_is_hardly_worth_it() -> None:
    """K decides: the same epilogue on the same output is a smaller and smaller part of the time."""
    choices = {k: SUITE["bias_gelu"].explain(4096, 4096, k).decision.choice for k in (512, 4096, 32768)}
    assert choices == {512: "fuse", 4096: "fuse", 32768: "marginal"}
    report = SUITE["bias_gelu"].explain(4096, 4096, 32768)
    assert report.decision.headline.startswith("HARDLY WORTH FUSING") and not report.decision.fuse
    assert "limited by arithmetic" in report.decision.reasons[1]


def test_few_rows_wait_for_the_cpu() -> None:
    report = SUITE["bias_gelu"].explain(48, 4096, 4096)
    assert report.decision.choice == "marginal"
    assert report.decision.headline.startswith("FUSE IN CUDA GRAPHS ONLY")
    words = " ".join(report.decision.reasons)
    assert "fits in the L2 cache (60 MiB)" in words and "limited by memory traffic" in words


@pytest.mark.parametrize(
    ("epilogue", "call"),
    [
        (SUITE["identity"], "F.linear(x, weight)"),
        (ep.builders.bias(), "F.linear(x, weight, bias)"),
        (ep.epilogue(lambda acc, extra: acc + extra, name="f"), None),
    ],
)
def test_what_one_call_does_is_nothing_to_fuse(epilogue: ep.Epilogue, call: str | None) -> None:
    if call is None:
        with pytest.raises(ep.EpilogueError, match="operand extra of epilogue f has no kind; annotate it"):
            epilogue.explain(64, 64, 64)
        return
    report = epilogue.explain(4096, 4096, 4096)
    assert report.decision.choice == "nothing to fuse"
    assert report.decision.headline == f"NOTHING TO FUSE: {call} computes all of it in one kernel"


def test_misaligned_problems_are_fused_and_say_how() -> None:
    report = residual(4095, 4097, 4093)
    assert report.decision.choice == "fuse" and report.kernel.spec is not None
    assert "cuBLAS has a slow kernel for an odd N or K" in report.decision.reasons[1]
    assert "for copies into padded rows" in report.decision.reasons[1] and report.times.copies > 0
    assert report.times.eager.expected > 4 * report.times.fused.expected
    routes = " ".join(report.kernel.routes)
    assert "x: copied into padded rows first, as its leading dimension of 4093 elements" in routes
    assert "operand residual: between memory and registers at its own alignment" in routes
    text = " ".join(str(report).split())
    assert all(route in text for route in report.kernel.routes)
    assert json.loads(report.to_json())["kernel"]["routes"] == list(report.kernel.routes)
    # padded strides need no copy, whatever the extents are; float32 is refused today
    assert residual(4095, 4104, 4096).times.copies == 0
    refused = residual(4095, 4097, 4093, dtype="f32")
    assert refused.decision.choice == "not possible" and refused.registers is None and refused.source == ""
    assert "no kernel takes this problem" in refused.source_note
    assert refused.limitations[0].startswith("No kernel takes this problem: the kernels take float16")


def test_float32_matrices_are_refused_today() -> None:
    report = residual(64, 64, 64, dtype=torch.float32)
    assert "the kernels take float16 and bfloat16 matrices, not float32" in report.decision.headline


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SUITE)
def test_every_epilogue_and_device_gives_every_form(name: str, device: str) -> None:
    report = SUITE[name].explain(777, 1544, 1032, dtype=torch.float16, device=device)
    text = str(report)
    assert text.splitlines()[0].endswith(f"on {DEVICES[device].name}")
    assert max(map(len, text.splitlines())) <= 120
    assert report.kernel.spec is not None and f"sm_{report.kernel.spec.arch}" in text
    assert report.kernel.spec.config.family == ("sm90" if DEVICES[device].capability == (9, 0) else "sm80")


SHAPES = [
    *[(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (1, 1, 1), (1, 8, 8), (7, 8, 9), (127, 131, 137)],
    *[(1, 4096, 4096), (4096, 1, 64), (2**31 - 1, 8, 8), (2**30, 2**30, 2**30), (8, 2**31 - 8, 16)],
]


@pytest.mark.parametrize("dtype", ["bf16", torch.float16, "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_a_report(shape: tuple[int, int, int], dtype: Any) -> None:
    for epilogue in (SUITE["residual"], every_kind):
        report = epilogue.explain(*shape, dtype=dtype)
        assert str(report).splitlines()[1] == report.decision.headline
        assert report.decision.choice in ("empty", "not possible", "fuse", "marginal")
        assert (report.decision.choice == "empty") == (0 in shape)
        assert 0 <= report.times.saved_share < 1 and 0 <= report.traffic.saved_share < 1
        assert "nan" not in str(report).lower().replace("nano", "")


def test_eager_rounding_and_compute_dtypes_have_reports() -> None:
    plain = SUITE["bias_gelu"].explain(4096, 4096, 4096)
    eager = SUITE["bias_gelu"].with_rounding("eager").explain(4096, 4096, 4096)
    # F.linear adds the bias before it rounds; torch.matmul and an addition are two kernels
    assert [kernel.name for kernel in plain.traffic.eager] == ["F.linear", "gelu_tanh"]
    assert [kernel.name for kernel in eager.traffic.eager] == ["torch.matmul", "add", "gelu_tanh"]
    assert "torch.matmul(x, weight.t())" in eager.script and "F.linear" not in eager.script
    linear = SUITE["bias_gelu"].with_rounding("eager_linear").explain(4096, 4096, 4096)
    assert linear.traffic == plain.traffic and "F.linear(x, weight, given['bias'])" in linear.script
    assert any("rounded to bf16" in entry.conversion for entry in eager.dtypes)
    assert not any("bit-identical" in line for line in eager.limitations)
    assert any("bit-identical" in line for line in plain.limitations)
    narrow = SUITE["bias_gelu"].with_compute_dtype(torch.bfloat16).explain(4096, 4096, 4096)
    assert narrow.traffic.unfused_bytes == plain.traffic.unfused_bytes


# -- what the estimates count -------------------------------------------------------------------------------


def test_unfused_kernels_pay_for_their_arithmetic_as_the_fused_one_does() -> None:
    """An elementwise kernel takes the longer of its bytes and its instructions: erf-gelu is worth fusing."""

    @ep.epilogue
    def erf_gelu(acc, bias: Row):
        return torch.nn.functional.gelu(acc + bias)

    report = erf_gelu.explain(4096, 4096, 4096)
    (kernel,) = report.traffic.elementwise
    assert kernel.instructions == analysis.exact_instructions("gelu_erf")
    fewer = erf_gelu.explain(4096, 4096, 4096, device=dataclasses.replace(find_device("h200"), peak32=1e18))
    assert (
        report.times.eager.expected - report.times.gemm_expected
        > fewer.times.eager.expected - fewer.times.gemm_expected
    )
    assert report.times.fused_arithmetic > fewer.times.fused_arithmetic
    assert report.decision.choice == "fuse"


def test_steps_of_one_function_count_for_the_kernel_that_does_them() -> None:
    report = ep.builders.quantize("float8_e4m3fn").explain(4096, 4096, 4096)
    names = [kernel.name for kernel in report.traffic.eager]
    assert names == ["F.linear", "mul", "clamp", "mul"]  # divided by the scale, clamped, converted
    assert report.traffic.eager[-1].instructions > 30  # log2, exp2, a division ...


def test_a_slower_family_is_reckoned_with_and_named() -> None:
    b200 = SUITE["bias_gelu"].explain(4096, 4096, 4096, device="b200")
    assert b200.times.fused.expected - b200.times.fused_arithmetic > 1.3 * b200.times.gemm_expected
    assert any("no other family runs on this device" in line and "guess" in line for line in b200.limitations)
    assert "whose mma.sync is slower" in b200.decision.reasons[1]
    ampere = SUITE["bias_gelu"].explain(4096, 4096, 4096, device="a100-80")
    assert not any("mma.sync" in line for line in ampere.limitations)


def test_torch_compile_may_be_faster_and_is_said_to_be() -> None:
    report = SUITE["residual"].explain(4096, 4096, 4096, device="b200")
    assert report.times.saved_share_compiled < 0
    assert any("torch.compile" in reason and "MORE GPU time" in reason for reason in report.decision.reasons)


def test_repeated_operations_are_counted_once_and_as_often_as_they_are_computed() -> None:
    @ep.epilogue
    def shared(acc, bias: Row):
        z = torch.tanh(acc + bias)
        return {"D": z * 2, "a": z * 3, "b": z * 4}

    report = shared.explain(4096, 4096, 4096)
    assert any(
        "2 operations that the main output shares with others are computed up to 3 times" in line
        for line in report.limitations
    )
    once = analysis.instructions_per_element(report.resolved, analysis.fast_instructions)
    again = analysis.fast_instructions("tanh") + analysis.fast_instructions("add")
    assert report.instructions == once + 2 * again


def test_rounding_as_eager_pytorch_leaves_less_to_cublaslt() -> None:
    def complete(name: str, rounding: str) -> bool:
        epilogue = ep.builders.bias_activation(name).with_rounding(rounding)
        return epilogue.explain(64, 64, 64).coverage.complete

    assert complete("relu", "once") and complete("relu", "eager_linear") and not complete("relu", "eager")
    assert complete("gelu_tanh", "once") and not complete("gelu_tanh", "eager_linear")


def test_copies_count_in_the_bytes_as_in_the_time() -> None:
    report = residual(4095, 4097, 4093)
    plain = residual(4095, 4104, 4096)
    assert len(report.traffic.copied) == 2 and not plain.traffic.copied  # x and weight
    moved = 2 * 2 * (4095 + 4097) * 4093
    assert sum(report.traffic.copied) == moved
    assert report.traffic.fused_bytes - moved == sum(
        2 * elements for elements in (4095 * 4093, 4097 * 4093, 4097, 4097, 2 * 4095 * 4097)
    )
    text = str(report)
    assert "fused, 3 kernels" in text and "fused, 1 kernel " in str(plain)
    assert "and 2 copies into padded rows before it, move" in " ".join(text.split())
    assert any("FusedLinear keeps it in padded rows" in line for line in report.limitations)
    assert not any("FusedLinear keeps" in line for line in plain.limitations)
    assert report.times.fused.limit == pytest.approx(
        max(2 * 4095 * 4097 * 4093 / 989e12, (report.traffic.fused_bytes - moved) / 4.8e12) + moved / 4.8e12
    )


# -- kernels ------------------------------------------------------------------------------------------------


def test_the_kernel_is_the_one_that_dispatch_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for device in (DEVICES["h200"], DEVICES["a100-80"]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where, found=device: found.capability)
        monkeypatch.setattr(dispatch, "multiprocessor_count", lambda where, found=device: found.multiprocessors)
        for shape in ((4096, 4096, 4096), (1000, 3000, 2000), (16, 4096, 4096), (4095, 4097, 4093), (4096, 4096, 4090)):
            for name, epilogue in SUITE.items():
                report = epilogue.explain(*shape, device=device)
                m, n, k = shape
                a, b = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((m, k), (n, k)))
                shapes = {ep.Kind.ROW: (n,), ep.Kind.COLUMN: (m,), ep.Kind.AUX: (m, n)}
                operands: dict[str, Any] = {
                    operand: 1.0
                    if kind is ep.Kind.SCALAR
                    else torch.empty(shapes[kind], dtype=torch.bfloat16, device="meta")
                    for operand, kind in epilogue.operands.items()
                }
                call = dispatch.bind_call(a, b.t(), epilogue, operands, None)
                there = dataclasses.replace(call.problem, device=torch.device("cuda", 0))
                decision = dispatch.decide(dataclasses.replace(call, problem=there))
                assert (report.kernel.way, report.kernel.reason) == ("fused", ""), (name, shape)
                seen.add(decision.backend)
                found = report.kernel.spec
                assert (found and found.key) == (decision.spec and decision.spec.key), (name, shape)
                assert bool(report.kernel.refusal) == (decision.spec is None)
    assert seen == {"skinny", "sm90", "sm80"}


def _pretend_built(spec: KernelSpec, record: str | None) -> Path:
    folder = cache_folder() / "kernels" / spec.key
    folder.mkdir(parents=True)
    (folder / LIBRARY).write_text("a library")
    if record is not None:
        (folder / RECORD).write_text(record)
    return folder / LIBRARY


def test_registers_of_a_built_kernel_are_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = residual().kernel.spec
    assert spec is not None and residual().built is None
    output = (
        "ptxas info    : 0 bytes gmem\n    296 bytes stack frame, 596 bytes spill stores, 668 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 2 barriers\n"
    )
    _pretend_built(spec, json.dumps({"output": output}))
    report = residual()
    assert report.built == kernel_module.BuiltResources(168, 296, "ptxas, when it was built")
    text = str(report)
    assert "built already" in text and "168 registers a thread, 296 bytes of local memory" in text
    assert not any("builds the kernel" in line for line in report.limitations)


def test_cuobjdump_is_asked_where_there_is_no_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = residual().kernel.spec
    assert spec is not None
    _pretend_built(spec, "not JSON")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert residual().built is None and "no cuobjdump" in str(residual())
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho ' Function gemm:'\necho '  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1'\n")
    tool.chmod(0o755)
    assert residual().built == kernel_module.BuiltResources(168, 0, "cuobjdump")
    assert "no spills (says cuobjdump)" in str(residual())
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert residual().built is None


def test_source_is_the_kernels() -> None:
    report = residual()
    assert report.kernel.spec is not None
    assert report.source == report.kernel.spec.source() and report.source_note == ""
    assert "struct Functor0" in report.source and "gemm_run" in report.source


def test_without_cutlass_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ToolchainError("the CUTLASS Python interface cannot be imported: install nvidia-cutlass")

    monkeypatch.setattr(visitor, "load_interface", missing)
    report = residual()
    assert report.source == "" and "install nvidia-cutlass" in report.source_note
    assert "install nvidia-cutlass" in report.to_markdown() and str(report)
    assert "install nvidia-cutlass" in json.loads(report.to_json())["source_note"]


# -- registers ----------------------------------------------------------------------------------------------


def _kept(count: int, *, stored: bool) -> EpilogueTree:
    """``count`` values, each of the one before, all needed again at the end; outputs of their own if ``stored``."""
    acc = Accumulator()
    value: Node = acc
    kept: list[Node] = []
    for i in range(count):
        value = Apply("tanh", (Apply("mul", (value, Constant(1.5 + i))),))
        kept.append(value)
    total = kept[-1]
    for one in kept:
        total = Apply("add", (Apply("mul", (total, one)), acc))
    extra = [Store(f"o{i}", one, "bf16") for i, one in enumerate(kept)] if stored else []
    return EpilogueTree((Store("D", total, "bf16"), *extra))


@pytest.mark.parametrize(
    ("tree", "spills"),
    [
        # what ptxas said of these on the first configuration, with nvcc 13.0
        (_kept(48, stored=False), True),  # 172 bytes
        (_kept(7, stored=True), True),  # 596 bytes
        (_kept(4, stored=True), True),  # 224 bytes
        (resolved(SUITE["residual"]), False),
        (resolved(SUITE["dequant"]), False),
        (resolved(every_kind), False),
        (_kept(15, stored=False), False),
    ],
)
def test_the_warning_agrees_with_the_compiler(tree: EpilogueTree, spills: bool) -> None:
    assert estimate_registers(tree, SM90_CONFIGS[0]).warns == spills


def test_register_estimate_by_hand() -> None:
    use = estimate_registers(resolved(SUITE["residual"]), SM90_CONFIGS[0])
    assert (use.accumulators, use.fragment, use.carried, use.live, use.needed) == (128, 16, 0, 4, 128 + 16 + 4 + 40)
    assert use.live_limit == 232 - 128 - 16 - 40
    assert [estimate_registers(resolved(SUITE["identity"]), c).accumulators for c in SM90_CONFIGS] == [
        *(128, 128, 128, 96, 64, 32, 48, 48, 16, 160, 104, 80, 16, 32)
    ]
    assert [estimate_registers(resolved(SUITE["identity"]), c).accumulators for c in SM80_CONFIGS] == [128, 32]
    assert carried_values(_kept(7, stored=True)) == 7 and carried_values(resolved(SUITE["train_gelu"])) == 1


def test_a_tree_that_spills_warns() -> None:
    epilogue = ep.Epilogue.from_tree(_kept(7, stored=True), "heavy")
    report = epilogue.explain(4096, 4096, 4096)
    assert report.registers is not None and report.registers.warns
    assert any(reason.startswith("Warning: about") for reason in report.decision.reasons)
    assert "WARNING: it will spill." in str(report)


# -- coverage and limitations -------------------------------------------------------------------------------


@ep.epilogue
def plus_matrix(acc, residual: Aux):
    return residual + acc


@pytest.mark.parametrize(
    ("epilogue", "complete", "call"),
    [
        (SUITE["identity"], True, "F.linear(x, weight)"),
        (ep.builders.bias(), True, "F.linear(x, weight, bias)"),
        (SUITE["bias_gelu"], True, "torch._addmm_activation(bias, x, weight.T, use_gelu=True)"),
        (ep.builders.bias_activation("relu"), True, "torch._addmm_activation(bias, x, weight.T)"),
        (plus_matrix, True, "torch.addmm(residual, x, weight.T)"),
        (SUITE["bias_gelu_erf"], False, "F.linear(x, weight, bias)"),
        (SUITE["train_gelu"], False, "F.linear(x, weight, bias)"),
        (SUITE["residual"], False, "F.linear(x, weight)"),
        (ep.builders.activation("relu"), False, "F.linear(x, weight)"),
        (ep.builders.cast("f32", SUITE["bias_gelu"]), False, "F.linear(x, weight, bias)"),
    ],
)
def test_coverage(epilogue: ep.Epilogue, complete: bool, call: str) -> None:
    report = epilogue.explain(64, 64, 64)
    assert (report.coverage.complete, report.coverage.cublaslt) == (complete, call)
    assert cover(report.resolved, "bf16", report.traffic).complete == complete


def test_a_bias_of_another_dtype_is_not_covered() -> None:
    report = ep.builders.bias_activation("relu").explain(64, 64, 64, operand_dtypes={"bias": torch.float32})
    assert not report.coverage.complete and report.coverage.cublaslt == "F.linear(x, weight)"


@pytest.mark.parametrize("name", ["bias_gelu", "bias", "plus_matrix", "bias_relu"])
def test_the_calls_named_compute_what_is_claimed(name: str) -> None:
    epilogue = {
        "bias_gelu": SUITE["bias_gelu"],
        "bias": ep.builders.bias(),
        "plus_matrix": plus_matrix,
        "bias_relu": ep.builders.bias_activation("relu"),
    }[name]
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, matrix = (torch.randn(shape, generator=generator) for shape in ((5, 8), (16, 8), (16,), (5, 16)))
    given = {"bias": bias, "residual": matrix}
    call = epilogue.explain(5, 16, 8, dtype="f32").coverage.cublaslt
    found = eval(call, {"torch": torch, "F": torch.nn.functional, "x": x, "weight": weight, **given})
    operands = {name: given[name] for name in epilogue.operands}
    torch.testing.assert_close(found, epilogue.reference(x @ weight.t(), **operands), rtol=1e-3, atol=1e-3)


def test_limitations_follow_the_tree() -> None:
    z = Apply("add", (Accumulator(), Constant(1.0)))
    shared = EpilogueTree((Store("D", z, "f16"), Store("act", Apply("silu", (z,)), "f16")))
    assert list(repeated_operations(shared).values()) == [2]
    assert not repeated_operations(resolved(SUITE["train_gelu"]))
    assert approximated(shared) == ["silu"]
    words = " ".join(ep.Epilogue.from_tree(shared, "shared").explain(64, 64, 64).limitations)
    assert "1 operation that the main output shares" in words and "16-bit output: silu." in words
    wide = " ".join(ep.builders.cast("f32", SUITE["bias_silu"]).explain(64, 64, 64).limitations)
    assert "Approximated" not in wide


# -- forms --------------------------------------------------------------------------------------------------


def test_json_has_what_its_description_names() -> None:
    from gemm_ops.explain import json_form

    described = re.findall(r"^    ([a-z_]+) {2,}\S", json_form.__doc__ or "", re.M)
    for report in (residual(), residual(4095, 4097, 4093), residual(0, 8, 8), every_kind.explain(64, 64, 64)):
        data = json.loads(report.to_json())
        assert list(data) == described and data["version"] == 1
        assert data["traffic"]["unfused"] == sum(op["read"] + op["written"] for op in data["traffic"]["eager"])
        assert ep.EpilogueTree.from_json(json.dumps(data["epilogue"]["tree"])) == report.tree
        assert (data["kernel"] is None) == bool(data["refusal"]) == (data["registers"] is None)
    assert json.loads(residual().to_json())["kernel"]["tile"] == [128, 128, 64]


def test_markdown_is_well_formed() -> None:
    text = residual().to_markdown()
    assert text.startswith("## scaled\\_residual, M x N x K")
    assert text.splitlines()[2].startswith("**FUSE: expected to take")
    assert text.count("```") % 2 == 0 and text.count("<details>") == text.count("</details>") == 2
    assert "```mermaid\nflowchart TD" in text and "```cpp\n// sm90" in text and "```python\n" in text
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(rows)) == 1, table


def test_text_is_short_and_narrow() -> None:
    text = str(residual())
    assert len(text.splitlines()) < 75 and max(map(len, text.splitlines())) <= 110
    assert text == "\n".join(line.rstrip() for line in text.splitlines())


def test_explain_takes_the_cost_of_operations() -> None:
    report = explain(SUITE["bias_gelu"], 64, 64, 64, cost=lambda name: 10)
    assert report.instructions == 20
    expensive = explain(SUITE["bias_gelu"], 4096, 4096, 4096, cost=lambda name: 100)
    assert expensive.decision.choice == "marginal"  # its arithmetic takes longer than what fusing saves
    assert expensive.decision.headline.startswith("NOT WORTH FUSING: expected to take no less GPU time")
    fast, exact = (SUITE["bias_gelu"], ep.builders.cast("f32", SUITE["bias_gelu"]))
    assert fast.explain(64, 64, 64).instructions < exact.explain(64, 64, 64).instructions


def test_units() -> None:
    assert [in_bytes(v) for v in (0, 999, 999.6, 134234112, 2**62)] == ["0 B", "999 B", "1 kB", "134 MB", "4.61 EB"]
    assert [in_time(v) for v in (0, 3e-6, 1.92e-4, 0.5)] == ["0 us", "3 us", "192 us", "500 ms"]
    assert in_time(1e-12) == "under 1 ns" and in_time(2.67e13) == "2.67e+13 s"
    assert in_rate(4.8e12, "B/s") == "4.8 TB/s" and in_rate(2250e12, "FLOP/s") == "2.25 PFLOP/s"
    assert [in_share(v) for v in (0, 0.001, 0.296, 1)] == ["0%", "less than 1%", "30%", "100%"]


def test_the_language_imports_no_kernels_until_it_is_asked() -> None:
    code = (
        "import sys, epilogues, epilogues.analysis, epilogues.graphs\n"
        "assert not [name for name in sys.modules if name.startswith(('gemm_ops', 'cutlass'))]\n"
        "report = epilogues.builders.gate().explain(64, 64, 64)\n"
        "assert str(report) and 'gemm_ops.explain' in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith(('cutlass', 'jinja2'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parent.parent)


def test_spec_of_the_report_is_that_of_a_built_kernel() -> None:
    """Keys must agree with those that calls make, or a built kernel is not found."""
    report = SUITE["gate"].explain(4096, 4096, 64)
    assert report.kernel.spec is not None and report.kernel.spec.key == spec_of(resolved(SUITE["gate"])).key

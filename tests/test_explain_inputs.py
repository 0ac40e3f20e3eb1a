"""The fusion decision report: devices, and what is asked for wrongly."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from explain_support import SUITE, empty_cache, importable, residual  # noqa: F401

import epilogues as ep
from gemm_ops.explain import DEVICES, devices, explain, find_device, measure_bandwidth

# -- what is asked for wrongly ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((-1, 8, 8), {}, r"m: expected a whole number from 0 to 2\^31 - 1, got -1"),
        ((8, 2.5, 8), {}, r"n: expected a whole number from 0 to 2\^31 - 1, got 2.5"),
        ((8, 8, True), {}, "k: expected a whole number"),
        ((8, 8, 2**31), {}, "k: expected a whole number"),
        ((2**31 - 1, 8, 2**31 - 1), {}, r"matrices of more than 2\^63 bytes, which no memory holds"),
        ((8, 8, 8), {"dtype": torch.float64}, "dtype torch.float64 has no place in an epilogue"),
        ((8, 8, 8), {"dtype": "int8"}, "dtype 'int8' has no place"),
        ((8, 8, 8), {"device": "h300"}, "unknown device 'h300': expected one of h200, h100"),
        ((8, 8, 8), {"device": "cuda"}, "device 'cuda': torch .* finds no CUDA device here"),
        ((8, 8, 8), {"device": torch.device("cpu")}, "unknown device 'cpu'"),
        ((8, 8, 8), {"measure": True}, "bandwidth is measured on a CUDA device that is there, not on 'cuda'"),
        ((8, 8, 8), {"measure": True, "device": "h200"}, "not on the figures of the H200 SXM"),
        ((8, 8, 8), {"operand_dtypes": {"bais": "f32"}}, "unknown operand bais; the epilogue has scale, bias"),
        ((8, 8, 8), {"operand_dtypes": {"bias": "int8"}}, "dtype 'int8' has no place"),
    ],
)
def test_bad_input_is_an_epilogue_error(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises(ep.EpilogueError, match=message):
        residual(*arguments, **keywords)


def test_operand_dtypes() -> None:
    wide = residual(operand_dtypes={"residual": torch.float32})
    assert wide.traffic.fused_bytes == residual().traffic.fused_bytes + 2 * 4096**2
    with pytest.raises(ep.EpilogueError, match="operand residual is bf16, and the epilogue fixes it to f32"):
        importable.explain(8, 8, 8, operand_dtypes={"residual": "bf16"})


# -- devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_devices_are_recognised_by_the_drivers_name(driver: str, name: str | None) -> None:
    assert devices.recognise(driver) == name


def _pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(
        name=name, L2_cache_size=60 * 2**20, multi_processor_count=78, major=capability[0], minor=capability[1]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_the_present_device_is_used_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "NVIDIA A100 80GB PCIe", (8, 0))
    report = residual()
    assert report.device.name == "NVIDIA A100 80GB PCIe" and report.device.bandwidth == 2039e9
    assert (report.device.l2, report.device.multiprocessors) == (60 * 2**20, 78)
    assert report.device_note == "" and "(assumed)" not in str(report)
    assert report.kernel.config is not None and report.kernel.config.family == "sm80"
    assert find_device("cuda:0") == report.device
    with pytest.raises(ep.EpilogueError, match="device 'cuda:1': there are 1 CUDA devices"):
        find_device("cuda:1")


def test_an_unknown_device_says_whose_figures_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "NVIDIA RTX 6000", (7, 5))
    report = residual()
    assert "no figures of the NVIDIA RTX 6000 are known here" in report.device.origin
    assert "no kernel family runs on compute capability 7.5" in report.decision.headline


def test_a_measured_bandwidth_takes_the_place_of_the_published(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "NVIDIA H200", (9, 0))
    monkeypatch.setattr("gemm_ops.explain.given.measure_bandwidth", lambda where: 4.3e12)
    report = residual(measure=True)
    assert report.device.bandwidth == 4.3e12
    assert report.device_note == "bandwidth measured by copying; published are 4.8 TB/s"


@pytest.mark.gpu
def test_measured_bandwidth_is_below_the_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    measured = measure_bandwidth("cuda")
    known = devices.recognise(torch.cuda.get_device_name())
    assert 1e11 < measured < (DEVICES[known].bandwidth if known else 1e14)


def test_devices_are_plausible() -> None:
    for device in DEVICES.values():
        assert 50 < device.peak16 / device.bandwidth < 500  # operations per byte
        assert device.peak32 < device.peak16 and device.peak("f32") == device.peak32
        assert 30 * 2**20 < device.l2 < 200 * 2**20 and device.capability >= (8, 0)


# -- a new user's mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (("64", 8, 8), {}, "m: expected a whole number from 0 to .*, got '64'"),
        ((8, None, 8), {}, "n: expected a whole number from 0 to .*, got None"),
        (
            (8, 8, torch.ones(2, 2)),
            {},
            r"k: expected a whole number from 0 to .*, got tensor\(\[\[1., 1.\], \[1., 1.\]\]\)$",
        ),
        ((10**5000, 8, 8), {}, "m: expected a whole number from 0 to .*, got <int that cannot be shown>"),
        ((8, 8, 8), {"dtype": None}, "dtype None has no place"),
        ((8, 8, 8), {"dtype": "BF17"}, "dtype 'BF17' has no place .*; did you mean bf16"),
        ((8, 8, 8), {"device": "A100"}, "unknown device 'A100': .*; did you mean .*a100-80"),
        ((8, 8, 8), {"device": "H100 PCIe"}, "; did you mean h100-pcie"),
        ((8, 8, 8), {"device": 0}, "device: expected a name .*, got int 0; a CUDA device is named 'cuda:0'"),
        ((8, 8, 8), {"device": 2.5}, "device: expected a name .*, got float 2.5$"),
        ((8, 8, 8), {"measure": True, "device": "H200"}, "not on the figures of the H200 SXM"),
        ((8, 8, 8), {"operand_dtypes": ["bias"]}, "operand_dtypes: expected a mapping of operand name .*, got list"),
        ((8, 8, 8), {"operand_dtypes": []}, r"expected a mapping .* such as \{'scale': torch.float32\}, got list \[\]"),
        ((8, 8, 8), {"operand_dtypes": "f32"}, "expected a mapping .*, got str 'f32'"),
        ((8, 8, 8), {"operand_dtypes": torch.ones(2)}, "expected a mapping .*, got Tensor tensor"),
        ((8, 8, 8), {"operand_dtypes": {1: "f32"}}, "unknown operand 1; the epilogue has scale, bias"),
        ((8, 8, 8), {"operand_dtypes": {"bais": "f32"}}, "unknown operand bais; .*; did you mean bias"),
        ((8, 8, 8), {"operand_dtypes": {"bias": None}}, "operand_dtypes: operand bias: dtype None has no place"),
        ((8, 8, 8), {"operand_dtypes": {"bias": 3}}, "operand_dtypes: operand bias: dtype 3 has no place"),
    ],
)
def test_wrong_types_and_names_are_epilogue_errors(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises(ep.EpilogueError, match=message) as error:
        residual(*arguments, **keywords)
    assert "\n" not in str(error.value)


def test_explain_refuses_what_is_no_epilogue_or_cost() -> None:
    with pytest.raises(ep.EpilogueError, match="explain: expected an Epilogue, got str 'gelu'"):
        explain("gelu", 8, 8, 8)  # type: ignore[arg-type]
    with pytest.raises(ep.EpilogueError, match=r"cost: expected a function .*, got 3"):
        explain(SUITE["gate"], 8, 8, 8, cost=3)  # type: ignore[arg-type]


def test_names_do_in_capitals_too() -> None:
    shouted = residual(dtype="FLOAT16", device="H100-PCIe", operand_dtypes={"bias": "BF16"})
    assert shouted == residual(dtype="f16", device="h100-pcie", operand_dtypes={"bias": torch.bfloat16})
    with pytest.raises(ep.EpilogueError, match=r"device 'cuda:0': torch .* finds no CUDA device here"):
        residual(device="CUDA:0")


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (0, 0, 0)])
def test_a_report_without_an_output_counts_nothing(shape: tuple[int, int, int]) -> None:
    report = residual(*shape)
    for words in (str(report), report.to_markdown()):
        for wrong in ("0 B", "0 us", "FLOP", "Bytes and time", "Triton", "covers the beginning", "times them"):
            assert wrong not in words, wrong
        assert "torch.compile has nothing to fuse: the output has no elements." in words
    assert str(report).endswith(
        "\n\nMore: report.script compares, report.to_markdown() has it; no kernel, so no C++ source"
    )
    data = json.loads(report.to_json())
    assert data["traffic"]["unfused"] == data["traffic"]["fused"] == 0 and data["kernel"] is None
    assert data["coverage"]["words"][1] == "torch.compile has nothing to fuse: the output has no elements."


def test_a_report_without_a_product_has_eager_pytorch_only() -> None:
    report = residual(64, 64, 0)
    for words in (str(report), report.to_markdown()):
        assert "eager PyTorch, 5 kernels" in words and "its result is zeros, or the bias." in words
        for wrong in ("fused, 1 kernel", "saved, against", "limited by", "The GEMM has", "Triton", "times them"):
            assert wrong not in words, wrong
        assert "torch.compile fuses what is computed from the zeros: mul, add, mul, add." in words
    eager = str(SUITE["bias_gelu"].with_rounding("eager").explain(64, 64, 0))
    assert "torch.matmul multiplies nothing: its result is zeros." in " ".join(eager.split())
    assert "has nothing left to fuse" in str(SUITE["identity"].explain(64, 64, 0))


def test_a_report_without_a_kernel_promises_no_source() -> None:
    assert str(residual(64, 63, 64, dtype="f32")).endswith("no kernel, so no C++ source")
    assert str(residual(64, 64, 64)).endswith("report.source is the C++, report.to_markdown() has both")


@pytest.mark.parametrize(
    "name", ["a\nb", "a\r\n# b", "a | b", "``` a", "# a #", "a`b", "[a](b) ~~c~~ &lt; $x$", "a\x1b[1mb", "a\u2028b"]
)
def test_any_name_is_one_line(name: str) -> None:
    report = ep.Epilogue.from_tree(SUITE["gate"].tree, name).explain(64, 64, 64)
    head = str(report).splitlines()[0]
    assert head.isprintable() and head.endswith("M x N x K = 64 x 64 x 64, bf16, on H200 SXM (assumed)")
    assert str(report).splitlines()[1] == report.decision.headline
    lines = report.to_markdown().splitlines()
    assert lines[0].startswith("## ") and lines[0].endswith("(assumed)") and lines[1] == "" and lines[2][:2] == "**"
    assert not re.search(r"(?<!\\)[|`#\[\]~&$*<>]", lines[0][3:])
    # every fence is closed by one as long, and what is between holds none
    fences = [line for line in lines if line.startswith("```")]
    for start, end in zip(fences[::2], fences[1::2], strict=True):
        assert set(end) == {"`"} and start.startswith(end)
    script = report.to_markdown().partition("python\n")[2]
    assert script.startswith('"""') and json.loads(report.to_json())["epilogue"]["name"] == name
    compile(report.script, "compare.py", "exec")

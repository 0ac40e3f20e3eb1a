"""``python -m shape_sweeps build`` and ``unpack``; the compilers are shell scripts."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from build_support import FAILS, SPEC, WRITES, Install, count, fresh, install

import gemm_ops
from gemm_ops.build.cache import cache_folder
from gemm_ops.build.compiler import build_kernel
from gemm_ops.dispatch import bind_call
from gemm_ops.foreseen import foresee
from gemm_ops.kernels.selection import Target, select_kernel
from shape_sweeps import build_command, cli, options
from shape_sweeps.catalogue import load_epilogue
from shape_sweeps.guards import GuardedOutput

__all__ = ["fresh", "install"]

H200 = ["--device", "h200"]
H200_TARGET = Target((9, 0), 132, "NVIDIA H200")
ONE = ["build", "--shapes", "512x512x512", "--dtypes", "bf16", "--epilogues", "bias_gelu", *H200]


@pytest.fixture(autouse=True)
def _no_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMM_OPS_BUNDLE", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def kernels() -> set[str]:
    folder = cache_folder() / "kernels"
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def test_a_cache_that_cannot_be_written_is_said_once(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel has a lock of its own in a cache that others made and may write."""

    def refuse(self: filelock.FileLock, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", self.lock_file)

    runs = install(WRITES)
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    code, out, err = run(capsys, *ONE, "--shapes", "4096x4096x4096")
    assert (code, err) == (1, "") and count(runs) == 0 and out.splitlines()[-1].endswith("2 failed")
    why = f"the kernel cache {cache_folder()} cannot be written (locks: Permission denied): point GEMM_OPS_CACHE to"
    assert out.count(str(cache_folder())) == 1 and why in out


def test_builds_what_the_calls_need(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    runs = install(WRITES)
    code, out, err = run(capsys, *ONE)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "shape-sweeps: 1 kernel for 1 case on sm_90 (132 multiprocessors)"
    (row,) = [line for line in lines if line.startswith("sm90_")]
    assert re.fullmatch(r"sm90_\S+ bf16 row/column -> bf16, sm_90a +512x512x512 bf16 bias_gelu +[0-9.]+ s *", row)
    assert lines[-1] == "1 built, 0 there already, 0 failed"
    weight = torch.empty(512, 512, dtype=torch.bfloat16, device="meta")
    bias = weight[0]
    epilogue = build_command.ep.builders.SUITE["bias_gelu"]()
    found = foresee(weight, weight.t(), epilogue, {"bias": bias}, Target((9, 0), 132))
    assert kernels() == {found.kernels[0].key} and count(runs) == 1
    # again: there already
    code, out, _ = run(capsys, *ONE)
    assert code == 0 and "there already" in out and out.splitlines()[-1] == "0 built, 1 there already, 0 failed"
    assert count(runs) == 1
    # training: two more
    code, out, _ = run(capsys, *ONE, "--training", "--jobs", "1")
    assert code == 0 and out.splitlines()[-1] == "2 built, 1 there already, 0 failed" and len(kernels()) == 3
    assert any(line.startswith("elementwise bf16 pieces") for line in out.splitlines())


def test_one_kernel_for_many_problems(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(WRITES)
    code, out, _ = run(capsys, *ONE[:2], "512x512x512,512x512x1024,512x512x2048", *ONE[3:])
    assert code == 0 and "512x512x512 bf16 bias_gelu and 2 more" in out


def test_several_devices(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(WRITES)
    code, out, _ = run(capsys, *ONE, "--arch", "sm_80")
    assert code == 0 and "on sm_90 (132 multiprocessors), sm_80 (108 multiprocessors)" in out
    assert out.splitlines()[-1] == "2 built, 0 there already, 0 failed"
    assert ", sm_90a " in out and ", sm_80 " in out


def keys(*arguments: str) -> set[str]:
    chosen = options.parser().parse_args(["build", *arguments])
    cases, epilogues = options.select_for_build(chosen)
    targets = build_command.read_targets(chosen)
    return set(build_command.plan(cases, epilogues, targets, training=chosen.training, padded=chosen.padded).kernels)


@pytest.mark.parametrize("device", [Target((9, 0), 132), Target((8, 0), 108)])
@pytest.mark.parametrize("shape", [(64, 255, 129), (513, 1025, 2049), (64, 256, 128)])
def test_padded_rows(device: Target, shape: tuple[int, int, int]) -> None:
    """Of a layer in evaluation mode, of what follows one with padded outputs, and of a sweep's own buffers."""
    m, n, k = shape
    arch = f"sm_{device.capability[0]}{device.capability[1]}"
    asked = ["--shapes", f"{m}x{n}x{k}", "--dtypes", "bf16", "--epilogues", "identity", "--arch", arch]
    usual, padded = keys(*asked), keys(*asked, "--padded")
    # an SM80 kernel reads as much at once as the extents allow, however the rows lie
    assert usual <= padded and (usual < padded) == (n % 8 != 0 and arch == "sm_90")

    def rows(*extents: int, pad: bool = True) -> torch.Tensor:
        return (
            gemm_ops.empty_padded(extents, dtype=torch.bfloat16, device="meta")
            if pad
            else torch.empty(extents, dtype=torch.bfloat16, device="meta")
        )

    identity = load_epilogue("identity")
    for x_padded in (False, True):
        found = foresee(rows(m, k, pad=x_padded), rows(n, k).t(), identity, {}, device, padded_output=True)
        assert {kernel.key for kernel in found.kernels} <= padded
    out = GuardedOutput.allocate(m, n, torch.bfloat16, "meta", "padded", fill=False).view
    call = bind_call(rows(m, k, pad=False), rows(n, k, pad=False).t(), identity, {}, out)
    spec = select_kernel(call.tree, "bf16", call.request, target=device).spec
    assert spec is not None and spec.key in padded


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device", "h200"], [H200_TARGET]),
        (["--device", "h200,H200,H100"], [H200_TARGET, Target((9, 0), 132, "NVIDIA H100 80GB HBM3")]),
        (["--arch", "sm_90"], [H200_TARGET]),
        (["--arch", "sm_90a,90,9.0,compute_90"], [H200_TARGET]),
        (["--arch", "sm_90", "--device", "h100-pcie"], [Target((9, 0), 114, "NVIDIA H100 PCIe")]),
        (["--arch", "sm_86", "--multiprocessors", "84"], [Target((8, 6), 84)]),
        (
            ["--arch", "sm_100", "--arch", "80"],
            [Target((10, 0), 148, "NVIDIA B200"), Target((8, 0), 108, "NVIDIA A100-SXM4-40GB")],
        ),
    ],
)
def test_targets(arguments: list[str], expected: list[Target]) -> None:
    chosen = options.parser().parse_args(["build", "--quick", *arguments])
    assert list(build_command.read_targets(chosen)) == expected


def test_those_that_fail_are_named_and_the_others_built(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install('if grep -q "elementwise_run" "$source"; then echo "error: not today"; exit 1; fi\n' + WRITES)
    code, out, _ = run(capsys, *ONE, "--training")
    assert code == 1
    assert out.splitlines()[-1] == "2 built, 0 there already, 1 failed" and len(kernels()) == 2
    (row,) = [line for line in out.splitlines() if line.startswith("elementwise ")]
    assert row.rstrip().endswith("failed (1)")
    (reason,) = [
        line for line in out.splitlines() if line.startswith("(1) nvcc failed with exit code 1 on elementwise ")
    ]
    assert ", sm_90: error: not today (" in reason and reason.endswith("/kernel.cu)")


def test_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *ONE)
    assert code == 1 and "(1) no usable nvcc found" in out
    assert out.splitlines()[-1] == "0 built, 0 there already, 1 failed"


def test_calls_without_a_kernel(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(WRITES)
    code, out, _ = run(capsys, *ONE[:2], "512x512x512,0x8x8", *ONE[3:])
    assert code == 0 and "no kernel for 1 call: sm_90: an extent is 0" in out
    code, out, _ = run(capsys, *ONE[:-1], "a100-80", "--backend", "sm90")
    assert code == 1 and "no kernel for 1 call: sm_80: no kernel family runs on compute capability 8.0" in out
    huge = f"{2**31 - 1}x{2**31 - 1}x8"
    code, out, _ = run(capsys, "build", "--shapes", huge, "--dtypes", "fp32", "--epilogues", "gate", *H200)
    assert code == 1 and "no kernel for 1 call: RuntimeError: Storage size calculation overflowed" in out
    assert out.splitlines()[-1] == "0 built, 0 there already, 0 failed"


def test_an_interrupt_leaves_a_table(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def build_kernels(specs: Any, *, jobs: Any, on_done: Any, on_failed: Any) -> None:
        on_done(specs[0], 1.0, False)
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm_ops, "build_kernels", build_kernels)
    path = tmp_path / "kernels.tar.xz"
    code, out, _ = run(capsys, *ONE, "--training", "--pack", str(path))
    assert code == 130 and "not reached" in out and not path.exists()
    assert out.splitlines()[-1] == "1 built, 0 there already, 0 failed; interrupted, 2 not reached"


def test_pack_and_unpack(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(WRITES)
    build_kernel(SPEC)  # of something else: not packed
    path = tmp_path / "kernels.tar.xz"
    code, out, _ = run(capsys, *ONE, "--training", "--pack", str(path))
    assert code == 0 and out.splitlines()[-1] == f"packed 3 kernels into {path}"
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.delenv("CUDA_HOME")
    code, out, _ = run(capsys, "unpack", str(path))
    assert code == 0
    assert out == f"3 kernels in {path}: 3 new in {tmp_path}/elsewhere, 0 there already\n"
    assert len(kernels()) == 3 and SPEC.key not in kernels()
    # all that the calls need is there, without a compiler
    code, out, _ = run(capsys, *ONE, "--training")
    assert code == 0 and out.splitlines()[-1] == "0 built, 3 there already, 0 failed"
    code, out, _ = run(capsys, "unpack", str(path), "--into", str(tmp_path / "folder"))
    assert code == 0 and f"3 new in {tmp_path}/folder, 0 there" in out
    with tarfile.open(path) as tar:
        manifest = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
    assert len(manifest["kernels"]) == 3


def test_what_was_built_is_packed_though_others_failed(
    install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install('if grep -q "elementwise_run" "$source"; then exit 1; fi\n' + WRITES)
    path = tmp_path / "kernels.tar.xz"
    code, out, _ = run(capsys, *ONE, "--training", "--pack", str(path))
    assert code == 1 and out.splitlines()[-1] == f"packed 2 kernels into {path}"


def test_nothing_is_packed_where_nothing_was_built(
    install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(FAILS)
    path = tmp_path / "kernels.tar.xz"
    code, _, _ = run(capsys, *ONE, "--pack", str(path))
    assert code == 1 and not path.exists()


def test_unpacking_says_what_is_of_no_use(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(WRITES)
    path = tmp_path / "kernels.tar.xz"
    run(capsys, *ONE, "--pack", str(path))
    monkeypatch.setattr("gemm_ops.build.bundle.generator_digest", lambda kind: "another")
    code, out, _ = run(capsys, "unpack", str(path))
    assert code == 0 and "note: 1 of the 1 kernels of the bundle were made by another generator" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["build", "--quick", "--arch", "hopper"], "--arch: 'hopper' is no architecture, such as sm_80 or sm_90"),
        (["build", "--quick", "--arch", "sm_90,"], "--arch: an item"),
        (["build", "--quick", "--arch", "sm_75"], "--arch: no kernel runs on sm_75: sm_80 is the oldest"),
        (["build", "--quick", "--arch", "sm_86"], "--arch: no device of sm_86 is known here"),
        (["build", "--quick", "--device", "h300"], "--device: unknown device 'h300'"),
        (["build", "--quick", "--device", "h200", "--multiprocessors", "3"], "--multiprocessors: goes with --arch"),
        (["build", "--quick", "--arch", "sm_90", "--multiprocessors", "0"], "--multiprocessors"),
        (["build", "--device", "h200", "--shapes", "12x13"], "--shapes: '12x13'"),
        (["build", "--device", "h200", "--dtypes", "int8"], "--dtypes: unknown dtype"),
        (["build", "--device", "h200", "--epilogues", "jelu"], "--epilogues: unknown epilogue"),
        (["build", "--device", "h200", "--backend", "reference"], "--backend"),
        (["build", "--device", "h200", "--jobs", "0"], "--jobs"),
        (["build", "--quick", "--device", "h200", "--pack", "/no/such/x.tar.xz"], "--pack: '/no/such/x.tar.xz'"),
        (["build", "--quick", "--device", "h200", "--pack", "-"], "--pack: '-' is no regular file"),
        (["build", "--quick", "--device", "h200", "--pack", "/dev/null"], "--pack: '/dev/null' is no regular file"),
        (["build", "--quick", "--device", "h200", "--seed", "1"], "--seed"),
        (["unpack"], "file"),
        (["unpack", "no/such.tar.xz"], "unpack: no/such.tar.xz: No such file or directory"),
        (["unpack", "/dev/null"], "unpack: /dev/null is"),
        (["unpack", __file__], "is no .tar.xz, or damaged"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and kernels() == set()
    assert err.startswith("shape-sweeps: error: ") and err.count("\n") == 1
    assert expected in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_has_to_be_named_where_none_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "build", "--quick")
    assert code == 2 and "there is no CUDA device here to build for: name one, such as --device h200" in err
    code, _, err = run(capsys, "build", "--quick", "--device", "cuda")
    assert code == 2 and "finds no CUDA device here" in err


def test_help_explains_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "build", "--help")
    assert code == 0 and "--training" in out
    for number in ("0", "1", "2", "130"):
        assert f"\n  {number}" in out


@pytest.mark.parametrize("arguments", [("",), ("k.tar.xz", "--into", "")])
def test_an_empty_name_is_no_folder(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable of the shell that is not set: nothing is unpacked into the current folder."""
    code, _, err = run(capsys, "unpack", *arguments)
    assert code == 2 and "is empty" in err

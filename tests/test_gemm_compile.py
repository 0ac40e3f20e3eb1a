"""Kernels that nvcc really compiles: what the compiler says of them, and whether they load.

Six kernels, built side by side, take three minutes on two cores.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import lzma
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gemm_support import every_kind, resolved, spec_of
from operation_support import every_row_tree

import epilogues as ep
from gemm_ops.build import cache
from gemm_ops.build.bundle import pack_kernels, unpack_kernels
from gemm_ops.build.compiler import build_kernel, build_kernels
from gemm_ops.build.toolchain import find_toolchain
from gemm_ops.errors import BuildError, ToolchainError
from gemm_ops.kernels.access import WHOLE, Access
from gemm_ops.kernels.config import SM90_CONFIGS
from gemm_ops.kernels.pad_spec import PadSpec
from gemm_ops.runtime.abi import GemmArguments

SPECS = {
    "sm90": spec_of(resolved(every_kind, "bf16", {"offset": "f32", "alpha": "f32"}), "sm90", "bf16"),
    "sm80": spec_of(resolved(ep.builders.SUITE["train_gelu"](), "f16"), "sm80", "f16", "80"),
    "sm90_unaligned": dataclasses.replace(
        spec_of(resolved(ep.builders.SUITE["gate"]())),
        config=SM90_CONFIGS[1],
        access=Access(operands=(WHOLE, 1), outputs=(1,), batched=True),
    ),
    "sm90_swapped": dataclasses.replace(
        spec_of(resolved(every_kind, "f16", {"offset": "f32"}), "swapped", "f16"), access=Access(batched=True)
    ),
    "skinny": spec_of(resolved(every_kind, "bf16", {"offset": "f32", "alpha": "f32"}), "skinny"),
    "sm80_every_operation": spec_of(every_row_tree("f32"), "sm80", "bf16", "90"),
}
FUNCTIONS = ("gemm_workspace_size", "gemm_run", "gemm_status_text", "gemm_cuda_error_text")

each_kernel = pytest.mark.parametrize("name", SPECS)
pytestmark = pytest.mark.compile


def has_nvcc() -> bool:
    try:
        find_toolchain()
    except ToolchainError:
        return False
    return True


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The kernels' libraries, built in a cache of their own."""
    if not os.environ.get("CI") and not has_nvcc():
        pytest.skip("no nvcc (in CI, where the environment variable CI is set, this is a failure)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMM_OPS_CACHE", str(tmp_path_factory.mktemp("kernels")))
        done: dict[str, bool] = {}
        build_kernels(SPECS.values(), on_done=lambda spec, seconds, cached: done.update({spec.key: cached}))
        assert done == {spec.key: False for spec in SPECS.values()}
        yield {name: cache.find_library(spec) or Path() for name, spec in SPECS.items()}


def record_of(library: Path) -> dict[str, str]:
    return dict(json.loads((library.parent / cache.RECORD).read_text()))


@each_kernel
def test_build_record(built: dict[str, Path], name: str) -> None:
    record = record_of(built[name])
    assert record["title"] == SPECS[name].title
    assert re.fullmatch(r"\d+\.\d+", record["nvcc"])
    assert (built[name].parent / cache.SOURCE).read_text() == SPECS[name].source()
    assert sorted(path.name for path in built[name].parent.iterdir()) == ["build.json", "kernel.cu", "kernel.so"]


@pytest.mark.parametrize("name", ["sm90", "sm90_swapped", "sm80", "skinny"])
def test_no_spills(built: dict[str, Path], name: str) -> None:
    """What ``ptxas -v`` reports of the kernel, which also shows that the report is there."""
    output = record_of(built[name])["output"]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert spills and set(spills) == {("0", "0")}, output
    assert re.search(r"Used \d+ registers", output)


@each_kernel
def test_no_warnings_from_our_code(built: dict[str, Path], name: str) -> None:
    ours = [
        line
        for line in record_of(built[name])["output"].splitlines()
        if "warning" in line and re.search(r"kernel\.cu|functors\.cuh", line)
    ]
    assert not ours


@each_kernel
def test_library_loads_and_exports_its_functions_only(built: dict[str, Path], name: str) -> None:
    library = ctypes.CDLL(str(built[name]))
    for function in FUNCTIONS:
        assert getattr(library, function)
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", built[name]], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert {symbol for symbol in exported if symbol.startswith("gemm_")} == set(FUNCTIONS)


@each_kernel
def test_host_functions_run_without_a_device(built: dict[str, Path], name: str) -> None:
    """The workspace is a question of extents; launching without a device is refused, with words for it."""
    from gemm_ops.runtime.library import Kernel

    kernel = Kernel(SPECS[name], built[name])
    arguments = GemmArguments(m=256, n=512, k=128, lda=128, ldb=128, multiprocessors=132, swizzle=1)
    for index in range(4):
        arguments.operands[index].leading_dimension = 512
        arguments.outputs[index].leading_dimension = 512
    assert 0 <= kernel.workspace_size(arguments) < 1 << 30
    assert kernel._status_text(0).decode() == "Success"
    assert kernel._cuda_error_text(0).decode() == "no error"
    assert kernel._cuda_error_text(2 << 8).decode() == "out of memory"


@each_kernel
def test_a_second_build_is_there_at_once(built: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, even."""
    monkeypatch.setattr("gemm_ops.build.compiler.find_toolchain", lambda: pytest.fail("looked for nvcc"))
    start = time.perf_counter()
    assert build_kernel(SPECS[name]) == built[name]
    assert time.perf_counter() - start < 0.5


def load_in_another_process(**environment: str) -> dict[str, Path]:
    """Loads all kernels where no nvcc is on PATH, and without the CUTLASS interface; gives where they are."""
    script = (
        "import sys\n"
        "from test_gemm_compile import SPECS\n"
        "from gemm_ops.runtime.library import load_kernel\n"
        "for name, spec in SPECS.items():\n"
        "    print(name, load_kernel(spec).path)\n"
        "assert 'cutlass_cppgen' not in sys.modules\n"
    )
    here = Path(__file__).parent
    path = {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "PATH": os.path.dirname(sys.executable)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **path, **environment}
    )
    assert done.returncode == 0, done.stderr
    assert "building" not in done.stderr
    return {name: Path(path) for name, path in map(str.split, done.stdout.splitlines())}


def test_another_process_finds_them(built: dict[str, Path]) -> None:
    """The keys are the same there."""
    assert load_in_another_process() == built


def test_a_bundle_of_them_loads_elsewhere(built: dict[str, Path], tmp_path: Path) -> None:
    """Merged into a fresh cache, or from a folder of its own, which nothing is written to."""
    bundle, merged, folder, empty = (tmp_path / name for name in ("kernels.tar.xz", "merged", "folder", "empty"))
    assert pack_kernels(bundle) == len(SPECS)
    assert bundle.stat().st_size < sum(path.stat().st_size for path in built.values()) / 4
    content = lzma.decompress(bundle.read_bytes())
    for here in (cache.cache_folder(), Path(__file__).parent.parent, Path.home()):
        assert f"{here}/".encode() not in content
    for root, environment in (
        (merged, {"GEMM_OPS_CACHE": str(merged)}),
        (folder, {"GEMM_OPS_CACHE": str(empty), "GEMM_OPS_BUNDLE": str(folder)}),
    ):
        assert unpack_kernels(bundle, into=root) == len(SPECS)
        expected = {name: root / "kernels" / spec.key / "kernel.so" for name, spec in SPECS.items()}
        assert load_in_another_process(**environment) == expected
    assert not empty.exists()


def test_nothing_is_left_of_the_builds(built: dict[str, Path]) -> None:
    root = cache.cache_folder()
    assert not list((root / "building").iterdir())
    assert not list((root / "failed").iterdir())
    assert len(list((root / "kernels").iterdir())) == len(SPECS)


def test_an_error_of_the_real_compiler(built: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemm_ops.build.compiler._failures", {})
    spec = dataclasses.replace(SPECS["sm80"], arch="7")
    with pytest.raises(BuildError, match="nvcc failed with exit code") as caught:
        build_kernel(spec, quiet=True)
    assert "compute_7" in caught.value.command and "architecture" in caught.value.output
    assert Path(caught.value.source).read_text() == spec.source()
    assert cache.find_library(spec) is None


def test_the_copy_into_padded_rows_compiles_and_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not os.environ.get("CI") and not has_nvcc():
        pytest.skip("no nvcc")
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path))
    library = ctypes.CDLL(str(build_kernel(PadSpec("80"), quiet=True)))
    assert library.pad_rows_run and library.pad_rows_error_text
    record = json.loads((tmp_path / "kernels" / PadSpec("80").key / cache.RECORD).read_text())
    assert set(re.findall(r"(\d+) bytes stack frame", record["output"])) == {"0"}

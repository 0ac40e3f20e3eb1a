"""Compilers that are shell scripts, for tests of how one is found and of the cache of built kernels.

>>> def test_something(install: Install) -> None:       # fixtures: import them, and fresh, by name
...     runs = install(WRITES)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gemm_support import spec_of
from operation_support import row_tree

from gemm_ops.build import compiler, toolchain
from gemm_ops.build.cache import cache_folder
from gemm_ops.runtime import loading

SPEC = spec_of(row_tree("relu", "bf16"), "sm80")
OTHER = spec_of(row_tree("exp", "bf16"), "sm80")
THIRD = spec_of(row_tree("tanh", "f32"), "sm80")

# What a script does as nvcc.  $out is the -o path, $source the source; every run is a line in $runs.
_HEAD = """#!/bin/sh
if [ "$1" = --version ]; then echo "nvcc: NVIDIA (R) Cuda compiler driver, release {version}, V{version}.88"; exit 0; fi
for argument; do
  [ "$previous" = -o ] && out=$argument
  previous=$argument; source=$argument
done
runs={runs}
echo "start $$" >> $runs
"""
WRITES = 'echo "not a library" > "$out"; echo "ptxas info: fine"\n'
SLOW = 'sleep 1; echo "not a library" > "$out"; echo "end $$" >> $runs\n'
FAILS = 'echo "$source(1): error: no such functor"; echo "1 error detected" >&2; exit 1\n'
DIES_HALFWAY = 'echo half > "$out"; echo "cicc died"; exit 2\n'
IS_KILLED = 'echo half > "$out"; kill -9 $$\n'
SAYS_NOTHING = "exit 0\n"
REAL_LIBRARY = """cat > "$out.c" <<'END'
long gemm_workspace_size(void* a) { return 42; }
int gemm_run(void* a, void* w, void* s) { return 0; }
char const* gemm_status_text(int c) { return "status"; }
char const* gemm_cuda_error_text(int c) { return "error"; }
END
gcc -shared -fPIC -o "$out" "$out.c" && rm "$out.c"
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, nothing remembered of other tests, and no compiler of this machine's."""
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_failures", {})
    monkeypatch.setattr(loading, "_loaded", {})
    for variable in ("CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH"):
        monkeypatch.delenv(variable, raising=False)
    without = [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "nvcc").exists()]
    # the host's tools stay within reach, even where they share a folder with nvcc
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "sleep", "cat", "gcc", "as", "ld", "rm", "kill"):
        for folder in os.environ["PATH"].split(os.pathsep):
            if (Path(folder) / tool).exists():
                (tools / tool).symlink_to(Path(folder) / tool)
                break
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), *without]))
    monkeypatch.setattr(toolchain, "_DEFAULT_FOLDER", tmp_path / "default")


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


Install = Callable[..., Path]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Makes a script the compiler; gives the file that counts its runs."""

    def install(body: str, version: str = "13.0") -> Path:
        runs = tmp_path / "runs"
        runs.touch()
        script(tmp_path / "cuda" / "bin" / "nvcc", _HEAD.format(version=version, runs=runs) + body)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        return runs

    return install


def count(runs: Path) -> int:
    return runs.read_text().count("start")


def leftovers() -> list[Path]:
    """Everything that must not be there after a failure."""
    return [*(cache_folder() / "kernels").iterdir(), *(cache_folder() / "building").iterdir()]


def nvcc_at(root: Path, version: str = "13.0") -> Path:
    return script(root / "bin" / "nvcc", f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.1"\n')


@pytest.fixture
def wheel_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A site-packages folder that is all of ``sys.path``, so that wheels installed here do not count."""
    assert SPEC.key  # worked out while nvidia-cutlass, whose version is in it, is within reach
    headers = tmp_path / "cutlass" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "cutlass.h").touch()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    return tmp_path / "site-packages"

"""Finding a compiler: where it is looked for, and what is said of one that is missing or cannot be used."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest
from build_support import SPEC, WRITES, Install, fresh, install, nvcc_at, script, wheel_path

from gemm_ops.build import compiler, toolchain
from gemm_ops.build.cache import cache_folder
from gemm_ops.build.compiler import build_kernel
from gemm_ops.build.toolchain import cutlass_include, find_toolchain
from gemm_ops.errors import ToolchainError

__all__ = ["fresh", "install", "wheel_path"]


def test_nvcc_is_looked_for_in_order(wheel_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = {
        "CUDA_HOME": tmp_path / "home",
        "CUDA_PATH": tmp_path / "path",
        "PATH": tmp_path / "local",
        "wheels": wheel_path / "nvidia" / "cu13",
        "the default folder": tmp_path / "default",
    }
    for root in places.values():
        nvcc_at(root)
    monkeypatch.setenv("CUDA_HOME", str(places["CUDA_HOME"]))
    monkeypatch.setenv("CUDA_PATH", str(places["CUDA_PATH"]))
    monkeypatch.setenv("PATH", f"{places['PATH'] / 'bin'}{os.pathsep}{os.environ['PATH']}")
    # the best one goes, and the next one is found
    for origin, root in places.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a test of its own, below
            found = find_toolchain()
        assert (found.origin, found.nvcc) == (origin, root / "bin" / "nvcc")
        assert found.version == "13.0"
        found.nvcc.unlink()
    with pytest.raises(ToolchainError, match="no usable nvcc found"):
        find_toolchain()


def test_wheels_bring_their_own_folders(wheel_path: Path, tmp_path: Path) -> None:
    root = wheel_path / "nvidia" / "cu13"
    nvcc_at(root)
    for folder in ("include", "include/cccl", "lib"):
        (root / folder).mkdir()
    found = find_toolchain()
    assert found.include == (tmp_path / "cutlass" / "include", root / "include", root / "include" / "cccl")
    assert found.libraries == (root / "lib",)
    command = compiler.compile_command(SPEC, found, Path("kernel.cu"), Path("kernel.so"))
    assert command[0] == str(root / "bin" / "nvcc")
    assert [f"-I{root}/include", f"-I{root}/include/cccl", f"-L{root}/lib", "-o", "kernel.so", "kernel.cu"] == command[
        -6:
    ]


def test_wheels_of_cuda_12_lie_side_by_side(wheel_path: Path) -> None:
    """And those of 13 are preferred."""
    nvidia = wheel_path / "nvidia"
    nvcc_at(nvidia / "cuda_nvcc", "12.9")
    for folder in ("cuda_nvcc/include", "cuda_runtime/include", "cuda_runtime/lib"):
        (nvidia / folder).mkdir(parents=True)
    found = find_toolchain()
    assert found.nvcc == nvidia / "cuda_nvcc" / "bin" / "nvcc" and found.version == "12.9"
    assert found.include[1:] == (nvidia / "cuda_nvcc" / "include", nvidia / "cuda_runtime" / "include")
    assert found.libraries == (nvidia / "cuda_runtime" / "lib",)
    nvcc_at(nvidia / "cu13")
    assert find_toolchain().nvcc == nvidia / "cu13" / "bin" / "nvcc"


def test_toolkit_needs_no_further_folders(install: Install, tmp_path: Path) -> None:
    install(WRITES)
    found = find_toolchain()
    assert found.include == (cutlass_include(),) and found.libraries == ()
    assert (found.include[0] / "cutlass" / "cutlass.h").is_file()


@pytest.mark.parametrize("mode", [0o644, None], ids=["not executable", "missing"])
def test_no_nvcc_names_where_it_looked(
    wheel_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int | None
) -> None:
    if mode is not None:
        nvcc_at(tmp_path / "home").chmod(mode)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    with pytest.raises(ToolchainError) as caught:
        find_toolchain()
    message = str(caught.value)
    fault = "is not there" if mode is None else "is not executable"
    assert f"{tmp_path}/home/bin/nvcc (from CUDA_HOME) {fault}" in message
    assert f"{tmp_path}/default/bin/nvcc (from the default folder) is not there" in message
    assert "pip install 'gemm-epilogue-fusion[toolchain]'" in message and "set CUDA_HOME" in message
    # and that is what a build says
    with pytest.raises(ToolchainError, match="no usable nvcc found"):
        build_kernel(SPEC)
    assert not cache_folder().exists()


UNUSABLE = {
    "too old": ('echo "Cuda compilation tools, release 12.3, V12.3.1"', "is release 12.3, older than 12.4"),
    "much too old": ('echo "Cuda compilation tools, release 9.2, V9.2"', "is release 9.2, older than 12.4"),
    "fails": ("echo broken; exit 3", "does not run.*exit status 3"),
    "says nothing": ("true", "does not say its release"),
}


@pytest.mark.parametrize(("body", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_nvcc_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, message: str) -> None:
    nvcc = script(tmp_path / "home" / "bin" / "nvcc", f"#!/bin/sh\n{body}\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    with pytest.raises(ToolchainError, match=message) as caught:
        build_kernel(SPEC)
    assert str(nvcc) in str(caught.value)
    assert not cache_folder().exists()
    # where there is another one, that is taken, and the user hears of it once
    nvcc_at(tmp_path / "path")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))
    assert find_toolchain().origin == "CUDA_PATH"
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setattr(toolchain, "_DEFAULT_FOLDER", tmp_path / "path")
    with pytest.warns(RuntimeWarning, match=f"CUDA_HOME={tmp_path}/home holds no usable nvcc .*{message}"):
        assert find_toolchain().origin == "the default folder"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_toolchain()


def test_nvcc_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "home" / "bin" / "nvcc", "#!/no/such/interpreter\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    with pytest.raises(ToolchainError, match=r"\(from CUDA_HOME\) does not run"):
        find_toolchain()


def test_the_oldest_nvcc(install: Install) -> None:
    install(WRITES, version="12.4")
    assert find_toolchain().version == "12.4"


def test_cutlass_headers_that_are_missing(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(WRITES)
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=rf"no CUTLASS headers in {tmp_path}/nowhere/include, where CUTLASS_PATH"):
        find_toolchain()
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "cutlass_library", raising=False)
    with pytest.raises(ToolchainError, match="pip install nvidia-cutlass"):
        find_toolchain()

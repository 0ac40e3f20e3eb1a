"""How the C++ module is built and loaded, with compilers that are shell scripts; what is said where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import epilogues as ep
from gemm_ops import FallbackWarning, announce, native
from gemm_ops.errors import BuildError, ToolchainError
from gemm_ops.native import extension


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and nothing loaded or said before."""
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GEMM_OPS_NATIVE", raising=False)
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_started", False)
    monkeypatch.setattr(native, "_failure", "")
    monkeypatch.setattr(announce, "_announced", set())


def compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> Path:
    """Makes a script the compiler; gives the file that its arguments go to."""
    script, seen = folder / "compiler", folder / "seen"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {seen}\nfor each; do [ "$before" = -o ] && out=$each; before=$each; done\n{body}'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return seen


def test_the_compiler_that_is_named_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler: CXX=.*nothing is none"):
        extension.load_extension()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"neither c\+\+ nor g\+\+ is there"):
        extension.load_extension()


def test_headers_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = compiler(monkeypatch, tmp_path, "exit 0\n")
    monkeypatch.setattr(extension.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ToolchainError, match=r"Python\.h is not there: install the development files of Python"):
        extension.load_extension()
    assert not seen.exists()


def test_a_compiler_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = compiler(
        monkeypatch, tmp_path, 'echo half > "$out"; echo "module.cpp:1: error: no such thing" >&2; exit 1\n'
    )
    with pytest.raises(BuildError, match="failed with exit code 1") as raised:
        extension.load_extension()
    assert "error: no such thing" in str(raised.value) and str(tmp_path / "compiler") in raised.value.command
    assert not extension.is_built()
    assert [path.suffix for path in extension.library_path().parent.iterdir()] in ([".lock"], [])
    assert "-std=c++20" in seen.read_text() and "module.cpp" in seen.read_text()


def test_a_library_that_does_not_load_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = compiler(monkeypatch, tmp_path, 'echo "not a library" > "$out"\n')
    for _ in range(2):
        with pytest.raises(BuildError, match="does not load"):
            extension.load_extension()
        assert not extension.is_built()
    assert len(seen.read_text().splitlines()) == 2


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ToolchainError, match="cannot be written"):
        extension.load_extension()


def test_the_module_is_one_for_each_python_and_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        extension._key.cache_clear()
        return extension._key()

    first = key()
    assert key() == first
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        assert key() != first
    with monkeypatch.context() as patch:
        patch.setattr(extension.sysconfig, "get_config_var", lambda name: "another")
        assert key() != first
    assert key() == first


def test_why_there_is_none_is_said_once_by_a_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))

    def remember() -> None:
        native.remember_plan(None, (), ep.builders.identity(), {}, False)

    with pytest.warns(FallbackWarning, match="calls take more of the host's time, as their C") as said:
        remember()  # begins to load, in the background
        end = time.monotonic() + 20
        while not native._failure:
            assert time.monotonic() < end
            time.sleep(0.01)
        remember()
        remember()
    assert len(said) == 1
    assert not native.is_loaded()


def test_processes_that_want_it_build_it_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extension: Any) -> None:
    """Three at a time; the compiler of the test copies what the session has built."""
    seen = compiler(monkeypatch, tmp_path, f'sleep 1; cp {extension.__file__} "$out"\n')
    code = "from gemm_ops.native.extension import load_extension; print(load_extension().counts())"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ})
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["(0, 0, 0)"] * 3
    assert len(seen.read_text().splitlines()) == 1

"""The cache of built kernels, with compilers that are shell scripts.

A stand-in for nvcc takes nvcc's arguments and writes to ``-o``; everything else (lowering, processes, locks, files)
is real.  Real kernels are built in ``test_gemm_compile.py``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from build_support import (
    DIES_HALFWAY,
    FAILS,
    IS_KILLED,
    OTHER,
    REAL_LIBRARY,
    SAYS_NOTHING,
    SLOW,
    SPEC,
    THIRD,
    WRITES,
    Install,
    count,
    fresh,
    install,
    leftovers,
    wheel_path,
)
from gemm_support import spec_of

import gemm_ops
from gemm_ops.build import cache, compiler
from gemm_ops.build.cache import cache_folder, find_library
from gemm_ops.build.compiler import build_kernel, build_kernels
from gemm_ops.build.toolchain import find_toolchain
from gemm_ops.errors import BuildError, ToolchainError
from gemm_ops.runtime import library, loading

__all__ = ["fresh", "install", "wheel_path"]


# One kernel.


def test_build(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    runs = install(WRITES)
    assert find_library(SPEC) is None
    path = build_kernel(SPEC)
    assert path == cache_folder() / "kernels" / SPEC.key / "kernel.so" == find_library(SPEC)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["build.json", "kernel.cu", "kernel.so"]
    assert (path.parent / "kernel.cu").read_text() == SPEC.source()
    record = json.loads((path.parent / "build.json").read_text())
    assert record["title"] == SPEC.title and record["nvcc"] == "13.0" and record["cutlass"] == "4.2.0.0"
    assert record["output"] == "ptxas info: fine\n"
    assert record["command"][0] == str(find_toolchain().nvcc)
    assert "-gencode=arch=compute_80,code=sm_80" in record["command"]
    assert f"building {SPEC.title}" in capsys.readouterr().err
    # there at once the second time, and without a word
    assert build_kernel(SPEC) == path and count(runs) == 1
    assert capsys.readouterr().err == ""
    # others may read a shared cache
    assert path.parent.stat().st_mode & 0o777 == 0o755


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" == gemm_ops.cache_folder()
    monkeypatch.setenv("GEMM_OPS_CACHE", "~/kernels")
    assert cache_folder() == Path.home() / "kernels"
    monkeypatch.setenv("GEMM_OPS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "gemm-ops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "gemm-ops"


def test_a_compiler_that_fails(install: Install) -> None:
    runs = install(FAILS)
    with pytest.raises(BuildError, match=r"nvcc failed with exit code 1") as caught:
        build_kernel(SPEC)
    error = caught.value
    assert not isinstance(error, ToolchainError)
    assert shlex.split(error.command)[0] == str(find_toolchain().nvcc)
    assert "error: no such functor" in error.output and "1 error detected" in error.output
    assert "error: no such functor" in str(error) and SPEC.title in str(error)
    assert error.command in str(error) and error.source in str(error)
    # what it points to is there, and everything else is as if nothing had been
    assert Path(error.source).read_text() == SPEC.source()
    assert (Path(error.source).parent / "output.txt").read_text() == error.output
    assert find_library(SPEC) is None and not leftovers()
    # not tried again in this process
    with pytest.raises(BuildError) as again:
        build_kernel(SPEC)
    assert again.value is error and count(runs) == 1
    # another kernel is
    with pytest.raises(BuildError):
        build_kernel(OTHER)
    assert count(runs) == 2


def test_errors_are_excerpted(install: Install) -> None:
    install('i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo "note $i"; echo "error $i"; done; exit 1\n')
    with pytest.raises(BuildError) as caught:
        build_kernel(SPEC)
    message = str(caught.value)
    assert "error 1\n" in message and "error 30\n" in message and "... 170 more lines" in message
    assert "note" not in message and "error 31" not in message
    assert "note 200" in caught.value.output


@pytest.mark.parametrize(
    ("body", "code"),
    [(DIES_HALFWAY, 2), (IS_KILLED, -9), (SAYS_NOTHING, 0)],
    ids=["dies half-way", "is killed", "writes nothing"],
)
def test_a_compiler_that_breaks_off_leaves_nothing(install: Install, body: str, code: int) -> None:
    install(body)
    with pytest.raises(BuildError, match=f"exit code {code} "):
        build_kernel(SPEC, quiet=True)
    assert find_library(SPEC) is None and not leftovers()


def test_after_a_failure_another_process_may_succeed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FAILS)
    with pytest.raises(BuildError) as caught:
        build_kernel(SPEC)
    install(WRITES)
    monkeypatch.setattr(compiler, "_failures", {})  # as in another process
    build_kernel(SPEC)
    assert find_library(SPEC) is not None
    assert not Path(caught.value.source).exists(), "what failed once is of no interest any more"


def test_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(BuildError("message", "command", "output", "source")))
    assert (str(error), error.command, error.output, error.source) == ("message", "command", "output", "source")
    assert type(pickle.loads(pickle.dumps(ToolchainError("message")))) is ToolchainError


def test_a_cache_that_cannot_be_written(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = install(WRITES)
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ToolchainError, match=rf"{tmp_path}/file/cache cannot be written .*GEMM_OPS_CACHE"):
        build_kernel(SPEC)
    assert count(runs) == 0


def test_stale_work_is_swept(install: Install) -> None:
    install(WRITES)
    building = cache_folder() / "building"
    for name, age in (("stale", 25 * 3600), ("recent", 23 * 3600)):
        (building / name).mkdir(parents=True)
        (building / name / "kernel.cu").touch()
        then = time.time() - age
        os.utime(building / name, (then, then))
    build_kernel(SPEC, quiet=True)
    assert [entry.name for entry in building.iterdir()] == ["recent"]


def test_a_kernel_folder_without_a_library_is_built_again(install: Install) -> None:
    install(WRITES)
    build_kernel(SPEC, quiet=True).unlink()
    assert find_library(SPEC) is None
    assert build_kernel(SPEC, quiet=True).read_text() == "not a library\n"


# Several processes.

_BUILDER = """
import sys, time
from pathlib import Path
from build_support import SPEC
from gemm_ops.build.compiler import build_kernel
SPEC.source()  # the slow import comes before the race
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
print(build_kernel(SPEC, quiet=True))
"""


def builder(tmp_path: Path, name: str, go: Path) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, "-c", _BUILDER, str(tmp_path / name), str(go)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_processes_that_build_one_kernel_build_it_once(install: Install, tmp_path: Path) -> None:
    runs, go = install(SLOW), tmp_path / "go"
    processes = [builder(tmp_path, f"ready{i}", go) for i in range(4)]
    wait_for(lambda: all((tmp_path / f"ready{i}").exists() for i in range(4)))
    go.touch()
    paths = set()
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        paths.add(output.strip())
    assert paths == {str(find_library(SPEC))}
    assert count(runs) == 1
    assert len(list((cache_folder() / "kernels").iterdir())) == 1 and not list((cache_folder() / "building").iterdir())


def test_a_process_that_dies_while_it_builds(install: Install, tmp_path: Path) -> None:
    """Its lock goes with it, and nothing of its work counts as a kernel."""
    runs, go = install('echo half > "$out"; sleep 30\n'), tmp_path / "go"
    process = builder(tmp_path, "ready", go)
    go.touch()
    wait_for(lambda: count(runs) == 1 and bool(list((cache_folder() / "building").glob("*/kernel.so"))))
    compiler_id = int(runs.read_text().split()[1])
    process.kill()
    process.wait()
    os.kill(compiler_id, signal.SIGKILL)
    assert find_library(SPEC) is None
    install(WRITES)
    assert build_kernel(SPEC, quiet=True).read_text() == "not a library\n"


def test_threads_that_build_one_kernel_build_it_once(install: Install) -> None:
    runs = install(SLOW)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build_kernel(SPEC, quiet=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and set(paths) == {find_library(SPEC)} and count(runs) == 1


# Many kernels.


def test_build_kernels(install: Install) -> None:
    runs = install(WRITES)
    build_kernel(OTHER, quiet=True)
    done: list[tuple[str, bool]] = []

    def on_done(spec: object, seconds: float, cached: bool) -> None:
        assert threading.current_thread() is threading.main_thread() and 0 <= seconds < 60
        done.append((spec.key, cached))  # type: ignore[attr-defined]

    build_kernels([SPEC, OTHER, spec_of(SPEC.tree, "sm80"), THIRD, SPEC], on_done=on_done)
    assert sorted(done) == sorted([(SPEC.key, False), (OTHER.key, True), (THIRD.key, False)])
    assert count(runs) == 3
    build_kernels([])


@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_compilers_as_asked_for(install: Install, jobs: int) -> None:
    runs = install(SLOW)
    build_kernels([SPEC, OTHER], jobs=jobs)
    events = [line.split()[0] for line in runs.read_text().splitlines()]
    assert events == (["start", "end"] * 2 if jobs == 1 else ["start", "start", "end", "end"])


def test_build_kernels_goes_on_after_a_failure(install: Install) -> None:
    # the compiler does not like what has an exp or a tanh
    install('if grep -qE "fn::(exp|tanh)" "$source"; then echo "$source: error: curved"; exit 1; fi\n' + WRITES)
    done: list[str] = []
    with pytest.raises(BuildError, match="2 of 3 kernels could not be built; the first: nvcc failed") as caught:
        build_kernels([OTHER, THIRD, SPEC], on_done=lambda spec, seconds, cached: done.append(spec.key))
    assert done == [SPEC.key] and find_library(SPEC) is not None
    assert "error: curved" in caught.value.output and Path(caught.value.source).is_file() and caught.value.command
    with pytest.raises(BuildError, match=r"^nvcc failed"):
        build_kernels([OTHER, SPEC])


def test_build_kernels_without_a_compiler(wheel_path: Path) -> None:
    with pytest.raises(ToolchainError, match="no usable nvcc found"):
        build_kernels([SPEC])


# Loading what was built.


def garbage() -> Path:
    path = cache_folder() / "kernels" / SPEC.key / cache.LIBRARY
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF, not really")
    return path


def test_load(install: Install) -> None:
    runs = install(REAL_LIBRARY)
    assert not loading.is_loaded(SPEC)
    kernel = library.load_kernel(SPEC)
    assert loading.is_loaded(SPEC) and library.load_kernel(SPEC) is kernel and count(runs) == 1
    assert kernel.path == find_library(SPEC)
    assert kernel.workspace_size(library.GemmArguments()) == 42


def test_a_library_that_does_not_load_is_built_again(install: Install) -> None:
    runs = install(REAL_LIBRARY)
    path = garbage()
    assert library.load_kernel(SPEC).workspace_size(library.GemmArguments()) == 42
    assert count(runs) == 1 and path.read_bytes()[:5] != b"\x7fELF,"


def test_a_library_of_other_functions_is_built_again(install: Install) -> None:
    runs = install(REAL_LIBRARY)
    path = garbage()
    source = path.with_suffix(".c")
    source.write_text("long gemm_workspace_size(void* a) { return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    assert library.load_kernel(SPEC).workspace_size(library.GemmArguments()) == 42
    assert count(runs) == 1


def test_a_library_that_does_not_load_even_when_fresh(install: Install) -> None:
    runs = install(WRITES)
    path = garbage()
    with pytest.raises(BuildError, match=rf"the kernel built at {path} does not load") as caught:
        library.load_kernel(SPEC)
    assert count(runs) == 1, "built again once"
    assert Path(caught.value.source).read_text() == SPEC.source()
    assert not loading.is_loaded(SPEC)


def test_what_a_killed_build_left_goes_with_the_next_try(install: Install) -> None:
    install(WRITES)
    mine, other = (cache_folder() / "building" / f"{spec.key}-left" for spec in (SPEC, OTHER))
    for folder in (mine, other):
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_text("half")
    build_kernel(SPEC)
    assert not mine.exists()
    assert other.exists(), "another process may be building that one"


def test_a_cache_path_that_cannot_be(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(WRITES)
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / ("x" * 300)))
    assert find_library(SPEC) is None
    with pytest.raises(ToolchainError, match="GEMM_OPS_CACHE"):
        build_kernel(SPEC)


def test_build_kernels_wants_specs() -> None:
    with pytest.raises(TypeError, match=r"backend_for\(\.\.\.\)\.spec, got NoneType"):
        build_kernels([None])  # type: ignore[list-item]


def test_a_library_that_never_loads_is_built_twice_at_most(install: Install) -> None:
    runs = install(WRITES)
    for _ in range(3):
        with pytest.raises(BuildError, match="does not load"):
            library.load_kernel(SPEC)
    assert count(runs) == 2

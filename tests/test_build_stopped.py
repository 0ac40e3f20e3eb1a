"""Builds that are interrupted: no compiler is left running, nor what it started, and nothing in the cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from build_support import OTHER, SPEC, THIRD, Install, fresh, install

from gemm_ops.build import compiler
from gemm_ops.build.cache import find_library
from gemm_ops.build.running import Compilers, StoppedError

__all__ = ["fresh", "install"]

# As nvcc has cicc: a child that goes on alone when its parent is killed alone.
HANGS = "sleep 61.25 & wait\n"


def processes() -> int:
    """How many of the children are there, but for those that are dead and not waited for."""
    found = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return sum(line.split()[1:] == ["sleep", "61.25"] and not line.startswith("Z") for line in found.splitlines())


def wait_until(condition: object, seconds: float = 20) -> None:
    began = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() - began < seconds, "not so in time"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """None is there before; and interrupts count, which what a shell runs in the background is told to ignore."""
    assert processes() == 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_output_and_exit_code() -> None:
    command = ["sh", "-c", "echo one; echo two >&2; exit 3"]
    assert Compilers().run(command, os.environ) == (3, "one\ntwo\n")


def test_those_of_one_caller_are_stopped() -> None:
    first, other = Compilers(), Compilers()
    raised: list[type[BaseException]] = []

    def run() -> None:
        try:
            first.run(["sh", "-c", HANGS], os.environ)
        except BaseException as error:
            raised.append(type(error))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: processes() == 3)
    other.stop()
    assert processes() == 3
    first.stop()
    for thread in threads:
        thread.join(10)
    assert raised == [StoppedError] * 3
    wait_until(lambda: processes() == 0)
    with pytest.raises(StoppedError):
        first.run(["true"], os.environ)


def test_an_interrupt_stops_all_builds(install: Install) -> None:
    install(HANGS)

    def interrupt() -> None:
        wait_until(lambda: processes() == 2)
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compiler.build_kernels([SPEC, OTHER, THIRD], jobs=2)
    killer.join()
    assert time.monotonic() - began < 30
    wait_until(lambda: processes() == 0)
    assert not any(find_library(spec) for spec in (SPEC, OTHER, THIRD))
    assert not compiler._failures, "another time they may be built"


def test_an_interrupt_of_one_build_stops_it(install: Install) -> None:
    install(HANGS)

    def interrupt() -> None:
        wait_until(lambda: processes() == 1)
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        compiler.build_kernel(SPEC, quiet=True)
    killer.join()
    wait_until(lambda: processes() == 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_build_command_leaves_nothing_running(install: Install, tmp_path: Path, number: int, code: int) -> None:
    """The signal goes to the process alone, as that of a scheduler does, and not to its group."""
    install(HANGS)
    command = [sys.executable, "-m", "shape_sweeps", "build", "--shapes", "64x64x64,1000x3000x2000", "--device", "h200"]
    with subprocess.Popen(
        [*command, "--dtypes", "bf16", "--epilogues", "bias_gelu,residual", "--jobs", "2"],
        env={**os.environ, "CUDA_HOME": str(tmp_path / "cuda")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        wait_until(lambda: processes() == 2, 60)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    assert "interrupted, 4 not reached" in output and "Traceback" not in output
    wait_until(lambda: processes() == 0)


def test_background_builds_end_with_the_interpreter(install: Install, tmp_path: Path) -> None:
    install(HANGS)
    script = (
        "import sys, time; sys.path.insert(0, 'tests')\n"
        "from build_support import SPEC\n"
        "from gemm_ops.when_to_build import build_in_background\n"
        "build_in_background(SPEC)\n"
        "time.sleep(float(sys.argv[1]))\n"
    )
    environment = {**os.environ, "CUDA_HOME": str(tmp_path / "cuda")}
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen([sys.executable, "-c", script, "8"], env=environment, cwd=root) as process:
        wait_until(lambda: processes() == 1, 60)
        assert process.wait(60) == 0
    wait_until(lambda: processes() == 0)

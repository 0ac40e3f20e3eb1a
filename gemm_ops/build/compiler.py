"""Builds kernels with nvcc, through the cache.

    >>> path = build_kernel(spec)                       # at once if it is built already
    >>> build_kernels(specs, jobs=8, on_done=print)     # many at a time, one nvcc each

A build that failed is not tried again in the same process: the error of the first try is raised.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..errors import BuildError
from ..kernels.sources import cutlass_version, generator_digest
from .buildable import Buildable
from .cache import LIBRARY, RECORD, SOURCE, BuildSlot, build_slot, find_library
from .flags import FLAGS
from .running import Compilers
from .toolchain import Toolchain, find_toolchain

#: Called for every kernel: the spec, the seconds it took, and whether it was there already.
OnDone = Callable[[Buildable, float, bool], None]
#: Called for every kernel that could not be built.
OnFailed = Callable[[Buildable, BuildError], None]

_failures: dict[str, BuildError] = {}
lowering_lock = threading.Lock()  # the CUTLASS interface keeps global state


def compile_command(spec: Buildable, toolchain: Toolchain, source: Path, library: Path) -> list[str]:
    """The nvcc command line of one kernel."""
    include = [Path(__file__).resolve().parent.parent / "cuda", *toolchain.include]
    return [
        str(toolchain.nvcc),
        *FLAGS,
        f"-gencode=arch=compute_{spec.arch},code=sm_{spec.arch}",
        *(f"-I{folder}" for folder in include),
        *(f"-L{folder}" for folder in toolchain.libraries),
        "-o",
        str(library),
        str(source),
    ]


def build_kernel(spec: Buildable, *, quiet: bool = False, compilers: Compilers | None = None) -> Path:
    """The library of a kernel, built if it is not in the cache yet (about a minute for SM90).

    Args:
        compilers: whose compiler it is, to be stopped with others; None: by an exception in this thread only.

    Raises:
        ToolchainError: if there is no compiler, no CUTLASS, or no place to write.
        BuildError: if the compiler fails.  Nothing is left in the cache.
    """
    if (library := find_library(spec)) is not None:
        return library
    raise_failure(spec)
    toolchain = find_toolchain()
    with build_slot(spec) as slot:
        if slot is None:
            built = find_library(spec)
            assert built is not None, "the slot said that the library is there"
            return built
        if not quiet:
            print(f"gemm_ops: building {spec.title} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        library = _compile(spec, toolchain, slot, compilers or Compilers())
        if not quiet:
            print(f"gemm_ops: built in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        return library


def remember_failure(spec: Buildable, error: BuildError) -> None:
    """Keeps this process from trying a kernel again: the next try would take as long and end alike."""
    _failures[spec.key] = error


def raise_failure(spec: Buildable) -> None:
    """Raises what an earlier try in this process ended with, if it failed."""
    if (error := _failures.get(spec.key)) is not None:
        raise error


def _compile(spec: Buildable, toolchain: Toolchain, slot: BuildSlot, compilers: Compilers) -> Path:
    with lowering_lock:
        source = _source(spec)
    (slot.folder / SOURCE).write_text(source)
    command = compile_command(spec, toolchain, slot.folder / SOURCE, slot.folder / LIBRARY)
    start = time.perf_counter()
    # nvcc is told to keep its temporary files in the slot, which goes away with the build
    environment = {**os.environ, "TMPDIR": str(slot.folder)}
    code, output = compilers.run(command, environment)
    seconds = time.perf_counter() - start
    if code != 0 or not (slot.folder / LIBRARY).is_file():
        kept = slot.keep_failure(output)
        error = BuildError(
            f"nvcc failed with exit code {code} on {spec.title}\n"
            f"  source: {kept}\n  command: {shlex.join(command)}\n{_excerpt(output)}",
            command=shlex.join(command),
            output=output,
            source=str(kept),
        )
        remember_failure(spec, error)
        raise error
    record = {
        "title": spec.title,
        "arch": spec.arch,
        "kind": spec.kind,
        "generator": generator_digest(spec.kind),
        "nvcc": toolchain.version,
        "cutlass": cutlass_version(),
        "seconds": round(seconds, 1),
        "command": command,
        "output": output,
    }
    (slot.folder / RECORD).write_text(json.dumps(record, indent=1))
    return slot.publish()


def _source(spec: Buildable) -> str:
    try:
        return spec.source()
    except BuildError:
        raise
    except Exception as error:  # of what is lowered, one among many must not cost the others their build
        raise BuildError(f"no source could be written for {spec.title}: {type(error).__name__}: {error}") from error


def _excerpt(output: str, lines: int = 30) -> str:
    """The first errors of a compiler's output: CUTLASS can print thousands of lines."""
    errors = [line for line in output.splitlines() if "error" in line.lower() or "fatal" in line.lower()]
    chosen = errors or output.splitlines()
    rest = f"\n  ... {len(chosen) - lines} more lines" if len(chosen) > lines else ""
    return "\n".join(f"  {line}" for line in chosen[:lines]) + rest


def build_kernels(
    specs: Iterable[Buildable],
    *,
    jobs: int | None = None,
    on_done: OnDone | None = None,
    on_failed: OnFailed | None = None,
) -> None:
    """Builds many kernels, several at a time.

    Args:
        specs: the kernels; one that is named twice is built once.
        jobs: how many compilers run at a time; default one per core this process may use.
        on_done: called in this thread after each kernel.
        on_failed: the same for each that could not be built, with its error.

    Raises:
        BuildError: after all are done, if any failed; the message counts them, the first is the cause.
    """
    specs = list(specs)
    for spec in specs:
        if not isinstance(spec, Buildable):
            raise TypeError(f"expected kernel specs, such as backend_for(...).spec, got {type(spec).__name__}")
    unique = list({spec.key: spec for spec in specs}.values())
    workers = jobs or len(os.sched_getaffinity(0))
    failures: list[BuildError] = []
    compilers = Compilers()

    def build(spec: Buildable) -> tuple[float, bool]:
        start = time.perf_counter()
        cached = find_library(spec) is not None
        build_kernel(spec, quiet=True, compilers=compilers)
        return time.perf_counter() - start, cached

    with ThreadPoolExecutor(max_workers=workers) as pool:
        waiting = {pool.submit(build, spec): spec for spec in unique}
        try:
            for future in as_completed(waiting):
                try:
                    seconds, cached = future.result()
                except BuildError as error:
                    failures.append(error)
                    if on_failed is not None:
                        on_failed(waiting[future], error)
                    continue
                if on_done is not None:
                    on_done(waiting[future], seconds, cached)
        except Exception:  # of on_done: what has begun is kept
            pool.shutdown(cancel_futures=True)
            raise
        except BaseException:  # interrupted: nobody waits for the rest
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.stop()
            raise
    if failures:
        first = failures[0]
        if len(failures) == 1:
            raise first
        raise BuildError(
            f"{len(failures)} of {len(unique)} kernels could not be built; the first: {first}",
            command=first.command,
            output=first.output,
            source=first.source,
        ) from first

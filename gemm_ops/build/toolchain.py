"""Finds the compiler: nvcc, its headers, and the CUTLASS headers.

    >>> toolchain = find_toolchain()
    >>> toolchain.nvcc, toolchain.origin
    (PosixPath('/usr/local/cuda/bin/nvcc'), 'PATH')

Looked for in this order: the folder that ``CUDA_HOME`` or ``CUDA_PATH`` names, ``PATH``, the wheels of the
extra ``toolchain`` (``nvidia-cuda-nvcc`` and what it needs), ``/usr/local/cuda``.  The CUTLASS headers come with
``nvidia-cutlass``, or from the checkout that ``CUTLASS_PATH`` names.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ToolchainError

_ADVICE = (
    "install a CUDA toolkit (12.4 or newer) and set CUDA_HOME, or install nvcc from the package index with "
    "`pip install 'gemm-epilogue-fusion[toolchain]'`"
)
#: What CUTLASS 4.2 needs for SM90 kernels.
_OLDEST_NVCC = (12, 4)
_DEFAULT_FOLDER = Path("/usr/local/cuda")
_VARIABLES = ("CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True)
class Toolchain:
    """A compiler that can build kernels.

    Attributes:
        nvcc: the compiler driver.
        version: its release, such as "13.0".
        include: further include folders: CUTLASS, and CUDA's own where nvcc does not know them.
        libraries: folders to link from, where nvcc does not know them.
        origin: how nvcc was found.
    """

    nvcc: Path
    version: str
    include: tuple[Path, ...]
    libraries: tuple[Path, ...]
    origin: str


def find_toolchain() -> Toolchain:
    """The toolchain that kernels are built with: the first nvcc that runs and is new enough.

    Raises:
        ToolchainError: naming what is missing, where it was looked for, and what to install.
    """
    include = cutlass_include()
    rejected = []
    for origin, root, nvcc in _candidates():
        version, fault = _version_of(nvcc)
        if fault:
            rejected.append(f"{nvcc} (from {origin}) {fault}")
            continue
        further, libraries = _wheel_folders(root) if origin == "wheels" else ((), ())
        _mention_ignored_variables(origin, nvcc)
        return Toolchain(nvcc, version, (include, *further), libraries, origin)
    raise ToolchainError(f"no usable nvcc found: {'; '.join(rejected) or 'there is nowhere to look'}. {_ADVICE}")


def _version_of(nvcc: Path) -> tuple[str, str]:
    """The release of a compiler, or "" and why it cannot be used."""
    if not nvcc.is_file():
        return "", "is not there"
    if not os.access(nvcc, os.X_OK):
        return "", "is not executable"
    return _ask_version(nvcc, nvcc.stat().st_mtime_ns)


@functools.cache
def _ask_version(nvcc: Path, modified: int) -> tuple[str, str]:
    """Runs the compiler once for each state of its file."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"does not run: {error}"
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if match is None:
        return "", f"does not say its release, it says {done.stdout.strip()!r}"
    release = f"{match[1]}.{match[2]}"
    if (int(match[1]), int(match[2])) < _OLDEST_NVCC:
        return "", f"is release {release}, older than {'.'.join(map(str, _OLDEST_NVCC))}"
    return release, ""


@functools.cache
def _mention_ignored_variables(origin: str, nvcc: Path) -> None:
    """Says once that a folder the user named holds no usable compiler and another one is taken."""
    for variable in _VARIABLES:
        if origin not in _VARIABLES and (value := os.environ.get(variable)):
            warnings.warn(
                f"{variable}={value} holds no usable nvcc ({_version_of(Path(value) / 'bin' / 'nvcc')[1]}); "
                f"kernels are built with {nvcc}, found through {origin}",
                RuntimeWarning,
                stacklevel=2,
            )


def cutlass_include() -> Path:
    """The folder of the CUTLASS headers.

    Raises:
        ToolchainError: if there is none.
    """
    if override := os.environ.get("CUTLASS_PATH"):
        include = Path(override) / "include"
        where = "CUTLASS_PATH"
    else:
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or spec.origin is None:
            raise ToolchainError("the CUTLASS headers are not there: install them with `pip install nvidia-cutlass`")
        include = Path(spec.origin).parent / "source" / "include"
        where = "the package nvidia-cutlass"
    if not (include / "cutlass" / "cutlass.h").is_file():
        raise ToolchainError(f"no CUTLASS headers in {include}, where {where} should have them")
    return include


def _candidates() -> Iterator[tuple[str, Path, Path]]:
    """(origin, toolkit folder, nvcc) in order of preference."""
    for variable in _VARIABLES:
        if value := os.environ.get(variable):
            yield variable, Path(value), Path(value) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield "PATH", Path(found).parent.parent, Path(found)
    for root in _wheel_roots():
        yield "wheels", root, root / "bin" / "nvcc"
    yield "the default folder", _DEFAULT_FOLDER, _DEFAULT_FOLDER / "bin" / "nvcc"


def _wheel_roots() -> list[Path]:
    """Folders of nvidia's wheels that hold an nvcc: ``nvidia/cu13`` (13.x), then ``nvidia/cuda_nvcc`` (12.x)."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    roots = [path.parent.parent for folder in folders for path in folder.glob("*/bin/nvcc")]
    return sorted(roots, key=lambda root: (root.name != "cuda_nvcc", root.name), reverse=True)


def _wheel_folders(root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Where the other CUDA wheels beside nvcc's keep headers and libraries."""
    siblings = [root, *(folder for folder in root.parent.glob("cuda_*") if folder != root)]
    include = [folder / "include" for folder in siblings] + [folder / "include" / "cccl" for folder in siblings]
    libraries = [folder / "lib" for folder in siblings]
    return tuple(filter(Path.is_dir, include)), tuple(filter(Path.is_dir, libraries))

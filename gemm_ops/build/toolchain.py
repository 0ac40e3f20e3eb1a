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


@dataclass(frozen=True)
class Toolchain:
    """A compiler that can build kernels.

    Attributes:
        nvcc: the compiler driver.
        include: further include folders: CUTLASS, and CUDA's own where nvcc does not know them.
        libraries: folders to link from, where nvcc does not know them.
        origin: how nvcc was found.
    """

    nvcc: Path
    include: tuple[Path, ...]
    libraries: tuple[Path, ...]
    origin: str

    @functools.cached_property
    def version(self) -> str:
        """Nvcc's version, such as "13.0".

        Raises:
            ToolchainError: if nvcc does not run, or is too old.
        """
        try:
            done = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise ToolchainError(f"{self.nvcc} (found through {self.origin}) does not run: {error}") from error
        match = re.search(r"release (\d+)\.(\d+)", done.stdout)
        if match is None:
            raise ToolchainError(f"{self.nvcc} --version does not say a release, it says: {done.stdout.strip()!r}")
        if (int(match[1]), int(match[2])) < _OLDEST_NVCC:
            raise ToolchainError(
                f"{self.nvcc} is release {match[1]}.{match[2]}; CUTLASS needs 12.4 or newer: {_ADVICE}"
            )
        return f"{match[1]}.{match[2]}"


def find_toolchain() -> Toolchain:
    """The toolchain that kernels are built with.

    Raises:
        ToolchainError: naming what is missing, where it was looked for, and what to install.
    """
    tried = []
    for origin, root, nvcc in _candidates():
        if nvcc.is_file() and os.access(nvcc, os.X_OK):
            include, libraries = _wheel_folders(root) if origin == "wheels" else ((), ())
            return Toolchain(nvcc, (cutlass_include(), *include), libraries, origin)
        tried.append(f"{nvcc} ({origin})")
    raise ToolchainError(f"no nvcc found; looked for {', '.join(tried) or 'nothing'}: {_ADVICE}")


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
    for variable in ("CUDA_HOME", "CUDA_PATH"):
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

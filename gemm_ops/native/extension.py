"""Builds and loads the C++ of this package, with the machine's C++ compiler, through the cache of kernels.

    >>> module = load_extension()                      # builds if need be, some 20 s; later at once
    >>> module.counts()
    (0, 0, 0)

It is built for one PyTorch and one Python, whose headers it needs; ``CXX`` names the compiler, ``c++`` and ``g++`` are
looked for.  Layout in the cache folder: ``native/<key>/gemm_ops_native.so``, put there by renaming a finished file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import filelock
import torch

from ..build.cache import cache_folder
from ..errors import BuildError, ToolchainError

_NAME = "gemm_ops_native"
_SOURCES = Path(__file__).resolve().parent / "cpp"
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-plt")


def load_extension() -> ModuleType:
    """The module, built if it is not in the cache yet.

    Raises:
        ToolchainError: if there is no C++ compiler, no header of Python or PyTorch, or no place to write.
        BuildError: if it does not compile, or does not load.
    """
    path = library_path()
    if not path.is_file():
        _build(path)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        path.unlink(missing_ok=True)  # of another machine, or damaged: the next process builds it anew
        raise BuildError(f"{path} does not load: {error}", source=str(_SOURCES / "module.cpp")) from error
    return module


def is_built() -> bool:
    """Whether loading would build nothing."""
    return library_path().is_file()


def library_path() -> Path:
    """Where the built module is, or would be."""
    return cache_folder() / "native" / _key() / f"{_NAME}.so"


@functools.cache
def _key() -> str:
    """What the module depends on: its sources, PyTorch's and Python's binary interfaces, and how it is compiled."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    parts = (torch.__version__, torch.compiled_with_cxx11_abi(), sysconfig.get_config_var("SOABI"), _FLAGS)
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:32]


def compile_command(compiler: str, output: Path) -> list[str]:
    """The compiler's command line.

    Raises:
        ToolchainError: if the headers of Python or PyTorch are not there.
    """
    root = Path(torch.__file__).resolve().parent
    python = Path(sysconfig.get_paths()["include"])
    folders = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include", python]
    for header in (python / "Python.h", root / "include" / "ATen" / "ATen.h"):
        if not header.is_file():
            raise ToolchainError(f"{header} is not there: install the development files of Python (python3-dev)")
    return [
        compiler,
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in folders),
        str(_SOURCES / "module.cpp"),
        "-o",
        str(output),
        f"-L{root / 'lib'}",
        *(f"-l{library}" for library in ("torch", "torch_cpu", "c10", "torch_python")),
    ]


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("c++", "g++"):
        if (found := shutil.which(name)) is not None:
            return found
    missing = f"CXX={wanted} is none" if wanted else "neither c++ nor g++ is there"
    raise ToolchainError(f"no C++ compiler: {missing}")


def _build(path: Path) -> None:
    compiler = _find_compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_suffix(".lock"))
        lock.acquire()
    except OSError as error:
        raise ToolchainError(
            f"the cache {cache_folder()} cannot be written ({error}): point GEMM_OPS_CACHE to a folder that can"
        ) from error
    try:
        if path.is_file():  # another process has built it meanwhile
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            output = Path(folder) / path.name
            command = compile_command(compiler, output)
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode != 0 or not output.is_file():
                raise BuildError(
                    f"{compiler} failed with exit code {done.returncode}\n  command: {shlex.join(command)}\n"
                    + "\n".join(f"  {line}" for line in done.stderr.splitlines()[:20]),
                    command=shlex.join(command),
                    output=done.stderr,
                    source=str(_SOURCES / "module.cpp"),
                )
            os.replace(output, path)
    finally:
        lock.release()

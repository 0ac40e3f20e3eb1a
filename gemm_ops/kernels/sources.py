"""Writing kernel sources, and a digest of what they are written from.

    >>> render("pad_rows.cu.j2", abi=declarations)
    >>> generator_digest("gemm")                         # a part of every GEMM kernel's key
    '5c0f...'

Contract: a kernel's source is made of nothing but its spec and the files named here for its kind, which are the
lowering's own, the device functions, the templates, the argument blocks and the compiler's flags; for GEMMs also
CUTLASS.  Where one of them changes, kernels of that kind are built anew, and no others.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent

_COMMON = ("build/flags.py", "kernels/sources.py", "runtime/abi.py")
#: The files of each kind of kernels, relative to the package, as patterns.
GENERATORS = {
    "gemm": (
        *_COMMON,
        "lowering/*.py",
        "kernels/access.py",
        "kernels/spec.py",
        "cuda/dependent_launch.cuh",
        "cuda/direct_*.cuh",
        "cuda/functors.cuh",
        "cuda/sm90_launch.cuh",
        "cuda/unaligned_*.cuh",
        "templates/host.cu.j2",
        "templates/sm*.cu.j2",
    ),
    "elementwise": (
        *_COMMON,
        "elementwise/*.py",
        "lowering/expressions.py",
        "lowering/functors.py",
        "cuda/element_types.cuh",
        "cuda/elementwise_*.cuh",
        "cuda/functors.cuh",
        "templates/elementwise.cu.j2",
    ),
    "skinny": (
        *_COMMON,
        "elementwise/body.py",
        "kernels/skinny_source.py",
        "kernels/spec.py",
        "lowering/expressions.py",
        "lowering/functors.py",
        "cuda/dependent_launch.cuh",
        "cuda/element_types.cuh",
        "cuda/functors.cuh",
        "cuda/skinny.cuh",
        "templates/skinny.cu.j2",
    ),
    "pad_rows": (*_COMMON, "kernels/pad_spec.py", "templates/pad_rows.cu.j2"),
}


def render(template: str, **values: Any) -> str:
    """A template of ``templates/``, filled in."""
    return str(_templates().get_template(template).render(**values))


@functools.cache
def _templates() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PACKAGE / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def generator_digest(kind: str) -> str:
    """A digest of the code that writes a kind of kernels, and of the CUTLASS version that GEMMs are written for."""
    return _digest(kind, cutlass_version() if kind == "gemm" else "")


@functools.cache
def _digest(kind: str, cutlass: str) -> str:
    digest = hashlib.sha256(cutlass.encode())
    for pattern in GENERATORS[kind]:
        for file in sorted(_PACKAGE.glob(pattern)):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def cutlass_version() -> str:
    """The installed version of ``nvidia-cutlass``, or "none", and where else headers are taken from, if anywhere."""
    try:
        version = importlib.metadata.version("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    override = os.environ.get("CUTLASS_PATH")
    return f"{version} with headers of {override}" if override else version

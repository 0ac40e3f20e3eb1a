"""Bundles of kernels that shell scripts built, read and written entry by entry.

>>> def test_something(packed: Path) -> None:           # fixtures: import them, and forget, by name
...     write(packed, read(packed))
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from build_support import OTHER, SPEC, WRITES, Install

import gemm_ops
from gemm_ops.build import archive, cache
from gemm_ops.build.compiler import build_kernels
from gemm_ops.runtime import loading

MANIFEST = archive.MANIFEST
Entries = dict[str, bytes]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of other tests' folders."""
    monkeypatch.delenv(cache.BUNDLES, raising=False)
    monkeypatch.setattr(cache, "_unusable", set())
    cache._read_bundle_folders.cache_clear()


def read(path: Path) -> Entries:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def write(path: Path, entries: Entries, *, kind: bytes = tarfile.REGTYPE, only: str = "") -> None:
    """Writes a bundle; the entry named ``only`` is of another kind."""
    with tarfile.open(path, "w:xz") as tar:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            if name == only:
                member.type, member.linkname = kind, "/etc/passwd"
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "elsewhere") -> Path:
    """Another machine: a cache of its own, and no compiler."""
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / name))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(loading, "_loaded", {})
    return tmp_path / name


@pytest.fixture
def packed(install: Install, tmp_path: Path) -> Path:
    """A bundle of two kernels, still in the cache."""
    install(WRITES)
    build_kernels([SPEC, OTHER])
    path = tmp_path / "kernels.tar.xz"
    assert gemm_ops.pack_kernels(path) == 2
    return path

"""Bundles of built kernels: packed, unpacked, found by ``GEMM_OPS_BUNDLE``.

The compilers are shell scripts; a bundle of a real kernel is loaded in ``test_gemm_compile.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
import threading
import warnings
from pathlib import Path

import pytest
from build_support import OTHER, REAL_LIBRARY, SPEC, THIRD, WRITES, Install, count, fresh, install
from bundle_support import MANIFEST, elsewhere, forget, packed, read, write

import gemm_ops
from gemm_ops.build import bundle, cache
from gemm_ops.build.cache import cache_folder, find_library
from gemm_ops.build.compiler import build_kernel, build_kernels
from gemm_ops.errors import BuildError, BundleError, ToolchainError
from gemm_ops.kernels import sources
from gemm_ops.runtime import library

__all__ = ["forget", "fresh", "install", "packed"]

# -- packing ----------------------------------------------------------------------------------------------


def test_a_bundle_says_what_is_in_it(packed: Path) -> None:
    entries = read(packed)
    keys = sorted([SPEC.key, OTHER.key])
    names = [f"kernels/{key}/{name}" for key in keys for name in ("build.json", "kernel.cu", "kernel.so")]
    assert list(entries) == [MANIFEST, *names]
    manifest = json.loads(entries[MANIFEST])
    assert manifest["format"] == 1 and manifest["cutlass"] == "4.2.0.0" and manifest["package"]
    assert manifest["generators"] == {kind: sources.generator_digest(kind) for kind in sources.GENERATORS}
    kernel = manifest["kernels"][SPEC.key]
    assert kernel["title"] == SPEC.title and kernel["arch"] == "80" and kernel["nvcc"] == "13.0"
    assert kernel["kind"] == "gemm" and kernel["generator"] == sources.generator_digest("gemm")
    assert entries[f"kernels/{SPEC.key}/kernel.so"] == b"not a library\n"
    assert entries[f"kernels/{SPEC.key}/kernel.cu"].decode() == SPEC.source()


def test_no_folder_of_the_machine_is_in_a_bundle(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(WRITES + 'echo "$source(12): warning: strange, see /opt/some/header.h"\n')
    build_kernel(SPEC)
    gemm_ops.pack_kernels(tmp_path / "kernels.tar.xz")
    entries = read(tmp_path / "kernels.tar.xz")
    record = json.loads(entries[f"kernels/{SPEC.key}/build.json"])
    assert record["output"] == "ptxas info: fine\nkernel.cu(12): warning: strange, see header.h\n"
    assert record["command"][0] == "nvcc" and record["command"][-1] == "kernel.cu" and "-Icuda" in record["command"]
    assert "seconds" not in record
    text = b"".join(content for name, content in entries.items() if not name.endswith(".cu"))
    for folder in (tmp_path, Path(gemm_ops.__file__).parent, Path.home(), Path("/opt")):
        assert f"{folder}/".encode() not in text


def test_packing_twice_gives_the_same_bytes(packed: Path, install: Install, tmp_path: Path) -> None:
    again = tmp_path / "again.tar.xz"
    os.utime(find_library(SPEC) or Path())
    gemm_ops.pack_kernels(again, [OTHER, SPEC, OTHER])
    assert again.read_bytes() == packed.read_bytes()


def test_packing_some(packed: Path, tmp_path: Path) -> None:
    assert gemm_ops.pack_kernels(packed, [OTHER]) == 1
    assert [name for name in read(packed) if name.endswith(".so")] == [f"kernels/{OTHER.key}/kernel.so"]
    with pytest.raises(BundleError, match=rf"1 of 2 kernels are not built, the first {THIRD.title}: gemm_ops.build_k"):
        gemm_ops.pack_kernels(tmp_path / "none.tar.xz", [OTHER, THIRD])
    with pytest.raises(TypeError, match="got NoneType"):
        gemm_ops.pack_kernels(tmp_path / "none.tar.xz", [None])  # type: ignore[list-item]
    with pytest.raises(BundleError, match="nothing to pack: no kernels were given"):
        gemm_ops.pack_kernels(tmp_path / "none.tar.xz", [])
    assert not (tmp_path / "none.tar.xz").exists()


def test_packing_an_empty_cache(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=rf"nothing to pack: {tmp_path}/cache holds no kernels"):
        gemm_ops.pack_kernels(tmp_path / "kernels.tar.xz")


def test_a_bundle_that_cannot_be_written(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no/such.tar.xz cannot be written: No such file or directory"):
        gemm_ops.pack_kernels(tmp_path / "no" / "such.tar.xz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BundleError, match="folder cannot be written: Is a directory"):
        gemm_ops.pack_kernels(tmp_path / "folder")
    assert not list(tmp_path.glob(".gemm-ops-*")), "nothing half-written is left"


def test_a_kernel_that_is_removed_meanwhile(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = packed.read_bytes()
    original = bundle._add

    def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
        original(tar, name, content)
        cache.discard(find_library(OTHER) or Path())

    monkeypatch.setattr(bundle, "_add", add)
    with pytest.raises(BundleError, match=rf"{OTHER.key}/kernel\.\w+ cannot be packed: No such file"):
        gemm_ops.pack_kernels(packed)
    assert packed.read_bytes() == before


def test_kernels_of_before_records_said_their_generator(packed: Path, tmp_path: Path) -> None:
    for record in (find_library(SPEC) or Path()).parent, (find_library(OTHER) or Path()).parent:
        path = record / "build.json"
        path.write_text(json.dumps({"title": json.loads(path.read_text())["title"]}))
    gemm_ops.pack_kernels(packed)
    kernel = json.loads(read(packed)[MANIFEST])["kernels"][SPEC.key]
    assert kernel["arch"] == "80" and kernel["generator"] == ""
    with pytest.warns(RuntimeWarning, match="2 of the 2 kernels of the bundle were made by another generator"):
        assert gemm_ops.unpack_kernels(packed, into=tmp_path / "into") == 2


# -- unpacking --------------------------------------------------------------------------------------------


def test_unpacking(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = (find_library(SPEC) or Path()).read_bytes()
    root = elsewhere(monkeypatch, tmp_path)
    with pytest.raises(ToolchainError):
        build_kernel(SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gemm_ops.unpack_kernels(packed) == 2
    path = build_kernel(SPEC)
    assert path == root / "kernels" / SPEC.key / "kernel.so" and path.read_bytes() == before
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["build.json", "kernel.cu", "kernel.so"]
    assert path.parent.stat().st_mode & 0o777 == 0o755
    assert not list((root / "building").iterdir())
    # again: all is there; and what was removed comes back
    assert gemm_ops.unpack_kernels(str(packed)) == 0
    cache.discard(path)
    assert find_library(SPEC) is None
    assert gemm_ops.unpack_kernels(packed) == 1
    # what was unpacked is packed as it came
    again = tmp_path / "again.tar.xz"
    gemm_ops.pack_kernels(again)
    assert again.read_bytes() == packed.read_bytes()


def test_kernels_that_are_there_are_left_alone(packed: Path) -> None:
    path = find_library(SPEC) or Path()
    path.write_text("mine")
    assert gemm_ops.unpack_kernels(packed) == 0 and path.read_text() == "mine"


def test_unpacking_in_many_threads(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = elsewhere(monkeypatch, tmp_path)
    added: list[int] = []
    threads = [threading.Thread(target=lambda: added.append(gemm_ops.unpack_kernels(packed))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(added) == 6 and sum(added) == 2
    assert len(list((root / "kernels").iterdir())) == 2 and not list((root / "building").iterdir())


def test_kernels_of_another_generator(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere(monkeypatch, tmp_path)
    entries = read(packed)
    manifest = json.loads(entries[MANIFEST])
    manifest["kernels"][OTHER.key]["generator"] = "another"
    manifest["package"], manifest["cutlass"] = "0.0.9", "4.1.0.0"
    write(packed, {**entries, MANIFEST: json.dumps(manifest).encode()})
    expected = (
        r"1 of the 2 kernels .* another generator .* \(it was packed by version 0.0.9 with CUTLASS 4.1.0.0; this is "
    )
    with pytest.warns(RuntimeWarning, match=expected):
        assert gemm_ops.unpack_kernels(packed) == 2


def test_a_folder_that_cannot_be_written(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match=rf"{tmp_path}/file.*: Not a directory"):
        gemm_ops.unpack_kernels(packed, into=tmp_path / "file" / "cache")


# -- GEMM_OPS_BUNDLE --------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_unpacked_folders_are_searched_after_the_cache(
    packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    gemm_ops.unpack_kernels(packed, into=second)
    gemm_ops.pack_kernels(packed, [OTHER])
    with tarfile.open(packed) as tar:  # as well
        tar.extractall(first, filter="data")
    root = elsewhere(monkeypatch, tmp_path)
    monkeypatch.setenv("GEMM_OPS_BUNDLE", f"{first}{os.pathsep}{os.pathsep}{second}")
    before = everything(first) | everything(second)
    assert build_kernel(SPEC) == second / "kernels" / SPEC.key / "kernel.so"
    assert build_kernel(OTHER) == first / "kernels" / OTHER.key / "kernel.so"
    assert find_library(THIRD) is None
    assert not root.exists() and everything(first) | everything(second) == before, "nothing is written"
    # the cache comes first
    gemm_ops.unpack_kernels(packed)
    assert build_kernel(OTHER) == root / "kernels" / OTHER.key / "kernel.so"
    # and what is in a bundle only can be packed by name
    assert gemm_ops.pack_kernels(tmp_path / "both.tar.xz", [SPEC, OTHER]) == 2


def test_folders_without_kernels_are_named_once(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        packed: "is a file: unpack it",
        tmp_path / "no": "is not there",
        tmp_path / "empty": "has no folder `kernels`",
    }
    for path, expected in cases.items():
        monkeypatch.setenv("GEMM_OPS_BUNDLE", str(path))
        with pytest.warns(RuntimeWarning, match=f"GEMM_OPS_BUNDLE: {path} {expected}"):
            assert find_library(THIRD) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert find_library(THIRD) is None


def test_a_bundles_library_that_does_not_load_is_built_here(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stays where it is, and the next folder is tried before."""
    install(WRITES)
    build_kernel(SPEC)
    gemm_ops.pack_kernels(tmp_path / "kernels.tar.xz")
    bad, good = tmp_path / "bad", tmp_path / "good"
    gemm_ops.unpack_kernels(tmp_path / "kernels.tar.xz", into=bad)
    runs = install(REAL_LIBRARY)
    (good / "kernels").mkdir(parents=True)
    monkeypatch.setenv("GEMM_OPS_BUNDLE", f"{bad}{os.pathsep}{good}")
    runs.write_text("")
    # in the cache is one that does not load, either
    path = library.load_kernel(SPEC).path
    assert path == cache_folder() / "kernels" / SPEC.key / "kernel.so" and count(runs) == 1
    assert (bad / "kernels" / SPEC.key / "kernel.so").read_text() == "not a library\n"
    gemm_ops.pack_kernels(tmp_path / "kernels.tar.xz")
    gemm_ops.unpack_kernels(tmp_path / "kernels.tar.xz", into=good)
    elsewhere(monkeypatch, tmp_path)
    assert library.load_kernel(SPEC).path == good / "kernels" / SPEC.key / "kernel.so"


def test_a_bundles_library_that_does_not_load_and_no_compiler(
    packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gemm_ops.unpack_kernels(packed, into=tmp_path / "bad")
    elsewhere(monkeypatch, tmp_path)
    monkeypatch.setenv("GEMM_OPS_BUNDLE", str(tmp_path / "bad"))
    for _ in range(2):
        with pytest.raises(ToolchainError, match="no usable nvcc found"):
            library.load_kernel(SPEC)


_LOADS = """
import sys
from build_support import SPEC
from gemm_ops.runtime.library import GemmArguments, load_kernel
kernel = load_kernel(SPEC)
print(kernel.workspace_size(GemmArguments()), kernel.path)
assert "cutlass_cppgen" not in sys.modules
"""


@pytest.mark.parametrize("how", ["merged", "named"])
def test_a_bundle_loads_where_there_is_no_compiler(
    how: str, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(REAL_LIBRARY)
    build_kernel(SPEC)
    bundle_file, folder = tmp_path / "kernels.tar.xz", tmp_path / "unpacked"
    gemm_ops.pack_kernels(bundle_file)
    root = elsewhere(monkeypatch, tmp_path)
    if how == "merged":
        gemm_ops.unpack_kernels(bundle_file)
    else:
        gemm_ops.unpack_kernels(bundle_file, into=folder)
        monkeypatch.setenv("GEMM_OPS_BUNDLE", str(folder))
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _LOADS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "PATH": os.path.dirname(sys.executable)},
    )
    assert done.returncode == 0, done.stderr
    expected = (root if how == "merged" else folder) / "kernels" / SPEC.key / "kernel.so"
    assert done.stdout.split() == ["42", str(expected)]


# -- the build's side -------------------------------------------------------------------------------------


def test_build_kernels_names_those_that_failed(install: Install) -> None:
    install('if grep -q "fn::exp" "$source"; then echo "error: curved"; exit 1; fi\n' + WRITES)
    failed: list[str] = []
    broken = dataclasses.replace(THIRD, layout_a="diagonal")  # nothing is written for that
    with pytest.raises(BuildError, match="2 of 3 kernels could not be built"):
        build_kernels([OTHER, broken, SPEC], on_failed=lambda spec, error: failed.append(f"{spec.key} {error}"))
    assert len(failed) == 2 and find_library(SPEC) is not None
    assert any(text.startswith(f"{broken.key} no source could be written for sm80_") for text in failed)
    assert any(text.startswith(f"{OTHER.key} nvcc failed") for text in failed)


def test_a_library_of_no_bytes_is_none(install: Install, tmp_path: Path) -> None:
    """What a full disk leaves is built anew, and not packed."""
    runs = install(WRITES)
    build_kernel(SPEC, quiet=True).write_bytes(b"")
    assert find_library(SPEC) is None
    with pytest.raises(BundleError, match=r"not built|nothing to pack"):
        gemm_ops.pack_kernels(tmp_path / "k.tar.xz", [SPEC])
    assert build_kernel(SPEC, quiet=True).stat().st_size > 0 and count(runs) == 2


def test_a_kernel_without_its_record_is_not_packed(install: Install, tmp_path: Path) -> None:
    install(WRITES)
    (build_kernel(SPEC, quiet=True).parent / "build.json").unlink()
    with pytest.raises(BundleError, match=r"build\.json, which says what the kernel is, cannot be read"):
        gemm_ops.pack_kernels(tmp_path / "k.tar.xz")
    with pytest.raises(BundleError, match="the name of the file is empty"):
        gemm_ops.pack_kernels("")

"""Bundles that are refused: not as their manifest says, of links, damaged, or not to be read."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build_support import SPEC, fresh, install
from bundle_support import MANIFEST, Entries, elsewhere, forget, packed, read, write

import gemm_ops
from gemm_ops.errors import BundleError

__all__ = ["forget", "fresh", "install", "packed"]


def _manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Entries], Entries]:
    def changed(entries: Entries) -> Entries:
        manifest = json.loads(entries[MANIFEST])
        change(manifest)
        return {**entries, MANIFEST: json.dumps(manifest).encode()}

    return changed


LIBRARY = f"kernels/{SPEC.key}/kernel.so"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda e: {**e, LIBRARY: b"not a Library\n"}, f"{LIBRARY} is not the file that its manifest says .sha256"),
        (lambda e: {**e, LIBRARY: b"longer"}, f"{LIBRARY} has 6 bytes, and its manifest says 14"),
        (lambda e: {n: c for n, c in e.items() if n != LIBRARY}, f"is damaged: {LIBRARY} is not in it, and 0 more"),
        (lambda e: {**e, "kernels/../../evil.so": b""}, "the path 'kernels/../../evil.so' leads out of the bundle"),
        (lambda e: {**e, "/tmp/evil.so": b""}, "the path '/tmp/evil.so' leads out of the bundle"),
        (lambda e: {**e, "extra": b""}, "'extra' is there twice, or is not in its manifest"),
        (lambda e: {n: c for n, c in e.items() if n != MANIFEST}, "no bundle of kernels: it does not begin with mani"),
        (lambda e: {}, "is no bundle of kernels"),
        (lambda e: {**e, MANIFEST: b"{"}, "manifest.json is not JSON"),
        (lambda e: {**e, MANIFEST: b"\xff"}, "manifest.json is not JSON"),
        (lambda e: {**e, MANIFEST: b"[" * 100_000}, "manifest.json is not JSON"),
        (lambda e: {**e, MANIFEST: b"[]"}, "is of format None; this version of the package reads format 1"),
        (_manifest(lambda m: m.update(format=2)), "is of format 2; this version of the package reads format 1"),
        (_manifest(lambda m: m.update(format=True)), "is of format True"),
        (_manifest(lambda m: m.update(platform="linux-aarch64")), "is for linux-aarch64, and this machine is "),
        (_manifest(lambda m: m.pop("kernels")), "'kernels' is missing or no object"),
        (_manifest(lambda m: m["kernels"].update({"../x": {}})), "'../x' is no key of a kernel"),
        (_manifest(lambda m: m["kernels"].update({"0" * 32: {}})), "'files' is missing"),
        (_manifest(lambda m: m["kernels"][SPEC.key]["files"].update({"../x": {}})), "'../x' is none of build.json, "),
        (_manifest(lambda m: m["kernels"][SPEC.key]["files"].pop("kernel.so")), "has no kernel.so"),
        (_manifest(lambda m: m["kernels"][SPEC.key]["files"]["kernel.so"].update(bytes=-1)), "no length or no digest"),
        (_manifest(lambda m: m["kernels"][SPEC.key].update(title=3)), "'title' is missing or no text"),
        (_manifest(lambda m: m["generators"].update(gemm=None)), "'gemm' is missing or no text"),
    ],
)
def test_what_is_not_as_the_manifest_says_is_refused(
    change: Callable[[Entries], Entries],
    expected: str,
    packed: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    root = elsewhere(monkeypatch, tmp_path)
    write(packed, change(read(packed)))
    with pytest.raises(BundleError) as caught:
        gemm_ops.unpack_kernels(packed)
    assert expected.replace(" .sha256", " (sha256") in str(caught.value)
    assert str(packed) in str(caught.value) and "\n" not in str(caught.value)
    assert not (root / "kernels").exists() and not list(root.glob("building/*")), "nothing is merged"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(
    kind: bytes, packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = elsewhere(monkeypatch, tmp_path)
    entries = read(packed)
    write(packed, entries, kind=kind, only=LIBRARY)
    with pytest.raises(BundleError, match="is a link, a folder or a device, not a file"):
        gemm_ops.unpack_kernels(packed)
    write(packed, entries, kind=kind, only=MANIFEST)
    with pytest.raises(BundleError, match=r"does not begin with manifest\.json"):
        gemm_ops.unpack_kernels(packed)
    assert not (root / "kernels").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"path": "../../evil.so"},
        {"size": "-5"},
        {"size": "99999999999999"},
        {"GNU.sparse.map": "0,5"},
        {"GNU.sparse.size": "10", "GNU.sparse.map": "a,b"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x", "GNU.sparse.realsize": "9"},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", [MANIFEST, LIBRARY])
def test_extended_headers_change_nothing(
    headers: dict[str, str], where: str, packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = elsewhere(monkeypatch, tmp_path)
    entries = read(packed)
    with tarfile.open(packed, "w:xz", format=tarfile.PAX_FORMAT) as tar:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.pax_headers = headers if name == where else {}
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(BundleError):
        gemm_ops.unpack_kernels(packed)
    assert not (root / "kernels").exists() and not list(root.glob("building/*"))


def test_an_entry_that_comes_twice_is_refused(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere(monkeypatch, tmp_path)
    entries = read(packed)
    with tarfile.open(packed, "w:xz") as tar:
        for name, content in [*entries.items(), (LIBRARY, b"another\n")]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(BundleError, match="is there twice"):
        gemm_ops.unpack_kernels(packed)


def test_damaged_archives_are_refused(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cut off anywhere, or with any byte changed."""
    root = elsewhere(monkeypatch, tmp_path)
    whole = packed.read_bytes()
    damaged = [whole[:length] for length in (*range(0, len(whole), len(whole) // 40), len(whole) - 1)]
    for place in range(0, len(whole), len(whole) // 40):
        damaged.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    damaged += [b"not an archive at all", lzma.compress(b"nor this"), lzma.compress(bytes(4096)), whole + b"more"]
    damaged.append(lzma.compress(lzma.decompress(whole) + bytes(2**21)))
    tar = lzma.decompress(whole)
    damaged += [lzma.compress(tar[:length]) for length in (100, 512, 1000, len(tar) // 2)]
    for content in damaged:
        packed.write_bytes(content)
        with pytest.raises(BundleError) as caught:
            gemm_ops.unpack_kernels(packed)
        assert str(packed) in str(caught.value)
    assert not (root / "kernels").exists() and not list(root.glob("building/*"))


def test_a_bundle_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no\.tar\.xz: No such file or directory"):
        gemm_ops.unpack_kernels(tmp_path / "no.tar.xz")
    with pytest.raises(BundleError, match="Is a directory"):
        gemm_ops.unpack_kernels(tmp_path)

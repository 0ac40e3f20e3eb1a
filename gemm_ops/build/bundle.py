"""Bundles: built kernels in one file, for machines that cannot build them or should not have to.

    >>> pack_kernels("kernels.tar.xz")                      # all of this machine's cache
    12
    >>> unpack_kernels("kernels.tar.xz")                    # elsewhere: into that machine's cache
    12

A kernel's key says all that its source is generated from, so a kernel of another version of the package is in nobody's
way: it is never asked for.  It does not say the compiler, nor the machine; what does not load is built anew, where that
can be.

Contract
--------
* A bundle is made of its kernels alone: the same files give the same bytes (with the same liblzma), and nothing that
  is written here has a path of the machine.  In a library nvcc itself notes the folder of its toolkit.
* Nothing is merged before all of the bundle was found to be what its manifest says.  Then each kernel appears as one
  that was built does: under its lock, by renaming a finished folder.
* What is in a bundle is code that will run: unpack what comes from where you would install a package from.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import re
import secrets
import shutil
import sysconfig
import tarfile
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BundleError
from ..kernels.sources import GENERATORS, cutlass_version, generator_digest
from .archive import FILES, MANIFEST, Archive, Manifest, PackedFile, PackedKernel, open_archive
from .buildable import Buildable
from .cache import LIBRARY, RECORD, cache_folder, find_library, library_in, open_slot

_DISTRIBUTION = "gemm-epilogue-fusion"


def pack_kernels(path: str | os.PathLike[str], specs: Iterable[Buildable] | None = None) -> int:
    """Writes built kernels into one file, and gives their number.

        >>> pack_kernels("kernels.tar.xz", [gemm_ops.backend_for(x, weight.t(), "gelu").spec])
        1

    Args:
        path: of the bundle, a .tar.xz; a file that is there is replaced when the new one is whole.
        specs: which kernels; None for all of the cache.

    Raises:
        BundleError: if there are none, one of ``specs`` is not built, or the file cannot be written.
    """
    import lzma  # a Python that was built without it can do all else

    path = Path(path)
    if not path.name:
        raise BundleError("pack_kernels: the name of the file is empty")
    folders = _cached() if specs is None else _chosen(specs)
    if not folders:
        raise BundleError(f"there is nothing to pack: {cache_folder()} holds no kernels")
    kernels: dict[str, PackedKernel] = {}
    records: dict[str, bytes] = {}
    for key, folder in sorted(folders.items()):
        with _vanishing(folder):
            kernels[key], records[key] = _describe(folder)
    manifest = Manifest(
        package=_package_version(),
        cutlass=_without_paths(cutlass_version()),
        platform=sysconfig.get_platform(),
        generators={kind: generator_digest(kind) for kind in sorted(GENERATORS)},
        kernels=kernels,
    )
    try:
        with (
            _replacing(path) as file,
            lzma.open(file, "wb") as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            _add(tar, MANIFEST, manifest.to_json().encode())
            for key, kernel in kernels.items():
                for name, packed in kernel.files.items():
                    with _vanishing(folders[key]):
                        content = records[key] if name == RECORD else (folders[key] / name).read_bytes()
                    if _facts(content) != packed:
                        raise BundleError(f"{folders[key] / name} changed while it was packed: try again")
                    _add(tar, f"kernels/{key}/{name}", content)
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror or error}") from error
    return len(kernels)


def unpack_kernels(path: str | os.PathLike[str], *, into: str | os.PathLike[str] | None = None) -> int:
    """Merges the kernels of a bundle into this machine's cache, and gives the number of those that were not there yet.

    Warns of how many were made by another generator (of another version of this package or of CUTLASS), if any were:
    those are never asked for.

    Args:
        path: of the bundle.
        into: another folder than the cache, such as one that ``GEMM_OPS_BUNDLE`` will name; made if need be.

    Raises:
        BundleError: if the file is no bundle, is damaged, of another format or for another platform, or holds what its
            manifest does not say.  Nothing is merged then.
        ToolchainError: if the folder cannot be written.
    """
    merged = merge(path, into=into)
    if merged.foreign:
        warnings.warn(merged.foreign_note, RuntimeWarning, stacklevel=2)
    return len(merged.added)


@dataclass(frozen=True)
class Merged:
    """What came of a bundle.

    Attributes:
        manifest: the bundle's.
        added: the keys of the kernels that are new here.
        foreign: the keys of those, here before or not, that another generator made.
    """

    manifest: Manifest
    added: tuple[str, ...]
    foreign: tuple[str, ...]

    @property
    def foreign_note(self) -> str:
        """What there is to say of kernels of another generator."""
        packed = f"{self.manifest.package} with CUTLASS {self.manifest.cutlass}"
        here = f"{_package_version()} with CUTLASS {_without_paths(cutlass_version())}"
        return (
            f"{len(self.foreign)} of the {len(self.manifest.kernels)} kernels of the bundle were made by another "
            f"generator and will never be asked for (it was packed by version {packed}; this is {here})"
        )


def merge(path: str | os.PathLike[str], *, into: str | os.PathLike[str] | None = None) -> Merged:
    """As :func:`unpack_kernels`, which warns; here the result says."""
    root = cache_folder() if into is None else Path(into)
    with open_archive(Path(path)) as archive:
        manifest = archive.manifest
        if manifest.platform != sysconfig.get_platform():
            raise BundleError(f"{path} is for {manifest.platform:.40}, and this machine is {sysconfig.get_platform()}")
        with _staging(root) as stage:
            _extract(archive, root, stage)
            added = [key for key in manifest.kernels if (stage / key).is_dir() and _publish(root, key, stage / key)]
    here = {kind: generator_digest(kind) for kind in GENERATORS}
    foreign = [key for key, kernel in manifest.kernels.items() if here.get(kernel.kind) != kernel.generator]
    return Merged(manifest, tuple(added), tuple(foreign))


def _extract(archive: Archive, root: Path, stage: Path) -> None:
    """Writes what is not there yet into ``<stage>/<key>/``; checks all of it."""
    there = {key for key in archive.manifest.kernels if library_in(root, key) is not None}
    for key, name, content in archive.files():
        if key in there:
            for _ in content:
                pass
            continue
        (stage / key).mkdir(exist_ok=True)
        with open(stage / key / name, "wb") as file:
            file.writelines(content)


def _publish(root: Path, key: str, folder: Path) -> bool:
    """Puts a kernel into place unless another process has meanwhile; says whether it did."""
    with open_slot(root, key, lambda: library_in(root, key) is not None) as slot:
        if slot is None:
            return False
        for file in folder.iterdir():
            os.rename(file, slot.folder / file.name)
        slot.publish()
        return True


@contextlib.contextmanager
def _staging(root: Path) -> Iterator[Path]:
    """A folder on the cache's own disk, so that what is in it can be renamed into place; goes with the context.

    What a process that dies leaves in ``building/`` a later build sweeps.
    """
    building = root / "building"
    building.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bundle-", dir=building))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cached() -> dict[str, Path]:
    """Key -> folder of all kernels in the cache."""
    folder = cache_folder() / "kernels"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {entry.name: entry for entry in found if (entry / LIBRARY).is_file()}


def _chosen(specs: Iterable[Buildable]) -> dict[str, Path]:
    """Key -> folder of some kernels, which may be in an unpacked bundle."""
    folders: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for spec in specs:
        if not isinstance(spec, Buildable):
            raise TypeError(f"expected kernel specs, such as backend_for(...).spec, got {type(spec).__name__}")
        library = find_library(spec)
        if library is None:
            missing[spec.key] = spec.title
        else:
            folders[spec.key] = library.parent
    if missing:
        first = next(iter(missing.values()))
        raise BundleError(
            f"{len(missing)} of {len(missing) + len(folders)} kernels are not built, the first {first}: "
            "gemm_ops.build_kernels(specs) builds them"
        )
    if not folders:
        raise BundleError("there is nothing to pack: no kernels were given")
    return folders


def _describe(folder: Path) -> tuple[PackedKernel, bytes]:
    """A kernel's entry in the manifest, and its build record as it is packed."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise BundleError(
            f"{folder / RECORD}, which says what the kernel is, cannot be read ({error}): remove the folder, and the "
            "kernel is built anew"
        ) from error
    record = _clean_record(record if isinstance(record, dict) else {})
    contents = {RECORD: (json.dumps(record, indent=1) + "\n").encode()}
    for name in FILES:
        # a source may be missing, as when somebody removed it by hand; a library may not
        if name != RECORD and (name == LIBRARY or (folder / name).is_file()):
            contents[name] = (folder / name).read_bytes()
    title = str(record.get("title", ""))
    arch = record.get("arch") or title.rpartition("sm_")[2]
    texts = {name: str(record.get(name, "")) for name in ("kind", "generator", "nvcc")}
    files = {name: _facts(contents[name]) for name in FILES if name in contents}
    return PackedKernel(title=title, arch=str(arch), **texts, files=files), contents[RECORD]


def _clean_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A build record without what is this machine's: folders, and how long it took."""
    kept = {name: value for name, value in record.items() if name != "seconds"}
    command = [str(part) for part in kept.get("command", [])]
    folders = [re.sub(r"^-[IL]", "", part) for part in command]
    folders += [os.path.dirname(folder) for folder in folders]
    # by name first: a folder's name may have characters that no pattern tells from the text around it
    known = sorted(
        (folder for folder in set(folders) if len(folder) > 1 and os.path.isabs(folder)), key=len, reverse=True
    )

    def clean(text: str) -> str:
        for folder in known:
            text = text.replace(folder, os.path.basename(folder))
        return _without_paths(text)

    if command:
        kept["command"] = [clean(part) for part in command]
    for name in ("output", "cutlass"):
        if name in kept:
            kept[name] = clean(str(kept[name]))
    return kept


def _without_paths(text: str) -> str:
    """The text with no more than the last name of each absolute path."""
    return re.sub(r"(?<![\w./~-])/(?:[^\s/:;,'\"()<>|]+/)*(?=[^\s/])", "", text)


def _facts(content: bytes) -> PackedFile:
    return PackedFile(len(content), hashlib.sha256(content).hexdigest())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file of nobody's, of no time."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o755 if name.endswith(LIBRARY) else 0o644
    tar.addfile(member, io.BytesIO(content))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """A new file in the place of what is at a path, once it is whole."""
    temporary = path.with_name(f".gemm-ops-{secrets.token_hex(6)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _vanishing(folder: Path) -> Iterator[None]:
    """Says it where a kernel is removed from the cache while it is packed."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"{error.filename or folder} cannot be packed: {error.strerror or error}") from error


def _package_version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"

"""The file that a bundle of built kernels is: what is in it, and how it is read without trusting it.

    >>> with open_archive(path) as archive:
    ...     for key, name, content in archive.files():
    ...         ...  # chunks of bytes, which are those of the manifest when the last has come

A tar archive, compressed with xz; ``manifest.json`` comes first, then the files ``kernels/<key>/<name>`` that it lists,
and nothing else::

    {"format": 1, "package": "0.1.0", "cutlass": "4.2.0.0", "platform": "linux-x86_64",
     "generators": {"gemm": "5c0f..."},
     "kernels": {"<key>": {"title": "...", "arch": "90a", "kind": "gemm", "generator": "5c0f...", "nvcc": "13.0",
                           "files": {"kernel.so": {"bytes": 1059936, "sha256": "..."}}}}}

Contract: whatever the bytes of the file are, reading them raises nothing but :class:`BundleError`, and follows no path
and no link.  That the kernels are what they say is a question of whom a bundle is from: as with any library, whoever
wrote it decides what it does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ..errors import BundleError
from .cache import LIBRARY, RECORD, SOURCE

FORMAT = 1
MANIFEST = "manifest.json"
#: The files of a kernel, in the order in which they are packed.
FILES = (RECORD, SOURCE, LIBRARY)

_KEY = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_MANIFEST = 64 * 2**20
_MOST_PADDING = 2**20  # after a tar archive's end comes the rest of a record of zeros
_CHUNK = 2**20


@dataclass(frozen=True)
class PackedFile:
    """A file's length, and its digest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class PackedKernel:
    """What a manifest says of a kernel.

    Attributes:
        title: one line that says what it is.
        arch: the target, as nvcc writes it.
        kind: which generator wrote its source.
        generator: that one's digest; "" where nobody wrote it down.
        nvcc: the compiler's release.
        files: by name; the library is always there.
    """

    title: str
    arch: str
    kind: str
    generator: str
    nvcc: str
    files: Mapping[str, PackedFile]


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself.

    Attributes:
        package: the version of this package that packed it.
        cutlass: the version of CUTLASS there.
        platform: of the machine, such as "linux-x86_64".
        generators: the digests of the package's generators by kind.
        kernels: by key.
    """

    package: str
    cutlass: str
    platform: str
    generators: Mapping[str, str]
    kernels: Mapping[str, PackedKernel]

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        kernels = {
            key: {
                **{name: getattr(kernel, name) for name in _TEXTS},
                "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in kernel.files.items()},
            }
            for key, kernel in self.kernels.items()
        }
        data = {
            "format": FORMAT,
            "package": self.package,
            "cutlass": self.cutlass,
            "platform": self.platform,
            "generators": dict(self.generators),
            "kernels": kernels,
        }
        return json.dumps(data, indent=1) + "\n"


_TEXTS = ("title", "arch", "kind", "generator", "nvcc")


class Archive:
    """A bundle that is open, its manifest read."""

    def __init__(self, path: Path, tar: tarfile.TarFile, stream: IO[bytes]) -> None:
        self.path = path
        self._tar = tar
        self._stream = stream
        member = tar.next()
        if member is None or member.name != MANIFEST or not _is_plain(member):
            raise BundleError(f"{path} is no bundle of kernels: it does not begin with {MANIFEST}")
        if member.size > _MOST_MANIFEST:
            raise BundleError(f"{path}: its {MANIFEST} has {member.size} bytes, and at most {_MOST_MANIFEST} are read")
        self.manifest = _read_manifest(b"".join(self._chunks(member)), f"{path}: {MANIFEST}")

    def files(self) -> Iterator[tuple[str, str, Iterator[bytes]]]:
        """Key, name and content of every file, each content to be read to its end before the next is asked for.

        Raises:
            BundleError: while they are read, if a file is not what the manifest says, is not in it, or is missing.
        """
        left = {
            f"kernels/{key}/{name}": (key, name)
            for key, kernel in self.manifest.kernels.items()
            for name in kernel.files
        }
        while (member := self._tar.next()) is not None:
            name = member.name
            if name not in left:
                raise BundleError(f"{self.path}: {_fault_of(name)}")
            if not _is_plain(member):
                raise BundleError(f"{self.path}: {name} is a link, a folder or a device, not a file")
            key, file = left.pop(name)
            yield key, file, self._checked(member, self.manifest.kernels[key].files[file])
        if left:
            raise BundleError(f"{self.path} is damaged: {next(iter(left))} is not in it, and {len(left) - 1} more")
        if len(self._stream.read(_MOST_PADDING)) == _MOST_PADDING:  # reads to the end, where xz has its checksum
            raise BundleError(f"{self.path} is damaged: it goes on after its end")

    def _checked(self, member: tarfile.TarInfo, expected: PackedFile) -> Iterator[bytes]:
        if member.size != expected.bytes:
            raise BundleError(
                f"{self.path}: {member.name} has {member.size} bytes, and its manifest says {expected.bytes}"
            )
        digest = hashlib.sha256()
        for chunk in self._chunks(member):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != expected.sha256:
            raise BundleError(f"{self.path}: {member.name} is not the file that its manifest says (sha256)")

    def _chunks(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        content = self._tar.extractfile(member)
        assert content is not None, "a plain file has content"
        while chunk := content.read(_CHUNK):
            yield chunk


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Opens a bundle and reads its manifest.

    Raises:
        BundleError: if it is none, cannot be read, is damaged, or of another format.  So does what is done within.
    """
    import lzma  # a Python that was built without it can do all else

    try:
        with lzma.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            yield Archive(path, tar, stream)
    except lzma.LZMAError as error:
        raise BundleError(f"{path} is no .tar.xz, or damaged: {error}") from error
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:  # the last two of numbers in headers
        raise BundleError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise BundleError(f"{error.filename or path}: {error.strerror or error}") from error


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None


def _fault_of(name: str) -> str:
    """Why an entry has no business in a bundle."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return f"the path {name!r} leads out of the bundle"
    return f"{name!r} is there twice, or is not in its manifest"


def _read_manifest(content: bytes, where: str) -> Manifest:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is not JSON: {error}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT or isinstance(version, bool):
        raise BundleError(f"{where} is of format {version!r:.40}; this version of the package reads format {FORMAT}")
    kernels = {}
    for key, entry in _mapping(data, "kernels", where).items():
        if not _KEY.fullmatch(key):
            raise BundleError(f"{where}: {key!r:.80} is no key of a kernel")
        kernels[key] = _read_kernel(entry, f"{where}: kernel {key}")
    generators = _mapping(data, "generators", where)
    return Manifest(
        **{name: _text(data, name, where) for name in ("package", "cutlass", "platform")},
        generators={kind: _text(generators, kind, where) for kind in generators},
        kernels=kernels,
    )


def _read_kernel(entry: Any, where: str) -> PackedKernel:
    files = {}
    listed = _mapping(entry, "files", where)
    for name in listed:
        if name not in FILES:
            raise BundleError(f"{where}: {name!r:.80} is none of {', '.join(FILES)}")
        size, digest = _mapping(listed, name, where).get("bytes"), _text(listed[name], "sha256", where)
        if type(size) is not int or size < 0 or not _SHA256.fullmatch(digest):
            raise BundleError(f"{where}: {name} has no length or no digest")
        files[name] = PackedFile(size, digest)
    if LIBRARY not in files:
        raise BundleError(f"{where} has no {LIBRARY}")
    return PackedKernel(**{name: _text(entry, name, where) for name in _TEXTS}, files=files)


def _mapping(data: Any, name: str, where: str) -> dict[str, Any]:
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise BundleError(f"{where}: {name!r} is missing or no object")
    return found


def _text(data: Any, name: str, where: str) -> str:
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, str):
        raise BundleError(f"{where}: {name!r} is missing or no text")
    return found

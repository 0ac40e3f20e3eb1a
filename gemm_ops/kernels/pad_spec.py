"""The kernel that copies a matrix into padded rows, as the build knows it.

>>> build_kernel(PadSpec("90"))
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from ..runtime.abi import pad_declarations
from .sources import generator_digest, render


@dataclass(frozen=True)
class PadSpec:
    """The kernel for one compute capability, such as "90"; elements of two or four bytes."""

    arch: str

    @property
    def kind(self) -> str:
        """Which generator writes its source."""
        return "pad_rows"

    @functools.cached_property
    def key(self) -> str:
        """A hexadecimal digest that names the kernel on disk."""
        return hashlib.sha256(repr(("pad_rows", self.arch, generator_digest(self.kind))).encode()).hexdigest()[:32]

    @property
    def title(self) -> str:
        """One line that says what the kernel is."""
        return f"copy into padded rows, sm_{self.arch}"

    def source(self) -> str:
        """The kernel's C++ source."""
        return render("pad_rows.cu.j2", abi=pad_declarations())

"""What the build needs to know of a kernel, whatever it computes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Buildable(Protocol):
    """A kernel that can be built: an identity, a source and a target.

    Attributes:
        key: names the kernel on disk; equal keys mean equal kernels.
        title: one line that says what it is.
        arch: the target's compute capability as nvcc writes it, such as "90a".
        kind: which generator writes its source, a key of :data:`gemm_ops.kernels.sources.GENERATORS`.
    """

    @property
    def key(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def arch(self) -> str: ...

    @property
    def kind(self) -> str: ...

    def source(self) -> str:
        """The C++ source."""
        ...

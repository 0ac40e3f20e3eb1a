"""The leading dimensions of a call as a kernel takes them: one M, one batch, and loops around launches.

    >>> dims = collapse((8, 128, 64), [x.lead, out.lead], shared=[weight.lead])
    >>> dims.m.extent, dims.batch.extent, dims.loops            # a weight that all rows share: one long M
    (65536, 1, ())

Two neighbouring dimensions are one where every tensor goes through them in even steps.  The last one is M, unless
a tensor that has no M, such as B, has a stride there.  Of the others the longest is the kernel's batch; a loop of
launches goes over the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .views import INT_MAX


@dataclass(frozen=True)
class Dim:
    """An extent, and the stride of each tensor along it."""

    extent: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Dims:
    """The dimensions after merging; strides in the order of the tensors: those with an M, then those without."""

    m: Dim
    batch: Dim
    loops: tuple[Dim, ...]

    @property
    def count(self) -> int:
        """How many dimensions there are."""
        return len(self.loops) + (self.batch.extent > 1) + (self.m.extent > 1)


def dims_of(extents: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Dim]:
    """The dimensions that say something: not those of extent 1, whose strides mean nothing.

    Args:
        strides: of each tensor.
    """
    return [Dim(extent, tuple(each[i] for each in strides)) for i, extent in enumerate(extents) if extent > 1]


def merge(dims: Sequence[Dim], *, most: int | None = None) -> list[Dim]:
    """The dimensions with neighbours merged where every tensor goes through both in even steps.

    Args:
        most: the largest extent that may come of it; None: any.
    """
    merged: list[Dim] = []
    for dim in dims:
        outer = merged[-1] if merged else None
        even = outer is not None and all(o == dim.extent * i for o, i in zip(outer.strides, dim.strides, strict=True))
        if outer is not None and even and (most is None or outer.extent * dim.extent <= most):
            merged[-1] = Dim(outer.extent * dim.extent, dim.strides)
        else:
            merged.append(dim)
    return merged


def collapse(extents: Sequence[int], leads: Sequence[tuple[int, ...]], shared: Sequence[tuple[int, ...]]) -> Dims:
    """Merges what can be merged; see the module's first page.

    Args:
        extents: of the leading dimensions, each at least 1.
        leads: strides of the tensors that have an M, A's first.
        shared: strides of the tensors that have none.
    """
    tensors = [*leads, *shared]
    dims = merge(dims_of(extents, tensors), most=INT_MAX)
    nothing = Dim(1, (0,) * len(tensors))
    m = nothing
    # a batch dimension does for an M of 1 where A goes on along it, and all share B
    goes_on = bool(dims) and (extents[-1] > 1 or dims[-1].strides[0] != 0)
    if goes_on and not any(dims[-1].strides[len(leads) :]):
        m = dims.pop()
    if not dims:
        return Dims(m, nothing, ())
    longest = max(range(len(dims)), key=lambda place: dims[place].extent)
    batch = dims.pop(longest)
    return Dims(m, batch, tuple(dims))

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


def collapse(extents: Sequence[int], leads: Sequence[tuple[int, ...]], shared: Sequence[tuple[int, ...]]) -> Dims:
    """Merges what can be merged; see the module's first page.

    Args:
        extents: of the leading dimensions, each at least 1.
        leads: strides of the tensors that have an M, A's first.
        shared: strides of the tensors that have none.
    """
    tensors = [*leads, *shared]
    dims: list[Dim] = []
    for place, extent in enumerate(extents):
        if extent == 1:  # its stride means nothing
            continue
        strides = tuple(lead[place] for lead in tensors)
        outer = dims[-1] if dims else None
        even = outer is not None and all(o == extent * i for o, i in zip(outer.strides, strides, strict=True))
        if outer is not None and even and outer.extent * extent <= INT_MAX:
            dims[-1] = Dim(outer.extent * extent, strides)
        else:
            dims.append(Dim(extent, strides))
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

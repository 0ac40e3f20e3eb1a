"""Made-up results of the benchmark."""

from __future__ import annotations

from shape_sweeps.benchmark.results import AMONG_PEERS, AMONG_PRODUCTS, MEASURED, Contestant, Entry
from shape_sweeps.benchmark.suite import Problem, group_of
from shape_sweeps.shapes import Shape
from shape_sweeps.timing import Sample


def made_up(
    shape: Shape,
    epilogue: str = "bias_gelu",
    *,
    mm: float | None = 100.0,
    rounded: float | None = None,
    fused: float = 100.0,
    **peers: float,
) -> Entry:
    """An entry with these times in microseconds, ours the same in both series."""
    entry = Entry(Problem(shape, epilogue, group_of(shape)), status=MEASURED, backend="sm90", kernel="k")
    entry.contestants["fused"] = Contestant({AMONG_PRODUCTS: sample(fused), AMONG_PEERS: sample(fused)}, "CUDA graph")
    for name, time in {"mm": mm, "rounded-mm": rounded}.items():
        if time is not None:
            entry.contestants[name] = Contestant({AMONG_PRODUCTS: sample(time)}, "CUDA graph")
    for name, time in peers.items():
        entry.contestants[name] = Contestant({AMONG_PEERS: sample(time)}, "CUDA graph")
    return entry


def sample(time: float) -> Sample:
    return Sample(time, 1.0, 8)

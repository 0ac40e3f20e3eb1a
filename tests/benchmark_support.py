"""What the tests of the benchmark share: made-up results, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shape_sweeps import cli
from shape_sweeps.benchmark.results import AMONG_PEERS, AMONG_PRODUCTS, MEASURED, SKIPPED, Contestant, Entry, Results
from shape_sweeps.benchmark.suite import Problem, group_of
from shape_sweeps.shapes import SUITE_DECODE, SUITE_LARGE, SUITE_MISALIGNED, Shape
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


def made_up_results() -> Results:
    entries = [
        made_up(SUITE_LARGE[0], fused=95.0, eager=140.0, cublaslt=104.0),
        made_up(SUITE_DECODE[1], "gate", fused=12.5, eager=18.0),
        made_up(SUITE_MISALIGNED[0], mm=900.0, rounded=100.0, fused=120.0, eager=990.0),
    ]
    entries[0].contestants["fused"].error = 1.65e-3
    entries[1].contestants["compile"] = Contestant(reason="BackendCompilerFailed: no")
    entries[2].status, entries[2].reason, entries[2].contestants = SKIPPED, "its tensors do not fit in memory", {}
    environment = {
        "device": "cuda",
        "device_name": "H200",
        "torch": "2.11",
        "time": "2026-11-30T00:00:00",
        "cuda": "13",
    }
    settings = {"cache": "cold", "rounds": 15, "seconds_per_case": 2.0, "peers": ["eager"], "seed": 0, "overlap": "off"}
    host = {"F.linear": 21.4, "FusedLinear": 18.3, "FusedLinear, GELU": 18.1}
    return Results(environment, ["benchmark"], settings, entries, 192, False, host, "", ["a note"])


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def check_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str, folder: Path) -> None:
    """``benchmark`` says so in one line, and leaves the folder as it is."""
    before = sorted(folder.iterdir())
    code, out, err = run(capsys, "benchmark", *arguments)
    assert code == 2 and not out
    assert err.startswith("shape-sweeps: error: ") and err.count("\n") == 1 and expected in err
    assert sorted(folder.iterdir()) == before

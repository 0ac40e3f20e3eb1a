"""The picture of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from shape_sweeps import cli, plots
from shape_sweeps.records import FAILED

RUN = ["run", "--shapes", "33x65x127,16x24x32", "--dtypes", "bf16", "--epilogues", "bias_gelu", "--device", "cpu"]


@pytest.mark.parametrize("suffix", plots.FORMATS)
def test_draws_every_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"sweep{suffix}"
    assert cli.main([*RUN, "--plot", str(path)]) == 0
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)


def test_says_what_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "sweep.svg"
    assert cli.main([*RUN, "--no-timing", "--plot", str(path)]) == 0
    assert path.stat().st_size > 5_000


def test_a_failed_case_is_marked() -> None:
    from shape_sweeps import runner
    from shape_sweeps.options import parser, select

    chosen, epilogues = select(parser().parse_args(RUN))
    sweep = runner.run_sweep(chosen, epilogues)
    sweep.records[0].status = FAILED
    speedups, errors = plots._points(sweep)
    assert [passed for _, _, passed in errors["unfused PyTorch"]] == [False, True]
    assert set(speedups) == {"eager PyTorch", "torch.mm alone"}
    operations = [point[0] for point in speedups["eager PyTorch"]]
    assert operations == [2.0 * 33 * 65 * 127, 2.0 * 16 * 24 * 32]


def test_what_matplotlib_cannot_draw_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts\nat all")

    monkeypatch.setattr(plots, "_figure", fail)
    assert cli.main([*RUN, "--plot", str(tmp_path / "sweep.png")]) == 2
    captured = capsys.readouterr()
    assert "2 passed" in captured.out
    assert captured.err == "shape-sweeps: error: --plot: matplotlib cannot draw it: RuntimeError: no fonts at all\n"
    assert not list(tmp_path.iterdir())


def test_unknown_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "--plot", "sweep.xyz"]) == 2
    assert "ends in .png, .svg, .pdf" in capsys.readouterr().err


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert cli.main([*RUN, "--plot", "sweep.png"]) == 2
    assert "gemm-epilogue-fusion[plots]" in capsys.readouterr().err

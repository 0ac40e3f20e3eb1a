"""A sweep as one picture: how fast, and how exact, over the size of the problem.

    >>> check_plot(output)                # before the sweep: the extra "plots" is there, the format is known
    >>> output.write(plot(sweep, environment, picture_format(output.name)))

Left: speed-up of the fused call over unfused eager PyTorch and over the bare ``torch.mm``, each case a point at
its 2 M N K floating-point operations.  Right: the error of each case relative to the unfused computation's error.
Cases that failed are crosses.  Without timing only the right panel is drawn.
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from .errors import InputError, OutputError, one_line
from .outputs import Output
from .records import FAILED, Sweep

FORMATS = (".png", ".svg", ".pdf")


def check_plot(output: Output) -> None:
    """Checks what can be checked before a sweep.

    Raises:
        InputError: a suffix that names no picture format, standard output, or matplotlib is missing.
    """
    if picture_format(output.name) not in FORMATS:
        raise InputError(f"--plot: expected a file name that ends in {', '.join(FORMATS)}, got {output.name!r}")
    if output.is_stdout:
        raise InputError(f"--plot: {output.name!r} is standard output, where the report goes")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot: needs matplotlib, install it with `pip install 'gemm-epilogue-fusion[plots]'`")


def picture_format(name: str) -> str:
    """The suffix of a file name, which tells the format."""
    return Path(name).suffix.lower()


def plot(sweep: Sweep, environment: dict[str, Any], suffix: str) -> bytes:
    """Draws the sweep; ``suffix`` is one of :data:`FORMATS`.

    Raises:
        OutputError: if matplotlib cannot.
    """
    picture = io.BytesIO()
    try:
        _figure(sweep, environment).savefig(picture, format=suffix.removeprefix("."))
    except Exception as error:  # fonts, backends, its own configuration: what a picture needs is not the sweep's fault
        raise OutputError(f"--plot: matplotlib cannot draw it: {one_line(error)}") from error
    return picture.getvalue()


def _figure(sweep: Sweep, environment: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    speedups, errors = _points(sweep)
    figure = Figure(figsize=(11 if speedups else 6, 4.5), layout="constrained")
    axes = list(figure.subplots(1, 2 if speedups else 1, squeeze=False)[0])
    if speedups:
        _draw(axes[0], speedups, "times as fast as", "speed-up")
        axes[0].set_yscale("log")
    _draw(axes[-1], errors, "error, relative to", "error (1: as unfused)")
    figure.suptitle(f"{environment.get('device_name', environment.get('device'))}, torch {environment.get('torch')}")
    return figure


#: label -> (operations, value, passed) of each case
Points = dict[str, list[tuple[float, float, bool]]]


def _points(sweep: Sweep) -> tuple[Points, Points]:
    speedups: Points = {}
    errors: Points = {}
    for record in sweep.records:
        case, passed = record.case, record.status != FAILED
        operations = 2.0 * case.m * case.n * case.k
        if record.timing is not None:
            for label, other in (("eager PyTorch", "eager"), ("torch.mm alone", "mm")):
                speedups.setdefault(label, []).append((operations, record.timing.ratio(other, "fused"), passed))
        worst = record.worst
        if worst is not None and worst.unfused_error > 0 and worst.error < float("inf"):
            errors.setdefault("unfused PyTorch", []).append((operations, worst.error / worst.unfused_error, passed))
    return speedups, errors


def _draw(axes: Any, points: Points, verb: str, quantity: str) -> None:
    for index, (label, found) in enumerate(points.items()):
        for passed, marker in ((True, "o"), (False, "x")):
            chosen = [(x, y) for x, y, ok in found if ok is passed]
            if chosen:
                text = f"{verb} {label}" + ("" if passed else " (failed)")
                axes.scatter(*zip(*chosen, strict=True), s=18, marker=marker, color=f"C{index}", alpha=0.7, label=text)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("floating-point operations, 2 M N K")
    axes.set_ylabel(quantity)
    if points:
        axes.legend()

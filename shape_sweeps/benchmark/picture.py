"""A run of the benchmark as one picture: every shape, group by group, and every epilogue a point.

Above: our time over that of the bare product.  Below: speed-up over eager PyTorch.  A line is at 1.
"""

from __future__ import annotations

import io
from itertools import groupby
from typing import Any

from ..errors import OutputError, one_line
from .results import Quantity, Results
from .tables import conditions


def plot(results: Results, suffix: str) -> bytes:
    """Draws it; ``suffix`` is one of :data:`shape_sweeps.plots.FORMATS`.

    Raises:
        OutputError: if matplotlib cannot.
    """
    picture = io.BytesIO()
    try:
        _figure(results).savefig(picture, format=suffix.removeprefix("."))
    except Exception as error:  # fonts, backends, its own configuration: what a picture needs is not the run's fault
        raise OutputError(f"--plot: matplotlib cannot draw it: {one_line(error)}") from error
    return picture.getvalue()


def _figure(results: Results) -> Any:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display
    from matplotlib.ticker import LogLocator, NullLocator

    shapes = list(dict.fromkeys(entry.problem.shape for entry in results.entries))
    figure = Figure(figsize=(max(7.0, 2.0 + 0.5 * len(shapes)), 8.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _draw(above, results, lambda entry: entry.over_product, "our time / bare product's")
    _draw(below, results, lambda entry: entry.speedup_over_eager, "eager PyTorch's time / ours")
    below.set_xticks(range(len(shapes)), [str(shape) for shape in shapes], rotation=45, ha="right", fontsize=8)
    below.set_yscale("log")
    below.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    below.yaxis.set_minor_locator(NullLocator())
    below.yaxis.set_major_formatter("{x:g}")
    _name_groups(above, results)
    handles, labels = above.get_legend_handles_labels()
    if not labels:
        handles, labels = below.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=4)
    figure.suptitle(conditions(results), fontsize=9, wrap=True)
    return figure


def _draw(axes: Any, results: Results, quantity: Quantity, label: str) -> None:
    shapes = list(dict.fromkeys(entry.problem.shape for entry in results.entries))
    names = list(dict.fromkeys(entry.problem.epilogue for entry in results.entries))
    for index, name in enumerate(names):
        points = [
            (shapes.index(entry.problem.shape) + 0.08 * (index - len(names) / 2), value)
            for entry in results.entries
            if entry.problem.epilogue == name and (value := quantity(entry)) is not None
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=14, color=f"C{index}", alpha=0.8, label=name)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylabel(label)


def _name_groups(axes: Any, results: Results) -> None:
    """Names groups above their shapes, with a line between two."""
    shapes = list(dict.fromkeys((entry.problem.group, entry.problem.shape) for entry in results.entries))
    position = 0
    for group, members in groupby(shapes, key=lambda pair: pair[0]):
        count = len(list(members))
        axes.text(
            position + (count - 1) / 2, 1.01, group, transform=axes.get_xaxis_transform(), ha="center", fontsize=9
        )
        position += count
        if position < len(shapes):
            axes.axvline(position - 0.5, color="lightgrey", linewidth=0.8)

"""What the command ``tune`` prints: candidates, results, what is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from gemm_ops.explain.units import count
from gemm_ops.tuner.known import Results
from gemm_ops.tuner.records import TWO_PASSES, UNFUSED, Measured

from . import report

#: Of the fused kernels of a problem, so many of the fastest are in the table; all are in the file.
_ROWS = 5


def _table(console: Console, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=None if not console.is_terminal else box.SIMPLE_HEAD, pad_edge=False)
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def print_candidates(console: Console, rows: Sequence[tuple[str, str, float, bool]]) -> None:
    """The candidates: of which problem, the name, the model's microseconds, whether the kernel is built."""
    if not rows:
        return
    table = _table(console, "problem", "candidate", numbers=("expected us", "kernel"))
    for problem, name, expected, is_built in rows:
        kernel = report.THERE if is_built else "to build"
        table.add_row(report.line_of(problem), report.line_of(name), f"{expected:.1f}", kernel)
    console.print(table)


def print_results(console: Console, results: Sequence[Measured]) -> None:
    """The fastest of each problem, the rules' choice and what is unfused, the one that is taken marked."""
    if not results:
        return
    table = _table(console, "problem", "candidate", numbers=("us", "model/this", "two passes/this", ""))
    for measured in results:
        problem = f"{measured.problem.extents} {measured.problem.element} {measured.example}"
        if measured.problem.access != "aligned":
            problem += f", {measured.problem.access}"
        for name in _shown(measured):
            time = measured.us[name]
            others = (measured.us.get(measured.model), measured.us.get(TWO_PASSES))
            ratios = ["-" if other is None else f"{other / time:.2f}" for other in others]
            mark = report.line_of("best", "green") if name == measured.best else ""
            table.add_row(report.line_of(problem), report.line_of(name), f"{time:.1f}", *ratios, mark)
    console.print(table)
    console.print(
        "us: of the GPU, medians of interleaved rounds, the weight from memory; model/this, two passes/this: time of"
        " the wave model's choice, and of cuBLAS and one kernel, over this one's (above 1: this is faster)",
        soft_wrap=True,
    )


def _shown(measured: Measured) -> list[str]:
    fused = [name for name in measured.order if name not in UNFUSED]
    shown = {measured.best, measured.model, *fused[:_ROWS], *UNFUSED}
    return [name for name in measured.order if name in shown]


def strangers(results: Iterable[Measured]) -> str:
    """How many results name kernels that this version has not, in words; "" for none."""
    number = sum(bool(each.strangers) for each in results)
    if not number:
        return ""
    name = "names" if number == 1 else "name"
    return f"{number} of them {name} kernels that this version does not have, which count for nothing"


def print_known(console: Console, files: Mapping[Path, Results], device: str = "") -> None:
    """What each file knows, a line for each result; of this device only, if one is given."""
    if device:
        files = {
            path: {key: each for key, each in results.items() if each.problem.device == device}
            for path, results in files.items()
        }
    if not any(files.values()):
        which = f" of the {device}" if device else ""
        console.print(f"nothing is known yet{which}: no results of the user's, and none in the package")
        return
    for path, results in files.items():
        if device and not results:
            continue
        said = [f"{count(len(results), 'result')} in {path}", strangers(results.values())]
        console.print("; ".join(filter(None, said)), soft_wrap=True)
        table = _table(console, "device", "problem", "epilogue", "best", numbers=("us", "model/best", "date"))
        for record in results.values():
            problem = record.problem
            best = record.us[record.best]
            model = f"{record.us[record.model] / best:.2f}" if record.model in record.us else "-"
            what = f"{problem.extents} {problem.element} {problem.layouts} {problem.access}"
            table.add_row(
                *map(report.line_of, (problem.device, what, record.tree, record.best)),
                f"{best:.1f}",
                model,
                record.date[:10],
            )
        console.print(table)

"""What the user sees: a header, progress while it runs, a table and a summary at the end.

On a terminal there is a progress bar and colour; in a file or a pipe there are plain lines, none of them
redrawn.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gemm_ops.build.buildable import Buildable
from gemm_ops.printable import printable, printable_lines

from .records import FAILED, PASSED, SKIPPED, CaseRecord, Sweep
from .runner import Observer

_COLOURS = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}
_PLAIN_WIDTH = 240
_PLAIN_SECONDS = 10.0  # between progress lines where nothing can be redrawn
_MAX_COMMANDS = 10
_LEGEND = (
    "error, unfused: relative error of the fused and of the unfused result against float64, for the output nearest to"
    " its limit; limit: the largest error that passes; eager/fused, mm/fused: time of unfused PyTorch, and of torch.mm"
    " alone, over the time of the fused call (above 1: fused is faster); -: not measured"
)
_MAX_REASON = 600  # characters: a compiler's output is for the JSON file


class _Console(Console):
    """Writes control characters out, wherever they come from: names in files, say, and a terminal would obey them.

    Strings are written out before rich has them: it drops some of these characters, such as a carriage return, makes
    spaces of tabs, and takes what stands between colons for the name of a picture.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable_lines(text), **{**options, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


def line_of(text: str, style: str = "") -> Text:
    """A line, or a cell of a table, in a style; rich's own class drops some control characters."""
    return Text(printable(text), style=style)


def make_console(*, stdout_taken: bool = False) -> Console:
    """A console on standard output, or on standard error if a report file goes to standard output."""
    stream = sys.stderr if stdout_taken else sys.stdout
    if stream.isatty():
        return _Console(file=stream, highlight=False, markup=False)
    # A width that no row exceeds: rich would otherwise fold rows at 80 columns, and nobody could grep them.
    return _Console(file=stream, highlight=False, markup=False, width=_PLAIN_WIDTH, no_color=True)


def print_header(
    console: Console, environment: dict[str, Any], cases: int, *, timing: bool = True, chosen: bool = True
) -> None:
    """One line on where this runs, and whether it is timed; ``chosen``: because the user said so."""
    device, name = environment["device"], environment["device_name"]
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    timed = (
        "timed" if timing else "not timed" if chosen else "not timed (on a CPU times say little; --timing takes them)"
    )
    console.print(f"shape-sweeps: {cases} cases on {device} ({name}), torch {environment['torch']}{cuda}, {timed}")


_UNFUSED = {"cublas": "cuBLAS and one kernel for the epilogue", "reference": "the PyTorch reference"}


class Progressing(Observer):
    """Shows how a sweep gets on; a context manager, which clears the progress bar at its end.

    ``give_up`` is called before each case, and may raise to end the sweep.
    """

    def __init__(self, console: Console, give_up: Callable[[], None] = lambda: None) -> None:
        self._console = console
        self._give_up = give_up
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._task: TaskID | None = None
        self._what, self._total, self._done = "", 0, 0
        self._began = self._shown = time.monotonic()
        self._cases = 0

    def __enter__(self) -> Progressing:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def planned(self, records: Sequence[CaseRecord]) -> None:
        self._cases = len(records)
        routes = [record.route for record in records]
        counts = Counter((route.backend, route.reason) for route in routes if route is not None)
        fused = sum(count for (backend, _), count in counts.items() if backend in ("skinny", "sm90", "sm80"))
        if fused:
            self._console.print(f"backend: a fused kernel for {fused} of {len(records)} cases")
        for (backend, reason), count in counts.items():
            if backend in _UNFUSED:
                text = f"backend: {_UNFUSED[backend]} for {count} of {len(records)} cases: {reason}"
                self._console.print(text)

    def building(self, kernels: int) -> None:
        self.begin(f"building {kernels} kernels", kernels)

    def built(self, seconds: float, cached: bool) -> None:
        self.advance("from the cache" if cached else f"built in {seconds:.0f} s")

    def measuring(self, problems: int) -> None:
        """So many problems are about to be measured."""
        self.begin("measuring", problems)

    def measured(self, title: str) -> None:
        """One problem is measured, or cannot be."""
        self.advance(title)

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, soft_wrap=True)

    def not_built(self, title: str) -> None:
        """One kernel could not be built."""
        self._console.print(f"failed {title}", style=_COLOURS[FAILED], soft_wrap=True)
        self.advance(title)

    def running(self, record: CaseRecord) -> None:
        self._give_up()
        if self._what != "running":
            self.begin("running", self._cases)
        self.describe(_title(record))

    def finished(self, record: CaseRecord) -> None:
        if record.status == FAILED:
            self._console.print(
                f"failed {_title(record)}: {shorten(record.reason)}", style=_COLOURS[FAILED], soft_wrap=True
            )
        self.advance(_title(record))

    def begin(self, what: str, total: int) -> None:
        """A stretch of work of so many steps begins."""
        self._what, self._total, self._done = what, total, 0
        self._shown = time.monotonic()
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total)
        elif what != "running":
            self._console.print(what)

    def describe(self, what: str) -> None:
        """What the step under way is, where there is a bar to show it."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)

    def advance(self, what: str) -> None:
        """One of its steps is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
        elif self._bar is None and time.monotonic() - self._shown >= _PLAIN_SECONDS:
            self._shown = time.monotonic()
            elapsed = self._shown - self._began
            self._console.print(f"{self._done} of {self._total} after {elapsed:.0f} s: {what}")


def print_report(console: Console, sweep: Sweep) -> None:
    """The table, what failed and how to see it again, and the summary line."""
    if sweep.records:
        table, footnotes = _table(sweep.records, plain=not console.is_terminal)
        console.print(table)
        console.print(_LEGEND, soft_wrap=True)
        for number, text in enumerate(footnotes, start=1):
            console.print(f"({number}) {shorten(text)}", soft_wrap=True)
    for note in sweep.notes:
        console.print(f"note: {shorten(note)}", soft_wrap=True)
    failures = sweep.failures
    if failures:
        console.print("\nto see a failure again:")
        for record in failures[:_MAX_COMMANDS]:
            console.print(f"  {record.case.reproducer()}", soft_wrap=True)
        if len(failures) > _MAX_COMMANDS:
            console.print(f"  and {len(failures) - _MAX_COMMANDS} more failures in the table")
    console.print(summary(sweep))


#: in place of the seconds that a kernel's build took
THERE = "there already"


def print_kernels(
    console: Console,
    kernels: Sequence[Buildable],
    serves: Mapping[str, Sequence[str]],
    results: Mapping[str, str],
    errors: Mapping[str, str],
) -> None:
    """The table of kernels, what each is for and what came of it, and below it why some failed.

    Args:
        kernels: in the order of the table.
        serves: key -> the problems that use it.
        results: key -> how long it took, or :data:`THERE`.
        errors: key -> why it could not be built.
    """
    if not kernels:
        return
    table = Table(box=None if not console.is_terminal else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", overflow="fold")
    table.add_column("problems", overflow="fold")
    table.add_column("built", justify="right")
    footnotes: list[str] = []
    for kernel in kernels:
        first, *others = serves[kernel.key]
        text, style = results.get(kernel.key, "not reached"), ""
        if kernel.key in errors:
            if errors[kernel.key] not in footnotes:
                footnotes.append(errors[kernel.key])
            text, style = f"failed ({footnotes.index(errors[kernel.key]) + 1})", _COLOURS[FAILED]
        problems = first + (f" and {len(others)} more" if others else "")
        table.add_row(line_of(kernel.title), line_of(problems), line_of(text, style))
    console.print(table)
    for number, footnote in enumerate(footnotes, start=1):
        console.print(f"({number}) {shorten(footnote)}", soft_wrap=True)


def summary(sweep: Sweep) -> str:
    """The last line: how many cases passed, failed and were skipped, and whether that is all of them."""
    text = ", ".join(f"{sweep.count(status)} {status}" for status in (PASSED, FAILED, SKIPPED))
    if sweep.interrupted:
        text += f"; interrupted, {sweep.planned - len(sweep.records)} of {sweep.planned} cases not reached"
    elif sweep.records and sweep.count(SKIPPED) == len(sweep.records):
        text += ": nothing was checked"
    if sweep.skipped_by_time_limit:
        text += f"; {sweep.skipped_by_time_limit} of {sweep.planned} cases skipped by the time limit"
    return text


def _table(records: Sequence[CaseRecord], *, plain: bool) -> tuple[Table, list[str]]:
    """The table, and the reasons it refers to by number."""
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("M x N x K")
    table.add_column("dtype")
    table.add_column("epilogue")
    table.add_column("backend, kernel", overflow="fold")
    for heading in ("error", "unfused", "limit", "eager/fused", "mm/fused"):
        table.add_column(heading, justify="right")
    table.add_column("status")
    footnotes: list[str] = []

    def footnote(text: str) -> str:
        if text not in footnotes:
            footnotes.append(text)
        return f"({footnotes.index(text) + 1})"

    for record in records:
        timing, nearest = record.timing, record.worst
        errors = (nearest.error, nearest.unfused_error, nearest.error_limit) if nearest else ()
        speedups = (timing.ratio("eager", "fused"), timing.ratio("mm", "fused")) if timing else ()
        status = record.status + (f" {footnote(record.reason)}" if record.reason else "")
        table.add_row(
            str(record.case.shape),
            record.case.dtype,
            record.case.epilogue,
            _route_text(record, footnote),
            *(_columns(errors, 3, "{:.2e}")),
            *(_columns(speedups, 2, "{:.2f}")),
            line_of(status, _COLOURS[record.status]),
        )
    return table, footnotes


def _route_text(record: CaseRecord, footnote: Any) -> str:
    route = record.route
    if route is None:
        return "-"
    if route.backend is None:
        return f"refused {footnote(route.reason)}"
    if route.kernel:
        return f"{route.backend} {route.kernel}"
    return f"{route.backend} {footnote(route.reason)}"


def _columns(values: Sequence[float], width: int, pattern: str) -> list[str]:
    texts = [pattern.format(value) if math.isfinite(value) else str(value) for value in values]
    return texts + ["-"] * (width - len(texts))


def shorten(text: str) -> str:
    """The text, or as much of it as a report has room for."""
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON].rstrip() + " ..."


def _title(record: CaseRecord) -> str:
    return f"{record.case.shape} {record.case.dtype} {record.case.epilogue}"

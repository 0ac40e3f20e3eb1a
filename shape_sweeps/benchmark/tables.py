"""A run of the benchmark as text: tables for the terminal, and Markdown for a README.

The terminal has a line for every shape and epilogue, group by group, geometric means, and the targets.  Markdown has
the targets, a line for every shape, and the geometric means: a README has no room for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from gemm_ops.explain.units import count
from gemm_ops.printable import printable_lines

from ..report import line_of, shorten
from .document import geomeans
from .results import FAILED, MEASURED, SKIPPED, Entry, Results, geomean, values_of
from .suite import COMPILE, CUBLASLT, EAGER, FUSED, GROUPS, MISALIGNED, MM, ROUNDED_MM
from .targets import MET, MISSED, NOT_MEASURED, judge

LEGEND = (
    "us: time of our call (FusedLinear as it is), median over rounds, +- half the interquartile range; fused/mm: that"
    " over the time of torch.mm alone, of misaligned shapes over torch.mm of extents rounded up to multiples of 8"
    " (below 1: ours is faster); eager/fused, peer/fused: time of eager PyTorch, and of the faster of torch.compile and"
    " cuBLASLt, over ours (above 1: ours is faster); error: relative to float64; -: not measured"
)
_COLOURS = {MET: "green", MISSED: "bold red", NOT_MEASURED: "yellow", FAILED: "bold red", SKIPPED: "yellow"}
_WORDS = {
    EAGER: "eager PyTorch",
    COMPILE: "torch.compile",
    CUBLASLT: "cuBLASLt",
    MM: "torch.mm",
    ROUNDED_MM: "rounded-up torch.mm",
}


def conditions(results: Results) -> str:
    """Where and how it was measured, in one line."""
    environment, settings = results.environment, results.settings
    parts = [f"{environment.get('device_name', environment.get('device'))}"]
    if environment.get("driver"):
        parts.append(f"driver {environment['driver']}")
    parts.append(f"torch {environment.get('torch')}")
    if environment.get("cuda") and results.on_gpu:
        parts.append(f"CUDA {environment['cuda']}")
    parts += [f"{environment.get('time', '')[:10]}", cache_words(results)]
    if settings.get("overlap") == "off":
        parts.append("our launches not overlapping")
    return ", ".join([*parts, f"up to {settings.get('rounds')} interleaved rounds"])


def cache_words(results: Results) -> str:
    """Whether calls find their inputs in the cache."""
    if results.settings.get("cache") == "cold":
        return "bf16, cold L2 cache (calls walk through copies of all inputs)"
    return "bf16, warm (every call uses the same tensors)"


def print_tables(console: Console, results: Results) -> None:
    """All of it: entries, geometric means, the host's time, targets, and a summary."""
    footnotes: list[str] = []
    for group, entries in groupby(results.entries, key=lambda entry: entry.problem.group):
        console.print(f"\n{group}", style="bold")
        console.print(_entries_table(list(entries), footnotes, plain=not console.is_terminal))
    if results.entries:
        console.print(LEGEND, soft_wrap=True)
        console.print("\ngeometric means of fused/mm, eager/fused, peer/fused")
        console.print(_geomeans_table(results, plain=not console.is_terminal))
    for number, text in enumerate(footnotes, start=1):
        console.print(f"({number}) {shorten(text)}", soft_wrap=True)
    if results.host:
        times = ", ".join(f"{name} {time:.1f}" for name, time in results.host.items())
        console.print(f"\nhost time of an eager call, us: {times}", soft_wrap=True)
    for note in notes(results):
        console.print(f"note: {shorten(note)}", soft_wrap=True)
    console.print("\ntargets")
    for outcome in judge(results):
        line = line_of(f"  {outcome.verdict:12} {outcome.target.name}: {outcome.text}")
        line.stylize(_COLOURS[outcome.verdict], 2, 14)
        console.print(line, soft_wrap=True)
    console.print(summary(results))


def notes(results: Results) -> list[str]:
    """The notes of a run, and what its entries have to say together."""
    found = list(results.notes)
    in_cache = [entry for entry in results.entries if entry.status == MEASURED and not entry.cold]
    if results.on_gpu and results.settings.get("cache") == "cold" and in_cache:
        found.append(f"{_count(in_cache)} so small that copies of the inputs stay in the L2 cache")
    for name in _WORDS:
        reasons: dict[str, list[Entry]] = {}
        for entry in results.entries:
            one = entry.contestants.get(name)
            if one is not None and one.reason and (not one.times or one.how):
                reasons.setdefault(one.reason, []).append(entry)
        for reason, entries in reasons.items():
            if reason not in _EXPECTED:
                found.append(f"{_WORDS[name]}, {_count(entries)}: {reason}")
    return found


#: reasons that say nothing about this run
_EXPECTED = ("cuBLASLt has no such epilogue", "the shape is aligned", "not timed: not asked for")


def _count(entries: Sequence[Entry]) -> str:
    return count(len(entries), "entry")


def summary(results: Results) -> str:
    """The last line."""
    verdicts = [outcome.verdict for outcome in judge(results)]
    text = ", ".join(f"{results.count(status)} {status}" for status in (MEASURED, FAILED, SKIPPED))
    if len(results.entries) < results.planned:
        text += f", {results.planned - len(results.entries)} of {results.planned} not reached"
    targets = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (MET, MISSED, NOT_MEASURED))
    return f"{text}; targets: {targets}"


def _entries_table(entries: Sequence[Entry], footnotes: list[str], *, plain: bool) -> Table:
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("M x N x K")
    table.add_column("epilogue")
    table.add_column("backend, kernel", overflow="fold")
    for heading in ("us", "+-", "fused/mm", "eager/fused", "peer/fused", "error", "eager's"):
        table.add_column(heading, justify="right")
    table.add_column("status")
    for entry in entries:
        table.add_row(
            str(entry.problem.shape),
            entry.problem.epilogue,
            line_of(f"{entry.backend} {entry.kernel or _footnote(entry.why, footnotes)}" if entry.backend else "-"),
            _number(entry.time_us(FUSED), "{:.1f}"),
            _number(_spread_us(entry), "{:.1f}"),
            *(_number(value, "{:.2f}") for value in _ratios(entry)),
            *(_number(_error(entry, name), "{:.2e}") for name in (FUSED, EAGER)),
            line_of(
                entry.status + (f" {_footnote(entry.reason, footnotes)}" if entry.reason else ""),
                _COLOURS.get(entry.status, ""),
            ),
        )
    return table


def _geomeans_table(results: Results, *, plain: bool) -> Table:
    means = geomeans(results)
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("epilogue")
    for group in means:
        table.add_column(group, justify="right")
    for epilogue in dict.fromkeys(name for by_name in means.values() for name in (*by_name,)):
        if epilogue != "all":
            table.add_row(epilogue, *(_means_text(means, group, epilogue) for group in means))
    table.add_row("all", *(_means_text(means, group, "all") for group in means))
    return table


def _means_text(means: dict[str, dict[str, dict[str, float | None]]], group: str, epilogue: str) -> str:
    found = means[group].get(epilogue, {})
    product = "over_rounded_mm" if group == MISALIGNED else "over_mm"
    keys = (product, "speedup_over_eager", "speedup_over_fused_peer")
    return ", ".join(_number(found.get(key), "{:.2f}") for key in keys)


def to_markdown(results: Results) -> str:
    """The tables for a README."""
    lines = [f"Measured on {conditions(results)}.", "", "| target | found | |", "| --- | --- | --- |"]
    lines += [f"| {one.target.name} | {_plain(one.text)} | {_verdict_cell(one.verdict)} |" for one in judge(results)]
    for group in GROUPS:
        entries = [entry for entry in results.entries if entry.problem.group == group]
        if entries:
            lines += ["", *_markdown_group(group, entries)]
    if results.entries:
        lines += ["", *_markdown_geomeans(results)]
    return printable_lines("\n".join(lines) + "\n")


def _markdown_group(group: str, entries: Sequence[Entry]) -> list[str]:
    product = "mm of rounded-up extents" if group == MISALIGNED else "mm"
    names = [entry.problem.epilogue for entry in entries]
    shown = "bias_gelu" if "bias_gelu" in names else names[0]
    lines = [
        f"| {group}: M x N x K | kernel ({shown}) | us | fused/{product} | eager/fused | least | peer/fused |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for shape, found in groupby(entries, key=lambda entry: entry.problem.shape):
        of_shape = list(found)
        example = next((entry for entry in of_shape if entry.problem.epilogue == shown), of_shape[0])
        eager = values_of(of_shape, lambda entry: entry.speedup_over_eager)
        cells = (
            f"{shape.m} x {shape.n} x {shape.k}",
            example.kernel or example.backend or "-",
            _number(example.time_us(FUSED), "{:.1f}"),
            _number(geomean(values_of(of_shape, lambda entry: entry.over_product)), "{:.2f}"),
            _number(geomean(eager), "{:.2f}"),
            _number(min(eager, default=None), "{:.2f}"),
            _number(geomean(values_of(of_shape, lambda entry: entry.speedup_over_fused_peer)), "{:.2f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _markdown_geomeans(results: Results) -> list[str]:
    means = geomeans(results)
    names = [name for name in dict.fromkeys(name for found in means.values() for name in found) if name != "all"]
    lines = [
        f"| geometric means of fused/mm, eager/fused, peer/fused | {' | '.join(means)} |",
        f"| --- |{' --- |' * len(means)}",
    ]
    lines += [
        f"| {name} | {' | '.join(_means_text(means, group, name) for group in means)} |" for name in (*names, "all")
    ]
    return lines


def _verdict_cell(verdict: str) -> str:
    return f"**{verdict}**" if verdict == MISSED else verdict


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _ratios(entry: Entry) -> tuple[float | None, ...]:
    return entry.over_product, entry.speedup_over_eager, entry.speedup_over_fused_peer


def _spread_us(entry: Entry) -> float | None:
    if FUSED not in entry.contestants or not entry.contestants[FUSED].times:
        return None
    return max(sample.iqr_us for sample in entry.contestants[FUSED].times.values()) / 2


def _error(entry: Entry, name: str) -> float | None:
    return entry.contestants[name].error if name in entry.contestants else None


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _footnote(text: str, footnotes: list[str]) -> str:
    if text not in footnotes:
        footnotes.append(text)
    return f"({footnotes.index(text) + 1})"

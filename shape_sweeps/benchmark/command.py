"""The command ``benchmark``: the table of the suite, measured or read from earlier runs.

    $ python -m shape_sweeps benchmark --peers no-compile --json run.json --markdown table.md --plot run.svg
    $ python -m shape_sweeps benchmark 4096x11008x4096 --epilogues bias_gelu
    $ python -m shape_sweeps benchmark --group decode --epilogues bias_gelu,gate --warm
    $ python -m shape_sweeps benchmark --replay run.json --replay compile.json --markdown table.md

On a machine without a CUDA device the same runs on the CPU, at small shapes unless others are named: it shows that the
command works, and no target is measured.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gemm_ops.explain.units import count

from .. import plots, report
from ..cli import BAD_INPUT, FAILURE, INTERRUPTED, OK
from ..environment import choose_device, describe, describe_driver
from ..errors import InputError, ReportLost
from ..outputs import Output, check_distinct, prepare, write_or_complain
from ..report import Progressing
from ..shapes import SHAPE_SETS, Shape, add_positional, given_shapes, has_shapes
from ..streams import Stream
from . import picture, tables
from .document import from_json, merge, to_json
from .results import FAILED, MEASURED, Entry, Results
from .runner import Settings, Watcher, is_warm, run_benchmark
from .suite import (
    COMPILE,
    CUBLASLT,
    FUSED,
    GROUPS,
    PEERS,
    SMALL_GROUPS,
    Problem,
    group_of,
    parse_epilogues,
    parse_groups,
    parse_peers,
    problems,
)

EXIT_CODES = """\
exit codes:
  0    everything that was reached was measured, and our results are right; targets may be missed
  1    a result of ours is wrong or was not computed, a kernel could not be built, or nothing was measured
  2    bad input, or an output that cannot be written: one line on standard error says what and where
  130  interrupted (Ctrl-C; 143 by SIGTERM), after the report of what was done; --json and the others are written
  141  the reader of the report went away (as in "| head"); --json and the others are written all the same
"""

_MEASURING = ("peers", "rounds", "seconds_per_case", "max_seconds", "warm", "device", "seed", "jobs", "build_only")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command that are no numbers."""
    add_positional(parser)
    add = parser.add_argument
    add(
        "--shapes",
        action="append",
        metavar="LIST",
        help=f"sets ({', '.join(name for name in SHAPE_SETS if name.startswith('suite'))}, ...) and shapes MxNxK"
        " (default: suite; on a CPU a few small ones)",
    )
    add("--group", action="append", metavar="LIST", help=f"only shapes of these groups: {', '.join(GROUPS)}")
    add("--epilogues", action="append", metavar="LIST", help="only these of the suite (default: all)")
    names = "; ".join(f"{name}: {what}" for name, what in PEERS.items())
    add(
        "--peers",
        action="append",
        metavar="LIST",
        help=f"whom to measure against: all, or some, or no-compile for all but that. {names}"
        " (default: all; on a CPU those that need neither CUDA nor a compiler)",
    )
    add(
        "--warm",
        action="store_const",
        const=True,
        help="every call uses the same tensors, which stay in the L2 cache if they fit (default on a GPU: calls walk"
        " through copies of all inputs that it does not hold, as in a network, where every layer has other weights)",
    )
    add("--device", metavar="NAME", help="cpu, cuda or cuda:INDEX (default: cuda where there is one)")
    add("--build-only", action="store_const", const=True, help="build the kernels of our calls, and measure nothing")
    add(
        "--replay",
        action="append",
        metavar="FILE",
        help="measure nothing, and take the results that --json wrote; several make one table",
    )
    add("--json", metavar="FILE", help="write everything as one JSON document; - for standard output")
    add("--markdown", metavar="FILE", help="write the tables for a README; - for standard output")
    add("--plot", metavar="FILE", help="draw ratios and speed-ups (.png, .svg, .pdf); needs the extra plots")


def run(options: argparse.Namespace, arguments: Sequence[str], stdout: Stream) -> int:
    """``benchmark``: measures or reads results, prints the tables, writes.

    Raises:
        InputError: before anything is measured.
        ReportLost: standard output is, and there are no results to be written elsewhere.
    """
    outputs = _outputs(options)
    console = report.make_console(stdout_taken=any(output.is_stdout for output in outputs.values()))
    if options.replay:
        results = _replay(options)
        console.print(f"shape-sweeps: benchmark of {tables.conditions(results)}, read from {', '.join(options.replay)}")
    else:
        device = choose_device(options.device)
        settings = _settings(options, device)
        chosen = _choose(options, device)
        environment = describe(device)
        if torch.device(device).type == "cuda":
            environment |= describe_driver(device)
        results = Results(environment, list(arguments))
        _print_header(console, results, len(chosen), settings, device, small=_takes_small_shapes(options, device))

        def give_up() -> None:
            if stdout.error is not None and not outputs:
                raise ReportLost

        with Progressing(console, give_up) as bar:
            watcher = _Watching(console, bar, give_up)
            options_of_run = {"jobs": options.jobs, "build_only": bool(options.build_only)}
            run_benchmark(chosen, settings, device=device, watcher=watcher, results=results, **options_of_run)
        if options.build_only:
            return _report_build(console, watcher, results)
    tables.print_tables(console, results)
    makers: dict[str, Callable[[], str | bytes]] = {
        "--json": lambda: to_json(results),
        "--markdown": lambda: tables.to_markdown(results),
        "--plot": lambda: picture.plot(results, plots.picture_format(options.plot)),
    }
    written = [write_or_complain(output, makers[option]) for option, output in outputs.items()]
    return _exit_code(results, all(written), replayed=bool(options.replay))


class _Watching(Watcher):
    """Shows how a benchmark gets on, on the progress display that all commands have."""

    def __init__(self, console: report.Console, bar: Progressing, give_up: Callable[[], None]) -> None:
        self._console, self._bar, self._give_up = console, bar, give_up
        self._entries, self._is_running = 0, False
        self.kernels, self.fresh, self.failed = 0, 0, 0

    def planned(self, entries: Sequence[Entry]) -> None:
        self._entries = len(entries)
        for backend, number in Counter(entry.backend or "none" for entry in entries).most_common():
            self._console.print(f"backend: {backend} for {number} of {len(entries)} entries")

    def building(self, kernels: int) -> None:
        self.kernels = kernels
        self._bar.building(kernels)

    def built(self, seconds: float, cached: bool) -> None:
        self.fresh += not cached
        self._bar.built(seconds, cached)

    def not_built(self, title: str) -> None:
        self.failed += 1
        self._bar.not_built(title)

    def measuring_host(self) -> None:
        self._bar.begin("taking the host's time", 1)

    def running(self, entry: Entry) -> None:
        self._give_up()
        if not self._is_running:
            self._is_running = True
            self._bar.begin(f"measuring {count(self._entries, 'entry')}", self._entries)
        self._bar.describe(str(entry.problem))

    def finished(self, entry: Entry) -> None:
        if entry.status != MEASURED:
            style = "bold red" if entry.status == FAILED else "yellow"
            self._console.print(
                f"{entry.status} {entry.problem}: {report.shorten(entry.reason)}", style=style, soft_wrap=True
            )
        time = entry.time_us(FUSED)
        self._bar.advance(str(entry.problem) + ("" if time is None else f", {time:.1f} us"))


def _print_header(
    console: report.Console, results: Results, entries: int, settings: Settings, device: str, *, small: bool
) -> None:
    cache = "every call uses the same tensors (warm)"
    if not is_warm(settings, device):
        cache = "calls walk through copies of all inputs that the L2 cache does not hold (cold)"
    environment = results.environment
    console.print(
        f"shape-sweeps: benchmark, {count(entries, 'entry')} on {device} ({environment['device_name']}),"
        f" torch {environment['torch']}, against {', '.join(settings.peers) or 'nobody'}; {cache}",
        soft_wrap=True,
    )
    if clocks := environment.get("clocks"):
        console.print(f"clocks: {clocks}", soft_wrap=True)
    if small:
        results.notes.append(
            "no CUDA device: small shapes instead of the suite's (--shapes suite takes these), by wall clock;"
            " these numbers say that the command works, not how fast anything is"
        )


def _report_build(console: report.Console, watcher: _Watching, results: Results) -> int:
    there = watcher.kernels - watcher.fresh - watcher.failed
    for note in results.notes:
        console.print(f"note: {report.shorten(note)}", soft_wrap=True)
    if results.interrupted:
        console.print(f"{watcher.fresh} built; interrupted")
        return INTERRUPTED
    console.print(f"{watcher.fresh} built, {there} there already, {watcher.failed} failed")
    return FAILURE if watcher.failed else OK


def _exit_code(results: Results, written: bool, *, replayed: bool) -> int:
    if results.interrupted and not replayed:
        return INTERRUPTED
    if not written:
        return BAD_INPUT
    return FAILURE if results.failures or not results.count(MEASURED) else OK


def _outputs(options: argparse.Namespace) -> dict[str, Output]:
    """Option -> where its result goes, found to be writable."""
    names = {"--json": options.json, "--markdown": options.markdown, "--plot": options.plot}
    given = {option: name for option, name in names.items() if name is not None}
    if options.build_only and given:
        raise InputError(f"--build-only: measures nothing, so that there is nothing for {next(iter(given))}")
    found = {option: prepare(name, option) for option, name in given.items()}
    check_distinct(list(found.values()))
    if "--plot" in found:
        plots.check_plot(found["--plot"])
    return found


def _settings(options: argparse.Namespace, device: str) -> Settings:
    usual = Settings()
    if options.peers:
        peers = parse_peers(options.peers)
    elif torch.device(device).type == "cuda":
        peers = usual.peers
    else:
        peers = tuple(name for name in PEERS if name not in (COMPILE, CUBLASLT))
    return Settings(
        peers=peers,
        warm=bool(options.warm),
        rounds=usual.rounds if options.rounds is None else options.rounds,
        seconds_per_case=options.seconds_per_case,
        max_seconds=options.max_seconds,
        seed=0 if options.seed is None else options.seed,
    )


def _takes_small_shapes(options: argparse.Namespace, device: str) -> bool:
    return torch.device(device).type != "cuda" and not has_shapes(options)


def _choose(options: argparse.Namespace, device: str) -> tuple[Problem, ...]:
    """The problems that the options ask for.

    Raises:
        InputError: if there are none, or an option makes no sense.
    """
    groups = parse_groups(options.group) if options.group else tuple(GROUPS)
    epilogues = parse_epilogues(options.epilogues or ["all"])
    if given := given_shapes(options):
        for shape, where in given.items():
            if 0 in (shape.m, shape.n, shape.k):
                raise InputError(f"{where}: {str(shape)!r} has nothing to measure")
        shapes: Sequence[Shape] = [shape for shape in given if group_of(shape) in groups]
        if not shapes:
            raise InputError(f"--group: none of the shapes is {' or '.join(groups)}")
    else:
        table = SMALL_GROUPS if _takes_small_shapes(options, device) else GROUPS
        shapes = [shape for group in groups for shape in table[group]]
    return problems(shapes, epilogues)


def _replay(options: argparse.Namespace) -> Results:
    """The results of files, as far as they are asked for.

    Raises:
        InputError: if a file cannot be read or has none, or measuring is asked for as well.
    """
    for name in _MEASURING:
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}: does not go with --replay, which measures nothing")
    results = merge([_read(name) for name in options.replay])
    groups = parse_groups(options.group) if options.group else tuple(GROUPS)
    epilogues = parse_epilogues(options.epilogues or ["all"])
    shapes = given_shapes(options)
    kept = [
        entry
        for entry in results.entries
        if entry.problem.group in groups
        and entry.problem.epilogue in epilogues
        and (not shapes or entry.problem.shape in shapes)
    ]
    if not kept and results.entries:
        raise InputError("--replay: none of the entries is of those shapes, groups and epilogues")
    if len(kept) < len(results.entries):
        results.entries, results.planned = kept, len(kept)
    return results


def _read(name: str) -> Results:
    where = f"--replay {name}"
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is no text in UTF-8 (from byte {error.start + 1} on)") from error
    except ValueError as error:
        raise InputError(f"{where}: no file can have that name") from error
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from error
    return from_json(text, where)

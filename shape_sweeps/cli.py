"""The command line: ``python -m shape_sweeps run`` and ``python -m shape_sweeps list``.

Exit codes: 0 every case passed (or was skipped next to others that passed); 1 a case failed, or every case
was skipped, so that nothing was checked; 2 bad input, with one line on standard error that says what and
where; 130 interrupted by the user, after the report of what was done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import epilogues as ep

from . import cases, export, plots, report
from .catalogue import FORMULAS, parse_epilogues
from .environment import choose_device, describe
from .errors import InputError
from .records import PASSED
from .runner import run_sweep
from .shapes import SHAPE_SETS, parse_shapes

OK, FAILURE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Reports bad input as everything else here does, in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(" ".join(message.split()))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    Args:
        argv: the arguments after the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parser().parse_args(arguments)
        return _list() if options.command == "list" else _run(options, arguments)
    except InputError as error:
        print(f"shape-sweeps: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # outside the sweep itself, which keeps what it has
        print("shape-sweeps: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    root = _Parser(
        prog="shape-sweeps",
        description="Check fused GEMMs against float64 and against unfused PyTorch, and time them.",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="run|list")
    run = commands.add_parser("run", help="run a sweep", description="Shapes x dtypes x epilogues.")
    add = run.add_argument
    add(
        "--shapes",
        action="append",
        metavar="LIST",
        help=f"sets ({', '.join(SHAPE_SETS)}) and shapes MxNxK, comma-separated; may be repeated"
        " (default: the set default)",
    )
    add("--quick", action="store_true", help="the shape set quick: under two minutes on two CPU cores")
    add("--dtypes", action="append", metavar="LIST", help=f"of {', '.join(cases.DTYPES)}; default: bf16,fp16")
    add(
        "--epilogues",
        action="append",
        metavar="LIST",
        help=f"of {', '.join(FORMULAS)}, or module:attribute for your own (default: all)",
    )
    add(
        "--operation",
        choices=cases.OPERATIONS,
        default="linear",
        help="linear: weight (N, K); matmul: (K, N) (default: linear)",
    )
    add(
        "--backend",
        choices=cases.BACKENDS,
        default="auto",
        help="force one; cases that it cannot take are skipped (default: auto)",
    )
    add("--device", metavar="NAME", help="cpu, cuda or cuda:INDEX (default: cuda where there is one)")
    add("--seed", type=_seed, default=0, metavar="N", help="of the random inputs (default: 0)")
    add("--json", metavar="FILE", help="write everything as one JSON document; - for standard output")
    add("--csv", metavar="FILE", help="write one line per case; - for standard output")
    add("--plot", metavar="FILE", help="draw speed-ups and errors (.png, .svg, .pdf); needs the extra plots")
    add("--no-timing", action="store_true", help="check only")
    add("--max-seconds", type=_seconds, metavar="S", help="begin no case later than this; skip the rest")
    add("--jobs", type=_jobs, metavar="N", help="kernels to build at a time (default: one per core)")
    commands.add_parser(
        "list",
        help="print what there is to choose from",
        description="Print shape sets, epilogues, dtypes and backends.",
    )
    return root


def select(options: argparse.Namespace) -> tuple[tuple[cases.Case, ...], dict[str, ep.Epilogue]]:
    """The cases that the options of ``run`` ask for, and the epilogues they name.

    Raises:
        InputError: if one of them makes no sense.
    """
    shapes = list(options.shapes or [])
    if options.quick:
        shapes.append("quick")
    epilogues = parse_epilogues(options.epilogues or ["all"])
    chosen = cases.product(
        parse_shapes(shapes or ["default"]),
        cases.parse_dtypes(options.dtypes or ["bf16,fp16"]),
        epilogues,
        operation=options.operation,
        seed=options.seed,
        backend=options.backend,
        device=choose_device(options.device),
    )
    return chosen, epilogues


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    chosen, epilogues = select(options)
    if options.plot is not None:
        plots.check_plot(options.plot)
    for path, where in ((options.json, "--json"), (options.csv, "--csv"), (options.plot, "--plot")):
        if path is not None:
            export.check_writable(path, where)
    if options.json == options.csv == export.STDOUT:
        raise InputError("--csv: standard output is taken by --json -")

    console = report.make_console(stdout_taken=export.STDOUT in (options.json, options.csv))
    environment = describe(chosen[0].device)
    report.print_header(console, environment, len(chosen))
    with report.Progressing(console) as progress:
        sweep = run_sweep(
            chosen,
            epilogues,
            timing=not options.no_timing,
            max_seconds=options.max_seconds,
            jobs=options.jobs,
            observer=progress,
        )
    report.print_report(console, sweep)
    if options.json is not None:
        export.write(options.json, export.to_json(sweep, environment, arguments))
    if options.csv is not None:
        export.write(options.csv, export.to_csv(sweep))
    if options.plot is not None:
        plots.plot(sweep, environment, options.plot)

    if sweep.interrupted:
        return INTERRUPTED
    return FAILURE if sweep.failures or not sweep.count(PASSED) else OK


def _list() -> int:
    console = report.make_console()
    console.print("shape sets (--shapes)")
    for entry in SHAPE_SETS.values():
        console.print(f"  {entry.name}: {entry.purpose}")
        console.print("    " + " ".join(str(shape) for shape in entry.shapes), soft_wrap=True)
    console.print("\nepilogues (--epilogues); [n] is a row, [m] a column, [m, n] a matrix")
    for name, formula in FORMULAS.items():
        console.print(f"  {name:15}{formula}")
    console.print("  module:attribute  your own, decorated with @epilogues.epilogue")
    console.print("\ndtypes (--dtypes)")
    for name, dtype in cases.DTYPES.items():
        console.print(f"  {name:15}{dtype}")
    console.print("\nbackends (--backend)")
    for name, text in _BACKENDS.items():
        console.print(f"  {name:15}{text}")
    return OK


_BACKENDS = {
    "auto": "what gemm_ops picks for the device and the problem",
    "sm90": "TMA and warp-specialised kernels for Hopper",
    "sm80": "cp.async kernels for Ampere, Ada and later",
    "reference": "unfused PyTorch, on any device",
}


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1")
    return int(text)


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds

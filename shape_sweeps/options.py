"""The options of the command line, and the cases they ask for.

>>> cases, epilogues = select(parser().parse_args(["run", "--quick", "--epilogues", "gate"]))
>>> len(cases), list(epilogues)
(24, ['gate'])
"""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

import epilogues as ep

from . import build_command, cases, explain_command, tune_command
from .benchmark import command as benchmark_command
from .catalogue import FORMULAS, parse_epilogues
from .cli import EXIT_CODES
from .environment import choose_device
from .errors import InputError
from .shapes import SHAPE_SETS, given_shapes


class _Parser(argparse.ArgumentParser):
    """Reports bad input as everything else here does, in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(" ".join(message.split()))


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    root = _Parser(
        prog="shape-sweeps",
        description="Check fused GEMMs against float64 and against unfused PyTorch, and time them.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = "run|list|benchmark|explain|build|unpack|tune"
    commands = root.add_subparsers(dest="command", required=True, metavar=names)
    run = commands.add_parser(
        "run",
        help="run a sweep",
        description="Shapes x dtypes x epilogues.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_cases(run)
    add = run.add_argument
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
    add(
        "--timing",
        action=argparse.BooleanOptionalAction,
        help="time the fused calls against unfused ones, or check only (default: timed on CUDA, not on a CPU)",
    )
    add("--max-seconds", type=_seconds, metavar="S", help="begin no case later than this; skip the rest")
    add("--jobs", type=_jobs, metavar="N", help="kernels to build at a time (default: one per core)")
    benchmark = commands.add_parser(
        "benchmark",
        help="measure the suite against its peers",
        description="The whole table of the suite: shapes x epilogues x peers, in bfloat16, in interleaved rounds, with"
        " geometric means and the targets met or missed.",
        epilog=benchmark_command.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark_command.add_arguments(benchmark)
    add = benchmark.add_argument
    add("--rounds", type=_jobs, metavar="N", help="interleaved rounds of each series at most (default: 15)")
    add(
        "--seconds-per-case",
        type=_seconds,
        metavar="S",
        help="for the rounds of one shape and epilogue; five rounds are made in any case (default: 2, on a CPU 0.2)",
    )
    add("--max-seconds", type=_seconds, metavar="S", help="begin no entry later than this; leave out the rest")
    add("--seed", type=_seed, metavar="N", help="of the random inputs (default: 0)")
    add("--jobs", type=_jobs, metavar="N", help="kernels to build at a time (default: one per core)")
    explain = commands.add_parser(
        "explain",
        help="say whether fusing an epilogue pays",
        description="The fusion decision report of an epilogue on a shape, behind a GEMM or as a standalone kernel:"
        " bytes and time with and without fusing, the kernel, dtypes, and what it does not do.  Runs nothing on the"
        " device.",
    )
    explain_command.add_arguments(explain)
    build = commands.add_parser(
        "build",
        help="build the kernels of such calls ahead of time",
        description="Build the kernels of shapes x dtypes x epilogues, on any machine that has nvcc.",
        epilog=build_command.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_cases(build)
    build_command.add_arguments(build)
    add = build.add_argument
    add("--backend", choices=build_command.BACKENDS, default="auto", help="force one (default: auto)")
    add("--multiprocessors", type=_jobs, metavar="N", help="of the devices that --arch names")
    add("--jobs", type=_jobs, metavar="N", help="kernels to build at a time (default: one per core)")
    unpack = commands.add_parser(
        "unpack",
        help="take built kernels from a file",
        description="Merge a bundle of built kernels into this machine's cache; no nvcc and no device need be there.",
    )
    build_command.add_unpack_arguments(unpack)
    tune = commands.add_parser(
        "tune",
        help="measure which kernels are fastest",
        description="Measure the kernels of shapes x dtypes x epilogues on this machine's CUDA device, and keep what is"
        " fastest for the calls to come.",
        epilog=tune_command.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_cases(tune, "suite")
    tune_command.add_arguments(tune)
    tune.set_defaults(backend="auto")  # which of them is fastest is the question
    add = tune.add_argument
    add("--seconds", type=_seconds, metavar="S", help="for all of it, builds included (default: no limit)")
    add(
        "--most", type=_jobs, default=tune_command.MOST, metavar="N", help="kernels of a problem (default: %(default)s)"
    )
    add("--jobs", type=_jobs, metavar="N", help="kernels to build at a time (default: one per core)")
    commands.add_parser(
        "list",
        help="print what there is to choose from",
        description="Print shape sets, epilogues, dtypes and backends.",
    )
    return root


def _add_cases(parser: argparse.ArgumentParser, default: str = "default") -> None:
    """What ``run``, ``build`` and ``tune`` have in common: the cases."""
    add = parser.add_argument
    add(
        "--shapes",
        action="append",
        metavar="LIST",
        help=f"sets ({', '.join(SHAPE_SETS)}) and shapes MxNxK, comma-separated; may be repeated"
        f" (default: the set {default})",
    )
    add("--quick", action="store_true", help="the shape set quick: seconds on two CPU cores")
    add("--dtypes", action="append", metavar="LIST", help=f"{cases.DTYPE_NAMES} (default: bf16,fp16)")
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


def select(options: argparse.Namespace) -> tuple[tuple[cases.Case, ...], dict[str, ep.Epilogue]]:
    """The cases that the options of ``run`` ask for, and the epilogues they name.

    Raises:
        InputError: if one of them makes no sense.
    """
    return _select(options, device=choose_device(options.device), seed=options.seed)


def select_for_build(options: argparse.Namespace) -> tuple[tuple[cases.Case, ...], dict[str, ep.Epilogue]]:
    """The same of ``build``, whose tensors need no memory and no device.

    Raises:
        InputError: if one of them makes no sense.
    """
    return _select(options, device="meta", seed=0)


def select_for_tuning(
    options: argparse.Namespace, device: str
) -> tuple[tuple[cases.Case, ...], dict[str, ep.Epilogue]]:
    """The same of ``tune``.

    Raises:
        InputError: if one of them makes no sense.
    """
    return _select(options, device=device, seed=0, default="suite")


def _select(
    options: argparse.Namespace, *, device: str, seed: int, default: str = "default"
) -> tuple[tuple[cases.Case, ...], dict[str, ep.Epilogue]]:
    shapes = list(given_shapes(options))
    if options.quick:
        shapes += SHAPE_SETS["quick"].shapes
    epilogues = parse_epilogues(options.epilogues or ["all"])
    chosen = cases.product(
        tuple(dict.fromkeys(shapes or SHAPE_SETS[default].shapes)),
        cases.parse_dtypes(options.dtypes or ["bf16,fp16"]),
        epilogues,
        operation=options.operation,
        seed=seed,
        backend=options.backend,
        device=device,
    )
    return chosen, epilogues


def _whole(text: str) -> int | None:
    """A whole number as people write it in ASCII, of at most 19 digits."""
    return int(text) if re.fullmatch("0*[0-9]{1,19}", text) else None


def _seed(text: str) -> int:
    seed = _whole(text)
    if seed is None or seed >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1")
    return seed


def _jobs(text: str) -> int:
    jobs = _whole(text)
    if not jobs:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return jobs


def _seconds(text: str) -> float:
    try:
        seconds = float(text) if text.isascii() and "_" not in text else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds

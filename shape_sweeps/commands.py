"""What the commands do: ``run`` a sweep and write its results, ``explain`` one epilogue, ``list`` the choices.

``build`` and ``unpack`` are in :mod:`.build_command`, ``tune`` is in :mod:`.tune_command`, ``benchmark`` in
:mod:`.benchmark`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from gemm_ops import variables

from . import build_command, cases, explain_command, export, plots, report, tune_command
from .benchmark import command as benchmark_command
from .catalogue import FORMULAS
from .cli import BAD_INPUT, FAILURE, INTERRUPTED, OK
from .environment import describe
from .errors import InputError, ReportLost
from .options import select, select_for_build, select_for_tuning
from .outputs import Output, check_distinct, prepare, write_or_complain
from .records import PASSED, Sweep
from .runner import run_sweep
from .shapes import SHAPE_SETS
from .streams import Stream


def run(options: argparse.Namespace, arguments: Sequence[str], stdout: Stream) -> int:
    """``run``: checks where results go, runs the sweep, reports, writes.

    Raises:
        InputError: before anything has run.
        ReportLost: standard output is, and there are no results to be written elsewhere.
    """
    chosen, epilogues = select(options)
    outputs = _outputs(options)
    device = chosen[0].device
    timing = torch.device(device).type == "cuda" if options.timing is None else options.timing

    console = report.make_console(stdout_taken=any(output.is_stdout for output in outputs.values()))
    environment = describe(device)
    report.print_header(console, environment, len(chosen), timing=timing, chosen=options.timing is not None)

    def give_up() -> None:
        if stdout.error is not None and not outputs:
            raise ReportLost

    with report.Progressing(console, give_up) as progress:
        sweep = run_sweep(
            chosen,
            epilogues,
            timing=timing,
            max_seconds=options.max_seconds,
            jobs=options.jobs,
            observer=progress,
        )
    report.print_report(console, sweep)

    makers: dict[str, Callable[[], str | bytes]] = {
        "--json": lambda: export.to_json(sweep, environment, arguments),
        "--csv": lambda: export.to_csv(sweep),
        "--plot": lambda: plots.plot(sweep, environment, plots.picture_format(options.plot)),
    }
    written = [write_or_complain(output, makers[option]) for option, output in outputs.items()]
    return _exit_code(sweep, all(written))


def benchmark(options: argparse.Namespace, arguments: Sequence[str], stdout: Stream) -> int:
    """``benchmark``.

    Raises:
        InputError: before anything has run.
        ReportLost: as :func:`run`.
    """
    return benchmark_command.run(options, arguments, stdout)


def explain(options: argparse.Namespace) -> int:
    """``explain``.

    Raises:
        InputError: if the options make no sense.
    """
    return explain_command.run(options)


def build(options: argparse.Namespace) -> int:
    """``build``.

    Raises:
        InputError: before anything is built.
    """
    return build_command.run(options, *select_for_build(options))


def unpack(options: argparse.Namespace) -> int:
    """``unpack``.

    Raises:
        InputError: if the file is no bundle, or cannot be merged.
    """
    return build_command.unpack(options)


def tune(options: argparse.Namespace) -> int:
    """``tune``.

    Raises:
        InputError: before anything is measured.
    """
    if not tune_command.wants_cases(options):
        return tune_command.run(options, (), {})
    device = tune_command.choose_device(options)
    return tune_command.run(options, *select_for_tuning(options, device))


def list_choices() -> int:
    """``list``."""
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
        others = [other for other, same in cases.DTYPE_ALIASES.items() if same == name]
        console.print(f"  {name:15}{dtype}; also {', '.join(others)}")
    console.print("\nbackends (--backend)")
    for name, text in _BACKENDS.items():
        console.print(f"  {name:15}{text}")
    return OK


def _outputs(options: argparse.Namespace) -> dict[str, Output]:
    """Option -> where its result goes, found to be writable."""
    names = {"--json": options.json, "--csv": options.csv, "--plot": options.plot}
    found = {option: prepare(name, option) for option, name in names.items() if name is not None}
    check_distinct(list(found.values()))
    if "--plot" in found:
        plots.check_plot(found["--plot"])
    return found


def _exit_code(sweep: Sweep, written: bool) -> int:
    if sweep.interrupted:
        return INTERRUPTED
    if not written:
        return BAD_INPUT
    return FAILURE if sweep.failures or not sweep.count(PASSED) else OK


def check_variables() -> None:
    """Refuses values of environment variables that every call would raise an error for.

    Raises:
        InputError: which says the variable.
    """
    try:
        variables.check_variables()
    except ValueError as error:
        raise InputError(str(error)) from error


_BACKENDS = {
    "auto": "what gemm_ops picks for the device and the problem",
    "skinny": "kernels for up to 16 rows, on Ampere and later",
    "sm90": "TMA and warp-specialised kernels for Hopper",
    "sm80": "cp.async kernels for Ampere, Ada and later",
    "cublas": "PyTorch's product, then one kernel for the whole epilogue",
    "reference": "unfused PyTorch, on any device",
}

"""The command ``tune``: which kernels are fastest, measured on this machine's GPU and kept for the calls to come.

    $ python -m shape_sweeps tune --shapes suite --epilogues bias_gelu --dtypes bf16 --seconds 300 --jobs 16
    $ python -m shape_sweeps tune 4096x11008x4096 --epilogues residual --training      # what its backward uses, too
    $ python -m shape_sweeps tune --shapes suite --dry-run --device h200               # the candidates; needs no GPU
    $ python -m shape_sweeps tune --show                                               # what is known
    $ python -m shape_sweeps tune --merge elsewhere.json --export all.json             # results as files

First the kernels of all problems are built, in parallel, those that the wave model likes best before the others; then
problems are measured one by one (:mod:`gemm_ops.tuner`), each result kept as soon as it is there.  Of problems and
epilogues of one class the first is measured.  What the user's file has already, with all its kernels, is not measured
again, so that a run which was too short, or interrupted, goes on where it ended; ``--again`` measures all.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import epilogues as ep
from gemm_ops import BuildError
from gemm_ops.build.buildable import Buildable
from gemm_ops.build.cache import find_library
from gemm_ops.explain import DEVICES, Device, find_device, present_device
from gemm_ops.explain.units import count
from gemm_ops.kernels.candidates import rank_candidates
from gemm_ops.kernels.selection import Target, problem_refusal
from gemm_ops.tuner import known, tune
from gemm_ops.tuner.classes import ProblemClass, problem_class, tree_class
from gemm_ops.tuner.records import NOT_BUILT, Measured, RecordError, write_records

from . import memory, report, tune_report
from .cases import Case
from .cli import BAD_INPUT, FAILURE, INTERRUPTED, OK, complain
from .environment import choose_device as choose_present_device
from .errors import InputError, OutputError, one_line
from .inputs import make_inputs, placeholder_inputs
from .outputs import Output, prepare
from .shapes import add_positional, has_shapes
from .tune_calls import Wanted, wanted_calls

EXIT_CODES = """\
exit codes:
  0    every problem is measured, or was before
  1    a problem could not be measured, --seconds were too few for it or its kernels, or a kernel failed
  2    bad input, no GPU to measure on, or a file that cannot be read or written: one line on standard error
  130  interrupted (Ctrl-C; 143 by SIGTERM), after the table of what was measured; that is kept
"""

#: Kernels to build for a problem at most.
MOST = tune.MOST
#: Seconds of rounds for a problem, and the least that make sense.
_SECONDS_OF_ROUNDS, _LEAST_SECONDS = 5.0, 0.3
#: Of --seconds, the share after which no further build begins.
_SHARE_OF_BUILDS = 0.6

Key = tuple[ProblemClass, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``tune`` that ``run`` has not."""
    add = parser.add_argument
    add_positional(parser)
    add(
        "--device",
        metavar="NAME",
        help="cuda or cuda:INDEX (default: cuda); with --dry-run, --show and --export also one of "
        + ", ".join(DEVICES),
    )
    add("--training", action="store_true", help="also recorded forwards, and the backward's products at odd extents")
    add("--padded", action="store_true", help="also x, weight and outputs in padded rows, where extents are odd")
    add("--again", action="store_true", help="measure what was measured before, too")
    add("--dry-run", action="store_true", help="list the candidates; builds and measures nothing, needs no GPU")
    add(
        "--show",
        action="store_true",
        help="list what is known, the user's results and the package's; with --device those of that device",
    )
    add(
        "--merge",
        action="extend",
        nargs="+",
        metavar="FILE",
        help="add the results of files to the user's; newer count",
    )
    add("--export", metavar="FILE", help="write all that is known of the device; - for standard output")


def wants_cases(options: argparse.Namespace) -> bool:
    """Whether problems are to be measured or listed; else it is about files alone."""
    named = has_shapes(options) or options.quick or options.epilogues or options.dtypes or options.dry_run
    return bool(named) or not (options.show or options.merge or options.export)


def choose_device(options: argparse.Namespace) -> str:
    """Where tensors are to be: on the GPU, or, to list candidates, nowhere.

    Raises:
        InputError: if there is no GPU to measure on.
    """
    if options.dry_run:
        return "meta"
    device = choose_present_device(options.device)
    if torch.device(device).type != "cuda":
        raise InputError(
            "tune: there is no CUDA device here to measure on; --dry-run lists the candidates, --show what is known"
        )
    return device


def run(options: argparse.Namespace, cases: Sequence[Case], epilogues: Mapping[str, ep.Epilogue]) -> int:
    """``tune``; see the module's first page.

    Args:
        cases: empty where it is about files alone.

    Raises:
        InputError: before anything is built or written.
    """
    output = None if options.export is None else prepare(options.export, "--export")
    console = report.make_console(stdout_taken=output is not None and output.is_stdout)
    merged = [(name, _read(name)) for name in options.merge or ()]
    device = _device_name(options) if options.export is not None else ""
    shown = _figures(options).driver_name if options.show and options.device is not None else ""
    for name, records in merged:
        newer = _newer(records)
        if unkept := known.remember(newer, quiet=True):
            raise InputError(f"--merge: {name!r}: {one_line(unkept[0])}")
        text = (
            f"{count(len(records), 'result')} in {name}: {len(newer)} new or newer, {len(records) - len(newer)} known"
        )
        console.print("; ".join(filter(None, (text, tune_report.strangers(records)))), soft_wrap=True)
    code = OK
    if cases and options.dry_run:
        code = _list_candidates(options, cases, epilogues, console)
    elif cases:
        code = _measure(options, cases, epilogues, console)
    if options.show:
        tune_report.print_known(console, known.known_files(), shown)
    if output is not None and code != INTERRUPTED:
        code = max(code, _export(output, device, console))
    return code


def _read(name: str) -> tuple[Measured, ...]:
    try:
        return known.read_file(Path(name))
    except (OSError, RecordError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(str(error))
        raise InputError(f"--merge: {name!r}: {reason}") from error


def _newer(records: Sequence[Measured]) -> list[Measured]:
    """Those that the user's file does not have, or has of an earlier time."""
    users = {record.problem.device: known.users_results(record.problem.device) for record in records}
    return [
        record
        for record in records
        if (there := users[record.problem.device].get(record.key)) is None or there.date < record.date
    ]


def _export(output: Output, device: str, console: report.Console) -> int:
    results = known.all_of(device)
    try:
        output.write(write_records(device, results.values()))
    except OutputError as error:
        complain(error)
        return BAD_INPUT
    console.print(f"wrote {count(len(results), 'result')} of the {device} to {output.name}", soft_wrap=True)
    return OK


def _device_name(options: argparse.Namespace) -> str:
    """Whose results to write: the device named, that is there, or that alone has some.

    Raises:
        InputError: if none of these says so.
    """
    if options.device is not None or torch.cuda.is_available():
        return _figures(options).driver_name
    devices = {record.problem.device for results in known.known_files().values() for record in results.values()}
    if len(devices) != 1:
        what = "nothing is known" if not devices else f"there are results of {', '.join(sorted(devices))}"
        raise InputError(f"--export: {what}, and no CUDA device is here: name one with --device")
    return devices.pop()


def _figures(options: argparse.Namespace) -> Device:
    """The device of ``--device``, or that is there, or an H200."""
    try:
        if options.device is not None:
            return find_device(options.device)
    except ep.EpilogueError as error:
        raise InputError(f"--device: {one_line(str(error))}") from error
    return present_device() or DEVICES["h200"]


def _list_candidates(
    options: argparse.Namespace,
    cases: Sequence[Case],
    epilogues: Mapping[str, ep.Epilogue],
    console: report.Console,
) -> int:
    """``--dry-run``: the candidates of each problem, and whether they are built."""
    figures = _figures(options)
    target = Target(figures.capability, figures.multiprocessors, figures.driver_name)
    kernels: dict[str, Buildable] = {}
    refused: Counter[str] = Counter()
    seen: set[Key] = set()
    rows: list[tuple[str, str, float, bool]] = []
    done: list[str] = []
    for wanted in wanted_calls(cases, epilogues, training=options.training, padded=options.padded):
        call = wanted.make(placeholder_inputs)
        if refusal := problem_refusal(call.problem, len(call.operands), len(call.tree.outputs)):
            refused[refusal] += 1
            continue
        assert call.problem.element is not None
        problem = problem_class(call.request, call.problem.element, target)
        if problem is None:
            refused["no kernel takes it in one launch"] += 1
            continue
        key = problem, tree_class(call.tree)
        if key in seen:
            continue
        seen.add(key)
        if not options.again and (found := _find_done(*key)) is not None:
            done.append(f"{wanted.title}: known, measured {found.date}; --again measures it anew")
        for each in rank_candidates(call.tree, call.problem.element, call.request, target, most=options.most):
            kernels[each.spec.key] = each.spec
            rows.append((wanted.title, each.name, each.expected, find_library(each.spec) is not None))
    tune_report.print_candidates(console, rows)
    for line in done:
        console.print(line, soft_wrap=True)
    for reason, calls in refused.items():
        console.print(f"nothing to measure of {count(calls, 'call')}: {report.shorten(reason)}", soft_wrap=True)
    missing = sum(find_library(kernel) is None for kernel in kernels.values())
    console.print(
        f"{count(len(rows), 'candidate')} of {count(len(seen), 'problem')} on the {figures.driver_name}: "
        f"{count(len(kernels), 'kernel')}, {missing} to build"
    )
    return OK if rows else FAILURE


@dataclass
class _Run(tune.Watch):
    """One run: what is measured, what went wrong; and the watch that shows it."""

    progress: report.Progressing
    measured: list[Measured] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    failed: bool = False

    def building(self, kernels: int) -> None:
        self.progress.building(kernels)

    def built(self, kernel: Buildable, seconds: float, cached: bool) -> None:
        self.progress.built(seconds, cached)

    def not_built(self, kernel: Buildable, error: BuildError) -> None:
        self.failed = True
        self.progress.not_built(kernel.title)

    def dropped(self, task: tune.Task, name: str, reason: str) -> None:
        if reason != NOT_BUILT:
            self.failed = True
            self.progress.say(f"dropped {name} of {task.title}: {report.shorten(one_line(reason))}")

    def refuse(self, reason: str, *, failed: bool = True) -> None:
        self.reasons[reason] += 1
        self.failed |= failed


def _measure(
    options: argparse.Namespace,
    cases: Sequence[Case],
    epilogues: Mapping[str, ep.Epilogue],
    console: report.Console,
) -> int:
    """Builds and measures; prints what came of it, and how the command ends."""
    began, seconds = time.perf_counter(), options.seconds
    interrupted, reached = False, 0
    with report.Progressing(console) as progress, tune.all_built(), torch.no_grad():
        state = _Run(progress)
        planned: dict[Key, Wanted] = {}
        try:
            kernels = _plan(options, cases, epilogues, state, planned)
            until = None if seconds is None else began + _SHARE_OF_BUILDS * seconds
            tune.build_in_order(kernels, jobs=options.jobs, until=until, watch=state)
            progress.measuring(len(planned))
            for wanted in planned.values():
                left = None if seconds is None else began + seconds - time.perf_counter()
                if left is not None and left < _LEAST_SECONDS:
                    break
                share = _SECONDS_OF_ROUNDS if left is None else left / (len(planned) - reached)
                _measure_one(wanted, options.most, min(max(share, _LEAST_SECONDS), _SECONDS_OF_ROUNDS), state)
                progress.measured(wanted.title)
                reached += 1
        except KeyboardInterrupt:
            interrupted = True
    tune_report.print_results(console, state.measured)
    for reason, problems in state.reasons.items():
        console.print(f"not measured, {count(problems, 'problem')}: {report.shorten(reason)}", soft_wrap=True)
    missed = len(planned) - reached
    summary = f"{count(len(state.measured), 'problem')} measured"
    if partial := sum(not each.is_whole for each in state.measured):
        summary += f", {partial} of them without kernels that were not built in time"
    if interrupted:
        console.print(f"{summary}; interrupted, {missed} not reached")
        return INTERRUPTED
    console.print(summary + (f", {missed} not reached within {seconds:g} s: run it again" if missed else ""))
    return FAILURE if state.failed or missed or partial else OK


def _plan(
    options: argparse.Namespace,
    cases: Sequence[Case],
    epilogues: Mapping[str, ep.Epilogue],
    state: _Run,
    planned: dict[Key, Wanted],
) -> list[tuple[Buildable, ...]]:
    """The kernels to build of each problem; ``planned`` gets what is to be measured, one of each class."""
    kernels = []
    for wanted in wanted_calls(cases, epilogues, training=options.training, padded=options.padded):
        try:
            if too_large := memory.shortage(wanted.case, wanted.epilogue):
                state.refuse(too_large)
                continue
            task = tune.plan_task(wanted.make(placeholder_inputs), most=options.most)
        except Exception as error:  # a fault of this case, whatever it is, must not end the command
            state.refuse(one_line(error))
            continue
        if isinstance(task, str):
            state.refuse(one_line(task))
        elif task.key in planned:
            continue
        elif not options.again and _find_done(*task.key) is not None:
            state.refuse("it was measured before; --again measures it anew", failed=False)
        else:
            planned[task.key] = wanted
            kernels.append(task.specs)
    return kernels


def _find_done(problem: ProblemClass, tree: str) -> Measured | None:
    """The result that the user's file has, if it has all there is to measure."""
    found = known.users_results(problem.device).get((problem, tree))
    return found if found is not None and found.is_whole else None


def _measure_one(wanted: Wanted, most: int, seconds: float, state: _Run) -> None:
    try:
        task = tune.plan_task(wanted.make(make_inputs), most=most)
        assert isinstance(task, tune.Task), "it was one when it was planned"
        measured = tune.measure_task(task, seconds, watch=state)
    except Exception as error:  # as in _plan
        state.refuse(f"{wanted.title}: {one_line(error)}")
        return
    tune.keep([measured])
    state.measured.append(measured)

"""The commands ``build`` and ``unpack``: kernels ahead of time, and in one file for machines that cannot build them.

    $ python -m shape_sweeps build --shapes 4096x11008x4096 --epilogues bias_gelu --device h200 --training
    $ python -m shape_sweeps build --shapes suite --arch sm_80,sm_90 --jobs 8 --pack kernels.tar.xz
    $ python -m shape_sweeps unpack kernels.tar.xz                         # elsewhere: into that machine's cache

No device need be there: which kernels the calls would use is :mod:`gemm_ops.foreseen`'s to say, for the compute
capability and the number of multiprocessors of a device by its name.  The calls are those that a user makes, with new
outputs; a sweep (``run``) writes into buffers with padded rows as well, whose kernels ``--padded`` builds.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import epilogues as ep
import gemm_ops
from gemm_ops.build.buildable import Buildable
from gemm_ops.build.bundle import merge
from gemm_ops.explain import DEVICES, Device, find_device, present_device
from gemm_ops.explain.units import count
from gemm_ops.foreseen import foresee
from gemm_ops.kernels.families import families_for
from gemm_ops.kernels.selection import Target

from . import report
from .cases import Case
from .cli import BAD_INPUT, FAILURE, INTERRUPTED, OK, complain
from .errors import InputError, one_line
from .inputs import Inputs, placeholder_inputs
from .outputs import Output, prepare
from .padded_inputs import in_rows, paddings
from .shapes import split_list

#: what ``--backend`` takes: the others build nothing
BACKENDS = ("auto", "skinny", "sm90", "sm80", "cublas")

EXIT_CODES = """\
exit codes:
  0    every kernel is there
  1    a kernel could not be built (all others are all the same), or no call has a kernel
  2    bad input, or a bundle that cannot be written: one line on standard error says what and where
  130  interrupted (Ctrl-C; 143 by SIGTERM), after the table of what was done; nothing is packed
"""

_ARCH = re.compile(r"(?:sm_|compute_)?([0-9]{1,2})\.?([0-9])a?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``build`` that ``run`` has not."""
    add = parser.add_argument
    add(
        "--device",
        action="append",
        metavar="LIST",
        help=f"devices to build for: {', '.join(DEVICES)}, cuda or cuda:INDEX (default: the CUDA device that is there)",
    )
    add(
        "--arch",
        action="append",
        metavar="LIST",
        help="architectures to build for, such as sm_90; which kernel is chosen depends on the number of"
        " multiprocessors as well: that of a --device of the architecture, else of the first in the list above",
    )
    add("--training", action="store_true", help="also the kernels of recorded forwards and of their backwards")
    add(
        "--padded",
        action="store_true",
        help="where extents are odd, also those of calls whose x, weight or outputs lie in padded rows, as the weight"
        " of a FusedLinear in evaluation mode and the result of padded_output=True do",
    )
    add("--pack", metavar="FILE", help="write the kernels into one file (.tar.xz), which unpack takes elsewhere")


def add_unpack_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``unpack``."""
    parser.add_argument("file", help="the bundle that build --pack, or gemm_ops.pack_kernels, wrote")
    parser.add_argument(
        "--into",
        metavar="FOLDER",
        help="a folder for GEMM_OPS_BUNDLE to name, which is made if need be (default: this machine's cache)",
    )


def read_targets(options: argparse.Namespace) -> tuple[Target, ...]:
    """The devices to build for.

    Raises:
        InputError: for one that is unknown, or has no kernels, or an architecture without a number of multiprocessors.
    """
    devices: list[Device] = []
    for name in split_list(options.device, "--device") if options.device else ():
        try:
            devices.append(find_device(name))
        except ep.EpilogueError as error:
            raise InputError(f"--device: {one_line(str(error))}") from error
    if not options.device and not options.arch:
        present = present_device()
        if present is None:
            raise InputError(
                "--device: there is no CUDA device here to build for: name one, such as --device h200 or --arch sm_90"
            )
        devices.append(present)
    found = dict.fromkeys(map(_target_like, devices))
    for name in split_list(options.arch, "--arch") if options.arch else ():
        found[_target_of(name, devices, options.multiprocessors)] = None
    if options.multiprocessors and not options.arch:
        raise InputError("--multiprocessors: goes with --arch; a --device has a number of its own")
    for target in found:
        if not families_for(target.capability):
            raise InputError(f"--arch: no kernel runs on {_name(target)}: sm_80 is the oldest")
    return tuple(found)


def _target_of(name: str, devices: Sequence[Device], multiprocessors: int | None) -> Target:
    match = _ARCH.fullmatch(name.lower())
    if match is None:
        raise InputError(f"--arch: {name!r} is no architecture, such as sm_80 or sm_90")
    capability = int(match[1]), int(match[2])
    if multiprocessors is not None:
        return Target(capability, multiprocessors)
    alike = [device for device in (*devices, *DEVICES.values()) if device.capability == capability]
    if not alike and families_for(capability):
        raise InputError(
            f"--arch: no device of {name} is known here: give its number of multiprocessors with --multiprocessors"
        )
    return _target_like(alike[0]) if alike else Target(capability, 1)


def _target_like(device: Device) -> Target:
    """What matters of a device; by its name, what was measured on it."""
    return Target(device.capability, device.multiprocessors, device.driver_name)


def _name(target: Target) -> str:
    return f"sm_{target.capability[0]}{target.capability[1]}"


@dataclass
class Planned:
    """What the calls need.

    Attributes:
        kernels: by key.
        serves: key -> the problems that use the kernel, in words.
        refused: why there is no kernel -> how many calls have none for that.
        notes: what else to know -> of how many calls.
    """

    kernels: dict[str, Buildable] = field(default_factory=dict)
    serves: dict[str, list[str]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


def plan(
    cases: Iterable[Case],
    epilogues: Mapping[str, ep.Epilogue],
    targets: Sequence[Target],
    *,
    training: bool = False,
    padded: bool = False,
) -> Planned:
    """The kernels of cases on PyTorch's meta device; ``padded``: as the option of that name."""
    planned = Planned()
    for case in cases:
        epilogue = epilogues[case.epilogue]
        title = f"{case.shape} {case.dtype} {case.epilogue}"
        try:
            for (inputs, padded_output), target in itertools.product(_calls(case, epilogue, padded), targets):
                found = foresee(
                    *(inputs.a, inputs.right, epilogue, inputs.operands, target),
                    backend=case.backend,
                    training=training,
                    padded_output=padded_output,
                )
                if found.refusal:
                    planned.refused[f"{_name(target)}: {one_line(found.refusal)}"] += 1
                planned.notes.update(one_line(note) for note in found.notes)
                for kernel in found.kernels:
                    planned.kernels.setdefault(kernel.key, kernel)
                    served = planned.serves.setdefault(kernel.key, [])
                    if title not in served:
                        served.append(title)
        except Exception as error:  # a fault of this case, whatever it is, must not end the command
            planned.refused[one_line(error)] += 1
    return planned


def _calls(case: Case, epilogue: ep.Epilogue, padded: bool) -> list[tuple[Inputs, bool]]:
    """Inputs, and whether outputs are to lie in padded rows: contiguous first, then what differs from it."""
    inputs = placeholder_inputs(case, epilogue)
    return [
        (replace(inputs, a=in_rows(inputs.a, pad_a), b=in_rows(inputs.b, pad_b)), pad_output)
        for pad_a, pad_b, pad_output in paddings(case, epilogue, inputs, padded)
    ]


def run(options: argparse.Namespace, cases: Sequence[Case], epilogues: Mapping[str, ep.Epilogue]) -> int:
    """``build``: finds the kernels, builds those that are missing, prints what came of it, packs.

    Raises:
        InputError: before anything is built.
    """
    targets = read_targets(options)
    pack = None if options.pack is None else _prepare_pack(options.pack)
    planned = plan(cases, epilogues, targets, training=options.training, padded=options.padded)
    console = report.make_console()
    where = ", ".join(
        dict.fromkeys(f"{_name(target)} ({target.multiprocessors} multiprocessors)" for target in targets)
    )
    for_cases = f"{count(len(planned.kernels), 'kernel')} for {count(len(cases), 'case')}"
    console.print(f"shape-sweeps: {for_cases} on {where}", soft_wrap=True)

    results: dict[str, str] = {}
    errors: dict[str, str] = {}
    interrupted = False

    def on_done(kernel: Buildable, seconds: float, cached: bool) -> None:
        results[kernel.key] = report.THERE if cached else f"{seconds:.1f} s"
        progress.built(seconds, cached)

    def on_failed(kernel: Buildable, error: gemm_ops.BuildError) -> None:
        errors[kernel.key] = _why(error)
        progress.not_built(kernel.title)

    kernels = list(planned.kernels.values())
    if kernels:
        with report.Progressing(console) as progress:
            progress.building(len(kernels))
            try:
                gemm_ops.build_kernels(kernels, jobs=options.jobs, on_done=on_done, on_failed=on_failed)
            except KeyboardInterrupt:
                interrupted = True
            except gemm_ops.BuildError:
                assert errors, "each that failed was told of"
    report.print_kernels(console, kernels, planned.serves, results, errors)
    for reason, calls in planned.refused.items():
        console.print(f"no kernel for {count(calls, 'call')}: {report.shorten(reason)}", soft_wrap=True)
    for note, calls in planned.notes.items():
        console.print(f"note on {count(calls, 'call')}: {report.shorten(note)}", soft_wrap=True)
    cached = sum(result == report.THERE for result in results.values())
    summary = f"{len(results) - cached} built, {cached} there already, {len(errors)} failed"
    if interrupted:
        console.print(f"{summary}; interrupted, {len(kernels) - len(results) - len(errors)} not reached")
        return INTERRUPTED
    console.print(summary)
    if pack is not None and results:
        try:
            packed = gemm_ops.pack_kernels(pack.path, [planned.kernels[key] for key in results])
        except gemm_ops.BundleError as error:
            complain(f"--pack: {error}")
            return BAD_INPUT
        console.print(f"packed {count(packed, 'kernel')} into {pack.name}", soft_wrap=True)
    return FAILURE if errors or not results else OK


def _why(error: gemm_ops.BuildError) -> str:
    """An error without the command line and most of the compiler's output, which its source has beside it."""
    text = str(error).partition("\n")[0]
    said = next((line for line in error.output.splitlines() if "error" in line.lower()), "")
    return one_line(": ".join(filter(None, (text, said))) + (f" ({error.source})" if error.source else ""))


def _prepare_pack(name: str) -> Output:
    output = prepare(name, "--pack")
    if not output.regular:
        raise InputError(f"--pack: {name!r} is no regular file, and a bundle goes into one")
    return output


def unpack(options: argparse.Namespace) -> int:
    """``unpack``: merges a bundle, and says what came of it.

    Raises:
        InputError: if it is none, or cannot be merged.
    """
    if not options.file:
        raise InputError("unpack: the name of the file is empty")
    if options.into == "":
        raise InputError("unpack: --into: the name of the folder is empty")
    try:
        merged = merge(options.file, into=options.into)
    except (gemm_ops.BundleError, gemm_ops.BuildError) as error:
        raise InputError(f"unpack: {one_line(str(error))}") from error
    console = report.make_console()
    total, added = len(merged.manifest.kernels), len(merged.added)
    folder = gemm_ops.cache_folder() if options.into is None else options.into
    console.print(
        f"{count(total, 'kernel')} in {options.file}: {added} new in {folder}, {total - added} there already",
        soft_wrap=True,
    )
    if merged.foreign:
        console.print(f"note: {merged.foreign_note}", soft_wrap=True)
    return OK

"""The command ``explain``: the fusion decision report of one epilogue on one shape.

    $ python -m shape_sweeps explain residual --shape 4096,4096,4096
    $ python -m shape_sweeps explain my_module:my_epilogue --shape 8192,14336,4096 --device a100-80 --format markdown
    $ python -m shape_sweeps explain residual --shape 4096,4096,4096 --format script --output compare.py
    $ python -m shape_sweeps explain residual --shape 8192,8192           # no K: a standalone kernel, without a GEMM

The report itself is :class:`gemm_ops.explain.Report` or :class:`gemm_ops.explain.ChainReport`; here is what the command
line asks for, and where it goes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import epilogues as ep
from epilogues.graphs import to_graphviz, to_mermaid
from gemm_ops.explain import DEVICES, AllOptions, ChainReport, Report, explain

from .cases import DTYPE_NAMES, parse_dtypes
from .catalogue import FORMULAS, load_epilogue
from .cli import BAD_INPUT, OK, complain
from .errors import InputError, OutputError, one_line
from .outputs import prepare
from .shapes import read_extents

#: format -> the report in it
FORMATS: dict[str, Callable[[Report | ChainReport], str]] = {
    "text": str,
    "markdown": lambda report: report.to_markdown(),
    "json": lambda report: report.to_json(),
    "mermaid": lambda report: to_mermaid(report.resolved),
    "graphviz": lambda report: to_graphviz(report.resolved),
    "script": lambda report: report.script,
    "source": lambda report: _source(report),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("epilogue", help=f"one of {', '.join(FORMULAS)}, or module:attribute for your own")
    add(
        "--shape",
        required=True,
        metavar="M,N[,K]",
        help="extents of (M, K) @ (K, N), or of the tensor (M, N) that a standalone kernel takes, which has no GEMM;"
        " MxNxK and MxN do as well",
    )
    add(
        "--dtype",
        default="bf16",
        metavar="NAME",
        help=f"of matrices, tensor and operands: {DTYPE_NAMES} (default: bf16)",
    )
    add(
        "--format",
        choices=tuple(FORMATS),
        default="text",
        help="the report as text, markdown or json; a picture of the tree for mermaid or graphviz; the script that"
        " compares fused with eager PyTorch; the source of the kernel (default: text)",
    )
    add(
        "--device",
        metavar="NAME",
        help=f"whose published figures to reckon with: {', '.join(DEVICES)}, cuda or cuda:INDEX"
        " (default: the CUDA device that is there, else h200)",
    )
    add("--measure", action="store_true", help="measure the CUDA device's bandwidth instead")
    add("--output", metavar="FILE", help="write to a file instead of standard output")


def run(options: argparse.Namespace) -> int:
    """Writes the report that the options ask for.

    Raises:
        InputError: if they make no sense.
    """
    m, n, k = parse_shape(options.shape)
    dtypes = parse_dtypes([options.dtype], "--dtype")
    if len(dtypes) != 1:
        raise InputError(f"--dtype: expected one dtype, got {options.dtype!r}")
    output = None if options.output is None else prepare(options.output, "--output")
    epilogue = load_epilogue(options.epilogue, "explain")
    asked = AllOptions(
        dtype=dtypes[0],
        device=options.device,
        measure=options.measure,
        origin=options.epilogue if ":" in options.epilogue else "",
    )
    try:
        report = explain(epilogue, m, n, **asked) if k is None else explain(epilogue, m, n, k, **asked)
    except ep.EpilogueError as error:
        raise InputError(f"explain: {one_line(str(error))}") from error
    text = FORMATS[options.format](report)
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        sys.stdout.write(text)
        return OK
    try:
        output.write(text)
    except OutputError as error:
        complain(error)
        return BAD_INPUT
    return OK


def parse_shape(text: str) -> tuple[int, int, int | None]:
    """One shape, M,N,K or MxNxK; or M,N or MxN, whose K is None.

    Raises:
        InputError: for anything else.
    """
    parts = text.replace("x", ",").replace("X", ",").split(",")
    if len(parts) not in (2, 3) or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InputError(
            f"--shape: expected three extents M,N,K, such as 4096,4096,4096, or two, M,N, for a standalone kernel, got"
            f" {text!r}"
        )
    m, n, *k = read_extents([part.strip() for part in parts], text, "--shape")
    return m, n, k[0] if k else None


def _source(report: Report | ChainReport) -> str:
    if not report.source:
        raise InputError(f"--format source: {one_line(report.source_note)}")
    return report.source

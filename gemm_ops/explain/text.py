"""The report as plain text, at most 110 columns wide, the decision first.

>>> print(to_text(report))
scaled_residual, M x N x K = 4096 x 4096 x 4096, bf16, on H200 SXM
FUSE: ...
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from epilogues.analysis import ChainTraffic

from .report import CommonReport, Report
from .units import count, in_bytes, in_mebibytes, in_number, in_rate, in_share, in_time

_WIDTH = 110
#: One row of a table.
Cells = tuple[str, ...]
_INDENT = "  "


def to_text(report: Report) -> str:
    """The whole report; the source and the script are only named, they are long."""
    parts = [[title(report), report.decision.headline, *bullets(report.decision.reasons)]]
    if has_output(report):
        parts += [
            ["Device", *wrapped(device_words(report))],
            ["Bytes and time", *columns(time_rows(report)), *wrapped(TIME_NOTE)],
            ["Kernels of eager PyTorch", *columns(eager_rows(report.traffic)), *wrapped(eager_note(report))],
        ]
    parts += [
        ["Fused kernel", *(line for words in kernel_words(report) for line in wrapped(words))],
        ["Dtypes: " + DTYPE_NOTE, *columns(dtype_rows(report)[1:])],
        ["Who fuses it already", *bullets(coverage_words(report))],
        ["Limitations", *bullets(report.limitations)],
        [more_words(report)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


# What both text and Markdown say.

TIME_NOTE = (
    "limit: no kernel is faster, it is the larger of bytes / bandwidth and FLOP / peak, and of several kernels the "
    "sum; expected: with what kernels were seen to lose on an H200. Estimates, not measurements."
)
DTYPE_NOTE = "computed in f32; rounded where it says so, nowhere else"


def has_output(report: CommonReport) -> bool:
    """Whether the result has elements: where it has none no kernel runs, and there is nothing to count."""
    return 0 not in (report.m, report.n)


def in_one_line(text: str) -> str:
    """The text without line breaks or other characters that are not printed: the user's names may hold anything."""
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in " ".join(text.split())
    )


def title(report: Report) -> str:
    """Epilogue, problem and device in one line."""
    return title_of(report, f"M x N x K = {report.m} x {report.n} x {report.k}")


def title_of(report: CommonReport, problem: str) -> str:
    """The same of a problem in words."""
    assumed = " (assumed)" if report.device_note.startswith("assumed") else ""
    return in_one_line(f"{report.name}, {problem}, {report.dtype}, on {report.device.name}{assumed}")


def more_words(report: Report) -> str:
    """Where the rest is, and what of it there is."""
    both = "report.to_markdown() has both"
    script = "report.script compares and times" if report.k and has_output(report) else "report.script compares"
    if report.kernel.spec is None:
        return f"More: {script}, report.to_markdown() has it; no kernel, so no C++ source"
    return f"More: {script}, report.source is the C++, {both}"


def device_words(report: Report) -> str:
    """The device's figures and where they are from."""
    return device_words_of(report, f"{in_rate(report.device.peak(report.dtype), 'FLOP/s')} in {report.dtype}")


def device_words_of(report: CommonReport, speed: str) -> str:
    """The same with how fast it computes in words."""
    device = report.device
    figures = (
        f"{device.name}: {in_rate(device.bandwidth, 'B/s')}, {speed}, L2 cache {in_mebibytes(device.l2)}, "
        f"{device.multiprocessors} multiprocessors; {device.origin}."
    )
    noted = f"{figures} {report.device_note[:1].upper()}{report.device_note[1:]}." if report.device_note else figures
    return in_one_line(noted)


def time_rows(report: Report) -> list[Cells]:
    """The table of the three ways, its head first; of eager PyTorch alone where there is no product to fuse."""
    traffic, times = report.traffic, report.times
    operations = 2 * report.m * report.n * report.k
    compiled = 1 + bool(traffic.tail)
    rows: list[Cells] = [("", "moves", "FLOP per byte", "limit", "expected")]
    for name, bytes, time in (
        (f"eager PyTorch, {count(len(traffic.eager), 'kernel')}", traffic.unfused_bytes, times.eager),
        (f"torch.compile, {count(compiled, 'kernel')}", traffic.compiled_bytes, times.compiled),
        (f"fused, {count(1 + len(traffic.copied), 'kernel')}", traffic.fused_bytes, times.fused),
    ):
        intensity = in_number(operations / bytes) if bytes else "-"
        rows.append((name, in_bytes(bytes), intensity, in_time(time.limit), in_time(time.expected)))
    if not report.k:
        return rows[:2]
    saved = in_share(traffic.saved_share) if traffic.saved_bytes >= 0 else "nothing"
    rows.append(("saved, against eager", saved, "", "", in_share(times.saved_share)))
    return rows


def eager_rows(traffic: ChainTraffic) -> list[Cells]:
    """The table of eager PyTorch's kernels, its head first."""
    rows: list[Cells] = [("", "reads", "writes")]
    rows += [(kernel.name, in_bytes(kernel.read), in_bytes(kernel.written)) for kernel in traffic.eager]
    return rows


def eager_note(report: Report) -> str:
    """How the kernels of eager PyTorch are counted."""
    counted = (
        "Counted: each kernel reads every input once and writes its result once; a bias that F.linear can add is part "
        "of it."
    )
    if not report.k:
        name = report.traffic.eager[0].name
        filled = "zeros, or the bias" if name == "F.linear" else "zeros"
        return f"{counted} {name} multiplies nothing: its result is {filled}."
    balance = in_number(report.times.gemm.ridge)
    return (
        f"{counted} The GEMM has {in_number(report.times.gemm.intensity)} FLOP per byte and the device balances at "
        f"{balance}: it is limited by {'arithmetic' if report.times.gemm.bound == 'compute' else 'memory traffic'}."
    )


def kernel_words(report: Report) -> list[str]:
    """Which kernel, and what it needs of registers; a paragraph each."""
    if report.kernel.spec is None:
        return [f"None: {report.kernel.refusal}."]
    state = "built already" if report.kernel.library else "not built yet"
    words = [f"{report.kernel.spec.config.name} for sm_{report.kernel.spec.arch}, {state}."]
    words += [f"{route}." for route in report.kernel.routes]
    use = report.registers
    if use is not None:
        warning = "  WARNING: it will spill." if use.warns else ""
        words.append(
            f"Registers: about {use.needed} of the {use.budget} that a thread may have (estimate). At most "
            f"{count(use.live, 'value')} of one element must be held at once ({peak_words(use.live_at)}); above "
            f"{max(use.live_limit, 0)}, values are expected to spill to memory.{warning}"
        )
    if report.kernel.library:
        words.append(built_words(report))
    work = count(report.instructions, "instruction")
    words.append(f"Work: about {work} for each element, {in_time(report.times.fused_arithmetic)} in all (estimate).")
    return words


def built_words(report: CommonReport) -> str:
    """What the compiler says of the kernel that is built."""
    if report.built is None:
        return "Built: registers and spills are not known, there is no record of the build and no cuobjdump."
    spilled = f"{count(report.built.spilled, 'byte')} of local memory" if report.built.spilled else "no spills"
    return f"Built: {report.built.registers} registers a thread, {spilled} (says {report.built.source})."


def peak_words(at: str) -> str:
    return "its inputs" if at == "load" else f"during {at}"


def dtype_rows(report: CommonReport) -> list[Cells]:
    """The dtype and cast map, its head first."""
    rows: list[Cells] = [("value", "dtype", "conversion")]
    return rows + [(entry.text, entry.dtype, entry.conversion) for entry in report.dtypes]


def coverage_words(report: Report) -> tuple[str, str]:
    """What cuBLASLt and torch.compile do."""
    coverage = report.coverage
    if not has_output(report):
        return (
            "cuBLASLt, through PyTorch, is not called: the output has no elements.",
            "torch.compile has nothing to fuse: the output has no elements.",
        )
    if not report.k:
        fused = f"fuses what is computed from the zeros: {', '.join(coverage.remaining)}"
        return (
            "cuBLASLt, through PyTorch, is not called: there is nothing to multiply.",
            f"torch.compile {fused if coverage.remaining else 'has nothing left to fuse'}.",
        )
    return (
        f"cuBLASLt, through PyTorch, {coverage.cublaslt_words}.",
        f"torch.compile {coverage.compile_words}.",
    )


# Layout.


def wrapped(words: str) -> list[str]:
    """Lines of a paragraph."""
    return textwrap.wrap(words, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False)


def bullets(items: Iterable[str]) -> list[str]:
    """Lines of a list."""
    lines = []
    for item in items:
        lines += textwrap.wrap(item, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
    return lines


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as columns: the first and words to the left, what begins with a digit in some row to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [any(cell[:1].isdigit() for cell in column) for column in zip(*rows, strict=True)]
    right[0] = False
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append((_INDENT + "  ".join(cells)).rstrip())
    return lines

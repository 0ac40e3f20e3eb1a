"""The report of a chain as plain text, at most 110 columns wide, the decision first.

>>> print(to_text(report))
bias_gelu_residual, standalone, M x N = 8192 x 8192, bf16, on H200 SXM
FUSE: ...
"""

from __future__ import annotations

from ..estimate import ATTAINED_BANDWIDTH, KERNEL_SECONDS, L2_SPEEDUP
from ..text import (
    DTYPE_NOTE,
    Cells,
    built_words,
    bullets,
    columns,
    device_words_of,
    dtype_rows,
    eager_rows,
    has_output,
    peak_words,
    title_of,
    wrapped,
)
from ..units import count, in_bytes, in_rate, in_share, in_time
from .report import ChainReport


def to_text(report: ChainReport) -> str:
    """The whole report; the source and the script are only named, they are long."""
    parts = [[title(report), report.decision.headline, *bullets(report.decision.reasons)]]
    if has_output(report):
        parts.append(["Device", *wrapped(device_words(report))])
    if report.traffic.eager:
        parts += [
            ["Bytes and time", *columns(time_rows(report)), *wrapped(TIME_NOTE)],
            ["Kernels of eager PyTorch", *columns(eager_rows(report.traffic)), *wrapped(EAGER_NOTE)],
        ]
    parts += [
        ["One kernel", *(line for words in kernel_words(report) for line in wrapped(words))],
        ["Dtypes: " + DTYPE_NOTE, *columns(dtype_rows(report)[1:])],
        ["Limitations", *bullets(report.limitations)],
        [more_words(report)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


# What both text and Markdown say.

TIME_NOTE = (
    f"at full bandwidth: bytes / the memory's bandwidth; expected: {in_time(KERNEL_SECONDS)} for each launch, and the "
    f"longer of the arithmetic and of the bytes at {in_share(ATTAINED_BANDWIDTH)} of the bandwidth, {L2_SPEEDUP:g} "
    "times as fast where inputs and outputs fit in the L2 cache. Estimates, not measurements."
)
EAGER_NOTE = (
    "Counted: each kernel reads every input once and writes its result once, in the dtype that PyTorch gives it."
)


def title(report: ChainReport) -> str:
    """Epilogue, tensor and device in one line."""
    return title_of(report, f"standalone, M x N = {report.m} x {report.n}")


def device_words(report: ChainReport) -> str:
    """The device's figures and where they are from."""
    return device_words_of(report, f"{in_rate(report.device.peak32 / 2, 'additions/s')} in f32")


def time_rows(report: ChainReport) -> list[Cells]:
    """The table of both ways, its head first."""
    traffic, times = report.traffic, report.times
    saved = in_share(traffic.saved_share) if traffic.saved_bytes >= 0 else "nothing"
    return [
        ("", "moves", "at full bandwidth", "expected"),
        (
            f"eager PyTorch, {count(len(traffic.eager), 'kernel')}",
            in_bytes(traffic.unfused_bytes),
            in_time(times.eager.limit),
            in_time(times.eager.expected),
        ),
        ("one kernel", in_bytes(traffic.fused_bytes), in_time(times.fused.limit), in_time(times.fused.expected)),
        ("saved", saved, "", in_share(times.saved_share)),
    ]


def kernel_words(report: ChainReport) -> list[str]:
    """Which kernel, and what it needs of registers; a paragraph each."""
    if report.kernel.spec is None:
        return [f"None: {report.kernel.refusal}."]
    state = "built already" if report.kernel.library else "not built yet"
    words = [f"{report.kernel.spec.title}; {state}."]
    use = report.registers
    if use is not None:
        warning = "  WARNING: it may spill." if use.warns else ""
        words.append(
            f"Registers: about {use.needed} of the {use.budget} that a thread may have where {use.blocks} blocks of "
            f"128 threads share a multiprocessor (estimate). At most {count(use.live, 'value')} of one element must be "
            f"held at once ({peak_words(use.live_at)}).{warning}"
        )
    if report.kernel.library:
        words.append(built_words(report))
    calls = f" and {count(report.special_calls, 'call')} of the special function unit" if report.special_calls else ""
    words.append(
        f"Work: about {count(report.instructions, 'instruction')}{calls} for each element, "
        f"{in_time(report.times.computing)} in all, beside {in_time(report.times.moving)} for the bytes (estimate)."
    )
    return words


def more_words(report: ChainReport) -> str:
    """Where the rest is."""
    script = "report.script compares and times" if has_output(report) else "report.script compares"
    if report.kernel.spec is None:
        return f"More: {script}, report.to_markdown() has it; no kernel, so no C++ source"
    return f"More: {script}, report.source is the C++, report.to_markdown() has both"

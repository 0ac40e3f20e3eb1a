"""The report of a chain as Markdown, for an issue or a pull request: long parts are folded, the tree is drawn.

>>> Path("report.md").write_text(to_markdown(report))
"""

from __future__ import annotations

from ..markdown import dtype_parts, escape, head_parts, last_parts, listed, table
from ..text import eager_rows, has_output
from .report import ChainReport
from .text import EAGER_NOTE, TIME_NOTE, device_words, kernel_words, time_rows, title


def to_markdown(report: ChainReport) -> str:
    """The whole report, source and script included."""
    parts = head_parts(report, title(report))
    if has_output(report):
        parts.append(f"*Device:* {escape(device_words(report))}")
    if report.traffic.eager:
        parts += [
            "### Bytes and time",
            table(time_rows(report)),
            escape(TIME_NOTE),
            "### Kernels of eager PyTorch",
            table(eager_rows(report.traffic)),
            escape(EAGER_NOTE),
        ]
    parts += ["### One kernel", listed(kernel_words(report)), *dtype_parts(report)]
    parts += last_parts(report, timed=has_output(report))
    return "\n\n".join(part for part in parts if part) + "\n"

"""The report as Markdown, for an issue or a pull request: long parts are folded, the tree is drawn by Mermaid.

>>> Path("report.md").write_text(to_markdown(report))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epilogues.graphs import to_mermaid

from .report import CommonReport, Report
from .text import (
    DTYPE_NOTE,
    TIME_NOTE,
    coverage_words,
    device_words,
    dtype_rows,
    eager_note,
    eager_rows,
    has_output,
    in_one_line,
    kernel_words,
    time_rows,
    title,
)

#: what Markdown, or GitHub's, gives a meaning in the middle of a line; the backslash, which takes it away, first
_MARKS = "\\|*_<>`#[]~$&"


def to_markdown(report: Report) -> str:
    """The whole report, source and script included."""
    parts = head_parts(report, title(report))
    if has_output(report):
        parts += [
            f"*Device:* {escape(device_words(report))}",
            "### Bytes and time",
            table(time_rows(report)),
            escape(TIME_NOTE),
            "### Kernels of eager PyTorch",
            table(eager_rows(report.traffic)),
            escape(eager_note(report)),
        ]
    parts += [
        "### Fused kernel",
        listed(kernel_words(report)),
        *dtype_parts(report),
        "### Who fuses it already",
        listed(coverage_words(report)),
    ]
    parts += last_parts(report, timed=bool(report.k) and has_output(report))
    return "\n\n".join(part for part in parts if part) + "\n"


# What reports of GEMMs and of chains have in common.


def head_parts(report: CommonReport, title: str) -> list[str]:
    """Title and decision."""
    return [f"## {escape(title)}", f"**{escape(report.decision.headline)}**", listed(report.decision.reasons)]


def dtype_parts(report: CommonReport) -> list[str]:
    """The dtype and cast map, and the tree as a picture."""
    return [
        "### Dtypes",
        f"{DTYPE_NOTE[:1].upper()}{DTYPE_NOTE[1:]}.",
        table(dtype_rows(report)),
        code(to_mermaid(report.resolved), "mermaid"),
    ]


def last_parts(report: CommonReport, *, timed: bool) -> list[str]:
    """Limitations, script and source; ``timed`` says whether the script takes times."""
    source = code(report.source, "cpp") if report.source else f"None: {escape(report.source_note)}."
    does = "checks both against float64" + (", and times them on a GPU" if timed else "")
    return [
        "### Limitations",
        listed(report.limitations),
        "### Comparison with eager PyTorch",
        folded(f"Script: {does}", code(report.script, "python")),
        "### Source of the kernel",
        folded("C++", source),
    ]


def listed(items: Iterable[str]) -> str:
    """A list of sentences."""
    return "\n".join(f"- {escape(item)}" for item in items)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """A table, its head first."""
    head, *body = [[escape(cell) for cell in row] for row in rows]
    lines = [head, ["---", *("---:" if cell[:1].isdigit() else "---" for cell in body[0][1:])], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(text: str, language: str) -> str:
    """A block of code."""
    fence = "```"
    while fence in text:  # such as in the name of the epilogue, which the script has
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def folded(summary: str, text: str) -> str:
    """What is shown when asked for."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def escape(text: str) -> str:
    """Text as it is, in one line."""
    text = in_one_line(text)
    for mark in _MARKS:
        text = text.replace(mark, f"\\{mark}")
    return text

"""The report as Markdown, for an issue or a pull request: long parts are folded, the tree is drawn by Mermaid.

>>> Path("report.md").write_text(to_markdown(report))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epilogues.graphs import to_mermaid

from .report import Report
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
    source = _code(report.source, "cpp") if report.source else f"None: {_escape(report.source_note)}."
    timed = ", and times them on a GPU" if report.k and has_output(report) else ""
    parts = [
        f"## {_escape(title(report))}",
        f"**{_escape(report.decision.headline)}**",
        _list(report.decision.reasons),
    ]
    if has_output(report):
        parts += [
            f"*Device:* {_escape(device_words(report))}",
            "### Bytes and time",
            _table(time_rows(report)),
            _escape(TIME_NOTE),
            "### Kernels of eager PyTorch",
            _table(eager_rows(report)),
            _escape(eager_note(report)),
        ]
    parts += [
        "### Fused kernel",
        _list(kernel_words(report)),
        "### Dtypes",
        f"{DTYPE_NOTE[:1].upper()}{DTYPE_NOTE[1:]}.",
        _table(dtype_rows(report)),
        _code(to_mermaid(report.resolved), "mermaid"),
        "### Who fuses it already",
        _list(coverage_words(report)),
        "### Limitations",
        _list(report.limitations),
        "### Comparison with eager PyTorch",
        _folded(f"Script: checks both against float64{timed}", _code(report.script, "python")),
        "### Source of the kernel",
        _folded("C++", source),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_escape(item)}" for item in items)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    head, *body = [[_escape(cell) for cell in row] for row in rows]
    lines = [head, ["---", *("---:" if cell[:1].isdigit() else "---" for cell in body[0][1:])], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(text: str, language: str) -> str:
    fence = "```"
    while fence in text:  # such as in the name of the epilogue, which the script has
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def _escape(text: str) -> str:
    text = in_one_line(text)
    for mark in _MARKS:
        text = text.replace(mark, f"\\{mark}")
    return text

"""The report of a standalone chain as data.

    >>> report = bias_gelu_residual.explain(8192, 8192)
    >>> report.decision.fuse, report.traffic.saved_share, report.times.speedup
    (True, 0.57..., 2.35...)
    >>> print(report)                                   # or report.to_markdown(), report.to_json()
    >>> report.source, report.script

A report never changes and computes nothing further but :attr:`ChainReport.source`, which is written when first asked
for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from epilogues.analysis import ChainTraffic

from ..report import CommonReport
from .estimate import ChainTimes
from .kernel import ChainKernel, ChainRegisters


@dataclass(frozen=True)
class ChainReport(CommonReport):
    """One epilogue on one tensor (M, N) and device.

    Attributes:
        traffic: bytes moved by eager PyTorch's kernels, and by one kernel.
        times: what to expect of both, and what bounds the one kernel.
        special_calls: of the special function unit, for one element of all outputs.
        kernel: the standalone kernel, or why there is none.
        registers: the estimate for it; None without one.
    """

    traffic: ChainTraffic
    times: ChainTimes
    special_calls: int
    kernel: ChainKernel
    registers: ChainRegisters | None

    @functools.cached_property
    def _source(self) -> tuple[str, str]:
        if self.kernel.spec is None:
            return "", f"no kernel takes this chain: {self.kernel.refusal}"
        return self.kernel.spec.source(), ""

    def __str__(self) -> str:
        from .text import to_text

        return to_text(self)

    def to_markdown(self) -> str:
        """The report as Markdown: the same, with a picture of the tree, the source and the script, folded."""
        from .markdown import to_markdown

        return to_markdown(self)

    def to_json(self) -> str:
        """The report as one JSON document; :mod:`gemm_ops.explain.chain.json_form` describes it."""
        from .json_form import to_json

        return to_json(self)

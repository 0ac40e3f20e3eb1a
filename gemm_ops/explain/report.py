"""The fusion decision report: everything that is known of one epilogue on one problem, as data.

    >>> report = scaled_residual.explain(4096, 4096, 4096)
    >>> print(report)                                   # as text, the decision first
    >>> report.decision.fuse, report.traffic.saved_share
    (True, 0.66...)
    >>> report.to_markdown(), report.to_json(), report.source, report.script

A report never changes and computes nothing further but :attr:`Report.source`, which is written when first asked for:
that imports the CUTLASS Python interface and takes seconds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from epilogues.analysis import NodeDtype, Traffic
from epilogues.tree import EpilogueTree

from ..errors import ToolchainError
from .coverage import Coverage
from .decision import FusionDecision
from .devices import Device
from .estimate import Times
from .kernel import BuiltResources, KernelChoice
from .registers import RegisterUse


@dataclass(frozen=True)
class CommonReport:
    """What a report says whether or not there is a GEMM.

    Attributes:
        name: the epilogue's.
        m, n: extents of the result; M is the product of all leading dimensions.
        dtype: short dtype name of the matrices, or of the tensor.
        device: whose figures are used.
        device_note: what to know of that choice, such as that it is assumed; "" if nothing.
        decision: whether to fuse, and why.
        instructions: for one element of all outputs, by the analysis' costs.
        dtypes: dtype and conversions of every value.
        built: what the compiler says of the kernel; None if it is not built, or nobody knows.
        limitations: what the fused kernel does not do today.
        script: a runnable comparison of the fused call with eager PyTorch.
        tree: as the user declared it.
        resolved: with all kinds and dtypes known, as the kernel computes it.
    """

    name: str
    m: int
    n: int
    dtype: str
    device: Device
    device_note: str
    decision: FusionDecision
    instructions: int
    dtypes: tuple[NodeDtype, ...]
    built: BuiltResources | None
    limitations: tuple[str, ...]
    script: str
    tree: EpilogueTree
    resolved: EpilogueTree

    @functools.cached_property
    def _source(self) -> tuple[str, str]:
        """The source, and why there is none: one of them is empty."""
        raise NotImplementedError

    @property
    def source(self) -> str:
        """The kernel's C++ source; "" where :attr:`source_note` says why there is none."""
        return self._source[0]

    @property
    def source_note(self) -> str:
        """Why there is no source, in words; "" if there is."""
        return self._source[1]


@dataclass(frozen=True)
class Report(CommonReport):
    """One epilogue on one GEMM and device.

    Attributes:
        k: the extent that is summed over.
        traffic: bytes moved by eager PyTorch, by torch.compile, and by one fused kernel.
        times: the roofline's limit and the expected time of each.
        kernel: which kernel would compute it, or why none does.
        registers: the estimate for that kernel; None without one.
        coverage: what cuBLASLt and torch.compile do of it already.
    """

    k: int
    traffic: Traffic
    times: Times
    kernel: KernelChoice
    registers: RegisterUse | None
    coverage: Coverage

    @functools.cached_property
    def _source(self) -> tuple[str, str]:
        if self.kernel.spec is None:
            return "", f"no kernel takes this problem: {self.kernel.refusal}"
        from ..build.compiler import lowering_lock  # the CUTLASS interface keeps global state

        try:
            with lowering_lock:
                return self.kernel.spec.source(), ""
        except ToolchainError as error:
            return "", str(error)

    def __str__(self) -> str:
        from .text import to_text

        return to_text(self)

    def to_markdown(self) -> str:
        """The report as Markdown: the same, with a picture of the tree, the source and the script, folded."""
        from .markdown import to_markdown

        return to_markdown(self)

    def to_json(self) -> str:
        """The report as one JSON document; :mod:`gemm_ops.explain.json_form` describes it."""
        from .json_form import to_json

        return to_json(self)

"""The fusion decision report: does fusing this epilogue on this problem pay, and what does the kernel look like?

    >>> from epilogues import builders
    >>> report = builders.scaled_residual().explain(4096, 4096, 4096)
    >>> print(report)
    scaled_residual, M x N x K = 4096 x 4096 x 4096, bf16, on H200 SXM
    FUSE: ...
    >>> print(builders.scaled_residual().explain(8192, 8192))           # no K: the standalone kernel of gemm_ops.apply
    scaled_residual, standalone, M x N = 8192 x 8192, bf16, on H200 SXM
    FUSE: one kernel in place of 4, ...

``make_report``   :func:`explain`: binds the epilogue to the problem and asks the others.
``chain``         the same without a GEMM: :class:`ChainReport`.
``given``         what is asked for, checked.
``report``        :class:`Report`, the result as data.
``decision``      fuse or not, and why, in words.
``devices``       how fast devices are; measuring one.
``estimate``      limits and expected times.
``kernel``        which kernel would compute it; what the compiler says of it.
``registers``     whether it has registers enough.
``coverage``      what cuBLASLt and torch.compile fuse already.
``limitations``   what the kernel does not do.
``script``        a script that compares it with eager PyTorch.
``text`` ``markdown`` ``json_form``   the report in three forms.

What needs no kernel and no device (bytes, live values, dtypes) is counted by :mod:`epilogues.analysis`.
"""

from .chain import ChainReport
from .devices import DEVICES, Device, find_device, measure_bandwidth, present_device
from .given import AllOptions, Options
from .make_report import explain
from .report import Report

__all__ = [
    "DEVICES",
    "AllOptions",
    "ChainReport",
    "Device",
    "Options",
    "Report",
    "explain",
    "find_device",
    "measure_bandwidth",
    "present_device",
]

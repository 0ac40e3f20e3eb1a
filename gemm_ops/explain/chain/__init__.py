"""The fusion decision report of a standalone chain: elementwise operations on a tensor that is there already.

    >>> report = builders.residual_activation("gelu").explain(8192, 8192)         # no K: no product
    >>> print(report)
    ...
    FUSE: one kernel in place of 3, ...

It says what ``gemm_ops.apply`` gains over eager PyTorch, which runs a kernel for each operation.

``make_report``  :func:`explain_chain`: binds the epilogue to a tensor and asks the others.
``report``       :class:`ChainReport`, the result as data.
``decision``     fuse or not, and why, in words.
``estimate``     expected times; what bounds the one kernel.
``kernel``       which kernel would compute it, and its registers.
``text`` ``markdown`` ``json_form``  the report in three forms.

Bytes are counted by :func:`epilogues.analysis.count_chain_traffic`; devices, the times of single kernels, the dtype
map, the comparison script and most words are those of the GEMM's report, in the folder above.
"""

from .make_report import explain_chain
from .report import ChainReport

__all__ = ["ChainReport", "explain_chain"]

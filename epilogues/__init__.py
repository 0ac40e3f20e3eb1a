"""Epilogues of matrix multiplications, written as ordinary Python functions.

    >>> import torch, epilogues as ep
    >>> from epilogues import epilogue, Row, Aux
    >>> @epilogue
    ... def bias_gelu_residual(acc, bias: Row, residual: Aux):
    ...     return ep.gelu(acc + bias, approximate="tanh") + residual
    >>> bias_gelu_residual.reference(a @ b, bias=bias, residual=residual)

An epilogue is strictly elementwise: output (i, j) depends on accumulator (i, j) and on the operands' entries
for i, j, (i, j) or all.  It is traced into an immutable :class:`EpilogueTree`; values are computed in float32
and rounded at explicit casts and when stored, nowhere else.

Where to look: ``tree`` (the data), ``operations`` (the table), ``functions`` (what users call), ``tracing``,
``symbol``, ``torch_calls``, ``torch_signatures`` and ``torch_losses`` (from function to tree), ``refusals``,
``refusal_reasons`` and ``validation`` (what is refused, and how; ``error_catalogue`` lists it all), ``reference``
(what a tree means), ``operand_shapes`` (how operands spread), ``passes`` (from tree to tree: simplification, eager
rounding, compute dtypes), ``gradients`` (the backward of an epilogue), ``analysis`` (bytes, registers, dtypes),
``builders`` (ready-made ones), ``render``, ``graphs`` and ``serialize`` (a tree as text, pictures and JSON),
``compiling`` (what PyTorch's compiler is kept out of).
Nothing here knows of GEMM kernels.
"""

from . import builders, functions
from .declare import Epilogue, epilogue
from .errors import BroadcastError, DtypeError, EpilogueError, ReductionError, UnsupportedOperationError
from .functions import *  # noqa: F403
from .signature import Aux, Column, Row, Scalar
from .tree import EpilogueTree, Kind

__all__ = [
    "Aux",
    "BroadcastError",
    "Column",
    "DtypeError",
    "Epilogue",
    "EpilogueError",
    "EpilogueTree",
    "Kind",
    "ReductionError",
    "Row",
    "Scalar",
    "UnsupportedOperationError",
    "builders",
    "epilogue",
]
__all__ += functions.__all__

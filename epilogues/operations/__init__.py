"""The operation table: one row says all there is to know about an elementwise operation.

    >>> from epilogues.operations import OPERATIONS
    >>> OPERATIONS["gelu_tanh"].arity
    1

Everything else reads this table: the reference calls ``reference``, the tracer makes nodes by ``name``,
the GEMM lowering calls ``functor`` from ``gemm_ops/cuda/functors.cuh``.  Adding an operation is adding a
row here, in the module of its kind, and the functor of the same name there; ``tests/test_operations.py``
checks that the two agree.  What users call is in :mod:`epilogues.functions`.

A row's ``reference`` takes and returns tensors of the compute dtype (float32, or float64 when a caller
wants the mathematical value), already broadcast against each other or broadcastable, and computes what the
PyTorch function of the same name computes, NaN and infinity included.  Parameters such as ``negative_slope``
are ordinary inputs (constants), so that a row needs no special cases.
"""

from __future__ import annotations

from dataclasses import replace

from ..tree import Apply, Node
from . import activations, arithmetic, comparisons, mathematics
from .comparisons import ON_CONDITIONS
from .costs import COSTS, SPECIAL_CALLS
from .row import Cost, Derivative, Operation

__all__ = ["ON_CONDITIONS", "OPERATIONS", "Cost", "Derivative", "Operation", "is_condition"]

#: name -> row
OPERATIONS: dict[str, Operation] = {
    row.name: replace(row, cost=Cost(*COSTS[row.name], *SPECIAL_CALLS.get(row.name, (0, 0))))
    for module in (arithmetic, mathematics, activations, comparisons)
    for row in module.ROWS
}


def is_condition(node: Node) -> bool:
    """Whether a node is true or false, and no value; of operations that are not in the table, False."""
    found = OPERATIONS.get(node.operation) if isinstance(node, Apply) else None
    return found is not None and found.result == "condition"

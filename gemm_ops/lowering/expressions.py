"""One node of a tree as a C++ expression: what GEMM epilogues and standalone kernels share.

    >>> expression(node, {id(x): "v0", id(bias): "leaf1"})
    'fn::add(v0, leaf1)'

Contract: the expression stands where ``fn`` is one of the namespaces of ``cuda/functors.cuh`` and the node's inputs
have the names given.  It is a float, or a bool of a comparison.  Operation names are looked up in the operation table,
never spelled here; leaves of a tree have no expression.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from epilogues.operations import OPERATIONS
from epilogues.tree import Apply, Cast, Constant, Node


def expression(node: Node, names: Mapping[int, str]) -> str:
    """The C++ of a constant, a cast or an operation.

    Args:
        node: the node.
        names: ``id`` of each input -> the C++ variable that holds it.
    """
    if isinstance(node, Constant):
        return f"ep::constant({_float_bits(node.value):#010x}u)"
    if isinstance(node, Cast):
        return f"ep::cast_{node.dtype}({names[id(node.value)]})"
    if isinstance(node, Apply):
        arguments = ", ".join(names[id(child)] for child in node.inputs)
        # qualified: the C library has an exp and a tanh of its own
        return f"fn::{OPERATIONS[node.operation].functor}({arguments})"
    raise AssertionError(f"{type(node).__name__} is a leaf")


def _float_bits(value: float) -> int:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond fp32: PyTorch's conversion gives infinity
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return int(struct.unpack("<I", packed)[0])

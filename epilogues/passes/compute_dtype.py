"""Computing in another dtype than float32: a tree in which every operation's inputs and result have that dtype.

    >>> narrow = ep.builders.bias_activation("relu").with_compute_dtype(torch.bfloat16)
    >>> print(narrow.tree)

Contract
--------
* The accumulator, operands, constants and results of operations are rounded to the dtype, to nearest even: what a
  device computes that has only arithmetic of that dtype, functions such as ``exp`` rounded correctly.  A kernel
  computes in float32 and rounds each result; for sums, products, quotients and square roots of 16-bit numbers that is
  the same.
* Explicit casts stay, what follows them is rounded again.
* An output has the dtype that it had: a cast at the root of the function's own, else that of the GEMM's inputs.
* float32 leaves a tree as it is.  float64 is for measuring errors: ``reference(..., compute_dtype=torch.float64)``;
  no kernel computes in it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..dtypes import dtype_name, torch_dtype
from ..errors import DtypeError, EpilogueError
from ..operations import is_condition
from ..tree import Apply, Cast, Constant, EpilogueTree, Node


def with_compute_dtype(tree: EpilogueTree, dtype: torch.dtype | str) -> EpilogueTree:
    """The tree with every operation computed in ``dtype``: float32, float16 or bfloat16.

    Raises:
        DtypeError: for other dtypes.
        EpilogueError: for a tree with eager rounding, which computes as eager PyTorch does.
    """
    if dtype in (torch.float64, "f64"):
        raise DtypeError(
            "compute_dtype torch.float64: expected torch.float32, torch.float16 or torch.bfloat16, as no kernel "
            "computes in float64; to measure errors, call reference(..., compute_dtype=torch.float64, keep_casts=False)"
        )
    name = dtype_name(dtype)
    if name == "f32":
        return tree
    if tree.rounding != "once":
        raise EpilogueError(
            f"compute_dtype with rounding={tree.rounding!r}: expected one of them, as eager PyTorch computes in the "
            "tensors' own dtypes"
        )
    return _narrowed(tree, name)


def _narrowed(tree: EpilogueTree, dtype: str) -> EpilogueTree:
    done: dict[int, Node] = {}
    casts: dict[int, Node] = {}  # a value is rounded once, whoever uses it

    def rounded(node: Node) -> Node:
        if is_condition(node) or (isinstance(node, Cast) and node.dtype == dtype):
            return node
        if isinstance(node, Constant):
            value = torch.tensor(node.value, dtype=torch.float32).to(torch_dtype(dtype)).item()
            return casts.setdefault(id(node), replace(node, value=value))
        return casts.setdefault(id(node), Cast(node, dtype, location=node.location))

    for node in tree.nodes:
        if isinstance(node, Apply):
            result = replace(node, operands=tuple(rounded(done[id(child)]) for child in node.operands))
            done[id(node)] = rounded(result)
        elif isinstance(node, Cast):
            done[id(node)] = replace(node, value=done[id(node.value)])
        else:
            done[id(node)] = node
    kept: dict[int, Node] = {}
    stores = []
    for store in tree.outputs:
        value = done[id(store.value)]
        if isinstance(value, Cast) and not isinstance(store.value, Cast):
            # a cast at the root would give the output its dtype
            value = kept.setdefault(id(value), Apply("identity", (value,), location=value.location))
        stores.append(replace(store, value=value))
    return replace(tree, outputs=tuple(stores))

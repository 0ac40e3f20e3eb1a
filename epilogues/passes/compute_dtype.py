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
* It is the tree's until a call resolves it: ``with_compute_dtype(torch.float32)`` leaves it out again.  It does not
  go with eager rounding, which computes in the dtypes that PyTorch has.  Called inside another epilogue it stays that
  of the inner one's operations.
* A backward (:mod:`epilogues.gradients`) computes in float32, whatever the forward does.
* float64 is for measuring errors: ``reference(..., compute_dtype=torch.float64)``;
  no kernel computes in it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..dtypes import dtype_name, torch_dtype
from ..errors import DtypeError
from ..operations import is_condition
from ..tree import Apply, Cast, Constant, EpilogueTree, Node


def known_compute_dtype(dtype: torch.dtype | str) -> str:
    """The short name of a compute dtype: float32, float16 or bfloat16.

    Raises:
        DtypeError: for other dtypes.
    """
    if dtype in (torch.float64, "f64"):
        raise DtypeError(
            "compute_dtype torch.float64: expected torch.float32, torch.float16 or torch.bfloat16, as no kernel "
            "computes in float64; to measure errors, call reference(..., compute_dtype=torch.float64, keep_casts=False)"
        )
    return dtype_name(dtype)


def write_out_compute_dtype(tree: EpilogueTree) -> EpilogueTree:
    """The tree with its compute dtype written out as casts, itself in float32."""
    dtype = tree.compute_dtype
    if dtype == "f32":
        return tree
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
    stores = []
    kept: dict[int, Node] = {}
    for store in tree.outputs:
        value = done[id(store.value)]
        if store.dtype is None and isinstance(value, Cast) and not isinstance(store.value, Cast):
            # a cast at the root would give the output its dtype
            value = kept.setdefault(id(value), Apply("identity", (value,), location=value.location))
        stores.append(replace(store, value=value))
    return replace(tree, outputs=tuple(stores), compute_dtype="f32")

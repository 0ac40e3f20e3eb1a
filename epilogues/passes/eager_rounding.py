"""The casts that eager PyTorch makes, inserted into a tree: so that fused and unfused agree to the bit.

    >>> unfused = ep.builders.bias_activation("silu").with_rounding("eager")
    >>> gemm_ops.matmul(a, b, unfused, bias=bias)      # F.silu(torch.matmul(a, b) + bias), every rounding included

Contract
--------
* ``rounding="eager"``: the result of the GEMM is rounded to its dtype, and so is the result of every operation; inside
  one PyTorch function nothing is (``Apply.intermediate``).  ``"eager_linear"``: the same, but that a row operand
  added to the accumulator itself is ``F.linear``'s bias, which cuBLAS adds before it rounds.
* The dtype of a result is what PyTorch promotes to: tensors with dimensions count first, 0-dimensional tensors only
  among themselves, Python numbers not at all.  float16 with bfloat16 gives float32.
* A Python number next to tensors of 16 bits goes into PyTorch's kernel as it is where the table's row says that it
  ``keeps_numbers``, and is rounded to the tensors' dtype elsewhere.  ``x / number`` is ``x * (1 / number)``, the
  inverse in float32.  A 0-dimensional tensor is rounded to the dtype of the result first.
* What PyTorch composes of several kernels (a row's ``eager``) is written out, each of them rounded.
* What is computed of nothing but numbers, such as ``alpha * alpha`` of a number alpha, is computed in float32; Python
  computes it in float64 before PyTorch sees it.
* An output is rounded to its own dtype last, as with any rounding: a tree stores bfloat16 where eager PyTorch would
  return float32 because an operand is wider.

These are the rules of PyTorch's CUDA kernels, measured over all values of 16 bits on an H200 with PyTorch 2.11: with
them every row of the table agrees with eager PyTorch to the bit (``tests/test_gpu_eager.py``).  Some functions that are
compositions here are other ones in PyTorch: the losses, ``ndtr`` and floor division may differ in their last bit.
PyTorch's CPU kernels round some numbers differently.  The device functions are then those of namespace ``ep::eager``:
PyTorch's own formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dtypes import torch_dtype
from ..operations import OPERATIONS, is_condition
from ..tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, SourceLocation

_NARROW = ("f16", "bf16")
#: In which order PyTorch lets values decide on the dtype of a result.
_RANKS = ("tensor", "0-dim", "number")


@dataclass(frozen=True)
class _Type:
    dtype: str
    rank: str


def insert_eager_casts(tree: EpilogueTree, gemm_dtype: str, ranks: Mapping[str, str]) -> EpilogueTree:
    """The tree with the casts that eager PyTorch makes.

    Args:
        tree: with every operand's kind and dtype known, and every output's.
        gemm_dtype: short dtype name of what the GEMM returns; others than float16 and bfloat16 are not rounded to.
        ranks: operands that are no tensors with dimensions, by name: "number" or "0-dim".
    """
    rounding = _Rounding(tree.rounding, gemm_dtype, ranks)
    done: dict[int, Node] = {}
    for node in tree.nodes:
        done[id(node)] = rounding.again(node, [done[id(child)] for child in node.inputs])
    return replace(tree, outputs=tuple(replace(store, value=done[id(store.value)]) for store in tree.outputs))


def write_out_compositions(tree: EpilogueTree) -> EpilogueTree:
    """The tree with every operation that eager PyTorch composes of several kernels written out as these."""
    maker = _Rows(_Plain())
    done: dict[int, Node] = {}
    for node in tree.nodes:
        inputs = [done[id(child)] for child in node.inputs]
        if isinstance(node, Apply):
            compose = None if node.intermediate else OPERATIONS[node.operation].eager
            done[id(node)] = replace(node, operands=tuple(inputs)) if compose is None else compose(maker, *inputs)
        else:
            done[id(node)] = replace(node, value=inputs[0]) if isinstance(node, Cast) else node
    return replace(tree, outputs=tuple(replace(store, value=done[id(store.value)]) for store in tree.outputs))


class _Plain:
    """Makes nodes, and nothing else of them."""

    def apply(self, operation: str, inputs: Sequence[Node]) -> Node:
        return Apply(operation, tuple(inputs))

    def constant(self, value: float) -> Node:
        return Constant(value)


class _Rounding:
    """Makes the nodes of one tree again, with their types; equal nodes are made once."""

    def __init__(self, mode: str, gemm_dtype: str, ranks: Mapping[str, str]) -> None:
        self.mode, self.gemm_dtype, self.ranks = mode, gemm_dtype, ranks
        self.types: dict[int, _Type] = {}
        self.known: dict[object, Node] = {}
        self.raw = Accumulator()  # before it is rounded
        self.location: SourceLocation | None = None

    def again(self, node: Node, inputs: Sequence[Node]) -> Node:
        """The node, of inputs that were made again."""
        self.location = node.location
        if isinstance(node, Accumulator):
            self.raw = node
            return self._rounded(node, _Type(self.gemm_dtype, "tensor"))
        if isinstance(node, Operand):
            assert node.dtype is not None, "eager rounding takes resolved trees"
            return self._typed(node, _Type(node.dtype, self.ranks.get(node.name, "tensor")))
        if isinstance(node, Constant):
            return self.constant(node.value)
        if isinstance(node, Cast):
            return self._cast(inputs[0], node.dtype, self._spread(inputs[0]))
        assert isinstance(node, Apply)
        if self._is_linear_bias(node):
            return self._linear_bias(inputs)
        return self.apply(node.operation, inputs, node.intermediate)

    def apply(self, operation: str, inputs: Sequence[Node], intermediate: bool = False) -> Node:
        """The operation as eager PyTorch computes it."""
        row = OPERATIONS[operation]
        if row.eager is not None and not intermediate:
            composed: Node = row.eager(_Rows(self), *inputs)
            return composed
        if operation == "div":
            quotient = self._division(*inputs)
            if quotient is not None:
                return quotient
        common = self._common(inputs)
        # torch.div(number, x); the operator is a reciprocal, then a product
        keeps = row.keeps_numbers and not (operation == "div" and isinstance(inputs[0], Constant))
        taken = tuple(self._taken(value, common, keeps) for value in inputs)
        node = self._once((operation, intermediate, *map(id, taken)), Apply(operation, taken, intermediate))
        if row.result == "condition":
            return self._typed(node, _Type("bool", self._most(inputs)))
        if operation == "where" and not intermediate and common.rank == "number":
            common = _Type("f32", self._most(inputs))  # torch.where of two numbers is a tensor of the default dtype
        return self._typed(node, common) if intermediate else self._rounded(node, common)

    def _division(self, x: Node, y: Node) -> Node | None:
        """Division by, or of, a Python number, where it is another operation."""
        ranks = self.types[id(x)].rank, self.types[id(y)].rank
        if ranks[0] != "number" and ranks[1] == "number":
            if isinstance(y, Constant):
                inverse: Node = self.constant((1.0 / torch.tensor(y.value, dtype=torch.float32)).item())
            else:
                inverse = self.apply("div", [self.constant(1.0), y], intermediate=True)
            return self.apply("mul", [x, inverse])
        if ranks[0] == "number" and ranks[1] != "number" and not isinstance(x, Constant):
            return self.apply("mul", [self.apply("reciprocal", [y]), x])  # Tensor.__rtruediv__
        return None

    def _is_linear_bias(self, node: Apply) -> bool:
        kinds = [child.kind for child in node.inputs if isinstance(child, Operand)]
        added = node.operation == "add" and kinds == [Kind.ROW]
        return self.mode == "eager_linear" and added and any(isinstance(child, Accumulator) for child in node.inputs)

    def _linear_bias(self, inputs: Sequence[Node]) -> Node:
        bias = next(child for child in inputs if isinstance(child, Operand))
        node = self._once(("linear", id(bias)), Apply("add", (self.raw, bias), location=self.location))
        return self._rounded(node, _Type(self.gemm_dtype, "tensor"))

    def _common(self, inputs: Sequence[Node]) -> _Type:
        """The type of a result, by PyTorch's promotion."""
        types = [self.types[id(value)] for value in inputs if not is_condition(value)]
        for rank in _RANKS:
            dtypes = {found.dtype for found in types if found.rank == rank}
            if dtypes:
                return _Type(dtypes.pop() if len(dtypes) == 1 else "f32", rank)
        return _Type("bool", self._most(inputs))

    def _most(self, inputs: Sequence[Node]) -> str:
        """The rank that counts most among the inputs, conditions included."""
        return min((self.types[id(value)].rank for value in inputs), key=_RANKS.index)

    def _spread(self, value: Node) -> str:
        """The rank of what a cast makes of a value: a condition's where it stands for one."""
        return self._most(value.inputs) if isinstance(value, Apply) and value.intermediate else self._most([value])

    def _taken(self, value: Node, common: _Type, keeps_numbers: bool) -> Node:
        """An input as PyTorch's kernel gets it."""
        given = self.types[id(value)]
        if given.dtype == "bool":
            return value
        if common.dtype not in _NARROW or given.dtype == common.dtype or common.rank == given.rank:
            return value
        if given.rank == "number" and not keeps_numbers:
            if isinstance(value, Constant):
                single = torch.tensor(value.value, dtype=torch.float32)
                return self.constant(single.to(torch_dtype(common.dtype)).item())
            return self._cast(value, common.dtype, given.rank)
        return self._cast(value, common.dtype, given.rank) if given.rank == "0-dim" else value

    def _rounded(self, node: Node, found: _Type) -> Node:
        return self._cast(node, found.dtype, found.rank) if found.dtype in _NARROW else self._typed(node, found)

    def _cast(self, value: Node, dtype: str, rank: str) -> Node:
        if isinstance(value, Cast) and value.dtype == dtype:
            return value
        node = self._once(("cast", id(value), dtype), Cast(value, dtype))
        return self._typed(node, _Type(dtype, rank))

    def constant(self, value: float) -> Node:
        return self._typed(self._once(("constant", float(value).hex()), Constant(value)), _Type("f32", "number"))

    def _once(self, key: object, node: Node) -> Node:
        return self.known.setdefault(key, replace(node, location=node.location or self.location))

    def _typed(self, node: Node, found: _Type) -> Node:
        self.types[id(node)] = found
        return node


class _Rows:
    """The rows of the table as functions of nodes and numbers, for a row's ``eager``."""

    def __init__(self, maker: _Rounding | _Plain) -> None:
        self._maker = maker

    def __getattr__(self, operation: str) -> Any:
        def call(*values: Any) -> Node:
            inputs = [value if isinstance(value, Node) else self._maker.constant(value) for value in values]
            return self._maker.apply(operation, inputs)

        return call

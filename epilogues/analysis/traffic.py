"""Bytes moved to and from memory: by eager PyTorch, with the elementwise tail as one kernel, and all in one kernel.

    >>> traffic = count_traffic(tree, 4096, 4096, 4096, "bf16")
    >>> [(operation.name, operation.bytes) for operation in traffic.eager]
    [('F.linear', 100663296), ('mul', 67117056), ...]
    >>> traffic.saved_bytes
    268435456
    >>> count_chain_traffic(tree, 4096, 4096, "bf16").eager[0].name        # of a tensor that is there: no GEMM
    'mul'

How bytes are counted
---------------------
* Every kernel reads each of its inputs once and writes its result once.  What a GEMM reads again, tile by tile, is
  expected to come from the cache.  Numbers, constants and 1-element tensors count nothing.
* *Eager*: one kernel for each operation of the tree, each writing its result to memory in the dtype that PyTorch
  gives it.  ``F.linear`` is one kernel, its bias included: an ``acc + bias`` with a Row of the matrices' dtype, if
  nothing else needs the accumulator, and unless the tree rounds as ``torch.matmul`` and an addition do
  (``rounding="eager"``).  A cast that changes the dtype is a kernel, and so is the conversion to an
  output's dtype.  The steps of one PyTorch function (``torch.addcmul``) are one kernel where the tree marks them
  (``Apply.intermediate``); other compositions count operation by operation.
* PyTorch's dtypes: tensors with dimensions promote each other (a bfloat16 product times a float32 row is float32,
  twice the bytes); numbers and 1-element tensors do not; comparisons give bool, one byte.
* *A standalone chain*: the same kernels without the GEMM, so that a bias is added by one; the accumulator is a tensor
  that the first of them reads.  One kernel reads that tensor, if the tree does, and every operand, and writes the
  outputs.
* *Tail in one kernel*: what ``torch.compile`` makes of it: ``F.linear`` as above, then one kernel that reads the
  product and what operands are left, and writes the outputs.
* Instructions are counted alongside, by the exact functions' costs: PyTorch's kernels and Triton's are as exact.
* *Fused*: the matrices, every operand and every output, once each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..operations import OPERATIONS, is_condition
from ..tree import Accumulator, Apply, Cast, EpilogueTree, Kind, Node, Operand
from .costs import exact_instructions
from .spread import Spread, spreads

_BYTES = {"bool": 1, "f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class EagerOperation:
    """One kernel of the eager computation.

    Attributes:
        name: the operation's name in the table, "F.linear" or "torch.matmul", or "to(bf16)" for a conversion.
        read, written: bytes.
        elements: of the result.
        instructions: for one element of the result; 0 of the GEMM.
    """

    name: str
    read: int
    written: int
    elements: int
    instructions: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class ChainTraffic:
    """Bytes moved by separate kernels, and by one kernel that does all they do.

    Attributes:
        eager: the kernels of the eager computation, in order.
        fused_bytes: all in one kernel, and what is copied before it.
    """

    eager: tuple[EagerOperation, ...]
    fused_bytes: int

    @property
    def unfused_bytes(self) -> int:
        return sum(operation.bytes for operation in self.eager)

    @property
    def saved_bytes(self) -> int:
        """Eager less fused."""
        return self.unfused_bytes - self.fused_bytes

    @property
    def saved_share(self) -> float:
        """The same as a share of eager; 0 where nothing is moved."""
        return self.saved_bytes / self.unfused_bytes if self.unfused_bytes else 0.0


@dataclass(frozen=True)
class Traffic(ChainTraffic):
    """Bytes moved by three ways to compute a GEMM with an epilogue; the first of the eager kernels is the GEMM.

    Attributes:
        tail: the bytes of the elementwise part as one kernel of its own; 0 if F.linear leaves nothing to it.
        tail_instructions: for one element of that kernel.
        product_bytes: the GEMM's result as eager PyTorch writes it.
        copied: what each copy before the fused kernel moves; empty where nothing is copied.
    """

    tail: int
    tail_instructions: int
    product_bytes: int
    copied: tuple[int, ...] = ()

    @property
    def gemm(self) -> EagerOperation:
        """The GEMM of the eager computation, with its bias if it has one."""
        return self.eager[0]

    @property
    def elementwise(self) -> tuple[EagerOperation, ...]:
        """The kernels after the GEMM, in eager PyTorch."""
        return self.eager[1:]

    def with_copies(self, copied: Sequence[int]) -> Traffic:
        """The same with copies before the fused kernel, each moving so many bytes."""
        return dataclasses.replace(self, fused_bytes=self.fused_bytes + sum(copied), copied=tuple(copied))

    @property
    def compiled_bytes(self) -> int:
        return self.gemm.bytes + self.tail


def count_traffic(tree: EpilogueTree, m: int, n: int, k: int, element: str) -> Traffic:
    """The bytes that a GEMM (M, K) by (K, N) with this epilogue moves; see the module's first page.

    Args:
        tree: with all kinds and dtypes known; marks of intermediate steps may still be there.
        m, n, k: extents, from 0 on; M is the product of all leading dimensions.
        element: short dtype name of the matrices.

    Raises:
        EpilogueError: if the kind of an operand is not known.
    """
    if not m * n:
        m = n = k = 0  # nothing is computed, so nothing is read
    spread = spreads(tree)
    bias = linear_bias(tree, element)
    product = m * n * _BYTES[element]
    matrices = (m * k + k * n) * _BYTES[element]
    in_bias = 0 if bias is None else _size(bias[1], element, spread, m, n)
    name = "torch.matmul" if tree.rounding == "eager" else "F.linear"
    after = _eager_kernels(tree, m, n, element, None if bias is None else bias[0])
    operands = _operand_bytes(tree, m, n)
    return Traffic(
        eager=(EagerOperation(name, matrices + in_bias, product, m * n), *after),
        tail=_tail_bytes(tree, element, bias, product, operands) if after else 0,
        tail_instructions=_tail_instructions(tree, bias, spread),
        fused_bytes=matrices + sum(operands.values()) + _output_bytes(tree, m, n),
        product_bytes=product,
    )


def count_chain_traffic(tree: EpilogueTree, m: int, n: int, element: str) -> ChainTraffic:
    """The bytes that this epilogue of a tensor (M, N) which is there already moves; see the module's first page.

    Args:
        tree: as for :func:`count_traffic`.
        m, n: extents, from 0 on; M is the product of all leading dimensions.
        element: short dtype name of the tensor.

    Raises:
        EpilogueError: if the kind of an operand is not known.
    """
    if not m * n:
        return ChainTraffic((), 0)
    read = sum(_operand_bytes(tree, m, n).values())
    if any(isinstance(node, Accumulator) for node in tree.nodes):
        read += m * n * _BYTES[element]
    return ChainTraffic(tuple(_eager_kernels(tree, m, n, element, None)), read + _output_bytes(tree, m, n))


def _operand_bytes(tree: EpilogueTree, m: int, n: int) -> dict[str, int]:
    spread = spreads(tree)
    return {operand.name: _size(operand, str(operand.dtype), spread, m, n) for operand in tree.operands}


def _output_bytes(tree: EpilogueTree, m: int, n: int) -> int:
    return sum(_BYTES[str(store.dtype)] * m * n for store in tree.outputs)


def _eager_kernels(tree: EpilogueTree, m: int, n: int, element: str, done: Node | None) -> list[EagerOperation]:
    """The kernels that eager PyTorch runs on what the accumulator stands for, in order.

    Args:
        done: the operation that the GEMM has done already.
    """
    spread, held = spreads(tree), _eager_dtypes(tree, element)
    eager: list[EagerOperation] = []
    # id(node) -> the nodes whose tensors PyTorch reads to have its value: itself, once it is in memory
    sources: dict[int, tuple[Node, ...]] = {}
    # id(node) -> the steps that the kernel which reads the value does first, because no other has
    pending: dict[int, dict[int, Node]] = {}
    for node in tree.nodes:
        sources[id(node)], pending[id(node)] = (node,), {}
        if not isinstance(node, (Apply, Cast)):
            continue
        behind = tuple({id(source): source for child in node.inputs for source in sources[id(child)]}.values())
        steps = {id(node): node} | {key: step for child in node.inputs for key, step in pending[id(child)].items()}
        if _is_free(node, held) or (isinstance(node, Apply) and node.intermediate):
            sources[id(node)], pending[id(node)] = behind, steps
        elif spread[id(node)].has_dimensions and node is not done:  # numbers have no kernel
            read = sum(_size(source, held[id(source)], spread, m, n) for source in behind)
            written = _size(node, held[id(node)], spread, m, n)
            name = node.operation if isinstance(node, Apply) else f"to({node.dtype})"
            instructions = sum(map(_instructions, steps.values()))
            eager.append(EagerOperation(name, read, written, spread[id(node)].elements(m, n), instructions))
    converted: set[tuple[int, str]] = set()
    for store in tree.outputs:
        dtype, key = str(store.dtype), (id(sources[id(store.value)][0]), str(store.dtype))
        if held[id(store.value)] != dtype and key not in converted:
            converted.add(key)
            read = _size(store.value, held[id(store.value)], spread, m, n)
            eager.append(EagerOperation(f"to({dtype})", read, m * n * _BYTES[dtype], m * n, 1))
    return eager


def _instructions(node: Node) -> int:
    """For one element."""
    return exact_instructions(node.operation) if isinstance(node, Apply) else int(isinstance(node, Cast))


def _tail_instructions(tree: EpilogueTree, bias: tuple[Apply, Operand] | None, spread: Mapping[int, Spread]) -> int:
    """What one kernel executes for an element of the result, after ``F.linear``; numbers are computed before."""
    done = None if bias is None else bias[0]
    return sum(_instructions(node) for node in tree.nodes if node is not done and spread[id(node)].has_dimensions)


def _is_free(node: Apply | Cast, held: Mapping[int, str]) -> bool:
    """Whether eager PyTorch gives the same tensor back, as ``x.to(x.dtype)`` does."""
    if isinstance(node, Cast):
        return held[id(node.value)] == node.dtype
    return node.operation == "identity"


def linear_bias(tree: EpilogueTree, element: str) -> tuple[Apply, Operand] | None:
    """The addition that ``F.linear`` does itself, and the operand it adds; None if the tree has none.

    It is the one of a Row of the matrices' dtype to the accumulator, where nothing else uses the accumulator.  With
    ``rounding="eager"`` the tree is ``torch.matmul`` and an addition, which round twice where ``F.linear`` rounds once.
    """
    if tree.rounding == "eager":
        return None
    users = [
        node
        for node in tree.nodes
        if any(_is_product(child, element) for child in node.inputs) and not _is_product(node, element)
    ]
    if len(users) != 1 or any(_is_product(store.value, element) for store in tree.outputs):
        return None
    (user,) = users
    if not isinstance(user, Apply) or user.operation != "add":
        return None
    match [_as_loaded(child) for child in user.operands if not _is_product(child, element)]:
        case [Operand(kind=Kind.ROW) as operand] if operand.dtype == element:
            return user, operand
    return None


def _as_loaded(node: Node) -> Node:
    """The operand that a value is, if it is one cast to its own dtype; else the value."""
    if isinstance(node, Cast) and isinstance(node.value, Operand) and node.value.dtype == node.dtype:
        return node.value
    return node


def _is_product(node: Node, element: str) -> bool:
    """Whether a value is what the GEMM of eager PyTorch gives: the accumulator, in the matrices' dtype."""
    if isinstance(node, Cast):
        return node.dtype == element and _is_product(node.value, element)
    return isinstance(node, Accumulator)


def _tail_bytes(
    tree: EpilogueTree,
    element: str,
    bias: tuple[Apply, Operand] | None,
    product: int,
    operands: Mapping[str, int],
) -> int:
    """The elementwise part as one kernel: reads the product and the operands, writes the outputs."""
    read = dict(operands)
    if bias is not None:
        readers = [node for node in tree.nodes if any(_as_loaded(child) is bias[1] for child in node.inputs)]
        if all(node is bias[0] or _as_loaded(node) is bias[1] for node in readers):
            del read[bias[1].name]
    written = 0
    for store in tree.outputs:
        own = store.value is bias[0] if bias is not None else _is_product(store.value, element)
        if not (own and store.dtype == element):  # F.linear's own result is there already
            written += product // _BYTES[element] * _BYTES[str(store.dtype)]
    return product + sum(read.values()) + written


def _eager_dtypes(tree: EpilogueTree, element: str) -> dict[int, str]:
    """id(node) -> short name of the dtype that eager PyTorch holds the value in."""
    spread = spreads(tree)
    held: dict[int, str] = {}
    for node in tree.nodes:
        if isinstance(node, Accumulator):
            held[id(node)] = element
        elif isinstance(node, (Operand, Cast)):
            held[id(node)] = str(node.dtype)
        elif is_condition(node):
            held[id(node)] = "bool"
        elif isinstance(node, Apply):
            conditions = OPERATIONS[node.operation].conditions
            values = [child for position, child in enumerate(node.operands) if position not in conditions]
            held[id(node)] = _promoted(held[id(v)] for v in values if spread[id(v)].has_dimensions)
        else:
            held[id(node)] = "f32"
    return held


def _promoted(dtypes: Iterable[str]) -> str:
    """What PyTorch promotes tensors to; float32, its default dtype, for numbers only."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else "f32"


def _size(node: Node, dtype: str, spread: Mapping[int, Spread], m: int, n: int) -> int:
    """Bytes of the tensor that holds a value; none for a number."""
    found = spread[id(node)]
    return found.elements(m, n) * _BYTES[dtype] if found.has_dimensions else 0

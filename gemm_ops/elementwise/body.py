"""Writes a tree as the body of a standalone kernel: C++ text that ``templates/elementwise.cu.j2`` frames.

    >>> print(compute_function(tree))
    static EP_DEVICE void compute(float in0, float in1, float& out0) {
      namespace fn = ep::fast;
      auto const v0 = fn::add(in0, in1);
      auto const v1 = fn::gelu_tanh(v0);
      out0 = v1;
    }

Contract: ``in0`` is x, which takes the accumulator's place, ``in1`` and on are the operands in the tree's order, and
``out0`` and on the outputs in theirs, the main one first.  Every node is computed once, in fp32.  An x that no output
depends on is no input of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epilogues.tree import Accumulator, EpilogueTree, Operand

from ..lowering.expressions import expression
from ..lowering.functors import variant_of
from .layout import ACCESS_BYTES, PIECES, REPEATED, SCALAR, SHIFTED

#: C++ types of ``cuda/elementwise_pieces.cuh`` of the short dtype names.
ELEMENTS = {"f32": "F32", "f16": "F16", "bf16": "Bf16"}

#: Registers that pieces in flight may take, of the 128 that leave a multiprocessor of 65,536 room for two blocks.
_REGISTERS_IN_FLIGHT = 80
_MOST_IN_FLIGHT = 4


@dataclass(frozen=True)
class Input:
    """An input of the kernel: its place in the argument block, its C++ element type and its access."""

    index: int
    element: str
    access: str

    @property
    def name(self) -> str:
        """The variable that holds it."""
        return f"in{self.index}"

    @property
    def is_scalar(self) -> bool:
        """Whether a thread reads it once, and not with every piece."""
        return self.access == SCALAR

    def loader(self, width: int) -> str:
        """The C++ type that loads it for a piece."""
        if self.access in (PIECES, SHIFTED):
            return f"Pieces<{self.element}, {width}, {_aligned(self.access)}>"
        return f"Repeated<{self.element}>" if self.access == REPEATED else f"Strided<{self.element}, {width}>"


@dataclass(frozen=True)
class Output:
    """An output of the kernel."""

    index: int
    element: str
    access: str

    @property
    def store(self) -> str:
        """The C++ function that stores a piece of it."""
        if self.access in (PIECES, SHIFTED):
            return f"store_pieces<{self.element}, {_aligned(self.access)}>"
        return f"store_strided<{self.element}>"


def _aligned(access: str) -> str:
    return "true" if access == PIECES else "false"


def inputs_of(tree: EpilogueTree, x_dtype: str, accesses: Sequence[str]) -> tuple[Input, ...]:
    """The inputs that a tree reads; accesses are those of x and of every operand."""
    found = []
    if any(isinstance(node, Accumulator) for node in tree.nodes):
        found.append(Input(0, ELEMENTS[x_dtype], accesses[0]))
    for index, operand in enumerate(tree.operands, start=1):
        found.append(Input(index, ELEMENTS[str(operand.dtype)], accesses[index]))
    return tuple(found)


def outputs_of(tree: EpilogueTree, accesses: Sequence[str]) -> tuple[Output, ...]:
    """The outputs of a tree."""
    return tuple(
        Output(index, ELEMENTS[str(store.dtype)], access)
        for index, (store, access) in enumerate(zip(tree.outputs, accesses, strict=True))
    )


def compute_function(tree: EpilogueTree) -> str:
    """The C++ function of one element."""
    place = {operand.position: index for index, operand in enumerate(tree.operands, start=1)}
    names: dict[int, str] = {}
    lines = [f"  namespace fn = ep::{variant_of(tree)};"]
    parameters: dict[int, str] = {}
    for node in tree.nodes:
        if isinstance(node, (Accumulator, Operand)):
            index = 0 if isinstance(node, Accumulator) else place[node.position]
            names[id(node)] = parameters[index] = f"in{index}"
        else:
            name = names[id(node)] = f"v{len(lines) - 1}"
            # auto: comparisons give bool
            lines.append(f"  auto const {name} = {expression(node, names)};")
    lines += [f"  out{index} = {names[id(store.value)]};" for index, store in enumerate(tree.outputs)]
    declared = [f"float {parameters[index]}" for index in sorted(parameters)]
    declared += [f"float& out{index}" for index in range(len(tree.outputs))]
    return "\n".join([f"static EP_DEVICE void compute({', '.join(declared)}) {{", *lines, "}"])


def pieces_in_flight(inputs: Sequence[Input], outputs: int, width: int) -> int:
    """How many pieces a thread loads before it computes the first: what registers allow.

    Args:
        inputs: what is read.
        outputs: how many are written.
        width: elements of a piece.
    """
    registers = 4 + 2 * outputs  # where the piece is
    for tensor in inputs:
        size = 4 if tensor.element == "F32" else 2
        if tensor.access in (PIECES, SHIFTED):
            # what is shifted into place takes another aligned part
            registers += (width * size + (ACCESS_BYTES if tensor.access == SHIFTED else 0)) // 4
        elif not tensor.is_scalar:
            registers += 1 if tensor.access == REPEATED else width
    return max(1, min(_MOST_IN_FLIGHT, _REGISTERS_IN_FLIGHT // registers))

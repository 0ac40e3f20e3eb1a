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
from typing import NamedTuple

from epilogues.analysis import count_live_values
from epilogues.tree import Accumulator, EpilogueTree, Operand

from ..lowering.expressions import expression
from ..lowering.functors import variant_of
from .layout import ACCESS_BYTES, PIECES, REPEATED, SCALAR, SHIFTED, STRIDED, WRAPPED

#: C++ types of ``cuda/elementwise_pieces.cuh`` of the short dtype names.
ELEMENTS = {"f32": "F32", "f16": "F16", "bf16": "Bf16"}

#: Registers that a thread may have where so many blocks of 128 threads share a multiprocessor's 65,536.
_REGISTERS = {12: 40, 10: 48, 8: 64, 6: 80, 4: 128, 2: 255}
#: Registers for where a piece lies.
_RESERVED = 12


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

    def loader(self, width: int) -> str:
        """The C++ type that loads it for a piece."""
        if self.access in (PIECES, SHIFTED):
            return f"Pieces<{self.element}, {width}, {_aligned(self.access)}>"
        if self.access in (STRIDED, WRAPPED):
            return f"{self.access.capitalize()}<{self.element}, {width}>"
        return f"{'Single' if self.access == SCALAR else 'Repeated'}<{self.element}>"


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


class Occupancy(NamedTuple):
    """How a multiprocessor's registers are used.

    Attributes:
        blocks: blocks of 128 threads that are to share a multiprocessor.
        needed: registers that a thread is thought to need.
    """

    blocks: int
    needed: int

    @property
    def budget(self) -> int:
        """Registers that a thread may have with so many blocks."""
        return _REGISTERS[self.blocks]

    @property
    def warns(self) -> bool:
        """Whether values are expected to spill to local memory."""
        return self.needed > self.budget


def occupancy_of(tree: EpilogueTree, inputs: Sequence[Input], width: int) -> Occupancy:
    """As many blocks as registers allow.

    Measured on an H200 (bf16, 8192 x 8192; microseconds of bias + GELU + residual, and of a GELU's gradient + gate): 96
    and 125 with a piece per thread and 12 blocks of 128 threads; 96 and 131 with 4 or 8 blocks, 97 and 131 with four
    pieces per thread, 104 to 116 and 132 to 141 where blocks go over the tensor in strides of the whole grid; 103 and
    126 by ``torch.compile``.  nvcc's kernels of 120 trees and layouts, 2 to 13 inputs, spill nowhere.

    Args:
        tree: what is computed.
        inputs: what is read.
        width: elements of a piece.
    """
    loaded = sum(_registers_of(tensor, width) for tensor in inputs)
    waiting = (len(tree.outputs) - 1) * width  # results of the pieces that are not stored first
    needed = loaded + waiting + count_live_values(tree).peak + _RESERVED
    return Occupancy(next((blocks for blocks, most in _REGISTERS.items() if needed <= most), min(_REGISTERS)), needed)


def _registers_of(tensor: Input, width: int) -> int:
    """Registers that a piece of an input takes."""
    if tensor.access in (SCALAR, REPEATED):
        return 1
    if tensor.access not in (PIECES, SHIFTED):
        return width
    size = 4 if tensor.element == "F32" else 2
    # what is shifted into place takes another aligned part
    return (width * size + (ACCESS_BYTES if tensor.access == SHIFTED else 0)) // 4

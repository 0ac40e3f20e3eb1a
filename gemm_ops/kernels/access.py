"""How a kernel reaches the matrices in memory: what of it is compiled in.

    >>> Access(outputs=(UNALIGNED,))             # D is stored at any alignment
    >>> Access(operands=(WHOLE, STRIDED))        # the second operand's rows are not contiguous

A matrix is reached in one of these ways:

==================  ================================================================================================
:data:`WHOLE`       in 16 bytes at a time, by TMA on SM90: pointer and leading dimension are multiples of 16 bytes
:data:`UNALIGNED`   at any alignment of its elements; its rows are contiguous
2                   two elements at a time (SM80): pointer, leading dimension and N are multiples of that
:data:`STRIDED`     element by element with both strides: any layout (SM90)
==================  ================================================================================================

On SM80 a single width serves the whole epilogue, and A and B have widths of their own (``cp.async``); on SM90 A and B
come by TMA always.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = 0
UNALIGNED = 1
STRIDED = -1


@dataclass(frozen=True)
class Access:
    """How one kernel reaches its matrices.

    Attributes:
        operands: by operand position; of operands that are no matrices WHOLE.  Empty: WHOLE for all.
        outputs: by output; empty: WHOLE for all.
        a, b: elements per access of A and B (SM80).
        batched: whether the kernel computes a batch of problems, with a batch stride for each tensor.
    """

    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    a: int = 8
    b: int = 8
    batched: bool = False

    def operand(self, position: int) -> int:
        """How an operand is reached."""
        return self.operands[position] if self.operands else WHOLE

    def output(self, index: int) -> int:
        """How an output is reached."""
        return self.outputs[index] if self.outputs else WHOLE

    @property
    def width(self) -> int:
        """Elements per access of the whole epilogue (SM80): the least that some matrix allows; WHOLE if all do."""
        return min((way for way in (*self.operands, *self.outputs) if way != WHOLE), default=WHOLE)


#: Everything in 16 bytes at a time.
ALIGNED = Access()

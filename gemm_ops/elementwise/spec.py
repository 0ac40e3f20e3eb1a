"""What one built elementwise kernel is: its identity on disk, and its source.

    >>> spec = ElementwiseSpec.of(tree, "bf16", layout, "90")
    >>> print(spec.source())

Contract: two specs with one key are the same kernel; the digest of :mod:`gemm_ops.kernels.sources`, of everything that
sources are generated from, is a part of the key.  Extents, strides and addresses are arguments of a launch: one kernel
serves all calls of a tree whose tensors are reached in the same way along as many dimensions.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from epilogues.operations import OPERATIONS
from epilogues.tree import Apply, EpilogueTree

from ..kernels.sources import generator_digest, render
from .arguments import declarations
from .body import compute_function, inputs_of, occupancy_of, outputs_of
from .layout import PIECES, WRAPPED, Layout


@dataclass(frozen=True)
class ElementwiseSpec:
    """One kernel.

    Attributes:
        tree: the resolved tree: kinds, operand and output dtypes all known.
        x_dtype: short dtype name of x, which takes the accumulator's place.
        inputs: the access of x and of every operand, in the tree's order; see :mod:`.layout`.
        outputs: the access of every output.
        dimensions: how many dimensions there are outside of the innermost one.
        width: elements of a piece.
        tiled: whether neighbouring threads take neighbouring rows; see :mod:`.layout`.
        whole: whether every piece is whole.
        arch: the target's compute capability as nvcc writes it, such as "90".
    """

    tree: EpilogueTree
    x_dtype: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dimensions: int
    width: int
    tiled: bool
    whole: bool
    arch: str

    @classmethod
    def of(cls, tree: EpilogueTree, x_dtype: str, layout: Layout, arch: str) -> ElementwiseSpec:
        """The kernel for a tree over tensors that lie like this."""
        return cls(
            tree,
            x_dtype,
            tuple(placement.access for placement in layout.inputs),
            tuple(placement.access for placement in layout.outputs),
            len(layout.outer),
            layout.width,
            layout.tiled,
            layout.whole,
            arch,
        )

    @property
    def kind(self) -> str:
        """Which generator writes its source."""
        return "elementwise"

    @functools.cached_property
    def key(self) -> str:
        """A hexadecimal digest that names the kernel on disk."""
        parts = (
            "elementwise",
            self.tree.rows,
            tuple(OPERATIONS[node.operation].functor for node in self.tree.nodes if isinstance(node, Apply)),
            self.x_dtype,
            self.inputs,
            self.outputs,
            self.dimensions,
            self.width,
            self.tiled,
            self.whole,
            self.arch,
            generator_digest(self.kind),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def title(self) -> str:
        """One line that says what the kernel is."""
        read = inputs_of(self.tree, self.x_dtype, self.inputs)
        inputs = "+".join(f"{tensor.element.lower()} {tensor.access}" for tensor in read)
        outputs = "+".join(f"{store.dtype} {way}" for store, way in zip(self.tree.outputs, self.outputs, strict=True))
        tiled = ", tiled" if self.tiled else ", whole" if self.whole else ""
        return f"elementwise {inputs or 'nothing'} -> {outputs}, {self.dimensions + 1}-d{tiled}, sm_{self.arch}"

    def source(self) -> str:
        """The kernel's C++ source."""
        inputs = inputs_of(self.tree, self.x_dtype, self.inputs)
        return render(
            "elementwise.cu.j2",
            title=self.title,
            abi=declarations(),
            inputs=inputs,
            outputs=outputs_of(self.tree, self.outputs),
            input_slots=len(self.inputs),
            dimensions=self.dimensions,
            width=self.width,
            tiled=self.tiled,
            whole=self.whole,
            wrapped=WRAPPED in self.inputs,
            occupancy=occupancy_of(self.tree, inputs, self.width),
            main_in_pieces=self.outputs[0] == PIECES,
            compute=compute_function(self.tree),
        )

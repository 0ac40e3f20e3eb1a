"""What one built kernel is: its identity on disk, and its source.

    >>> spec = KernelSpec(tree, config, "bf16", "row", "column", "90a")
    >>> spec.key
    '5c0f…'
    >>> print(spec.source())

Contract: two specs with one key are the same kernel.  The key is made without importing CUTLASS or running
nvcc, so that a process finds a kernel that an earlier one built at the cost of a hash.  It covers the tree
(structure, kinds and dtypes, not names), the configuration, and everything the source is generated from
(:mod:`.sources`).  It does not cover the compiler: a kernel stays valid when nvcc is updated, or is gone.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from epilogues.operations import OPERATIONS
from epilogues.tree import Apply, EpilogueTree, Kind

from ..runtime.abi import c_declarations
from .access import ALIGNED, WHOLE, Access
from .config import KernelConfig
from .skinny_source import skinny_source
from .sources import generator_digest, render

_LAYOUTS = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}


@dataclass(frozen=True)
class Side:
    """One side of the product: the names of its extent and its matrix in the argument block, and its layout."""

    extent: str
    matrix: str
    layout: str

    @property
    def transposed(self) -> Side:
        """The same matrix read as its transpose."""
        return Side(self.extent, self.matrix, "column" if self.layout == "row" else "row")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel.

    Attributes:
        tree: the resolved tree: kinds, operand and output dtypes all known.
        config: tile, cluster, schedule.
        element: short dtype name of A and B.
        layout_a: "row" if A (M x K) is contiguous along K, "column" if along M.
        layout_b: "row" if B (K x N) is contiguous along N, "column" if along K (a weight of ``nn.Linear``).
        arch: the target's compute capability as nvcc writes it, such as "90a" or "80".
        access: how the matrices are reached in memory.
    """

    tree: EpilogueTree
    config: KernelConfig
    element: str
    layout_a: str
    layout_b: str
    arch: str
    access: Access = ALIGNED

    @property
    def kind(self) -> str:
        """Which generator writes its source."""
        return "skinny" if self.config.family == "skinny" else "gemm"

    @functools.cached_property
    def key(self) -> str:
        """A hexadecimal digest that names the kernel on disk."""
        parts = (
            self.tree.rows,
            tuple(OPERATIONS[node.operation].functor for node in self.tree.nodes if isinstance(node, Apply)),
            self.config.compiled,
            self.element,
            self.layout_a,
            self.layout_b,
            self.arch,
            self.access,
            generator_digest(self.kind),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def title(self) -> str:
        """One line that says what the kernel is."""
        outputs = "+".join(str(store.dtype) for store in self.tree.outputs)
        layouts = f"{self.layout_a}/{self.layout_b}"
        batched = ", batched" if self.access.batched else ""
        return f"{self.config.name} {self.element} {layouts} -> {outputs}{batched}, sm_{self.arch}"

    def source(self) -> str:
        """The kernel's C++ source.

        Raises:
            ToolchainError: if the CUTLASS Python interface cannot be imported.
        """
        if self.config.family == "skinny":
            overlaps = int(self.arch.rstrip("a")) >= 90
            return skinny_source(self.tree, self.config, element=self.element, title=self.title, overlaps=overlaps)
        from ..lowering.visitor import ELEMENTS, lower, matrix_stride

        swapped = self.config.swapped
        first, second = Side("m", "a", self.layout_a), Side("n", "b", self.layout_b)
        if swapped:
            first, second = second.transposed, first.transposed
        return render(
            f"{self.config.family}.cu.j2",
            title=self.title,
            abi=c_declarations(),
            config=self.config,
            # as CUTLASS computes it, which may be the transpose
            tile=self.config.tile if not swapped else (self.config.tile[1], self.config.tile[0], self.config.tile[2]),
            cluster=self.config.cluster[:: -1 if swapped else 1],
            first=first,
            second=second,
            access=self.access,
            scalars=[operand.position for operand in self.tree.operands if operand.kind is Kind.SCALAR],
            visitor=lower(self.tree, self.config.family, self.access, swapped=swapped),
            stores_d=self.access.output(0) == WHOLE,
            direct=all(self.access.output(i) != WHOLE for i in range(len(self.tree.outputs))),
            stride_d=matrix_stride("args.outputs[0]", WHOLE, self.access.batched, swapped=swapped),
            element=ELEMENTS[self.element],
            element_d=ELEMENTS[str(self.tree.outputs[0].dtype)],
            layout_a=_LAYOUTS[first.layout],
            layout_b=_LAYOUTS[second.layout],
            # CUTLASS 3.x strides are (M, K, L) for A and (N, K, L) for B: where the leading dimension goes
            stride_mode_a=0 if first.layout == "row" else 1,
            stride_mode_b=1 if second.layout == "row" else 0,
        )

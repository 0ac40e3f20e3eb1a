"""The C++ of a kernel for few rows: what ``templates/skinny.cu.j2`` frames.

    >>> print(skinny_source(spec.tree, spec.config, element="bf16", title=spec.title))

The CUTLASS interface has no kernel that reads its operands without shared memory, so this one does not come from it:
``cuda/skinny.cuh`` multiplies, and the epilogue is the function that standalone kernels have, of one element.
"""

from __future__ import annotations

from epilogues.tree import Accumulator, EpilogueTree, Kind

from ..elementwise.body import ELEMENTS, compute_function
from ..runtime.abi import c_declarations
from .config import KernelConfig
from .sources import render

#: Threads of a multiprocessor among which its registers are divided, where a thread has 128.
_THREADS = 512


def skinny_source(tree: EpilogueTree, config: KernelConfig, *, element: str, title: str, overlaps: bool) -> str:
    """The kernel's C++ source.

    Args:
        tree: resolved.
        element: short dtype name of A and B.
        overlaps: whether the architecture has programmatic dependent launch: 9.0 and newer.
    """
    values = ["sum"] if any(isinstance(node, Accumulator) for node in tree.nodes) else []
    for operand in tree.operands:
        dtype, argument = ELEMENTS[str(operand.dtype)], f"args.operands[{operand.position}]"
        values.append(
            {
                Kind.ROW: f"skinny::read_row<{dtype}>({argument}, n, batch)",
                Kind.COLUMN: f"skinny::read_column<{dtype}>({argument}, m, batch)",
                Kind.SCALAR: f"skinny::read_scalar<{dtype}>({argument})",
                Kind.AUX: f"skinny::read_matrix<{dtype}>({argument}, m, n, batch)",
            }[operand.kind]
        )
    return render(
        "skinny.cu.j2",
        title=title,
        abi=c_declarations(),
        config=config,
        element=ELEMENTS[element],
        overlaps=overlaps,
        blocks=max(1, _THREADS // (32 * config.split_k)),
        values=values,
        outputs=[ELEMENTS[str(store.dtype)] for store in tree.outputs],
        compute=compute_function(tree),
    )

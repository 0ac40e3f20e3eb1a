"""What one built kernel is: its identity on disk, and its source.

    >>> spec = KernelSpec(tree, config, "bf16", "row", "column", "90a")
    >>> spec.key
    '5c0f…'
    >>> print(spec.source())

Contract: two specs with one key are the same kernel.  The key is made without importing CUTLASS or running
nvcc, so that a process finds a kernel that an earlier one built at the cost of a hash.  It covers the tree
(structure, kinds and dtypes, not names), the configuration, and everything the source is generated from: the
lowering's own files, the device functions, the templates, the compiler's flags, and the version of CUTLASS.  It does
not cover the compiler: a kernel stays valid when nvcc is updated, or is gone.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epilogues.operations import OPERATIONS
from epilogues.tree import Apply, EpilogueTree

from ..runtime.abi import c_declarations
from .access import ALIGNED, WHOLE, Access
from .config import KernelConfig

_PACKAGE = Path(__file__).resolve().parent.parent
#: Everything that the generated source depends on, relative to the package.
_GENERATOR_FILES = (
    "lowering",
    "templates",
    "cuda",
    "elementwise",
    "runtime/abi.py",
    "kernels/spec.py",
    "kernels/access.py",
    "build/flags.py",
)

_LAYOUTS = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}


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
            generator_digest(),
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
        from ..lowering.visitor import ELEMENTS, lower, matrix_stride

        return render(
            f"{self.config.family}.cu.j2",
            title=self.title,
            abi=c_declarations(),
            config=self.config,
            access=self.access,
            visitor=lower(self.tree, self.config.family, self.access),
            stores_d=self.access.output(0) == WHOLE,
            direct=all(self.access.output(i) != WHOLE for i in range(len(self.tree.outputs))),
            stride_d=matrix_stride("args.outputs[0]", WHOLE, self.access.batched),
            element=ELEMENTS[self.element],
            element_d=ELEMENTS[str(self.tree.outputs[0].dtype)],
            layout_a=_LAYOUTS[self.layout_a],
            layout_b=_LAYOUTS[self.layout_b],
            # CUTLASS 3.x strides are (M, K, L) for A and (N, K, L) for B: where the leading dimension goes
            stride_mode_a=0 if self.layout_a == "row" else 1,
            stride_mode_b=1 if self.layout_b == "row" else 0,
        )


def render(template: str, **values: Any) -> str:
    """A template of ``templates/``, filled in."""
    return str(_templates().get_template(template).render(**values))


@functools.cache
def _templates() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PACKAGE / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def generator_digest() -> str:
    """A digest of the code that writes kernel sources, and of the CUTLASS version they are written for."""
    return _digest(cutlass_version())


@functools.cache
def _digest(cutlass: str) -> str:
    digest = hashlib.sha256(cutlass.encode())
    for name in _GENERATOR_FILES:
        path = _PACKAGE / name
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        for file in files:
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def cutlass_version() -> str:
    """The installed version of ``nvidia-cutlass``, or "none", and where else headers are taken from, if anywhere."""
    try:
        version = importlib.metadata.version("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    override = os.environ.get("CUTLASS_PATH")
    return f"{version} with headers of {override}" if override else version

"""GEMMs with fused epilogues on PyTorch tensors.

    >>> import gemm_ops
    >>> y = gemm_ops.linear(x, weight, "gelu", bias=bias)

The layers, from the user down; each only knows those below it:

``conversion/``          :func:`fuse`, :func:`unfuse`: whole models.
``modules``              :class:`FusedLinear`.
``adapters``             LoRA and its kin on one: what they add comes before the epilogue.
``holders``              which of these hold a layer.
``sharded``              the same for a weight that is sharded over devices.
``functional``           :func:`matmul`, :func:`linear`, :func:`backend_for`.
``standalone``           :func:`apply`: an epilogue without a product.
``symbolic``             what torch.fx sees of a call.
``operators``            what PyTorch's compiler and exporter see of it.
``recording``            what autograd sees of it.
``gradients``            its backward, from the derivative trees.
``foreseen``             which kernels a product would use on a device that is not there.
``dispatch``             one product: bind its tensors, decide on a backend, execute.
``two_passes``           a product by cuBLAS, then the epilogue as an elementwise call.
``elementwise_call``     one elementwise call, the same.
``plan``                 what a repeated call reuses; ``native/``: the same in C++, and what autograd records of it.
``problem`` ``operands`` ``outputs``   what the tensors are: shapes, layouts, alignments.
``addressing/``          how each tensor reaches a kernel: as it is, at its own alignment, or copied first.
``kernels/``             families and configurations; a kernel's identity and source.
``lowering/``            epilogue tree to C++, through the CUTLASS Python interface.
``elementwise/``         the same tree as one standalone kernel over tensors, without a GEMM.
``build/``               nvcc, the cache of built kernels, and bundles of them for other machines.
``when_to_build``        when a call's kernel is built.  ``variables``: what the environment says, checked.
``tuner/``               what is fastest for a problem, as measured: results, and how they are made.
``runtime/``             loading and launching.
``printable``            text that goes to a terminal as it reads.
``fallback``             the PyTorch reference backend.  ``autocast``: what dtype it asks for.

Importing this package needs no GPU, no nvcc and no CUTLASS.
"""

from . import flops  # noqa: F401  for whoever counts operations
from .adapters import epilogue_last
from .build.bundle import pack_kernels, unpack_kernels
from .build.cache import cache_folder
from .build.compiler import build_kernel, build_kernels
from .conversion import Fusion, fuse, unfuse
from .dispatch import Decision
from .errors import (
    BuildError,
    BundleError,
    FallbackWarning,
    LaunchError,
    ProblemError,
    ToolchainError,
    UnsupportedProblemError,
)
from .forcing import use_backend
from .functional import backend_for, linear, matmul
from .modules import FusedLinear
from .outputs import empty_padded
from .standalone import apply
from .tuner.context import tuning
from .when_to_build import building

__all__ = [
    "BuildError",
    "BundleError",
    "Decision",
    "FallbackWarning",
    "FusedLinear",
    "Fusion",
    "LaunchError",
    "ProblemError",
    "ToolchainError",
    "UnsupportedProblemError",
    "apply",
    "backend_for",
    "build_kernel",
    "build_kernels",
    "building",
    "cache_folder",
    "empty_padded",
    "epilogue_last",
    "fuse",
    "linear",
    "matmul",
    "pack_kernels",
    "tuning",
    "unfuse",
    "unpack_kernels",
    "use_backend",
]

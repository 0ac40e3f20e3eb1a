"""One case of a sweep, and the product of shapes, dtypes and epilogues.

    >>> from shape_sweeps import Case
    >>> case = Case(33, 65, 127, "bf16", "bias_gelu")
    >>> case.id
    'linear-33x65x127-bf16-bias_gelu-auto-cpu-seed0'
    >>> case.reproducer()
    'python -m shape_sweeps run --shapes 33x65x127 --dtypes bf16 --epilogues bias_gelu ...'

A case is plain data: everything that determines its inputs and the call it makes, and nothing else.  Running
the same case twice on the same machine gives the same numbers, whatever else is in the sweep.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .errors import InputError
from .shapes import Shape, split_list

#: name on the command line -> dtype of the GEMM's inputs
DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}

#: other spellings -> name: those of the epilogue language, and PyTorch's
DTYPE_ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "f16": "fp16",
    "float16": "fp16",
    "f32": "fp32",
    "float32": "fp32",
}

#: all of them in words
DTYPE_NAMES = ", ".join(
    f"{name} ({', '.join(other for other, same in DTYPE_ALIASES.items() if same == name)})" for name in DTYPES
)

#: "linear" takes a weight (N, K) as nn.Linear does, "matmul" a matrix (K, N)
OPERATIONS = ("linear", "matmul")

#: "auto" lets gemm_ops choose; the others force one
BACKENDS = ("auto", "skinny", "sm90", "sm80", "cublas", "reference")


@dataclass(frozen=True)
class Case:
    """One GEMM with one epilogue.

    Attributes:
        m, n, k: extents of (M, K) @ (K, N).
        dtype: key of :data:`DTYPES`: the dtype of the inputs, of vector and matrix operands that do not name
            their own, and of outputs that do not name their own.
        epilogue: a name of the suite, or ``module:attribute``.
        operation: "linear" or "matmul".
        seed: of the random inputs.
        backend: one of :data:`BACKENDS`.
        device: "cpu", "cuda" or "cuda:INDEX".
    """

    m: int
    n: int
    k: int
    dtype: str
    epilogue: str
    operation: str = "linear"
    seed: int = 0
    backend: str = "auto"
    device: str = "cpu"

    @property
    def shape(self) -> Shape:
        return Shape(self.m, self.n, self.k)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def id(self) -> str:
        """A readable name, unique among cases."""
        return (
            f"{self.operation}-{self.shape}-{self.dtype}-{self.epilogue}-{self.backend}-{self.device}-seed{self.seed}"
        )

    def arguments(self) -> list[str]:
        """The command line after ``python -m shape_sweeps`` that runs this case and no other."""
        return [
            "run",
            *("--shapes", str(self.shape)),
            *("--dtypes", self.dtype),
            *("--epilogues", self.epilogue),
            *("--operation", self.operation),
            *("--backend", self.backend),
            *("--device", self.device),
            *("--seed", str(self.seed)),
        ]

    def reproducer(self) -> str:
        """The same as one line for a shell."""
        return shlex.join(["python", "-m", "shape_sweeps", *self.arguments()])


def product(
    shapes: Iterable[Shape],
    dtypes: Iterable[str],
    epilogues: Iterable[str],
    *,
    operation: str = "linear",
    seed: int = 0,
    backend: str = "auto",
    device: str = "cpu",
) -> tuple[Case, ...]:
    """Every shape with every dtype with every epilogue; the shape varies slowest."""
    return tuple(
        Case(shape.m, shape.n, shape.k, dtype, epilogue, operation, seed, backend, device)
        for shape, dtype, epilogue in itertools.product(shapes, dtypes, epilogues)
    )


def parse_dtypes(values: Iterable[str], where: str = "--dtypes") -> tuple[str, ...]:
    """Names of dtypes, keys of :data:`DTYPES`, from comma-separated lists of any spelling; duplicates are dropped.

    Raises:
        InputError: for a name that is neither in :data:`DTYPES` nor in :data:`DTYPE_ALIASES`.
    """
    found: dict[str, None] = {}
    for item in split_list(values, where):
        name = item.lower().removeprefix("torch.")
        name = DTYPE_ALIASES.get(name, name)
        if name not in DTYPES:
            raise InputError(f"{where}: unknown dtype {item!r}: expected some of {DTYPE_NAMES}")
        found[name] = None
    return tuple(found)

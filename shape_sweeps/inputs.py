"""Random inputs of a case.

    >>> inputs = make_inputs(Case(33, 65, 127, "bf16", "residual"), load_epilogue("residual"))
    >>> inputs.a.shape, inputs.b.shape, sorted(inputs.operands)
    ((33, 127), (65, 127), ['alpha', 'bias', 'residual', 'scale'])

Entries of A and of vector and matrix operands are normal with unit variance, those of B normal with variance
1/K, so that accumulators have unit variance whatever K is: errors of different shapes compare, and fp16 does
not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import epilogues as ep
from epilogues.dtypes import torch_dtype

from .cases import Case


class _Fill(Protocol):
    """Makes a tensor of a shape and dtype, its entries spread by ``scale`` if they are drawn."""

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor: ...


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call.

    Attributes:
        operation: "linear" or "matmul": how ``b`` is laid out.
        a: (M, K), in the case's dtype.
        b: the weight (N, K) for "linear", (K, N) for "matmul"; in the case's dtype.
        operands: name -> (N,) for a row, (M,) for a column, (M, N) for an auxiliary matrix, each in the dtype
            the epilogue names or else the case's; a Python float for a scalar.
    """

    operation: str
    a: Tensor
    b: Tensor
    operands: Mapping[str, Any]

    @property
    def right(self) -> Tensor:
        """B as (K, N), a view."""
        return self.b.t() if self.operation == "linear" else self.b

    @property
    def bytes(self) -> int:
        """What one call reads, in bytes."""
        tensors = [self.a, self.b, *(value for value in self.operands.values() if isinstance(value, Tensor))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_inputs(case: Case, epilogue: ep.Epilogue, *, repeat: int = 0) -> Inputs:
    """The inputs of a case: the same for the same case, different for different ``repeat``."""
    generator = torch.Generator(case.device).manual_seed(case.seed)
    if repeat:
        # drawn rather than counted up, so that repeat 1 of seed 0 is not repeat 0 of seed 1
        seeds = torch.Generator().manual_seed(case.seed)
        generator.manual_seed(int(torch.randint(2**62, (repeat,), generator=seeds)[-1]))

    def normal(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=case.device, dtype=torch.float32)
        return values.mul_(scale).to(dtype)

    inputs = _build(case, epilogue, normal)
    # Away from zero, where it would hide what it multiplies, and exactly a float32, as kernels take it.
    drawn = torch.rand(len(inputs.operands), generator=generator, device=case.device) + 0.5
    numbers = dict(zip(inputs.operands, drawn.tolist(), strict=True))
    operands = {name: value if isinstance(value, Tensor) else numbers[name] for name, value in inputs.operands.items()}
    return Inputs(case.operation, inputs.a, inputs.b, operands)


def placeholder_inputs(case: Case, epilogue: ep.Epilogue) -> Inputs:
    """Inputs of the right shapes, strides, dtypes and alignment with whatever the memory holds: enough to ask
    which kernel would run, without the time it takes to draw numbers.
    """

    def empty(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, device=case.device, dtype=dtype)

    return _build(case, epilogue, empty)


def output_dtypes(case: Case, epilogue: ep.Epilogue) -> dict[str, torch.dtype]:
    """Name -> dtype of every output, the main one first."""
    default = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[case.torch_dtype]
    tree = epilogue.tree
    return {store.name: torch_dtype(tree.output_dtype(store, default)) for store in tree.outputs}


def _build(case: Case, epilogue: ep.Epilogue, fill: _Fill) -> Inputs:
    m, n, k, dtype = case.m, case.n, case.k, case.torch_dtype
    a = fill((m, k), dtype)
    b = fill((n, k) if case.operation == "linear" else (k, n), dtype, max(k, 1) ** -0.5)
    named = {operand.name: operand.dtype for operand in epilogue.tree.operands}
    shapes = {ep.Kind.ROW: (n,), ep.Kind.COLUMN: (m,), ep.Kind.AUX: (m, n)}
    operands: dict[str, Any] = {}
    for name, kind in epilogue.operands.items():
        if kind is ep.Kind.SCALAR:
            operands[name] = 1.0
        else:
            own = named.get(name)
            operands[name] = fill(shapes[kind], dtype if own is None else torch_dtype(own))
    return Inputs(case.operation, a, b, operands)

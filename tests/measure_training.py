"""Measures training steps of one layer on a GPU: fused, eager PyTorch, and ``torch.compile``.

    $ PYTHONPATH=. python tests/measure_training.py                   # a line for each shape and activation; a minute

A step is the forward pass, and the gradients of x, weight and bias for a given gradient of the output.  Each contender
is a CUDA graph of several steps; graphs are replayed in interleaved rounds, and medians compared.  Gradients are
compared with fp64, beside eager PyTorch's, where the shape is small enough.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure_misaligned import measure
from torch import Tensor
from torch.nn import functional as F

import epilogues as ep
import gemm_ops

SHAPES = ((4096, 4096, 4096), (4096, 11008, 4096), (1000, 3000, 2000), (4095, 4097, 4093), (1000, 3001, 2000))
GELU = ep.builders.SUITE["bias_gelu"]()


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same as people write it."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result = gemm_ops.linear(x, weight, GELU, bias=bias)
    assert isinstance(result, Tensor)
    return result


def step_of(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(call(*leaves), leaves, grad)


def measure_shape(m: int, n: int, k: int) -> str:
    """One line: times of a step, and of the forward pass within it."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).bfloat16()

    leaves = [tensor.requires_grad_() for tensor in (normal(m, k), normal(n, k, scale=k**-0.5), normal(n))]
    grad = normal(m, n)
    torch.compiler.reset()
    compiled = torch.compile(eager, dynamic=False)
    steps = {
        name: step_of(call, leaves, grad) for name, call in (("fused", fused), ("eager", eager), ("compile", compiled))
    }
    errors = ""
    if m * n * k < 2**34:
        exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
        truth = torch.autograd.grad(eager(*exact), exact, grad.double())
        for name in ("fused", "eager"):
            found = [
                ((one.double() - other).norm() / other.norm()).item()
                for one, other in zip(steps[name](), truth, strict=True)
            ]
            errors += f", errors {name} " + " ".join(f"{error:.1e}" for error in found)
    times = measure(steps, dict.fromkeys(steps, 2 if m * n * k > 1e10 else 10))
    shown = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    ratios = f"eager/fused {times['eager'] / times['fused']:.2f}, compile/fused {times['compile'] / times['fused']:.2f}"
    return f"{f'{m} x {n} x {k}':18} us a step: {shown}; {ratios}{errors}"


def main() -> None:
    """Prints a line for each shape."""
    torch.manual_seed(0)
    for shape in SHAPES:
        print(measure_shape(*shape), flush=True)


if __name__ == "__main__":
    main()

"""Measures standalone elementwise kernels on a GPU: bandwidth, against a copy, eager PyTorch and ``torch.compile``.

    $ PYTHONPATH=. python tests/measure_elementwise.py                   # a line for each chain and shape; a minute

Each contender is a CUDA graph of several calls; graphs are replayed in interleaved rounds, and medians compared.
Results are checked against fp64 first.  Bandwidth counts every tensor read and written once, and is given as a share of
what ``Tensor.copy_`` of an aligned matrix of the same size reaches in the same rounds.  Beside small tensors stands
what one elementwise kernel of PyTorch takes: ``torch.add`` of two of them, and ``F.gelu`` of one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure_misaligned import measure
from torch import Tensor
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from epilogues import Aux, Row

SHAPES = (
    *((8192, 8192), (4096, 11008), (8192, 8191), (4096, 11007), (8192, 4093), (65536, 10)),
    *((512, 1024), (512, 512), (512, 511), (64, 512)),
)


@ep.epilogue
def bias_gelu_residual(acc, bias: Row, residual: Aux):
    return ep.gelu(acc + bias, approximate="tanh") + residual


def eager_bias_gelu_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """The same as people write it."""
    return F.gelu(x + bias, approximate="tanh") + residual


@ep.epilogue
def gelu_gradient_gate(acc, z: Aux, gate: Aux):
    cubic = 0.044715
    t = ep.tanh(0.7978845608028654 * (z + cubic * z * z * z))
    slope = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608028654 * (1 + 3 * cubic * z * z)
    return acc * slope * gate


def eager_gelu_gradient_gate(x: Tensor, z: Tensor, gate: Tensor) -> Tensor:
    """The same as autograd and a product compute it."""
    return torch.ops.aten.gelu_backward(x, z, approximate="tanh") * gate


CHAINS = {
    "bias_gelu_residual": (bias_gelu_residual, eager_bias_gelu_residual),
    "gelu_gradient_gate": (gelu_gradient_gate, eager_gelu_gradient_gate),
}


def measure_chain(name: str, m: int, n: int) -> str:
    """One line: times, and what of a copy's bandwidth they are."""
    epilogue, eager = CHAINS[name]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x = normal(m, n)
    given = {key: normal(n) if kind.value == "row" else normal(m, n) for key, kind in epilogue.operands.items()}
    out = torch.full_like(x, float("nan"))
    gemm_ops.apply(x, epilogue, out=out, **given)
    expected = eager(x.double(), *(value.double() for value in given.values()))
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 3e-3, f"{name} {m} x {n}: error {error:.1e}"
    aligned = [torch.empty(m, -(-n // 8) * 8, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    contenders: dict[str, Callable[[], object]] = {
        "copy": lambda: aligned[0].copy_(aligned[1]),
        "fused": lambda: gemm_ops.apply(x, epilogue, out=out, **given),
        "eager": lambda: eager(x, *given.values()),
    }
    torch.compiler.reset()  # kernels for this shape, not for any
    compiled = torch.compile(eager, dynamic=False)
    compiled(x, *given.values())
    contenders["compile"] = lambda: compiled(x, *given.values())
    matrix = list(given.values())[-1]
    alone: dict[str, Callable[[], object]] = {}
    if m * n <= 2**20:
        alone = {"add": lambda: torch.add(x, matrix), "gelu": lambda: F.gelu(x, approximate="tanh")}
    times = measure({**contenders, **alone}, dict.fromkeys((*contenders, *alone), 4 if m * n > 2**22 else 20))
    moved = sum(value.numel() for value in (x, out, *given.values()))
    of_copy = {
        key: moved / times[key] / (2 * aligned[0].numel() / times["copy"]) for key in contenders if key != "copy"
    }
    shares = ", ".join(f"{key} {times[key]:6.2f} us ({share:.2f})" for key, share in of_copy.items())
    single = "".join(f", one {key} {times[key]:.2f} us" for key in alone)
    return f"{name:18} {f'{m} x {n}':12} copy {times['copy']:5.2f} us, {shares}{single}"


def main() -> None:
    """Prints a line for each chain and shape; in brackets the share of a copy's bandwidth."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for m, n in SHAPES:
        for name in CHAINS:
            print(measure_chain(name, m, n), flush=True)


if __name__ == "__main__":
    main()

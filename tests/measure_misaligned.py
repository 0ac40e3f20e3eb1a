"""Measures odd extents on a GPU: fused calls against eager PyTorch, and against ``torch.mm`` of rounded-up extents.

    $ PYTHONPATH=. python tests/measure_misaligned.py            # the table in the README; minutes, most of it building

What is timed is ``FusedLinear`` in evaluation mode with a contiguous x: where K is odd, x is copied into padded rows
within the time.  Each contender is a CUDA graph of several calls, so that the GPU's time counts and not the host's;
graphs are replayed in interleaved rounds, and medians compared.  Results are checked against fp32 first.

``python -m shape_sweeps benchmark --group misaligned`` has the same shapes with every epilogue and peer, and weights
that are not in the L2 cache; here every call uses the same tensors.

Rounds are of fused calls and eager PyTorch, and others of fused calls and ``torch.mm``.  All in one would favour
``torch.mm``: eager PyTorch does little at a time at odd extents, and clocks rise higher than a network of fused layers,
or of ``torch.mm``, would see (4095 x 4097 x 4093 on an H200: ``torch.mm`` takes 178 to 186 us there, 200 to 216 among
its like).
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from shape_sweeps.graph_timing import capture, replay_us, sample_rounds
from shape_sweeps.shapes import SUITE_MISALIGNED

EPILOGUES = ("bias_gelu", "residual", "gate")
ROUNDS = 7
_LARGE = 6e11  # multiply-adds from which on results are not checked again: fp32 would take seconds


def make_tensors(m: int, n: int, k: int) -> dict[str, Tensor]:
    """Random tensors of one problem; accumulators have a variance of one."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).bfloat16()

    return {
        "x": normal(m, k),
        "weight": normal(n, k, scale=k**-0.5),
        "bias": normal(n),
        "scale": normal(n),
        "matrix": normal(m, n),
    }


def make_layer(name: str, tensors: Mapping[str, Tensor]) -> gemm_ops.FusedLinear:
    """A layer of one epilogue with the tensors' weight and bias."""
    n, k = tensors["weight"].shape
    layer = gemm_ops.FusedLinear(k, n, epilogue=ep.builders.SUITE[name](), device="meta", dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(tensors["weight"].clone())
    layer.bias = torch.nn.Parameter(tensors["bias"])
    return layer.eval()


def operands_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the layer's call takes besides x."""
    if name == "residual":
        return {"scale": tensors["scale"], "alpha": 0.5, "residual": tensors["matrix"]}
    return {"gate": tensors["matrix"]} if name == "gate" else {}


def eager(name: str, t: Mapping[str, Tensor]) -> Tensor:
    """The same as people write it."""
    if name == "bias_gelu":
        return F.gelu(F.linear(t["x"], t["weight"], t["bias"]), approximate="tanh")
    if name == "residual":
        return (F.linear(t["x"], t["weight"]) * t["scale"] + t["bias"]) * 0.5 + t["matrix"]
    return F.silu(F.linear(t["x"], t["weight"], t["bias"])) * t["matrix"]


def measure(contenders: Mapping[str, Callable[[], object]], calls: Mapping[str, int]) -> dict[str, float]:
    """Microseconds of one call of each contender."""
    graphs = {name: capture(lambda _, call=call: call(), calls[name])[0] for name, call in contenders.items()}
    samplers = {name: functools.partial(replay_us, graph, calls[name]) for name, graph in graphs.items()}
    samples = sample_rounds(samplers, rounds=ROUNDS)
    return {name: statistics.median(found) for name, found in samples.items()}


@dataclass(frozen=True)
class Ratios:
    """Of one shape and epilogue: microseconds, and other times over these."""

    fused: float
    over_eager: float
    over_mm: float


def measure_shape(m: int, n: int, k: int) -> dict[str, Ratios]:
    """By epilogue."""
    tensors = make_tensors(m, n, k)
    rounded = [-(-extent // 8) * 8 for extent in (m, n, k)]
    a, b, out = (
        torch.randn(rows, columns, device="cuda").bfloat16()
        for rows, columns in ((rounded[0], rounded[2]), (rounded[1], rounded[2]), (rounded[0], rounded[1]))
    )
    fused: dict[str, Callable[[], object]] = {}
    unfused: dict[str, Callable[[], object]] = {}
    for name in EPILOGUES:
        layer, operands = make_layer(name, tensors), operands_of(name, tensors)
        if m * n * k < _LARGE:
            expected = eager(name, {key: value.float() for key, value in tensors.items()})
            error = (layer(tensors["x"], **operands).float() - expected).norm() / expected.norm()
            assert error < 3e-3, f"{name} {m} x {n} x {k}: error {error:.1e}"
        fused[name] = lambda layer=layer, operands=operands: layer(tensors["x"], **operands)
        unfused[f"eager {name}"] = lambda name=name: eager(name, tensors)
    many = 4 if m * n * k > 1e11 else 20
    calls = dict.fromkeys((*fused, "mm"), many) | dict.fromkeys(unfused, 2 if m * n * k > 1e10 else many)
    among_eager = measure({**fused, **unfused}, calls)
    among_mm = measure({"mm": lambda: torch.mm(a, b.t(), out=out), **fused}, calls)
    return {
        name: Ratios(among_mm[name], among_eager[f"eager {name}"] / among_eager[name], among_mm["mm"] / among_mm[name])
        for name in fused
    }


def main() -> None:
    """Prints a line for each shape and epilogue, and the geometric means."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    specs = []
    for m, n, k in ((shape.m, shape.n, shape.k) for shape in SUITE_MISALIGNED):
        tensors = make_tensors(m, n, k)
        for name in EPILOGUES:
            layer, operands = make_layer(name, tensors), operands_of(name, tensors)
            weight = layer.weight.t()
            found = gemm_ops.backend_for(tensors["x"], weight, layer.epilogue, bias=layer.bias, **operands)
            specs.append(found.spec)
        del tensors
    start = time.perf_counter()
    gemm_ops.build_kernels([spec for spec in specs if spec is not None])
    print(f"{len(specs)} kernels built or found in {time.perf_counter() - start:.0f} s", flush=True)
    found: list[Ratios] = []
    for m, n, k in ((shape.m, shape.n, shape.k) for shape in SUITE_MISALIGNED):
        for name, ratios in measure_shape(m, n, k).items():
            found.append(ratios)
            print(
                f"{f'{m}x{n}x{k}':16} {name:10} {ratios.fused:8.1f} us, eager/fused {ratios.over_eager:5.2f}, "
                f"mm of rounded-up extents/fused {ratios.over_mm:5.2f}",
                flush=True,
            )
    eager_mean, mm_mean = (
        math.exp(statistics.fmean(map(math.log, values)))
        for values in ([r.over_eager for r in found], [r.over_mm for r in found])
    )
    least = min(ratios.over_eager for ratios in found)
    print(f"geometric mean: eager/fused {eager_mean:.2f} (least {least:.2f}), fused/mm {1 / mm_mean:.3f}")


if __name__ == "__main__":
    main()

"""The host's time of a call: what a program waits for before it can go on, while the GPU computes.

    >>> host_times({"F.linear": lambda: F.linear(x, weight, bias), "FusedLinear": lambda: layer(x)})
    {'F.linear': 21.4, 'FusedLinear': 18.1}

Calls should be so small that the device waits for the host; they are made so few at a time that they do not fill its
queue.  Rounds of the contenders are interleaved; medians, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epilogues as ep
from gemm_ops import FusedLinear, backend_for, native
from gemm_ops.build.buildable import Buildable

_CALLS, _ROUNDS, _WARM_UP_CALLS = 100, 41, 20
#: extents of the problem of :func:`linear_contenders`: x is (M, K), the weight (N, K)
PROBLEM = (64, 512, 512)


def host_times(contenders: Mapping[str, Callable[[], object]], *, rounds: int = _ROUNDS) -> dict[str, float]:
    """Median host time per call on the current CUDA device, in microseconds, by name."""
    for call in contenders.values():
        for _ in range(_WARM_UP_CALLS):
            call()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            found[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def linear_contenders(device: str) -> dict[str, Callable[[], object]]:
    """Eager calls without gradients of one bfloat16 layer, with a bias: PyTorch's and ours."""
    x, linear, bare, gelu = _layers(device)
    return {
        "F.linear": lambda: F.linear(x, linear.weight, linear.bias),
        "nn.Linear": lambda: linear(x),
        "F.gelu(nn.Linear)": lambda: F.gelu(linear(x), approximate="tanh"),
        "FusedLinear": lambda: bare(x),
        "FusedLinear, GELU": lambda: gelu(x),
    }


def linear_kernels(device: str) -> list[Buildable]:
    """The kernels of ours, for :func:`gemm_ops.build_kernels`."""
    x, _, *ours = _layers(device)
    found = [backend_for(x, layer.weight.t(), layer.epilogue, bias=layer.bias).spec for layer in ours]
    return [spec for spec in found if spec is not None]


def _layers(device: str) -> tuple[Tensor, nn.Linear, FusedLinear, FusedLinear]:
    """An x, PyTorch's layer, and ours without and with an activation, which share its parameters."""
    m, n, k = PROBLEM
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    linear = nn.Linear(k, n, device=device, dtype=torch.bfloat16).eval()
    gelu = FusedLinear.from_linear(linear, epilogue=ep.builders.SUITE["bias_gelu"]())
    return x, linear, FusedLinear.from_linear(linear), gelu


def load_native() -> None:
    """Has the C++ path of calls ready, which is otherwise built in the background.

    Raises:
        ToolchainError, BuildError: if it cannot be built.
    """
    native.load()

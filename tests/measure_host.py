"""The host's time per call of FusedLinear beside nn.Linear: ``python tests/measure_host.py`` on a machine with a GPU.

Calls are so small that the device waits for the host, and so few at a time that they do not fill its queue.  Rounds of
the contenders are interleaved; medians, in microseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

import gemm_ops
from gemm_ops import FusedLinear, native

_CALLS, _ROUNDS = 100, 41


def host_times(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median host time per call, in microseconds."""
    for call in contenders.values():
        for _ in range(20):
            call()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, call in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            found[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    if "--python" not in sys.argv:
        start = time.perf_counter()
        native.load()
        print(f"native module ready in {time.perf_counter() - start:.1f} s")
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(64, 512, **options)
    linear = torch.nn.Linear(512, 512, **options)
    fused = FusedLinear.from_linear(linear, epilogue="gelu")
    bare = FusedLinear.from_linear(linear)
    grad = torch.randn(64, 512, **options)
    wanted = [x.clone().requires_grad_(), linear.weight, linear.bias]
    tables = {
        "inference": {
            "F.linear": lambda: F.linear(x, linear.weight, linear.bias),
            "nn.Linear": lambda: linear(x),
            "F.gelu(nn.Linear)": lambda: F.gelu(linear(x)),
            "FusedLinear": lambda: bare(x),
            "FusedLinear gelu": lambda: fused(x),
            "gemm_ops.linear gelu": lambda: gemm_ops.linear(x, linear.weight, "gelu", bias=linear.bias),
        },
        "recorded forward": {
            "nn.Linear": lambda: linear(wanted[0]),
            "F.gelu(nn.Linear)": lambda: F.gelu(linear(wanted[0])),
            "FusedLinear": lambda: bare(wanted[0]),
            "FusedLinear gelu": lambda: fused(wanted[0]),
        },
        "forward and backward": {
            "nn.Linear": lambda: torch.autograd.grad(linear(wanted[0]), wanted, grad),
            "F.gelu(nn.Linear)": lambda: torch.autograd.grad(F.gelu(linear(wanted[0])), wanted, grad),
            "FusedLinear": lambda: torch.autograd.grad(bare(wanted[0]), wanted, grad),
            "FusedLinear gelu": lambda: torch.autograd.grad(fused(wanted[0]), wanted, grad),
        },
    }
    for title, contenders in tables.items():
        with torch.set_grad_enabled(title != "inference"):
            for name, time_per_call in host_times(contenders).items():
                print(f"{title:22} {name:24} {time_per_call:8.1f} us")
    print("plans, recordings, calls computed natively:", native.load().counts() if native.is_loaded() else "none")


if __name__ == "__main__":
    main()

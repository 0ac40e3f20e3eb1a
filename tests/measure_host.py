"""The host's time per call of FusedLinear beside nn.Linear: ``python tests/measure_host.py`` on a machine with a GPU.

How it is measured, :mod:`shape_sweeps.host_timing` says; ``python -m shape_sweeps benchmark`` takes the eager call's.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.nn import functional as F

import gemm_ops
from gemm_ops import FusedLinear, native
from shape_sweeps.host_timing import host_times


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

"""Measures what the rows of the operation table cost on the present GPU, and their registers.

    python tests/measure_costs.py > table.txt       # as in epilogues/operations/costs.py

Each device function runs in a loop over values in registers; its time, less that of the same loop without it, is stated
in the time of one fp32 addition.  Registers are nvcc's for a kernel that applies the function, less those for one that
only adds its inputs.  A build takes about ten seconds.

The second table there, of calls of the special function unit, is :func:`count_special_calls`, which needs no GPU.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from pathlib import Path

import torch

import gemm_ops
from epilogues.operations import OPERATIONS
from gemm_ops.build.toolchain import find_toolchain

VARIANTS = ("exact", "fast")
_HEADER = Path(gemm_ops.__file__).parent / "cuda" / "functors.cuh"
_THREADS, _ITERATIONS = 256, 512


def _source() -> str:
    parts = [f'#include "{_HEADER}"']
    for arity in (1, 2, 3):
        parts.append(_kernels(f"sum{arity}", arity, " + ".join(f"x{i}" for i in range(arity))))
    for variant in VARIANTS:
        for name, row in OPERATIONS.items():
            inputs = ", ".join(f"x{i} > 0.0f" if i in row.conditions else f"x{i}" for i in range(row.arity))
            parts.append(_kernels(f"{variant}_{name}", row.arity, f"ep::{variant}::{row.functor}({inputs})"))
    return "\n".join(parts)


def _kernels(name: str, arity: int, expression: str) -> str:
    pointers = ", ".join(f"float const* in{i}" for i in range(arity))
    loads = " ".join(f"float x{i} = in{i}[i];" for i in range(arity))
    return f"""
__global__ void apply_{name}({pointers}, float* out) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  {loads}
  out[i] = static_cast<float>({expression});
}}
__global__ void loop_{name}(float* out, float start, float step) {{
  float x0 = start + threadIdx.x * 1e-3f, x1 = 0.7f + threadIdx.x * 1e-4f, x2 = 1.5f, sum = 0.0f;
  #pragma unroll 4
  for (int i = 0; i < {_ITERATIONS}; ++i) {{
    sum += static_cast<float>({expression});
    x0 += step; x1 -= step; x2 += step;
  }}
  if (sum == 12345.678f) out[0] = sum;
}}
extern "C" void time_{name}(float* out, float start, float step, int blocks) {{
  loop_{name}<<<blocks, {_THREADS}>>>(out, start, step);
}}"""


def build(folder: Path, arch: str) -> tuple[ctypes.CDLL, dict[str, int]]:
    """The library of all loops, and the registers of all ``apply`` kernels by name."""
    (folder / "costs.cu").write_text(_source())
    command = [str(find_toolchain().nvcc), "-std=c++17", "-O3", f"-arch={arch}", "-Xptxas=-v", "-Xcompiler=-fPIC"]
    command += ["--shared", "-o", "costs.so", "costs.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    pattern = r"entry function '_Z\d+apply_(\w+?)(?:PKf)+\w*'.*?Used (\d+) registers"
    registers = {name: int(count) for name, count in re.findall(pattern, done.stderr, re.DOTALL)}
    return ctypes.CDLL(str(folder / "costs.so")), registers


def measure() -> dict[str, tuple[int, int, int]]:
    """By row: instructions of the exact and of the fast function, registers beyond the inputs' of the wider one."""
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        library, registers = build(Path(folder), f"sm_{major}{minor}")
        out = torch.empty(1, device="cuda")
        blocks = 8 * torch.cuda.get_device_properties(0).multi_processor_count

        def seconds(name: str) -> float:
            function = getattr(library, f"time_{name}")
            times = []
            for _ in range(5):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(torch.cuda.default_stream())
                for _ in range(5):
                    function(ctypes.c_void_p(out.data_ptr()), ctypes.c_float(-2.5), ctypes.c_float(0.0097), blocks)
                end.record(torch.cuda.default_stream())
                end.synchronize()
                times.append(start.elapsed_time(end))
            return min(times)

        for _ in range(20):  # clocks up
            seconds("exact_exp")
        sums = {arity: seconds(f"sum{arity}") for arity in (1, 2, 3)}
        # each further input costs two additions: its own progression, and that to the sum
        addition = (sums[3] - sums[1]) / 4
        found = {}
        for name, row in OPERATIONS.items():
            # the loop itself: the inputs' progressions and the sum
            loop = sums[row.arity] - (row.arity - 1) * addition
            exact, fast = (round((seconds(f"{variant}_{name}") - loop) / addition) for variant in VARIANTS)
            wide = max(registers[f"{variant}_{name}"] for variant in VARIANTS) - registers[f"sum{row.arity}"]
            least = 0 if name == "identity" else 1
            found[name] = (max(least, exact), max(least, fast), max(0, wide))
        return found


def count_special_calls() -> dict[str, tuple[int, int]]:
    """By row: calls of the special function unit in the exact and in the fast function; needs nvcc, but no device."""
    parts = [f'#include "{_HEADER}"']
    for variant in VARIANTS:
        for name, row in OPERATIONS.items():
            inputs = ", ".join(f"x{i} > 0.0f" if i in row.conditions else f"x{i}" for i in range(row.arity))
            result = f"static_cast<float>(ep::{variant}::{row.functor}({inputs}))"
            parameters = ", ".join(f"float x{i}" for i in range(row.arity))
            kernel = f"__global__ void {variant}_{name}(float* out, {parameters})"
            parts.append(f'extern "C" {kernel} {{ out[threadIdx.x] = {result}; }}')
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "calls.cu").write_text("\n".join(parts))
        command = [
            str(find_toolchain().nvcc),
            "-std=c++17",
            "-O3",
            "-arch=sm_90",
            "-ptx",
            "-o",
            "calls.ptx",
            "calls.cu",
        ]
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        text = (Path(folder) / "calls.ptx").read_text()
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", text, re.DOTALL))
    calls = {
        name: len(re.findall(r"\b(?:ex2|rcp|rsqrt|sqrt|lg2|sin|cos|tanh|div)\.", body)) for name, body in bodies.items()
    }
    return {name: (calls[f"exact_{name}"], calls[f"fast_{name}"]) for name in OPERATIONS}


if __name__ == "__main__":
    for operation, cost in measure().items():
        print(f'    "{operation}": {cost},')

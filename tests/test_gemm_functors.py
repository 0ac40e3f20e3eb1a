"""The device functions of functors.cuh, all variants, on the host.

The header is compiled with a C++ compiler, the few lines of PTX and the CUDA intrinsics replaced by what they are
defined to compute (approximations by exact values with the same flushing of denormals).  So the formulas, their
handling of NaN and infinity, and their conditioning are tested here against the operation table's reference in fp64;
the hardware's own approximations are tested on the GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch
from host_functors import host_functors
from operation_support import CANCELLING

from epilogues.operations import OPERATIONS

VARIANTS = ("exact", "fast", "eager")
ROWS = 4096


def host_source() -> str:
    """The header as host C++, and one exported loop per row and variant."""
    loops = []
    for variant in VARIANTS:
        for name, row in OPERATIONS.items():
            inputs = [f"in{i}[i] != 0.0f" if i in condition_inputs(name) else f"in{i}[i]" for i in range(row.arity)]
            parameters = ", ".join(f"float const* in{i}" for i in range(row.arity))
            loops.append(
                f'extern "C" void {variant}_{name}({parameters}, float* out, int n) {{\n'
                f"  for (int i = 0; i < n; ++i) out[i] = ep::{variant}::{row.functor}({', '.join(inputs)});\n}}"
            )
    return host_functors() + "\n".join(loops) + "\n"


def condition_inputs(name: str) -> tuple[int, ...]:
    return OPERATIONS[name].conditions


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Callable[..., np.ndarray]]:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is what nvcc needs too"
    folder = tmp_path_factory.mktemp("functors")
    (folder / "functors.cpp").write_text(host_source())
    # no contraction: the loops must compute what is written, as the device does up to fused multiply-adds
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-o",
        "functors.so",
        "functors.cpp",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    library = ctypes.CDLL(str(folder / "functors.so"))

    def find(variant: str, name: str) -> Callable[..., np.ndarray]:
        function = getattr(library, f"{variant}_{name}")

        def call(*inputs: np.ndarray) -> np.ndarray:
            out = np.empty_like(inputs[0])
            pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*inputs, out)]
            function(*pointers, ctypes.c_int(out.size))
            return out

        return call

    return find


EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 6.0, 20.0, 25.0, -25.0, 88.0, -88.0, 100.0, -100.0]
SPECIAL = [float("inf"), float("-inf"), float("nan")]


def inputs_of(name: str, special: bool) -> list[np.ndarray]:
    """Random values of several magnitudes, and every combination of the edge values."""
    row = OPERATIONS[name]
    generator = np.random.default_rng(0)
    edges = np.array(EDGES + (SPECIAL if special else []), dtype=np.float32)
    grid = np.meshgrid(*[edges] * row.arity, indexing="ij")
    columns = []
    for index, mesh in enumerate(grid):
        scale = generator.choice(np.array([0.01, 1.0, 10.0], dtype=np.float32), ROWS)
        values = (generator.standard_normal(ROWS) * scale).astype(np.float32)
        column = np.concatenate([values, mesh.ravel()])
        columns.append((column > 0).astype(np.float32) if index in row.conditions else column)
    # parameters in the range that PyTorch allows them
    if name in ("softplus", "celu"):
        columns[1] = np.abs(columns[1]) + np.float32(0.1)
        columns[1][~np.isfinite(columns[1])] = 1.0
    if name == "softplus":
        columns[2] = np.full_like(columns[2], 20.0)
    if name == "elu":
        columns[1][~np.isfinite(columns[1])] = 1.0
    if name in ("hardshrink", "softshrink"):
        columns[1] = np.abs(columns[1])
        columns[1][~np.isfinite(columns[1])] = 1.0
    return columns


def reference(name: str, inputs: list[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    row = OPERATIONS[name]
    tensors = [torch.from_numpy(array).to(dtype) for array in inputs]
    given = [tensor != 0 if index in row.conditions else tensor for index, tensor in enumerate(tensors)]
    return np.asarray(row.reference(*given).to(torch.float64).numpy())


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_functor(functions: Callable[..., Callable[..., np.ndarray]], variant: str, name: str) -> None:
    inputs = inputs_of(name, special=True)
    result = functions(variant, name)(*inputs).astype(np.float64)
    single, truth = reference(name, inputs, torch.float32), reference(name, inputs, torch.float64)
    # PyTorch itself is not of one mind everywhere: its vectorised fp32 gelu of infinity is NaN, its fp64 one is not
    assert np.isnan(result[np.isnan(single) & np.isnan(truth)]).all(), "no NaN where PyTorch has one"
    assert not np.isnan(result[~np.isnan(single) & ~np.isnan(truth)]).any(), "NaN where PyTorch has none"
    infinite = np.isinf(single)
    assert np.array_equal(result[infinite], single[infinite]), "infinities differ"
    finite = np.isfinite(result) & np.isfinite(single) & np.isfinite(truth)
    error, allowed = np.abs(result[finite] - truth[finite]), np.abs(single[finite] - truth[finite])
    # exact: a few units in the last place of fp32; fast: invisible in 16 bits, an eighth of a unit of fp16
    relative = 2.0**-14 if variant == "fast" else 2.0**-21
    # denormals of fp32 are flushed by the fast functions, and below fp16's resolution nothing shows
    floor = 2.0**-27 if variant == "fast" else 2.0**-140
    largest = np.max([np.nan_to_num(np.abs(array[finite]), posinf=0.0) for array in inputs], axis=0)
    # 1 + erf(x) and 1 + tanh(x), as PyTorch writes them, lose the tail in fp64 too
    cancels = name in CANCELLING or (variant == "eager" and name in ("gelu_erf", "gelu_tanh"))
    floor = floor + largest * (2.0**-22 if cancels else 2.0**-51)
    limit = np.maximum(np.abs(truth[finite]) * relative + floor, 2.0 * allowed)
    worst = int(np.argmax(error - limit)) if error.size else 0
    if error.size:
        values = [float(array[finite][worst]) for array in inputs]
        assert error[worst] <= limit[worst], f"{name}({values}): {result[finite][worst]} for {truth[finite][worst]}"
    assert finite.sum() > ROWS // 8, "hardly anything was compared"

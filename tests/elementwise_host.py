"""Elementwise kernels on the host: the generated source and its header, compiled by g++, on tensors in host memory.

>>> run_on_host(tree, x, operands, outputs)

What is compiled is what nvcc compiles, but for the launch: threads run one after another.  Every access is checked: it
must be aligned, reads must be within an input, writes within an output.  Undefined behaviour ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from host_functors import CUDA, host_functors
from torch import Tensor

from epilogues.dtypes import dtype_name
from epilogues.reference import evaluate
from epilogues.tree import EpilogueTree, Kind, Operand
from gemm_ops.elementwise.arguments import MAX_INPUTS, MAX_OUTPUTS, ElementwiseArguments
from gemm_ops.elementwise.layout import Layout, plan_layout, view_of
from gemm_ops.elementwise.spec import ElementwiseSpec
from gemm_ops.runtime.elementwise import block_template, fill_block

_SHIM = """
#include <cstdint>
#include <cstdio>
#include <type_traits>
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32) | low) >> (bits & 31));
}
struct Range { uintptr_t begin, end; };
static Range readable[32], writable[32];
static int readable_count, writable_count;
static int64_t violations, whole_reads, whole_writes;
inline void check(char const* address, unsigned bytes, bool writes) {
  uintptr_t const at = reinterpret_cast<uintptr_t>(address);
  bool fine = false;
  for (int i = 0; i < (writes ? writable_count : readable_count); ++i) {
    Range const range = writes ? writable[i] : readable[i];
    fine |= at >= range.begin && at + bytes <= range.end;
  }
  violations += !fine || at % bytes != 0;
  (writes ? whole_writes : whole_reads) += bytes == 16;
}
"""

_DRIVER = """
template <bool kWide>
void run_threads(ElementwiseArguments const& args, bool backwards) {
  Walk<Kernel, kWide> const walk(args);
  int64_t const threads = (walk.pieces + 127) / 128 * 128;  // whole blocks
  for (int64_t thread = 0; thread < threads; ++thread) {
    process<Kernel, kWide>(walk, backwards ? threads - 1 - thread : thread);
  }
}

extern "C" void run(ElementwiseArguments const* args, int wide, int backwards, int64_t* counts) {
  violations = whole_reads = whole_writes = readable_count = writable_count = 0;
  auto const range = [](ElementwiseTensor const& tensor) {
    uintptr_t const begin = reinterpret_cast<uintptr_t>(tensor.data);
    return Range{begin, begin + static_cast<uintptr_t>(tensor.bytes)};
  };
  for (int i = 0; i < Kernel::kInputs; ++i) {
    if (args->inputs[i].data) readable[readable_count++] = range(args->inputs[i]);
  }
  for (int i = 0; i < Kernel::kOutputs; ++i) writable[writable_count++] = range(args->outputs[i]);
  if (wide) {
    run_threads<true>(*args, backwards);
  } else {
    run_threads<false>(*args, backwards);
  }
  counts[0] = violations;
  counts[1] = whole_reads;
  counts[2] = whole_writes;
}

template <bool kWide> void find_piece(ElementwiseArguments const& args, int64_t piece, int64_t* found) {
  auto const place = Walk<Kernel, kWide>(args).at(piece);
  *found++ = place.column;
  *found++ = place.begin;
  *found++ = place.end;
  for (int64_t offset : place.inputs) *found++ = offset;
  for (int64_t offset : place.outputs) *found++ = offset;
}

extern "C" void find(ElementwiseArguments const* args, int wide, int64_t piece, int64_t* found) {
  wide ? find_piece<true>(*args, piece, found) : find_piece<false>(*args, piece, found);
}
"""

#: The header's memory accesses, and what is checked before each.
_ACCESSES = {
    r"Part<kWords> read_part\(char const\* from\) {": "check(from, 4 * kWords, false);",
    r"void write_part\(char\* to, Part<kWords> part\) {": "check(to, 4 * kWords, true);",
    r"Bits read_element\(char const\* from\) {": "check(from, sizeof(Bits), false);",
    r"void write_element\(char\* to, Bits bits\) {": "check(to, sizeof(Bits), true);",
}


class HostKernel:
    """A kernel compiled for the host."""

    def __init__(self, spec: ElementwiseSpec) -> None:
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "a C++ compiler is what nvcc needs too"
        folder = _folder()
        source, library = folder / f"{spec.key}.cpp", folder / f"{spec.key}.so"
        source.write_text(host_source(spec))
        # no contraction: what is written is computed, as the device does up to fused multiply-adds
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
        flags += ["-Wno-maybe-uninitialized", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
        done = subprocess.run([compiler, *flags, "-o", library, source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        self.spec = spec
        self._library = ctypes.CDLL(str(library))

    def run(self, block: ElementwiseArguments, *, wide: bool = False, backwards: bool = False) -> tuple[int, int]:
        """Runs the kernel and gives the number of reads and writes of whole 16 bytes."""
        counts = (ctypes.c_int64 * 3)()
        self._library.run(ctypes.byref(block), int(wide), int(backwards), counts)
        assert counts[0] == 0, f"{counts[0]} accesses outside of the tensors or not aligned"
        return counts[1], counts[2]

    def find(self, block: ElementwiseArguments, piece: int, *, wide: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(column, begin, end) of a piece, and the byte offsets of its row in every input and output."""
        found = (ctypes.c_int64 * (3 + MAX_INPUTS + MAX_OUTPUTS))()
        self._library.find(ctypes.byref(block), int(wide), ctypes.c_int64(piece), found)
        tensors = len(self.spec.inputs) + len(self.spec.outputs)
        return tuple(found[:3]), tuple(found[3 : 3 + tensors])


@functools.cache
def _folder() -> Path:
    # kept alive by the cache until the session ends
    _folder.directory = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
    return Path(_folder.directory.name)  # type: ignore[attr-defined]


@functools.cache
def host_kernel(spec: ElementwiseSpec) -> HostKernel:
    """The kernel of a spec, compiled once in a session."""
    return HostKernel(spec)


def host_source(spec: ElementwiseSpec) -> str:
    """The kernel's source with everything it includes, and functions to run it."""
    types, walk, pieces = (
        (CUDA / f"{name}.cuh").read_text() for name in ("element_types", "elementwise_walk", "elementwise_pieces")
    )
    for pattern, checked in _ACCESSES.items():
        pieces, found = re.subn(rf"(EP_DEVICE {pattern})", rf"\1 {checked}", pieces)
        assert found == 1, pattern
    source = spec.source()
    assert source.count('#include "elementwise_pieces.cuh"') == 1
    source = source.replace('#include "elementwise_pieces.cuh"', "".join(map(without_includes, (types, walk, pieces))))
    return host_functors() + _SHIM + source + _DRIVER


def without_includes(header: str) -> str:
    """A header to be written into a source that has what it includes."""
    return re.sub(r"#pragma once|#include .*", "", header)


def plan(
    tree: EpilogueTree, x: Tensor, operands: Sequence[Tensor | float], outputs: Sequence[Tensor]
) -> tuple[ElementwiseSpec, Layout]:
    """The kernel and the layout of a call."""
    shape = tuple(outputs[0].shape)
    inputs = [view_of(given, shape) if isinstance(given, Tensor) else None for given in (x, *operands)]
    layout = plan_layout(shape, inputs, [view_of(output, shape) for output in outputs])
    assert isinstance(layout, Layout), layout
    return ElementwiseSpec.of(tree, dtype_name(x.dtype), layout, "90"), layout


def run_on_host(
    tree: EpilogueTree,
    x: Tensor,
    operands: Sequence[Tensor | float],
    outputs: Sequence[Tensor],
    *,
    wide: bool = False,
    backwards: bool = False,
) -> Layout:
    """Runs a resolved tree and gives the layout it took."""
    spec, layout = plan(tree, x, operands, outputs)
    block = fill_block(block_template(layout), x, operands, outputs)
    host_kernel(spec).run(block, wide=wide, backwards=backwards)
    return layout


def expected(
    tree: EpilogueTree, x: Tensor, operands: Sequence[Tensor | float], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """The outputs of a resolved tree in fp64, rounded at casts only; operands spread as PyTorch broadcasts them."""
    # dtypes and kinds are those of tensors that fill the shape
    change = {id(node): Operand(node.name, Kind.AUX, node.position) for node in tree.operands}
    filled = {
        node.name: (given if isinstance(given, Tensor) else torch.tensor(given).to(_dtype(node))).expand(shape).double()
        for node, given in zip(tree.operands, operands, strict=True)
    }
    rows = shape if len(shape) > 1 else (1, *shape)
    filled = {name: tensor.reshape(rows) for name, tensor in filled.items()}
    results = evaluate(
        tree.map_nodes(change),
        x.expand(shape).double().reshape(rows),
        filled,
        compute_dtype=torch.float64,
        keep_casts=False,
    )
    return {name: result.expand(rows).reshape(shape) for name, result in results.items()}


def _dtype(node: Operand) -> torch.dtype:
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[str(node.dtype)]


#: Relative rounding errors of the dtypes; of fp32 with what a few operations add.
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-10.9, torch.bfloat16: 2.0**-7.9}


def check_outputs(results: Sequence[Tensor], truth: dict[str, Tensor]) -> None:
    """Fails unless every output is the fp64 result rounded to its dtype."""
    for result, (name, exact) in zip(results, truth.items(), strict=True):
        relative = ROUNDING[result.dtype]
        torch.testing.assert_close(
            result.double(), exact, rtol=relative, atol=2.0**-18, msg=lambda words, name=name: f"{name}: {words}"
        )

"""What an elementwise kernel is on disk, what its source says, what nvcc makes of it, and how it is launched."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gemm_support import every_kind, resolved
from operation_support import every_row_tree
from test_gemm_compile import has_nvcc

import epilogues as ep
from epilogues import Aux, Row
from epilogues.operations import OPERATIONS
from epilogues.tree import Accumulator, Apply, Constant, EpilogueTree, Kind, Operand, Store
from gemm_ops.build import cache
from gemm_ops.build.buildable import Buildable
from gemm_ops.build.compiler import build_kernel
from gemm_ops.build.toolchain import find_toolchain
from gemm_ops.elementwise.arguments import ElementwiseArguments, ElementwiseTensor, declarations
from gemm_ops.elementwise.body import Input, compute_function, occupancy_of
from gemm_ops.elementwise.layout import Layout, plan_layout, view_of
from gemm_ops.elementwise.spec import ElementwiseSpec
from gemm_ops.errors import BuildError, LaunchError
from gemm_ops.kernels import sources
from gemm_ops.runtime import elementwise as runtime
from gemm_ops.runtime import loading


def residual_tree(names: tuple[str, str] = ("bias", "residual"), constant: float = 0.5) -> EpilogueTree:
    bias, residual = Operand(names[0], Kind.ROW, 0, "bf16"), Operand(names[1], Kind.AUX, 1, "f32")
    z = Apply("add", (Accumulator(), bias))
    scaled = Apply("mul", (Apply("relu", (z,)), Constant(constant)))
    return EpilogueTree((Store("D", Apply("add", (scaled, residual)), "bf16"), Store("z", z, "f16")))


INPUTS, OUTPUTS = ("pieces", "pieces", "strided"), ("pieces", "pieces")
BASE = ElementwiseSpec(
    residual_tree(), "bf16", INPUTS, OUTPUTS, dimensions=1, width=4, tiled=False, whole=False, arch="90"
)
DIFFERENT = {
    "constant": dataclasses.replace(BASE, tree=residual_tree(constant=0.25)),
    "x": dataclasses.replace(BASE, x_dtype="f16"),
    "inputs": dataclasses.replace(BASE, inputs=("pieces", "pieces", "repeated")),
    "outputs": dataclasses.replace(BASE, outputs=("pieces", "strided")),
    "main output": dataclasses.replace(BASE, outputs=("strided", "pieces")),
    "dimensions": dataclasses.replace(BASE, dimensions=2),
    "tiled": dataclasses.replace(BASE, tiled=True),
    "whole": dataclasses.replace(BASE, whole=True),
    "width": dataclasses.replace(BASE, width=8),
}


def test_different_kernels_have_different_keys_and_sources() -> None:
    specs = {"base": BASE, **DIFFERENT}
    assert len({spec.key for spec in specs.values()}) == len(specs)
    assert len({spec.source() for spec in specs.values()}) == len(specs)
    assert all(re.fullmatch(r"[0-9a-f]{32}", spec.key) for spec in specs.values())
    assert dataclasses.replace(BASE, arch="80").key != BASE.key
    assert isinstance(BASE, Buildable)


def test_names_do_not_count() -> None:
    same = dataclasses.replace(BASE, tree=residual_tree(("offset", "skip")))
    assert same.key == BASE.key and same.source() == BASE.source()


def test_a_functor_of_another_name_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = BASE.key
    monkeypatch.setitem(OPERATIONS, "relu", dataclasses.replace(OPERATIONS["relu"], functor="identity"))
    assert dataclasses.replace(BASE).key != before


def test_the_generator_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "gemm_ops"
    shutil.copytree(sources._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = BASE.key
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_PACKAGE", package)

        def key_now() -> str:
            sources._digest.cache_clear()
            return dataclasses.replace(BASE).key

        assert key_now() == before
        files = ["templates/elementwise.cu.j2", "cuda/elementwise_walk.cuh", "lowering/expressions.py"]
        for file in (*files, "elementwise/body.py", "elementwise/arguments.py", "elementwise/layout.py"):
            text = (package / file).read_text()
            (package / file).write_text(text + "\n")
            assert key_now() != before, file
            (package / file).write_text(text)
    sources._digest.cache_clear()


def test_a_layout_gives_its_kernel() -> None:
    x, bias, residual = torch.empty(6, 40).bfloat16(), torch.empty(40).bfloat16(), torch.empty(40, 6).t()
    out, z = torch.empty(6, 40).bfloat16(), torch.empty(6, 40).half()
    layout = plan_layout(
        (6, 40), [view_of(given, (6, 40)) for given in (x, bias, residual)], [view_of(out, (6, 40))] * 2
    )
    assert isinstance(layout, Layout)
    found = ElementwiseSpec.of(residual_tree(), "bf16", layout, "90")
    assert found == dataclasses.replace(BASE, whole=True) and found.title.endswith("2-d, whole, sm_90")
    assert BASE.title == ("elementwise bf16 pieces+bf16 pieces+f32 strided -> bf16 pieces+f16 pieces, 2-d, sm_90")
    assert z.shape == out.shape


def test_every_node_is_computed_once() -> None:
    z = Apply("add", (Accumulator(), Operand("bias", Kind.ROW, 0, "bf16")))
    # the same object in two outputs, and twice in one node
    tree = EpilogueTree((Store("D", Apply("mul", (z, z)), "bf16"), Store("z", z, "bf16")))
    assert compute_function(tree) == (
        "static EP_DEVICE void compute(float in0, float in1, float& out0, float& out1) {\n"
        "  namespace fn = ep::fast;\n"
        "  auto const v0 = fn::add(in0, in1);\n"
        "  auto const v1 = fn::mul(v0, v0);\n"
        "  out0 = v1;\n"
        "  out1 = v0;\n"
        "}"
    )
    exact = compute_function(EpilogueTree((Store("D", z, "f32"),)))
    assert "namespace fn = ep::exact;" in exact


def test_the_more_is_read_the_fewer_blocks_share_a_multiprocessor() -> None:
    tree = residual_tree()
    pieces, single, shifted = Input(0, "Bf16", "pieces"), Input(0, "F32", "pieces"), Input(0, "Bf16", "shifted")
    found = [occupancy_of(tree, [pieces] * count, 8) for count in range(17)]
    blocks, needed = zip(*found, strict=True)
    assert list(blocks) == sorted(blocks, reverse=True) and blocks[1] == 12 and blocks[16] == 4
    assert {after - before for before, after in itertools.pairwise(needed)} == {4}, "four registers a piece"
    assert not any(occupancy.warns for occupancy in found) and occupancy_of(tree, [single] * 30, 8).warns
    for other, registers in (
        (single, 8),
        (shifted, 8),
        (Input(0, "F32", "scalar"), 1),
        (Input(0, "F16", "strided"), 8),
    ):
        assert occupancy_of(tree, [pieces, other], 8).needed == needed[1] + registers
    more = EpilogueTree((*tree.outputs, Store("again", tree.outputs[0].value, "f32")))
    assert occupancy_of(more, [pieces], 8).needed == needed[1] + 8


def test_the_block_is_declared_once() -> None:
    text = declarations()
    assert f"static_assert(sizeof(ElementwiseTensor) == {ctypes.sizeof(ElementwiseTensor)});" in text
    assert f"static_assert(sizeof(ElementwiseArguments) == {ctypes.sizeof(ElementwiseArguments)});" in text
    assert "  int64_t strides[5];" in text and "  ElementwiseTensor inputs[17];" in text
    assert text in BASE.source()


# What nvcc makes of it.


@ep.epilogue
def gate(acc, gate: Aux, bias: Row):
    return {"D": ep.gelu(acc + bias, approximate="tanh") * gate, "z": ep.cast(acc + bias, "bf16")}


def spec_for(tree: EpilogueTree, x_dtype: str, *shapes: tuple[int, ...]) -> ElementwiseSpec:
    """A kernel over contiguous tensors of these shapes, for x and every operand."""
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    names = [x_dtype, *(str(operand.dtype) for operand in tree.operands)]
    inputs = [
        view_of(torch.empty(shape, dtype=dtypes[name]), shapes[0]) for shape, name in zip(shapes, names, strict=True)
    ]
    outputs = [view_of(torch.empty(shapes[0], dtype=dtypes[str(store.dtype)]), shapes[0]) for store in tree.outputs]
    layout = plan_layout(shapes[0], inputs, outputs)
    assert isinstance(layout, Layout)
    return ElementwiseSpec.of(tree, x_dtype, layout, "90")


SPECS = {
    "gate": spec_for(resolved(gate), "bf16", (9, 33), (9, 33), (33,)),
    "every kind": spec_for(resolved(every_kind, "f32"), "f32", (3, 9, 33), (33,), (9, 1), (), (9, 33)),
    "every operation": spec_for(every_row_tree("bf16"), "f16", (9, 33), (33,)),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", SPECS)
def test_kernels_compile_without_spills(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not os.environ.get("CI") and not has_nvcc():
        pytest.skip("no nvcc")
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path))
    path = build_kernel(SPECS[name], quiet=True)
    record = json.loads((path.parent / cache.RECORD).read_text())
    assert record["title"] == SPECS[name].title
    assert "warning" not in record["output"]
    registers = [int(used) for used in re.findall(r"Used (\d+) registers", record["output"])]
    assert len(registers) == 2, "narrow and wide"
    assert max(registers) <= 128, registers
    assert set(re.findall(r"(\d+) bytes spill", record["output"])) == {"0"}
    if name != "every operation":  # the library's sine has a table on the stack
        assert set(re.findall(r"(\d+) bytes stack frame", record["output"])) == {"0"}
    listing = subprocess.run(["nm", "--dynamic", "--defined-only", path], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert {symbol for symbol in exported if "elementwise" in symbol} == {"elementwise_run", "elementwise_error_text"}


@pytest.mark.compile
def test_inputs_are_read_by_ordinary_global_loads(tmp_path: Path) -> None:
    """Not through the non-coherent path, which may not see what the kernel writes; and not by generic addresses."""
    if not os.environ.get("CI") and not has_nvcc():
        pytest.skip("no nvcc")
    (tmp_path / "kernel.cu").write_text(SPECS["gate"].source())
    toolchain = find_toolchain()
    include = [Path(sources.__file__).parent.parent / "cuda", *toolchain.include]
    command = [str(toolchain.nvcc), "-std=c++17", "-O3", "-arch=sm_90", "-ptx", *(f"-I{path}" for path in include)]
    subprocess.run([*command, "-o", tmp_path / "kernel.ptx", tmp_path / "kernel.cu"], check=True, timeout=300)
    found = re.findall(r"^\s*(?:@!?%p\d+ )?((?:ld|st)\.\S+)", (tmp_path / "kernel.ptx").read_text(), re.M)
    accesses = {access for access in found if not access.startswith("ld.param")}
    assert {"ld.global.v2.u32", "ld.global.u16"} <= accesses
    assert all(re.fullmatch(r"(ld|st)\.global\.(v[24]\.)?\w+", access) for access in accesses), accesses


# Launching.


class Library:
    """Stands for a built kernel: keeps what it is called with."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[ElementwiseArguments, int]] = []

    def elementwise_run(self, block: object, stream: int) -> int:
        given = block._obj  # type: ignore[attr-defined]
        self.calls.append((ElementwiseArguments.from_buffer_copy(given), stream))
        return self.code

    def elementwise_error_text(self, code: int) -> bytes:
        return f"error {code}".encode()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(runtime, "current_stream", lambda device: 77)
    return 77


def launch(
    spec: ElementwiseSpec,
    layout: Layout,
    x: torch.Tensor,
    operands: list[torch.Tensor | float],
    outputs: list[torch.Tensor],
) -> None:
    """What a plan does."""
    block = runtime.fill_block(runtime.block_template(layout), x, operands, outputs)
    runtime.start(runtime.load_elementwise(spec), block, outputs[0], spec.title)


def call() -> tuple[Layout, torch.Tensor, list[torch.Tensor | float], list[torch.Tensor]]:
    x, bias = torch.empty(6, 41).bfloat16()[:, 1:], 0.3
    residual = torch.empty(40, 6).t()
    outputs = [torch.empty(6, 40).bfloat16(), torch.empty(6, 40).half()]
    inputs = [view_of(x, (6, 40)), None, view_of(residual, (6, 40))]
    layout = plan_layout((6, 40), inputs, [view_of(output, (6, 40)) for output in outputs])
    assert isinstance(layout, Layout)
    return layout, x, [bias, residual], outputs


def test_a_launch_hands_over_pointers_strides_and_numbers(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(loading._loaded, BASE.key, library)
    for _ in range(2):  # a second time with other tensors: nothing of the first is left
        layout, x, operands, outputs = call()
        launch(BASE, layout, x, operands, outputs)
        block, used = library.calls[-1]
        assert used == stream
        assert (block.columns, list(block.outer)) == (40, [6, 0, 0, 0, 0])
        assert block.pieces_per_row == layout.pieces_per_row
        matrix, number, turned = block.inputs[:3]
        assert (matrix.data, matrix.strides[0], matrix.column_stride) == (x.data_ptr(), 82, 2)
        assert matrix.bytes == (5 * 41 + 40) * 2
        assert number.data is None and math.isclose(number.value, 0.3, rel_tol=1e-6)
        residual = operands[1]
        assert isinstance(residual, torch.Tensor)
        assert (turned.data, turned.strides[0], turned.column_stride) == (residual.data_ptr(), 4, 24)
        for argument, output in zip(block.outputs, outputs, strict=False):
            assert (argument.data, argument.strides[0], argument.bytes) == (output.data_ptr(), 80, 480)


def test_a_launch_that_is_refused_says_why(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading._loaded, BASE.key, Library(9))
    with pytest.raises(LaunchError, match=r"^elementwise bf16 .* sm_90: CUDA says: error 9 \(shape \(6, 40\)\)$"):
        launch(BASE, *call())


@pytest.mark.compile
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run on memory of the host")
def test_the_real_library_refuses_without_a_device(
    stream: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not os.environ.get("CI") and not has_nvcc():
        pytest.skip("no nvcc")
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_loaded", {})
    with pytest.raises(LaunchError, match=r"CUDA says: .*(device|driver)"):
        launch(BASE, *call())
    assert runtime.load_elementwise(BASE) is loading._loaded[BASE.key]


def test_a_library_that_does_not_load_is_built_again_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "kernel.so"
    broken.write_text("no library")
    built: list[str] = []
    discarded: list[Path] = []
    monkeypatch.setattr("gemm_ops.build.compiler._failures", {})
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr(loading, "build_kernel", lambda spec: built.append(spec.key) or broken)
    monkeypatch.setattr(loading, "discard", discarded.append)
    for _ in range(2):  # the second time it fails at once
        with pytest.raises(BuildError, match="does not load"):
            runtime.load_elementwise(BASE)
    assert built == [BASE.key] * 2 and discarded == [broken]

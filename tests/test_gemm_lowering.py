"""From trees to kernel sources: golden files, determinism, and the argument block.

``UPDATE_GOLDEN=1 pytest tests/test_gemm_lowering.py`` rewrites ``tests/golden/``; read the difference before
committing it.  Lowering runs through the real CUTLASS interface; no compiler runs but g++, on the argument block.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from gemm_support import every_kind, finish, resolved, spec_of, start
from operation_support import every_row_tree, row_tree

import epilogues as ep
from epilogues import Column, Row
from epilogues.operations import OPERATIONS
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Operand, Store
from gemm_ops.kernels import sources
from gemm_ops.kernels.access import ALIGNED, STRIDED, WHOLE, Access
from gemm_ops.kernels.spec import KernelSpec
from gemm_ops.lowering.functors import functor_source, variant_of
from gemm_ops.lowering.stages import Stage, split_stages
from gemm_ops.lowering.visitor import lower
from gemm_ops.runtime import abi

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("sm90", "sm80")


@ep.epilogue
def three_dtypes(acc, bias: Row, column: Column):
    z = acc + bias
    return {
        "D": ep.relu(z),  # reads the value of preact
        "preact": ep.cast(z, "f32"),
        "other": ep.cast(ep.silu(acc * column), "f16"),  # independent of both
    }


@ep.epilogue
def casts_and_constants(acc, bias: Row):
    z = ep.cast(acc, "bf16") + bias
    z = ep.cast(z * 0.1, "f16")
    z = ep.maximum(z, -math.inf)
    return ep.clamp(ep.minimum(z, math.nan), -0.0, 1e300) * 3.0


TREES = {
    "bias_gelu_tanh": resolved(ep.builders.SUITE["bias_gelu"]()),
    "dequant": resolved(ep.builders.SUITE["dequant"](), "f16", {"row_scale": "f32", "col_scale": "f32"}),
    "residual": resolved(ep.builders.SUITE["residual"](), "bf16", {"alpha": "f32", "residual": "f16"}),
    "train_gelu": resolved(ep.builders.SUITE["train_gelu"](), "f16"),
    "three_dtypes": resolved(three_dtypes),
    "casts_and_constants": resolved(casts_and_constants),
    "gate_unaligned": resolved(ep.builders.SUITE["gate"]()),
    "every_kind_batched": resolved(every_kind, "bf16", {"alpha": "f32"}),
}
#: how the matrices are reached, where it is not in 16 bytes at a time: by name and family
ACCESS = {
    ("gate_unaligned", "sm90"): Access(operands=(0, 1), outputs=(1,)),
    ("gate_unaligned", "sm80"): Access(operands=(0, 1), outputs=(1,), a=2, b=1),
    ("every_kind_batched", "sm90"): Access(operands=(0, 0, 0, STRIDED), outputs=(WHOLE, STRIDED), batched=True),
    ("every_kind_batched", "sm80"): Access(batched=True),
    ("every_kind_batched", "swapped"): Access(batched=True),
    ("every_kind_batched", "skinny"): Access(batched=True),
}
PAIRS = [(name, family) for name in TREES for family in FAMILIES]
PAIRS += [("every_kind_batched", "swapped"), ("train_gelu", "swapped"), ("three_dtypes", "swapped")]
PAIRS += [("every_kind_batched", "skinny"), ("casts_and_constants", "skinny"), ("train_gelu", "skinny")]


def golden_spec(name: str, family: str) -> KernelSpec:
    # in the suite's layouts, but for one tree that shows the others
    spec = spec_of(TREES[name], family, "f16" if name in ("dequant", "train_gelu") else "bf16")
    spec = dataclasses.replace(spec, access=ACCESS.get((name, family), ALIGNED))
    return dataclasses.replace(spec, layout_a="column", layout_b="row") if name == "three_dtypes" else spec


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_golden_source(name: str, family: str) -> None:
    path = GOLDEN / f"{name}_{family}.cu"
    source = golden_spec(name, family).source()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(source)
    assert source == path.read_text(), f"{path} is another source; UPDATE_GOLDEN=1 rewrites it"


def test_no_golden_file_without_a_test() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}_{family}.cu" for name, family in PAIRS}


_SOURCES = """
import hashlib, json
from test_gemm_lowering import PAIRS, golden_spec
print(json.dumps([[golden_spec(*pair).key, hashlib.sha256(golden_spec(*pair).source().encode()).hexdigest()]
                  for pair in PAIRS]))
"""


def test_sources_and_keys_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Also: lowering leaves nothing in the current directory (the interface wants a database there)."""
    runs = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        runs.append(start(_SOURCES, folder, PYTHONHASHSEED=seed))
    first, second = (json.loads(finish(run)) for run in runs)
    assert first == second
    assert len({key for key, _ in first}) == len({source for _, source in first}) == len(PAIRS)
    assert not list((tmp_path / "1").iterdir()) and not list((tmp_path / "2").iterdir())


# The operation table.


def functions_of(namespace: str) -> set[str]:
    """The functions that functors.cuh has in a namespace of ``ep``; fast has those of exact that it does not hide."""
    text = (Path(sources.__file__).parent.parent / "cuda" / "functors.cuh").read_text()
    body = re.search(rf"^namespace {namespace} {{\n(.*?)^}}  // namespace {namespace}$", text, re.M | re.S)
    assert body is not None
    defined = set(re.findall(r"^EP_DEVICE (?:float|bool) (\w+)\(", body[1], re.M))
    if "using namespace exact;" in body[1]:
        assert namespace == "fast"
        exact = functions_of("exact")
        assert defined < exact, "fast has a function that exact lacks"
        return exact
    return defined


@pytest.mark.parametrize("namespace", ["exact", "fast"])
def test_every_functor_has_its_function(namespace: str) -> None:
    assert functions_of(namespace) == {operation.functor for operation in OPERATIONS.values()}


@pytest.mark.parametrize("output", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_lowers(family: str, output: str) -> None:
    for name, operation in OPERATIONS.items():
        visitor = lower(row_tree(name, output), family)
        calls = re.findall(r"fn::(\w+)\(([^)]*)\)", visitor.functors)
        arguments = [given.split(", ") for functor, given in calls if functor == operation.functor]
        assert any(len(given) == operation.arity for given in arguments), name
        assert f"namespace fn = ep::{'exact' if output == 'f32' else 'fast'};" in visitor.functors
    calls = re.findall(r"fn::(\w+)\(", lower(every_row_tree(output), family).functors)
    assert set(calls) == {operation.functor for operation in OPERATIONS.values()}


def test_variant_is_exact_as_soon_as_an_output_shows_it() -> None:
    assert variant_of(TREES["bias_gelu_tanh"]) == variant_of(TREES["train_gelu"]) == "fast"
    assert variant_of(TREES["three_dtypes"]) == "exact"
    # a cast inside does not make an output of that dtype
    inside = Apply("exp", (Cast(Accumulator(), "f32"),))
    assert variant_of(EpilogueTree((Store("D", inside, "f16"),))) == "fast"


def test_constants_are_written_as_their_fp32_bits() -> None:
    values = {0.0: 0x00000000, 1.0: 0x3F800000, 0.1: 0x3DCCCCCD, 1e300: 0x7F800000, -1e300: 0xFF800000}
    values |= {math.inf: 0x7F800000, -math.inf: 0xFF800000, math.nan: 0x7FC00000, 1e-46: 0x00000000}
    found = [(value, bits) for value, bits in values.items()] + [(-0.0, 0x80000000)]
    for value, bits in found:
        tree = EpilogueTree((Store("D", Apply("add", (Accumulator(), Constant(value))), "f32"),))
        (stage,) = split_stages(tree)
        assert f"ep::constant({bits:#010x}u)" in functor_source(stage, "F", "exact"), value


def test_a_value_that_is_a_leaf_is_handed_through() -> None:
    (stage,) = split_stages(EpilogueTree((Store("D", Accumulator(), "f32"),)))
    source = functor_source(stage, "Functor0", "exact")
    assert "apply(float leaf0)" in source and "return leaf0;" in source


# Splitting trees into stages.


def shape_of(stages: tuple[Stage, ...]) -> list[tuple[str, list[str], list[str]]]:
    """(output, its leaves, its body) of each stage; leaves and body by what they are."""
    stored = {id(stage.output.value): stage.output.name for stage in reversed(stages)}

    def name(node: object) -> str:
        if isinstance(node, Accumulator):
            return "acc"
        if isinstance(node, Operand):
            return node.name
        if isinstance(node, Apply):
            return node.operation
        return f"cast_{node.dtype}" if isinstance(node, Cast) else "constant"

    def leaf(node: object) -> str:
        return name(node) if isinstance(node, (Accumulator, Operand)) else f"value of {stored[id(node)]}"

    return [(s.output.name, [leaf(n) for n in s.leaves], [name(n) for n in s.body]) for s in stages]


def test_stages_one_output() -> None:
    acc, bias = Accumulator(), Operand("bias", Kind.ROW, 0, "f32")
    z = Apply("add", (acc, bias))
    # leaves in the order in which they are met, each once; shared nodes computed once
    tree = EpilogueTree((Store("D", Apply("mul", (Apply("exp", (z,)), Apply("sub", (z, bias)))), "f32"),))
    stages = split_stages(tree)
    assert shape_of(stages) == [("D", ["acc", "bias"], ["add", "exp", "sub", "mul"])]
    assert stages[0].body[0] is z and stages[0].leaves == (acc, bias)


def test_stages_main_reads_an_auxiliary_output() -> None:
    acc, bias = Accumulator(), Operand("bias", Kind.ROW, 0, "f32")
    z = Apply("add", (acc, bias))
    stages = split_stages(EpilogueTree((Store("D", Apply("relu", (z,)), "f16"), Store("z", z, "f16"))))
    assert shape_of(stages) == [("z", ["acc", "bias"], ["add"]), ("D", ["value of z"], ["relu"])]
    assert [stage.index for stage in stages] == [1, 0]


def test_stages_auxiliary_output_reads_the_main_one() -> None:
    """Nothing may read D's stage: what D computes is computed again."""
    acc, bias = Accumulator(), Operand("bias", Kind.ROW, 0, "f32")
    z = Apply("add", (acc, bias))
    stages = split_stages(EpilogueTree((Store("D", z, "f16"), Store("act", Apply("silu", (z,)), "f16"))))
    assert shape_of(stages) == [("act", ["acc", "bias"], ["add", "silu"]), ("D", ["acc", "bias"], ["add"])]


def test_stages_chain_in_an_order_of_evaluation() -> None:
    """Declared the other way around: each output comes after those that it reads."""
    acc = Accumulator()
    one = Apply("exp", (acc,))
    two = Apply("neg", (one,))
    three = Apply("tanh", (two,))
    outputs = (Store("D", Apply("relu", (three,)), "f16"), Store("c", three, "f16"), Store("b", two, "f16"))
    stages = split_stages(EpilogueTree((*outputs, Store("a", one, "f16"))))
    assert shape_of(stages) == [
        ("a", ["acc"], ["exp"]),
        ("b", ["value of a"], ["neg"]),
        ("c", ["value of b"], ["tanh"]),
        ("D", ["value of c"], ["relu"]),
    ]
    assert [stage.index for stage in stages] == [3, 2, 1, 0]


def test_stages_two_outputs_of_one_value() -> None:
    acc = Accumulator()
    z = Apply("exp", (acc,))
    tree = EpilogueTree((Store("D", Apply("neg", (z,)), "f16"), Store("x", z, "f16"), Store("y", z, "f32")))
    stages = split_stages(tree)
    # the second has no body: its value is the first one's
    assert [(stage.output.name, len(stage.leaves), len(stage.body)) for stage in stages] == [
        ("x", 1, 1),
        ("y", 1, 0),
        ("D", 1, 1),
    ]
    assert stages[1].leaves == (z,) and stages[2].leaves == (z,)


def test_stages_bare_accumulator() -> None:
    acc = Accumulator()
    gate = Apply("sigmoid", (acc,))
    stages = split_stages(EpilogueTree((Store("D", gate, "f16"), Store("raw", acc, "f32"))))
    # stored or not, the accumulator is read as the accumulator
    assert shape_of(stages) == [("raw", ["acc"], []), ("D", ["acc"], ["sigmoid"])]
    assert shape_of(split_stages(EpilogueTree((Store("D", acc, "f16"),)))) == [("D", ["acc"], [])]


def test_stages_of_a_deep_tree() -> None:
    node = Accumulator()
    for _ in range(5000):
        node = Apply("add", (node, node))  # exponentially many paths
    (stage,) = split_stages(EpilogueTree((Store("D", node, "f32"),)))
    assert len(stage.body) == 5000 and len(stage.leaves) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*TREES, "every_kind"])
def test_every_operand_and_output_is_an_argument(name: str, family: str) -> None:
    tree = TREES[name] if name != "every_kind" else resolved(every_kind)
    spec = spec_of(tree, family)
    arguments = lower(tree, family).arguments
    for operand in tree.operands:
        assert f"args.operands[{operand.position}].data" in arguments
        is_scalar = operand.kind is Kind.SCALAR
        assert (f"args.operands[{operand.position}].value" in arguments) == is_scalar
        is_matrix = operand.kind is Kind.AUX
        assert (f"args.operands[{operand.position}].leading_dimension" in arguments) == is_matrix
    for index in range(len(tree.outputs)):
        # on SM90 D belongs to the collective
        assert (f"args.outputs[{index}].data" in arguments) == (index > 0 or family == "sm80")
        assert f"args.outputs[{index}].data" in spec.source()
    assert arguments.count("{") == arguments.count("}")


# The argument block.

_OFFSETS = """
#include <cstddef>
#include <cstdint>
#include <cstdio>
%s
int main() {
%s
}
"""


def test_argument_block_has_the_same_layout_in_c(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler, "nvcc needs a host compiler, and so does this test"
    structures = (abi.OperandArgument, abi.OutputArgument, abi.GemmArguments)
    fields = [(s, field[0]) for s in structures for field in s._fields_]
    lines = [
        f'  std::printf("{s.__name__}.{f} %zu %zu\\n", offsetof({s.__name__}, {f}), sizeof({s.__name__}::{f}));'
        for s, f in fields
    ]
    (tmp_path / "offsets.cpp").write_text(_OFFSETS % (abi.c_declarations(), "\n".join(lines)))
    subprocess.run([compiler, "-std=c++17", "-o", "offsets", "offsets.cpp"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True)
    in_c = {name: (int(offset), int(size)) for name, offset, size in map(str.split, done.stdout.splitlines())}
    in_python = {f"{s.__name__}.{f}": (getattr(s, f).offset, getattr(s, f).size) for s, f in fields}
    assert in_c == in_python and len(in_c) == len(fields)


def test_argument_block_reads_back_in_c(tmp_path: Path) -> None:
    """Values that Python writes are those that C++ sees."""
    main = """
    extern "C" double weigh(GemmArguments const* args) {
      return args->m + 2.0 * args->swizzle + 4.0 * args->operands[15].value +
             8.0 * static_cast<double>(args->outputs[7].leading_dimension) +
             (args->b == reinterpret_cast<void*>(0x1234) ? 1e6 : 0);
    }
    """
    (tmp_path / "weigh.cpp").write_text("#include <cstdint>\n" + abi.c_declarations() + main)
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-o", "weigh.so", "weigh.cpp"], cwd=tmp_path, check=True)
    weigh = ctypes.CDLL(str(tmp_path / "weigh.so")).weigh
    weigh.restype = ctypes.c_double
    block = abi.GemmArguments(m=3, swizzle=5, b=0x1234)
    block.operands[15].value = 0.5
    block.outputs[7].leading_dimension = 2**40
    assert weigh(ctypes.byref(block)) == 3 + 10 + 2 + 8 * 2**40 + 1e6

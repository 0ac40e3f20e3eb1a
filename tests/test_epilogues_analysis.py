"""Traffic, live values, roofline and dtype map: by hand, and traffic against what PyTorch really does."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from explain_support import Counting
from gemm_support import resolved

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar, analysis
from epilogues.operations import OPERATIONS
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store
from gemm_ops.explain import explain

M, N, K = 24, 40, 16
SUITE = {name: make() for name, make in ep.builders.SUITE.items()}


def traffic(epilogue: ep.Epilogue, **dtypes: str) -> analysis.Traffic:
    return analysis.count_traffic(resolved(epilogue, dtypes=dtypes), M, N, K, "bf16")


# -- traffic ------------------------------------------------------------------------------------------------


def test_traffic_of_bias_gelu_by_hand() -> None:
    found = traffic(SUITE["bias_gelu"])
    assert [(op.name, op.read, op.written) for op in found.eager] == [
        ("F.linear", 2 * (M * K + K * N + N), 2 * M * N),
        ("gelu_tanh", 2 * M * N, 2 * M * N),
    ]
    assert found.fused_bytes == 2 * (M * K + K * N + N + M * N)
    assert found.saved_bytes == 4 * M * N  # the product is not written and read again
    assert found.tail == 4 * M * N and found.compiled_bytes == found.unfused_bytes


def test_traffic_of_scaled_residual_by_hand() -> None:
    found = traffic(SUITE["residual"])
    matrix = 2 * M * N
    assert [(op.name, op.read, op.written) for op in found.eager] == [
        ("F.linear", 2 * (M * K + K * N), matrix),
        ("mul", matrix + 2 * N, matrix),
        ("add", matrix + 2 * N, matrix),
        ("mul", matrix, matrix),
        ("add", 2 * matrix, matrix),
    ]
    assert found.fused_bytes == 2 * (M * K + K * N + 2 * N) + 2 * matrix
    assert found.tail == 3 * matrix + 4 * N
    assert found.saved_share == pytest.approx(1 - found.fused_bytes / found.unfused_bytes)


def test_a_float32_row_makes_everything_after_it_float32() -> None:
    found = traffic(SUITE["bias_gelu"], bias="f32")
    assert [(op.name, op.read, op.written) for op in found.eager] == [
        ("F.linear", 2 * (M * K + K * N), 2 * M * N),  # not its bias
        ("add", 2 * M * N + 4 * N, 4 * M * N),
        ("gelu_tanh", 4 * M * N, 4 * M * N),
        ("to(bf16)", 4 * M * N, 2 * M * N),
    ]


def test_train_stores_what_linear_gives_once() -> None:
    found = traffic(SUITE["train_gelu"])
    assert [op.name for op in found.eager] == ["F.linear", "gelu_tanh"]
    assert found.tail == 4 * M * N
    assert found.fused_bytes == 2 * (M * K + K * N + N) + 4 * M * N


def test_identity_saves_nothing() -> None:
    found = traffic(SUITE["identity"])
    assert found.elementwise == () and found.saved_bytes == 0 and found.tail == 0 and found.saved_share == 0


@pytest.mark.parametrize("shape", [(0, N, K), (M, 0, K), (0, 0, 0)])
def test_without_elements_nothing_moves(shape: tuple[int, int, int]) -> None:
    found = analysis.count_traffic(resolved(SUITE["residual"]), *shape, "bf16")
    assert found.unfused_bytes == found.fused_bytes == found.compiled_bytes == 0 and found.saved_share == 0


def test_without_k_the_output_is_still_written() -> None:
    found = analysis.count_traffic(resolved(SUITE["identity"]), M, N, 0, "bf16")
    assert found.unfused_bytes == found.fused_bytes == 2 * M * N


def test_two_outputs_of_one_value_are_one_tensor_in_eager() -> None:
    z = Apply("exp", (Accumulator(),))
    found = analysis.count_traffic(EpilogueTree((Store("D", z, "bf16"), Store("x", z, "bf16"))), M, N, K, "bf16")
    assert [op.name for op in found.eager] == ["F.linear", "exp"]
    assert found.fused_bytes == 2 * (M * K + K * N) + 4 * M * N


def test_conditions_are_a_byte_and_casts_to_the_same_dtype_nothing() -> None:
    acc = Accumulator()
    positive = Apply("gt", (acc, Constant(0.0)))
    tree = EpilogueTree((Store("D", Cast(Apply("where", (positive, acc, Constant(1.0))), "bf16"), "bf16"),))
    found = analysis.count_traffic(tree, M, N, K, "bf16")
    assert [(op.name, op.read, op.written) for op in found.elementwise] == [
        ("gt", 2 * M * N, M * N),
        ("where", 3 * M * N, 2 * M * N),
    ]


def test_the_steps_of_one_pytorch_function_are_one_kernel() -> None:
    acc, x, y = Accumulator(), Operand("p", Kind.AUX, 0, "bf16"), Operand("q", Kind.AUX, 1, "bf16")
    product = Apply("mul", (x, y), intermediate=True)
    found = analysis.count_traffic(EpilogueTree((Store("D", Apply("add", (acc, product)), "bf16"),)), M, N, K, "bf16")
    assert [(op.name, op.read, op.written) for op in found.elementwise] == [("add", 6 * M * N, 2 * M * N)]


def test_an_operand_without_a_kind_is_refused() -> None:
    operand = Operand("scale", Kind.AUTO, 0, "f32")
    tree = EpilogueTree((Store("D", Apply("mul", (Accumulator(), operand)), "bf16"),))
    with pytest.raises(ep.EpilogueError, match="operand scale: its kind is told from a tensor's shape"):
        analysis.count_traffic(tree, M, N, K, "bf16")


@ep.epilogue
def mixed(acc, scale: Row[torch.float32], offset: Column, alpha: Scalar, gate: Aux[torch.float16]):
    z = ep.cast(acc * scale + offset, torch.bfloat16)
    weighted = ep.where(z > alpha, z * gate, 0.5 * z)
    return {"D": ep.leaky_relu(weighted, 0.2), "small": ep.cast(weighted, torch.float16), "positive": z * (1 - offset)}


@ep.epilogue
def vectors(acc, scale: Row, offset: Column, alpha: Scalar):
    return acc * (ep.exp(scale) * alpha) + ep.tanh(offset * alpha)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", [*SUITE, "mixed", "vectors"])
def test_eager_traffic_is_what_pytorch_really_moves(name: str, dtype: str) -> None:
    """The comparison script's unfused computation, watched kernel by kernel."""
    epilogue = {**SUITE, "mixed": mixed, "vectors": vectors}[name]
    report = explain(epilogue, M, N, K, dtype=dtype)
    script: dict[str, Any] = {"__name__": "comparison"}
    argv, sys.argv = sys.argv, ["compare.py", str(M), str(N), str(K)]
    try:
        exec(report.script, script)
    finally:
        sys.argv = argv
    script["DEVICE"] = "cpu"
    x, weight, operands = script["make_inputs"](0)
    with torch.no_grad(), Counting() as counting:
        outputs = script["unfused"](x, weight, operands)
    assert counting.found == [(kernel.read, kernel.written) for kernel in report.traffic.eager]
    assert {key: value.dtype for key, value in outputs.items()} == {
        store.name: {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[str(store.dtype)]
        for store in report.resolved.outputs
    }


# -- live values --------------------------------------------------------------------------------------------


def live(*outputs: Node) -> analysis.LiveValues:
    return analysis.count_live_values(
        EpilogueTree(tuple(Store(f"o{i}" if i else "D", value, "bf16") for i, value in enumerate(outputs))),
        registers=lambda operation: 0,
    )


def test_live_values_of_a_chain_are_its_inputs() -> None:
    acc, bias = Accumulator(), Operand("bias", Kind.ROW, 0, "bf16")
    assert live(Apply("relu", (Apply("add", (acc, bias)),))) == analysis.LiveValues(2, "load", 2)
    assert live(Apply("exp", (acc,))) == analysis.LiveValues(1, "load", 1)


def test_a_value_that_waits_counts() -> None:
    acc = Accumulator()
    gate = Apply("sigmoid", (acc,))  # acc is needed again
    assert live(Apply("mul", (acc, gate))) == analysis.LiveValues(2, "sigmoid", 1)
    values = [Apply("mul", (acc, Constant(float(i)))) for i in range(1, 6)]
    total: Node = values[-1]
    for value in values[:-1]:
        total = Apply("add", (total, value))
    # evaluated in the order of nodes: the last value and the first are needed first
    found = live(total)
    assert found.loaded == 1 and found.peak == 3


def test_scalars_and_constants_are_the_same_for_all_elements() -> None:
    acc, alpha = Accumulator(), Operand("alpha", Kind.SCALAR, 0, "f32")
    factor = Apply("exp", (Apply("mul", (alpha, Constant(2.0))),))
    assert live(Apply("mul", (acc, factor))) == analysis.LiveValues(1, "load", 1)


def test_the_main_output_waits_for_the_others() -> None:
    acc = Accumulator()
    main = Apply("exp", (acc,))
    assert live(main, Apply("tanh", (acc,))).peak == 2
    assert live(main).peak == 1


def test_live_values_of_the_suite() -> None:
    peaks = {name: analysis.count_live_values(resolved(e), lambda operation: 0).peak for name, e in SUITE.items()}
    assert peaks["identity"] == 1 and peaks["bias_gelu"] == 2 and peaks["residual"] == 4 and peaks["dequant"] == 4


def test_what_a_function_holds_counts_while_it_runs() -> None:
    acc, bias = Accumulator(), Operand("bias", Kind.ROW, 0, "bf16")
    tree = EpilogueTree((Store("D", Apply("add", (Apply("erf", (acc,)), bias)), "bf16"),))
    found = analysis.count_live_values(tree, lambda operation: {"erf": 5, "add": 0}[operation])
    assert found == analysis.LiveValues(7, "erf", 2)  # erf's result, the bias, and erf's own five


# -- costs --------------------------------------------------------------------------------------------------


def test_instructions_count_operations_and_casts_with_the_costs_given() -> None:
    tree = resolved(ep.builders.cast("f16", SUITE["bias_gelu"]))
    assert analysis.instructions_per_element(tree, lambda operation: 1) == 3
    cost = OPERATIONS["gelu_tanh"].cost
    assert analysis.instructions_per_element(tree) == cost.exact + OPERATIONS["add"].cost.exact + 1
    fast = analysis.instructions_per_element(tree, analysis.fast_instructions)
    assert fast == cost.fast + OPERATIONS["add"].cost.fast + 1
    assert analysis.instructions_per_element(tree, lambda operation: {"gelu_tanh": 12, "add": 1}[operation]) == 14


# -- roofline -----------------------------------------------------------------------------------------------


def test_roofline() -> None:
    memory = analysis.place_on_roofline(operations=100, bytes=50, peak=1000, bandwidth=10)
    assert memory == analysis.Roofline(intensity=2, ridge=100, seconds=5, bound="memory")
    compute = analysis.place_on_roofline(operations=10000, bytes=50, peak=1000, bandwidth=10)
    assert (compute.seconds, compute.bound, compute.intensity) == (10, "compute", 200)
    nothing = analysis.place_on_roofline(operations=0, bytes=0, peak=1000, bandwidth=10)
    assert (nothing.seconds, nothing.intensity) == (0, 0)


# -- dtypes -------------------------------------------------------------------------------------------------


def test_dtype_map_names_every_conversion() -> None:
    acc, bias = Accumulator(), Operand("bias", Kind.ROW, 0, "bf16")
    scale = Operand("scale", Kind.COLUMN, 1, "f32")
    rounded = Cast(Apply("mul", (Apply("add", (acc, bias)), scale)), "f16")
    wide = Cast(rounded, "f32")
    flag = Apply("gt", (wide, Constant(0.0)))
    tree = EpilogueTree(
        (
            Store("D", Apply("where", (flag, wide, Constant(-1.0))), "bf16"),
            Store("half", rounded, "f16"),
            Store("again", rounded, "bf16"),
        )
    )
    entries = {entry.text: (entry.dtype, entry.conversion) for entry in analysis.map_dtypes(tree)}
    assert len(entries) == len(tree.nodes) + 3
    assert [text for text in entries] == [line.partition("  : ")[0].rstrip() for line in str(tree).splitlines()]
    by_start = {text.partition(" = ")[2]: value for text, value in entries.items()}
    assert by_start["operand bias (row, 0)"] == ("bf16", "read as f32, exactly")
    assert by_start["operand scale (column, 1)"] == ("f32", "")
    assert by_start["cast(%4, f16)"] == ("f16", "rounded to f16, then read as f32")
    assert by_start["cast(%5, f32)"] == ("f32", "")
    assert by_start["gt(%6, %7)"] == ("bool", "")
    assert entries["store half = %5"] == ("f16", "")
    assert entries["store again = %5"] == ("bf16", "rounded from f16 when stored")
    assert next(value for text, value in entries.items() if text.startswith("store D")) == (
        "bf16",
        "rounded from f32 when stored",
    )


def test_dtype_map_keeps_the_users_lines() -> None:
    entries = analysis.map_dtypes(resolved(mixed, dtypes={"scale": "f32", "gate": "f16"}))
    gt = next(entry for entry in entries if "gt(" in entry.text)
    assert gt.location is not None and "weighted = ep.where" in gt.location.text

"""Where values are rounded: eager rounding's rules of promotion and numbers, and compute dtypes, without a GPU.

That eager rounding is what PyTorch's CUDA kernels do is tested on a GPU (``test_gpu_eager.py``); its CPU kernels round
some Python numbers in another way, and some functions twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_functions import eager_functions, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_support import row_tree
from random_trees import trees
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from epilogues import Aux, Epilogue, EpilogueTree, Kind, Row, Scalar
from epilogues.operations import OPERATIONS
from epilogues.passes.compute_dtype import write_out_compute_dtype
from epilogues.passes.eager_rounding import write_out_compositions
from epilogues.tree import Apply, Cast, Constant
from epilogues.validation import validate

#: What PyTorch computes otherwise on a CPU: some numbers next to 16 bits are rounded first that CUDA's kernels keep,
#: and the other way round; some functions round in between, or use other formulas.
OTHERWISE_ON_CPU = {
    *("add_number", "sub_number", "number_mul", "number_div", "number_minus", "add_alpha", "sub_alpha"),
    *(
        "xlogy",
        "xlogy_number",
        "number_xlogy",
        "softshrink",
        "logit",
        "logit_eps",
        "entr",
        "xlog1py",
        "cube",
        "power_minus_2",
    ),
    *("gelu_erf", "gelu_tanh", "gelu_new", "addcmul_value", "addcdiv_value", "div_number", "erf", "threshold"),
}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", [name for name in eager_functions() if name not in OTHERWISE_ON_CPU])
def test_agrees_with_eager_pytorch(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    acc = torch.randint(-600, 601, (64, 72)).to(dtype)
    row = (torch.randn(72) * 3).to(dtype)
    function = pack({name: eager_functions()[name]}, 1 / 256)
    eager = function(acc, row)["D"].to(dtype)
    result = ep.epilogue(function, rounding="eager").reference(acc, row=row)
    assert torch.equal(result.nan_to_num(7e4), eager.nan_to_num(7e4))
    # float32 operations that are not rounded in between would not do
    assert result.dtype == dtype


def resolved(function: Any, *, rounding: str = "eager", gemm: str = "bf16", ranks: Any = None, **dtypes: str) -> str:
    """The text of a function's tree for operands of these dtypes."""
    made = ep.epilogue(function, rounding=rounding)
    facts = {operand.name: (operand.kind, dtypes.get(operand.name, "bf16")) for operand in made.tree.operands}
    text = str(made.tree.resolve(facts, gemm, ranks or {}))
    *lines, mark = text.splitlines()
    assert mark == f"rounding: {rounding}"
    return "\n".join(" ".join(line.split(" : ")[0].split()) for line in lines)


def test_every_result_is_rounded_and_so_is_the_gemm() -> None:
    assert resolved(lambda acc, bias: torch.relu(acc + bias)).splitlines() == [
        "%0 = accumulator",
        "%1 = cast(%0, bf16)",
        "%2 = operand bias (auto, 0)",
        "%3 = add(%1, %2)",
        "%4 = cast(%3, bf16)",
        "%5 = relu(%4)",
        "%6 = cast(%5, bf16)",
        "store D = %6",
    ]


def test_linear_adds_its_bias_before_it_rounds() -> None:
    def biased(acc: Any, bias: Row) -> Any:
        return torch.relu(acc + bias) * acc

    text = resolved(biased, rounding="eager_linear")
    assert "add(%0, %1)" in text
    assert "cast(%0, bf16)" in text, "the product takes the accumulator itself, rounded"
    # only what is added to the accumulator itself is a bias
    assert "add(%0, " not in resolved(lambda acc, bias: acc * 2 + bias, rounding="eager_linear")


@pytest.mark.parametrize(
    ("gemm", "operand", "ranks", "rounded_to"),
    [
        ("bf16", "bf16", {}, "bf16"),
        ("f16", "f16", {}, "f16"),
        ("bf16", "f32", {}, None),
        ("bf16", "f16", {}, None),
        ("f32", "bf16", {}, None),
        ("bf16", "f32", {"y": "0-dim"}, "bf16"),
        ("bf16", "f16", {"y": "0-dim"}, "bf16"),
        ("bf16", "f32", {"y": "number"}, "bf16"),
    ],
)
def test_promotion(gemm: str, operand: str, ranks: dict[str, str], rounded_to: str | None) -> None:
    def product(acc: Any, y: Scalar) -> Any:
        return acc * y

    text = resolved(product, gemm=gemm, ranks=ranks, y=operand)
    last = text.splitlines()[-2]
    assert (last.endswith(f", {rounded_to})") and "cast" in last) if rounded_to else "mul" in last
    dimensionless = ranks.get("y") == "0-dim" and operand != gemm
    assert (f"= operand y (scalar, 0)\n%3 = cast(%2, {gemm})" in text) == dimensionless


def constants(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if "constant" in line]


def test_numbers_are_kept_or_rounded_as_the_kernels_do() -> None:
    rounded = torch.tensor(0.3).bfloat16().item()
    assert constants(resolved(lambda acc: acc + 0.3)) == [0.3]
    assert constants(resolved(lambda acc: torch.where(acc > 0.3, acc, acc * 0.3))) == [rounded, 0.3]
    assert constants(resolved(lambda acc: F.leaky_relu(acc, 0.3))) == [0.3]
    assert constants(resolved(lambda acc: torch.pow(acc, 0.3))) == [rounded]
    assert constants(resolved(lambda acc: acc / 0.3)) == [(1 / torch.tensor(0.3)).item()]
    assert constants(resolved(lambda acc: torch.div(0.3, acc))) == [rounded]
    assert "reciprocal" in resolved(lambda acc: 0.3 / acc)


def test_number_operands() -> None:
    def quotients(acc: Any, alpha: Scalar) -> Any:
        return {"D": acc / alpha, "other": torch.where(acc > alpha, acc, alpha)}

    text = resolved(quotients, ranks={"alpha": "number"}, alpha="f32")
    assert "div(" in text and "mul(" in text, "the inverse in float32, then a product"
    assert "%7 = cast(%3, bf16)\n%8 = gt(%1, %7)" in text, "compared as bfloat16"


def test_masks_are_of_the_values_dtype_and_float_of_them_float32() -> None:
    assert "where" in resolved(lambda acc: acc * (acc > 0))
    assert resolved(lambda acc: acc * (acc > 0)).splitlines()[-2].endswith("bf16)")
    assert "mul" in resolved(lambda acc: acc * (acc > 0).float()).splitlines()[-2], "float32 times bfloat16 is float32"


def test_steps_within_one_function_are_not_rounded() -> None:
    def blend(acc: Any, u: Aux, v: Aux) -> Any:
        return torch.addcmul(acc, u, v, value=0.5)

    assert resolved(blend).count("cast") == 2  # the accumulator and the result
    assert resolved(lambda acc, u, v: acc + 0.5 * u * v).count("cast") == 4


def test_the_same_in_json_pickle_and_composition() -> None:
    inner = ep.builders.bias_activation("gelu").with_rounding("eager")
    assert EpilogueTree.from_json(inner.tree.to_json()) == inner.tree
    assert inner != ep.builders.bias_activation("gelu")
    assert inner.with_rounding("once") == ep.builders.bias_activation("gelu")

    @ep.epilogue(rounding="eager")
    def outer(acc: Any, bias: Row) -> Any:
        return inner(acc, bias) * 2

    @ep.epilogue(rounding="eager")
    def flat(acc: Any, bias: Row) -> Any:
        return F.gelu(acc + bias) * 2

    assert outer.tree == flat.tree
    with pytest.raises(ep.EpilogueError, match=r"rounding='eager'.*once(.|\n)*instead: declare both alike"):
        ep.epilogue(lambda acc, bias: inner(acc, bias), name="plain")


def test_intermediate_steps_survive_json() -> None:
    made = ep.epilogue(lambda acc, u, v: torch.addcmul(acc, u, v, value=0.5), rounding="eager", name="blend")
    assert EpilogueTree.from_json(made.tree.to_json()).rows == made.tree.rows
    assert any(getattr(node, "intermediate", False) for node in made.tree.nodes)
    assert not any(getattr(node, "intermediate", False) for node in made.tree.without_intermediates().nodes)


@pytest.mark.parametrize("rounding", ("fast", None, 3))
def test_unknown_roundings(rounding: Any) -> None:
    with pytest.raises(ep.EpilogueError, match="expected a rounding among 'once', 'eager', 'eager_linear'"):
        ep.epilogue(lambda acc: acc, rounding=rounding, name="named")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_compute_dtype_rounds_every_result(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    acc, row = torch.randn(32, 40) * 9, torch.randn(40)

    def blend(acc: Any, row: Row) -> Any:
        return (acc * row + row) / (row * row + 1.0) - acc

    made = ep.epilogue(blend, compute_dtype=dtype)
    result = made.reference(acc, row=row)
    assert torch.equal(result, blend(acc.to(dtype), row.to(dtype)).float())
    assert not torch.equal(result, ep.epilogue(blend).reference(acc, row=row).to(dtype).float())


def test_compute_dtype_leaves_outputs_and_casts() -> None:
    def outputs(acc: Any, bias: Row) -> Any:
        z = acc + bias
        return {"D": z, "wide": z.float(), "half": (z * 0.3).half()}

    made = ep.epilogue(outputs, compute_dtype=torch.bfloat16)
    results = made.reference(torch.randn(8, 16, dtype=torch.float16), bias=torch.randn(16))
    assert [value.dtype for value in results.values()] == [torch.float16, torch.float32, torch.float16]
    assert torch.equal(results["wide"], results["wide"].bfloat16().float())
    written = write_out_compute_dtype(made.tree)
    assert [node.value for node in written.nodes if isinstance(node, Constant)] == [torch.tensor(0.3).bfloat16().item()]
    assert str(made.tree).endswith("computed in: bf16")
    assert made.with_compute_dtype(torch.float32) == ep.epilogue(outputs)
    assert ep.epilogue(outputs, compute_dtype=torch.float32) == ep.epilogue(outputs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_row_in_another_compute_dtype(name: str) -> None:
    made = Epilogue.from_tree(row_tree(name, "f32"), name).with_compute_dtype("bf16")
    acc, row = torch.randn(16, 24), torch.rand(24).bfloat16()
    operands = {operand.name: row for operand in made.tree.operands}
    result = made.reference(acc, out_dtype=torch.float32, **operands)
    assert torch.equal(result.nan_to_num(1.0), result.bfloat16().float().nan_to_num(1.0))
    narrow = [node for node in write_out_compute_dtype(made.tree).nodes if isinstance(node, Cast)]
    assert narrow and all(node.dtype == "bf16" for node in narrow)


def test_refused_compute_dtypes() -> None:
    with pytest.raises(ep.DtypeError, match="no kernel computes in float64"):
        ep.epilogue(lambda acc: acc * 2, compute_dtype=torch.float64, name="wide")
    with pytest.raises(ep.DtypeError, match="int8"):
        ep.builders.identity().with_compute_dtype(torch.int8)
    eager, narrow = (
        ep.builders.identity().with_rounding("eager"),
        ep.builders.identity().with_compute_dtype(torch.bfloat16),
    )
    with pytest.raises(ep.EpilogueError, match="take one of the two"):
        eager.with_compute_dtype(torch.bfloat16)
    with pytest.raises(ep.EpilogueError, match="take one of the two"):
        narrow.with_rounding("eager")
    with pytest.raises(ep.EpilogueError, match="take one of the two"):
        ep.epilogue(lambda acc: acc, rounding="eager", compute_dtype=torch.bfloat16, name="both")
    with pytest.raises(ep.EpilogueError, match="take one of the two"):
        ep.epilogue(lambda acc: narrow(acc), rounding="eager", name="outer")


def test_compute_dtype_survives_composition_and_json() -> None:
    inner = ep.epilogue(lambda acc, row: acc * 0.3 + row, compute_dtype=torch.bfloat16, name="inner")
    outer = ep.epilogue(lambda acc, row: inner(acc, row) * 3.0, name="outer")
    acc, row = torch.randn(16, 24) * 9, torch.randn(24)
    assert torch.equal(outer.reference(acc, row=row), inner.reference(acc, row=row) * 3.0)
    assert EpilogueTree.from_json(inner.tree.to_json()) == inner.tree
    assert inner.tree != inner.with_compute_dtype(torch.float32).tree


CONDITIONS_OF_NUMBERS = {
    "where": lambda acc, s: torch.where(s > 0, acc, -acc),
    "not": lambda acc, s: torch.where(~(s > 0), acc, -acc),
    "or": lambda acc, s: torch.where((s > 0) | (s < -1), acc, -acc),
    "isnan": lambda acc, s: torch.where(torch.isnan(s), acc, -acc),
    "floor": lambda acc, s: torch.div(acc, s, rounding_mode="floor"),
    "floordiv": lambda acc, s: acc // s,
    "floor of a number": lambda acc, s: acc // 0.75 + s,
    "hardtanh": lambda acc, s: acc * F.hardtanh(s),
    "heaviside": lambda acc, s: acc * torch.heaviside(s, s),
}


@pytest.mark.parametrize("scalar_as", ("number", "0-dim"))
@pytest.mark.parametrize("name", CONDITIONS_OF_NUMBERS)
def test_conditions_of_numbers(name: str, scalar_as: str) -> None:
    def function(acc: Any, s: Scalar) -> Any:
        return CONDITIONS_OF_NUMBERS[name](acc, s)

    acc = torch.randint(-20, 21, (8, 16)).bfloat16()
    scalar = torch.tensor(0.75, dtype=torch.bfloat16)
    result = ep.epilogue(function, rounding="eager").reference(acc, s=0.75 if scalar_as == "number" else scalar)
    assert torch.equal(result, function(acc, scalar))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trees(), st.sampled_from(("eager", "eager_linear")), st.data())
def test_eager_casts_make_valid_trees(tree: EpilogueTree, rounding: str, data: st.DataObject) -> None:
    facts, ranks = {}, {}
    for operand in tree.operands:
        kind = Kind.ROW if operand.kind is Kind.AUTO else operand.kind
        facts[operand.name] = kind, operand.dtype or data.draw(st.sampled_from(("f16", "bf16", "f32")))
        if kind is Kind.SCALAR and data.draw(st.booleans()):
            ranks[operand.name] = data.draw(st.sampled_from(("number", "0-dim")))
    validate(replace(tree, rounding=rounding).resolve(facts, "bf16", ranks))


def test_the_reference_backend_rounds_as_the_matrices_do() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(24, 32).bfloat16()
    bias = torch.randn(24).bfloat16()
    made = ep.builders.bias_activation("relu").with_rounding("eager")
    acc = (x.float() @ weight.float().t()).bfloat16()
    assert torch.equal(gemm_ops.linear(x, weight, made, bias=bias), torch.relu(acc + bias))
    layer = gemm_ops.FusedLinear(32, 24, epilogue=made, dtype=torch.bfloat16)
    assert torch.equal(layer(x), gemm_ops.linear(x, layer.weight, made, bias=layer.bias))


def test_kinds_stay() -> None:
    tree = ep.builders.scaled_residual().with_rounding("eager").tree
    facts = {operand.name: (operand.kind, "bf16") for operand in tree.operands}
    assert [operand.kind for operand in tree.resolve(facts, "bf16").operands] == [
        Kind.ROW,
        Kind.ROW,
        Kind.SCALAR,
        Kind.AUX,
    ]


def test_compositions_written_out() -> None:
    written = write_out_compositions(row_tree("quick_gelu", "f32"))
    assert [node.operation for node in written.nodes if isinstance(node, Apply)] == ["mul", "sigmoid", "mul"]
    plain = ep.builders.bias_activation("gelu").tree
    assert write_out_compositions(plain) == plain

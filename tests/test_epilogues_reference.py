"""The reference against PyTorch written by hand, bit for bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, BroadcastError, Column, DtypeError, EpilogueError, Row, Scalar, builders, epilogue
from epilogues.reference import evaluate
from epilogues.tree import Constant, EpilogueTree, Kind, Operand, Store

M, N = 5, 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: suite name -> the same in PyTorch, on float32 (or float64) values; outputs by name
BY_HAND = {
    "identity": lambda acc: {"D": acc},
    "bias_gelu": lambda acc, bias: {"D": F.gelu(acc + bias, approximate="tanh")},
    "bias_gelu_erf": lambda acc, bias: {"D": F.gelu(acc + bias)},
    "bias_silu": lambda acc, bias: {"D": F.silu(acc + bias)},
    "train_gelu": lambda acc, bias: {"D": F.gelu(acc + bias, approximate="tanh"), "preact": acc + bias},
    "residual": lambda acc, scale, bias, alpha, residual: {"D": (acc * scale + bias) * alpha + residual},
    "gate": lambda acc, bias, gate: {"D": F.silu(acc + bias) * gate},
    "dequant": lambda acc, row_scale, col_scale, bias: {"D": F.silu(acc * row_scale[..., None] * col_scale + bias)},
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).mul(2).to(dtype)


def operands_of(tree, m_shape, n, dtype):
    shapes = {ep.Kind.ROW: (n,), ep.Kind.COLUMN: m_shape, ep.Kind.SCALAR: (), ep.Kind.AUX: (*m_shape, n)}
    return {operand.name: random(*shapes[operand.kind], dtype=dtype) for operand in tree.operands}


def test_the_suite_is_complete():
    assert list(builders.SUITE) == list(BY_HAND)


@pytest.mark.parametrize("m_shape", [(M,), (2, 3), (1,), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_HAND)
def test_suite(name, dtype, m_shape):
    tree = builders.SUITE[name]().tree
    acc = random(*m_shape, N)
    operands = operands_of(tree, m_shape, N, dtype)
    wide = {key: value.float() for key, value in operands.items()}
    expected = BY_HAND[name](acc, **wide)
    outputs = evaluate(tree, acc, operands, out_dtype=dtype)
    assert list(outputs) == list(expected)
    for key, output in outputs.items():
        assert output.dtype == dtype
        assert output.shape == acc.shape
        assert torch.equal(output, expected[key].to(dtype))


@pytest.mark.parametrize("name", BY_HAND)
def test_suite_in_float64(name):
    tree = builders.SUITE[name]().tree
    acc, operands = random(M, N), operands_of(tree, (M,), N, torch.bfloat16)
    expected = BY_HAND[name](acc.double(), **{key: value.double() for key, value in operands.items()})
    exact = evaluate(tree, acc, operands, compute_dtype=torch.float64, keep_casts=False)
    rounded = evaluate(tree, acc, operands, compute_dtype=torch.float64)
    for key in expected:
        assert exact[key].dtype == torch.float64
        assert torch.equal(exact[key], expected[key])
        assert torch.equal(rounded[key], expected[key].float())


def test_the_accumulators_dtype_is_the_default():
    for dtype in DTYPES:
        acc = random(M, N, dtype=dtype)
        output = builders.bias_activation("gelu").reference(acc, bias=random(N))
        assert output.dtype == dtype


@epilogue
def casts_inside(acc, bias: Row):
    z = acc + bias
    return {"D": z.to(torch.bfloat16) * 3 - z, "narrow": z.half(), "wide": ep.tanh(z.half())}


def test_casts_round_where_they_are_and_nowhere_else():
    acc, bias = random(M, N), random(N)
    z = acc + bias
    outputs = evaluate(casts_inside.tree, acc, {"bias": bias})
    assert torch.equal(outputs["D"], z.bfloat16().float() * 3 - z)
    assert torch.equal(outputs["narrow"], z.half())  # the dtype of a cast at the root
    assert torch.equal(outputs["wide"], torch.tanh(z.half().float()))
    # and the casts matter for these values
    assert not torch.equal(outputs["D"], z * 3 - z)
    assert not torch.equal(outputs["D"], (z.bfloat16() * 3).float() - z)


def test_casts_left_out():
    acc, bias = random(M, N), random(N)
    z = acc + bias
    outputs = evaluate(casts_inside.tree, acc, {"bias": bias}, keep_casts=False)
    assert torch.equal(outputs["D"], z * 3 - z)
    assert torch.equal(outputs["narrow"], z.half())  # still how it is stored
    exact = evaluate(casts_inside.tree, acc, {"bias": bias}, keep_casts=False, compute_dtype=torch.float64)
    assert torch.equal(exact["narrow"], acc.double() + bias.double())


def test_intermediate_values_are_not_rounded_to_the_operands_dtype():
    acc, bias = random(M, N, dtype=torch.bfloat16), random(N, dtype=torch.bfloat16)
    output = builders.residual().reference(acc, bias=bias, residual=acc)
    assert torch.equal(output, (acc.float() + bias.float() + acc.float()).bfloat16())
    assert not torch.equal(output, acc + bias + acc)


def test_each_operand_has_its_own_dtype():
    acc = random(M, N)
    given = {"row_scale": random(M), "col_scale": random(N).half(), "bias": random(N).bfloat16()}
    output = builders.dequantize("silu").reference(acc, **given)
    expected = F.silu(acc * given["row_scale"][:, None] * given["col_scale"].float() + given["bias"].float())
    assert torch.equal(output, expected)


@pytest.mark.parametrize("shape", [(M, N), (M,), (M, 1), (N,), (1, N), (), (1,), 0.75, 3], ids=str)
def test_unannotated_operands_spread_as_their_shape_says(shape):
    f = epilogue(lambda acc, other: acc * other, name="f")
    acc = random(M, N)
    other = shape if isinstance(shape, int | float) else random(*shape)
    spread = other[:, None] if shape == (M,) else other
    assert torch.equal(f.reference(acc, other=other), acc * spread)


def test_strided_operands_and_accumulators():
    acc, residual = random(N, 2 * M).T[::2], random(M, 3 * N)[:, ::3]
    bias = random(4 * N)[::4]
    output = builders.residual("relu").reference(acc, bias=bias, residual=residual)
    assert torch.equal(output, F.relu(acc + bias) + residual)


def test_outputs_are_new_tensors():
    f = epilogue(lambda acc: {"D": acc, "copy": ep.identity(acc), "cast": acc.float()}, name="f")
    acc = random(M, N)
    outputs = evaluate(f.tree, acc, {})
    pointers = {output.data_ptr() for output in outputs.values()} | {acc.data_ptr()}
    assert len(pointers) == 4
    z = epilogue(lambda acc: {"D": acc + 1, "same": acc + 1}, name="z").reference(acc)
    assert z["D"].data_ptr() != z["same"].data_ptr()


def test_scalars_beyond_float32_are_infinite():
    output = epilogue(lambda acc, s: acc * 0 + s + 1e300, name="f").reference(random(M, N), s=-1e39)
    assert torch.isnan(output).all()
    with pytest.raises(EpilogueError, match="operand s: the integer given is too large"):
        epilogue(lambda acc, s: acc + s, name="f").reference(random(M, N), s=10**400)


def test_edge_values_reach_the_output():
    acc = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 1e-40]])
    assert torch.equal(builders.identity().reference(acc)[0, 1:], acc[0, 1:])
    assert builders.activation("relu").reference(acc)[0, 0].isnan()
    clamped = epilogue(lambda acc: acc.clamp(-1, 1), name="f").reference(acc)
    assert clamped[0, 0].isnan() and clamped[0, 1] == 1 and clamped[0, 2] == -1


@pytest.mark.parametrize("shape", [(0, N), (M, 0), (0, 0), (2, 0, N)], ids=str)
def test_empty(shape):
    tree = builders.scaled_residual().tree
    operands = operands_of(tree, shape[:-1], shape[-1], torch.float32)
    assert evaluate(tree, torch.empty(shape), operands)["D"].shape == shape


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients(name):
    tree = builders.SUITE[name]().tree
    names = [operand.name for operand in tree.operands]
    inputs = [random(3, 4, dtype=torch.float64)]
    inputs += operands_of(tree, (3,), 4, torch.float64).values()

    def outputs(acc, *operands):
        given = dict(zip(names, operands, strict=True))
        return tuple(evaluate(tree, acc, given, compute_dtype=torch.float64, keep_casts=False).values())

    assert torch.autograd.gradcheck(outputs, [value.requires_grad_() for value in inputs])


def test_gradients_pass_casts():
    acc = random(M, N).requires_grad_()
    bias = random(N).bfloat16().requires_grad_()
    casts_inside.reference(acc, bias=bias)["narrow"].sum().backward()
    assert torch.equal(acc.grad, torch.ones(M, N))
    assert bias.grad.dtype == torch.bfloat16 and torch.equal(bias.grad, torch.full((N,), M).bfloat16())


def test_nothing_is_read_back_from_the_device():
    tree = builders.scaled_residual().tree
    operands = {name: value.to("meta") for name, value in operands_of(tree, (M,), N, torch.float16).items()}
    acc = torch.empty(M, N, device="meta")
    assert evaluate(tree, acc, operands | {"alpha": 0.5})["D"].shape == (M, N)  # meta tensors have no values


@epilogue
def all_kinds(acc, row: Row, column: Column, alpha: Scalar, aux: Aux, fixed: Row[torch.float16]):
    return (acc * row + column) * alpha + aux + fixed


NESTED = torch.nested.nested_tensor([torch.ones(N)], layout=torch.jagged)
GOOD = {
    "row": torch.ones(N),
    "column": torch.ones(M),
    "alpha": 2.0,
    "aux": torch.ones(M, N),
    "fixed": torch.ones(N, dtype=torch.float16),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"row": torch.ones(M)}, BroadcastError, r"operand row \(Row\): expected shape \(7,\)"),
        ({"column": torch.ones(N)}, BroadcastError, "operand column"),
        ({"alpha": torch.ones(2)}, BroadcastError, "operand alpha"),
        ({"aux": torch.ones(N, M)}, BroadcastError, "operand aux"),
        ({"aux": 1.0}, BroadcastError, "operand aux .*got the number"),
        ({"row": torch.ones(N, dtype=torch.int64)}, DtypeError, r"operand row: .*torch\.int64"),
        ({"row": torch.ones(N, dtype=torch.float64)}, DtypeError, r"operand row: .*torch\.float64"),
        ({"fixed": torch.ones(N)}, DtypeError, r"operand fixed: .*torch\.float16, got torch\.float32"),
        ({"row": torch.ones(N, device="meta")}, EpilogueError, "operand row is on meta .*on cpu"),
        ({"alpha": torch.ones(1, device="meta")}, EpilogueError, "give a Python number"),
        ({"alpha": True}, EpilogueError, "operand alpha: expected a tensor, an int or a float, got bool"),
        ({"row": [1.0] * N}, EpilogueError, "operand row: expected a tensor, an int or a float, got list"),
        ({"alpha": [2.0]}, EpilogueError, "operand alpha: expected a tensor, an int or a float, got list"),
        ({"alpha": (1,)}, EpilogueError, "operand alpha: expected a tensor, an int or a float, got tuple"),
        ({"row": torch.Size([N])}, EpilogueError, "operand row: expected a tensor, an int or a float, got Size"),
        ({"row": np.ones(N)}, EpilogueError, r"operand row: .*got ndarray; make it a tensor: torch.as_tensor\(row\)"),
        ({"row": torch.ones(N).to_sparse()}, EpilogueError, "operand row: expected a dense .*strided.*sparse_coo"),
        ({"aux": torch.ones(M, N).to_sparse()}, EpilogueError, "operand aux: expected a dense .*sparse_coo"),
        ({"row": NESTED}, EpilogueError, "operand row: expected a dense tensor .*got a nested tensor"),
        ({"extra": 1.0}, EpilogueError, "unknown operand extra"),
        ({"row": None}, EpilogueError, "operand row: expected a tensor"),
    ],
)
def test_bad_operands(change, error, message):
    acc = torch.ones(M, N)
    all_kinds.reference(acc, **GOOD)
    with pytest.raises(EpilogueError, match=message) as caught:
        all_kinds.reference(acc, **(GOOD | change))
    assert type(caught.value) is error


def test_missing_operand():
    with pytest.raises(EpilogueError, match="missing operand row, aux; the epilogue takes"):
        all_kinds.reference(torch.ones(M, N), column=1, alpha=1, fixed=1)


def test_a_float64_accumulator_is_computed_in_float64():
    f, acc, bias = builders.bias_activation("gelu"), random(M, N, dtype=torch.float64), random(N, dtype=torch.float64)
    found = f.reference(acc, bias=bias)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.nn.functional.gelu(acc + bias), rtol=1e-14, atol=1e-14)
    assert torch.equal(f(acc, bias=bias), found) and torch.equal(f(acc, bias), found)
    assert f.reference(acc.float(), bias=bias.float()).dtype == torch.float32


def test_float64_operands_only_when_asked():
    given = random(N, dtype=torch.float64)
    f = builders.bias()
    exact = f.reference(torch.ones(M, N), bias=given, compute_dtype=torch.float64, keep_casts=False)
    assert torch.equal(exact, 1 + given.expand(M, N))
    with pytest.raises(DtypeError, match="operand bias"):
        f.reference(torch.ones(M, N), bias=given)


@pytest.mark.parametrize(
    ("acc", "arguments", "message"),
    [
        (torch.ones(M, N), {"compute_dtype": torch.bfloat16}, "compute_dtype: expected"),
        (torch.ones(M, N), {"out_dtype": torch.int8}, "torch.int8"),
        (torch.ones(M, N, dtype=torch.int32), {}, "acc: expected a floating dtype, got torch.int32"),
        (
            torch.ones(M, N, dtype=torch.float64),
            {"compute_dtype": torch.float32},
            "output D has the accumulator's dtype, torch.float64",
        ),
        (torch.ones(()), {}, "acc: expected a tensor of shape"),
        ([[1.0]], {}, "acc: expected a tensor of shape .*got list"),
        (torch.ones(M, N).to_sparse(), {}, r"acc: expected a dense tensor \(layout torch.strided\), got .*sparse_coo"),
        (NESTED, {}, "acc: expected a dense tensor .*nested"),
    ],
)
def test_bad_calls(acc, arguments, message):
    with pytest.raises(EpilogueError, match=message):
        builders.identity().reference(acc, **arguments)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused():
    quantized = torch.quantize_per_tensor(torch.ones(M, N), 1.0, 0, torch.qint8)
    with pytest.raises(EpilogueError, match=r"operand aux: expected a dense tensor .*quantized tensor \(torch.qint8\)"):
        all_kinds.reference(torch.ones(M, N), **(GOOD | {"aux": quantized}))
    with pytest.raises(EpilogueError, match=r"acc: expected a dense tensor .*quantized"):
        builders.identity().reference(quantized)


@pytest.mark.parametrize("number", [2, 2.5, np.float32(2.5), np.float16(2.5), np.int64(2), Fraction(5, 2)], ids=repr)
def test_numbers_of_any_real_type(number):
    acc = random(M, N)
    f = epilogue(lambda acc, s, t: acc * s + t, name="f")
    assert torch.equal(f.reference(acc, s=number, t=torch.tensor(1.0)), acc * float(number) + 1)


def test_one_element_tensors_keep_the_rules_of_tensors():
    f = epilogue(lambda acc, s: acc * s, name="f")
    for wrong in (torch.tensor(2), torch.tensor([2.0], dtype=torch.float64)):
        with pytest.raises(DtypeError, match="operand s"):
            f.reference(random(M, N), s=wrong)


@pytest.mark.parametrize("compute", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_have_the_operands_dtype(dtype, compute):
    def scaled(acc, s):
        return acc * s

    scaled.__annotations__["s"] = Scalar[dtype]
    f, acc = epilogue(scaled), random(M, N)
    for number in (0.1, -1 / 3, 1e-9, 65519.0, 1e9, 1e300, float("nan")):
        rounded = torch.tensor(number, dtype=torch.float64).float().to(dtype)
        asked = f.reference(acc, s=number, compute_dtype=compute, keep_casts=False)
        given = f.reference(acc, s=rounded, compute_dtype=compute, keep_casts=False)
        assert torch.equal(asked.nan_to_num(), given.nan_to_num())
    assert not torch.equal(f.reference(acc, s=0.1), acc * 0.1)


def test_output_dtypes_by_name():
    acc = random(M, N)
    assert builders.identity().reference(acc, out_dtype="float16").dtype == torch.float16


def test_outputs_have_the_accumulators_shape_whatever_they_are_made_of():
    """A tree that was simplified may have lost what gave a value its shape."""
    row = Operand("row", Kind.ROW, 0, "f32")
    tree = EpilogueTree((Store("D", Constant(2.0), "f32"), Store("z", row, "bf16")))
    values = torch.randn(N)
    outputs = evaluate(tree, torch.randn(2, M, N), {"row": values})
    assert torch.equal(outputs["D"], torch.full((2, M, N), 2.0))
    assert torch.equal(outputs["z"], values.bfloat16().expand(2, M, N)) and outputs["z"].is_contiguous()

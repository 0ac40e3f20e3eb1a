"""From functions to trees: what is accepted, what tree it makes, what is said of the rest."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, Column, EpilogueError, Kind, Row, Scalar, UnsupportedOperationError, epilogue
from epilogues.tree import Accumulator, Apply, Cast, Constant, Operand


def form(tree, output=0):
    """The value of an output as nested tuples, for comparing in a readable way."""

    def spell(node):
        if isinstance(node, Accumulator):
            return "acc"
        if isinstance(node, Operand):
            return node.name
        if isinstance(node, Constant):
            return node.value
        if isinstance(node, Cast):
            return ("cast", spell(node.value), node.dtype)
        return (node.operation, *map(spell, node.operands))

    return spell(tree.outputs[output].value)


INF = float("inf")

SPELLINGS = [
    (lambda x: x + 1, ("add", "acc", 1.0)),
    (lambda x: 1 + x, ("add", 1.0, "acc")),
    (lambda x: x - 1, ("sub", "acc", 1.0)),
    (lambda x: 1 - x, ("sub", 1.0, "acc")),
    (lambda x: x * 2, ("mul", "acc", 2.0)),
    (lambda x: 2 * x, ("mul", 2.0, "acc")),
    (lambda x: x / 2, ("div", "acc", 2.0)),
    (lambda x: 2 / x, ("mul", ("reciprocal", "acc"), 2.0)),  # as torch.Tensor has it
    (lambda x: torch.div(2, x), ("div", 2.0, "acc")),
    (lambda x: -x, ("neg", "acc")),
    (lambda x: +x, "acc"),
    (lambda x: np.float32(2) * x, ("mul", 2.0, "acc")),
    (lambda x: x * np.float64(2), ("mul", "acc", 2.0)),
    (lambda x: np.exp(x), ("exp", "acc")),
    (lambda x: x.add(1, alpha=3), ("add", "acc", 3.0)),
    (lambda x: torch.add(x, x, alpha=3), ("fma", "acc", 3.0, "acc")),
    (lambda x: torch.sub(x, x, alpha=0.5), ("fma", "acc", -0.5, "acc")),
    (lambda x: torch.sub(x, 1), ("sub", "acc", 1.0)),
    (lambda x: torch.rsub(x, 1), ("sub", 1.0, "acc")),
    (lambda x: x.sub(2).mul(3).div(4).neg(), ("neg", ("div", ("mul", ("sub", "acc", 2.0), 3.0), 4.0))),
    (lambda x: torch.mul(x, 2), ("mul", "acc", 2.0)),
    (lambda x: torch.div(x, 2), ("div", "acc", 2.0)),
    (lambda x: torch.true_divide(x, 2), ("div", "acc", 2.0)),
    (lambda x: torch.neg(x), ("neg", "acc")),
    (lambda x: torch.minimum(x, 2 * x), ("minimum", "acc", ("mul", 2.0, "acc"))),
    (lambda x: torch.max(x, -x), ("maximum", "acc", ("neg", "acc"))),
    (lambda x: torch.min(x, other=-x), ("minimum", "acc", ("neg", "acc"))),
    (lambda x: x.maximum(-x), ("maximum", "acc", ("neg", "acc"))),
    (lambda x: ep.maximum(x, 0), ("maximum", "acc", 0.0)),
    (lambda x: ep.minimum(0, x), ("minimum", 0.0, "acc")),
    (lambda x: torch.clamp(x, 0, 6), ("clamp", "acc", 0.0, 6.0)),
    (lambda x: torch.clip(x, max=6), ("clamp", "acc", -INF, 6.0)),
    (lambda x: x.clamp(min=-1), ("clamp", "acc", -1.0, INF)),
    (lambda x: x.clamp(-1, -x), ("clamp", "acc", -1.0, ("neg", "acc"))),
    (lambda x: torch.clamp(x, max=-x), ("clamp", "acc", -INF, ("neg", "acc"))),
    (lambda x: torch.clamp_min(x, 1), ("clamp", "acc", 1.0, INF)),
    (lambda x: F.relu(x), ("relu", "acc")),
    (lambda x: F.relu(x, inplace=False), ("relu", "acc")),
    (lambda x: torch.relu(x), ("relu", "acc")),
    (lambda x: x.relu(), ("relu", "acc")),
    (lambda x: F.leaky_relu(x), ("leaky_relu", "acc", 0.01)),
    (lambda x: F.leaky_relu(x, 0.2, False), ("leaky_relu", "acc", 0.2)),
    (lambda x: ep.leaky_relu(x, negative_slope=0.3), ("leaky_relu", "acc", 0.3)),
    (lambda x: F.gelu(x), ("gelu_erf", "acc")),
    (lambda x: F.gelu(x, approximate="tanh"), ("gelu_tanh", "acc")),
    (lambda x: ep.gelu(x, "tanh"), ("gelu_tanh", "acc")),
    (lambda x: F.silu(x), ("silu", "acc")),
    (lambda x: ep.swish(x), ("silu", "acc")),
    (lambda x: torch.sigmoid(x), ("sigmoid", "acc")),
    (lambda x: F.sigmoid(x), ("sigmoid", "acc")),
    (lambda x: x.tanh(), ("tanh", "acc")),
    (lambda x: F.tanh(x), ("tanh", "acc")),
    (lambda x: torch.exp(x), ("exp", "acc")),
    (lambda x: ep.identity(x), ("identity", "acc")),
    (lambda x: x.to(torch.bfloat16), ("cast", "acc", "bf16")),
    (lambda x: x.to(dtype=torch.float16), ("cast", "acc", "f16")),
    (lambda x: x.half().float(), ("cast", ("cast", "acc", "f16"), "f32")),
    (lambda x: ep.cast(x.bfloat16(), "f32"), ("cast", ("cast", "acc", "bf16"), "f32")),
    (lambda x: nn.ReLU()(x), ("relu", "acc")),
    (lambda x: nn.GELU("tanh")(x), ("gelu_tanh", "acc")),
    (lambda x: nn.Sequential(nn.SiLU(), nn.LeakyReLU(0.5))(x), ("leaky_relu", ("silu", "acc"), 0.5)),
    (lambda x: x * Fraction(1, 2), ("mul", "acc", 0.5)),
    (lambda x: np.int64(3) - x, ("sub", 3.0, "acc")),
    (lambda x: F.dropout(x, training=False), "acc"),
    (lambda x: F.dropout(x, 0.3, False), "acc"),
    (lambda x: torch.dropout(x, 0.3, False), "acc"),
    (lambda x: torch.dropout(x, p=0.3, train=False), "acc"),
    (lambda x: nn.Dropout().eval()(x), "acc"),
    (lambda x: nn.Dropout(0.0)(x), "acc"),
    (lambda x: nn.Sequential(nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()).eval()(x), "acc"),
    (lambda x: F.alpha_dropout(x), "acc"),
    (lambda x: F.rrelu(x, 0.25, 0.75), ("leaky_relu", "acc", 0.5)),
    (lambda x: nn.RReLU(0.25, 0.75).eval()(x), ("leaky_relu", "acc", 0.5)),
    (lambda x: ep.cast(x, "fp32"), ("cast", "acc", "f32")),
    (lambda x: ep.cast(x, "float32"), ("cast", "acc", "f32")),
    (lambda x: ep.cast(x, "fp16"), ("cast", "acc", "f16")),
    (lambda x: ep.cast(x, "float16"), ("cast", "acc", "f16")),
    (lambda x: ep.cast(x, "torch.bfloat16"), ("cast", "acc", "bf16")),
    (lambda x: ep.cast(x, "bfloat16"), ("cast", "acc", "bf16")),
    (lambda x: nn.Tanh()(nn.Sigmoid()(nn.Identity()(x))), ("tanh", ("sigmoid", "acc"))),
]


@pytest.mark.parametrize(("function", "expected"), SPELLINGS)
def test_spellings(function, expected):
    assert form(epilogue(function).tree) == expected


@pytest.mark.parametrize("training", [True, False])
def test_random_functions_compute_what_they_do_in_evaluation(training):
    x = torch.linspace(-2, 2, 8).reshape(2, 4)
    for module in (nn.Dropout(0.0 if training else 0.5), nn.RReLU().eval()):
        module.train(training and isinstance(module, nn.Dropout))
        assert torch.equal(epilogue(module).reference(x), module(x))


def test_operands_are_read_off_the_signature():
    @epilogue
    def f(x, r: Row, c: Column, s: Scalar, t: Aux, u, w: Row[torch.float32], *, k: ep.Aux[torch.bfloat16]):
        return x + r + c + s + t + u + w + k

    kinds = [Kind.ROW, Kind.COLUMN, Kind.SCALAR, Kind.AUX, Kind.AUTO, Kind.ROW, Kind.AUX]
    assert list(f.operands.items()) == list(zip("rcstuwk", kinds, strict=True))
    assert [operand.position for operand in f.tree.operands] == list(range(7))
    assert [operand.dtype for operand in f.tree.operands] == [None] * 5 + ["f32", "bf16"]


def test_positions_follow_the_signature_not_the_order_of_use():
    @epilogue
    def f(acc, first: Row, second: Row):
        return acc * second + first

    assert [operand.name for operand in f.tree.operands] == ["first", "second"]


def test_nodes_know_the_users_line():
    @epilogue
    def f(acc, bias: Row):
        z = acc + bias
        return F.silu(z)  # in torch/nn/functional.py, called from here

    add, silu = (node for node in f.tree if isinstance(node, Apply))
    assert add.location.file == silu.location.file == __file__
    assert add.location.text == "z = acc + bias"
    assert silu.location.text.startswith("return F.silu(z)")
    assert silu.location.line == add.location.line + 1


def test_equal_values_are_one_node():
    @epilogue
    def f(acc, bias: Row):
        return torch.sigmoid(acc + bias) * (acc + bias) + 0.5 * (0.5 * (acc + bias))

    assert sum(isinstance(node, Apply) and node.operation == "add" for node in f.tree) == 2
    assert sum(isinstance(node, Constant) for node in f.tree) == 1
    assert len(set(map(id, f.tree.nodes))) == len(f.tree.nodes)


def test_signed_zeros_are_two_constants_and_nans_one():
    @epilogue
    def f(acc):
        return acc * 0.0 + acc * -0.0 + ep.maximum(acc, float("nan")) + ep.minimum(acc, -float("nan"))

    assert sum(isinstance(node, Constant) for node in f.tree) == 3


def test_deep_chains_do_not_overflow():
    @epilogue
    def f(acc):
        for i in range(3000):
            acc = acc * acc + i
        return acc

    assert ep.EpilogueTree.from_json(f.tree.to_json()) == f.tree
    assert len(str(f.tree).splitlines()) == len(f.tree.nodes) + 1
    assert "6001" in repr(f.tree) or str(len(f.tree.nodes)) in repr(f.tree)


def test_several_outputs_start_with_the_main_one():
    @epilogue
    def f(acc, bias: Row):
        z = acc + bias
        return {"preact": z, "D": F.gelu(z), "bias": z.half()}

    assert f.outputs == ("D", "preact", "bias")
    assert form(f.tree, 1) == ("add", "acc", "bias")


def test_dtypes_of_values():
    seen = {}

    @epilogue
    def f(acc, fixed: Row[torch.bfloat16]):
        seen.update(cast=acc.half().dtype, fixed=fixed.dtype, condition=(acc > 0).dtype)
        return acc + fixed

    assert seen == {
        "cast": torch.float16,
        "fixed": torch.bfloat16,
        "condition": torch.bool,
    }
    # not float32: z.to(z.dtype) would make an output of bf16 matrices float32
    with pytest.raises(UnsupportedOperationError, match="the dtype of a computed value"):
        epilogue(lambda acc: ep.silu(acc.float()).to(acc.dtype))
    with pytest.raises(UnsupportedOperationError, match="dtype of operand bias is not known"):

        @epilogue
        def g(acc, bias: Row):
            return acc.to(bias.dtype)


def signatures():
    outside = torch.ones(3)

    def star(acc, *rest): ...
    def stars(acc, **rest): ...
    def default(acc, alpha: Scalar = 1.0): ...
    def positional_only(acc, alpha: Scalar, /): ...
    def nothing(): ...
    def keyword_accumulator(*, acc): ...
    def annotated_tensor(acc, bias: torch.Tensor): ...
    def annotated_kind(acc, bias: Kind.ROW): ...
    def annotated_text(acc, bias: "a.b.Rows"): ...  # noqa: F821
    def reserved(acc, weight: Row): ...
    def reserved_too(acc, out_dtype: Row): ...
    def reserved_b(acc, b: Row): ...
    def forgotten(bias: Row):
        return bias

    def forgotten_dtype(bias: Aux[torch.float32], scale: Row):
        return bias * scale

    def forgotten_text(bias: "Row[torch.int8]"):
        return bias

    def unused(acc, bias: Row, scale: Row):
        return acc + bias

    def unused_but_computed(acc, bias: Row):
        _ = acc + bias
        return acc

    def returns_none(acc): ...
    def returns_number(acc):
        return 1.0

    def returns_tuple(acc):
        return acc, acc

    def returns_tensor(acc):
        return outside

    def no_main(acc):
        return {"E": acc}

    def empty(acc):
        return {}

    def bad_name(acc):
        return {"D": acc, "pre act": acc}

    def number_output(acc):
        return {"D": acc, "one": 1.0}

    def constant_output(acc, bias: Row):
        return {"D": acc, "twice": bias * 2}

    def constant_main(acc, bias: Row):
        return bias * 2

    return [
        (star, r"parameter \*rest stands for any number of operands"),
        (stars, r"parameter \*\*rest stands for"),
        (default, "parameter alpha has a default"),
        (positional_only, "operand alpha is positional-only"),
        (nothing, "expected a first parameter"),
        (keyword_accumulator, "the accumulator, is keyword-only"),
        (annotated_tensor, r"operand bias is annotated .*expected Row, Column, Scalar, Aux"),
        (annotated_kind, "operand bias is annotated"),
        (annotated_text, "operand bias is annotated 'a.b.Rows'"),
        (reserved, "operand 'weight' has a name that"),
        (reserved_too, "operand 'out_dtype' has a name that"),
        (reserved_b, r"operand 'b' (?s:.)*rename it, for example to 'bias'; reserved are a, b, .*weight, x"),
        (forgotten, r"the first parameter is the accumulator, and bias is annotated as an operand \(Row\)"),
        (forgotten_dtype, r"the first parameter is the accumulator(?s:.)*def forgotten_dtype\(acc, bias: \.\.\.\)"),
        (forgotten_text, "the first parameter is the accumulator"),
        (unused, "no output depends on operand scale"),
        (unused_but_computed, "no output depends on operand bias"),
        (returns_none, r"returned nothing \(None\); expected a value"),
        (returns_number, r"returned the number 1.0; expected a value"),
        (returns_tuple, "returned a tuple of 2 values; expected a value"),
        (returns_tensor, r"returned a tensor of shape \(3,\); expected a value"),
        (no_main, "returned a dict of 'E' without the main output \"D\""),
        (empty, "returned a dict of nothing without the main output"),
        (bad_name, "returned an output named 'pre act'"),
        (number_output, "output 'one' is the number 1.0"),
        (constant_output, "output twice does not depend on the accumulator"),
        (constant_main, "output D does not depend on the accumulator"),
    ]


@pytest.mark.parametrize(("function", "message"), signatures(), ids=lambda value: getattr(value, "__name__", ""))
def test_functions_that_are_no_epilogue(function, message):
    with pytest.raises(EpilogueError, match=message) as caught:
        epilogue(function)
    assert type(caught.value) is EpilogueError
    assert function.__name__ in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


def test_not_a_function():
    with pytest.raises(EpilogueError, match="expected a function, got int 3"):
        epilogue(3)
    with pytest.raises(EpilogueError, match=r"got str 'gelu'; did you mean epilogues.builders.activation\('gelu'\)"):
        epilogue("gelu")
    with pytest.raises(EpilogueError, match=r"got the class ReLU; make an instance: epilogue\(ReLU\(\.\.\.\)\)"):
        epilogue(nn.ReLU)


@pytest.mark.parametrize(
    ("function", "wrapped"),
    [
        (F.gelu, 'lambda acc: F.gelu(acc), or use epilogues.builders.activation("gelu")'),
        (torch.relu, 'lambda acc: torch.relu(acc), or use epilogues.builders.activation("relu")'),
        (F.relu, 'lambda acc: F.relu(acc), or use epilogues.builders.activation("relu")'),
        (F.leaky_relu, 'lambda acc: F.leaky_relu(acc), or use epilogues.builders.activation("leaky_relu")'),
        (ep.gelu, 'lambda acc: ep.gelu(acc), or use epilogues.builders.activation("gelu")'),
        (torch.Tensor.tanh, 'lambda acc: acc.tanh(), or use epilogues.builders.activation("tanh")'),
        (torch.clamp, "lambda acc: torch.clamp(acc, ...)"),
        (F.softmax, "lambda acc: F.softmax(acc, ...)"),
    ],
)
def test_functions_to_wrap(function, wrapped):
    with pytest.raises(EpilogueError) as caught:
        epilogue(function)
    assert str(caught.value).endswith(f"\n  instead: wrap it: {wrapped}")
    assert f"{__file__}:" in str(caught.value)


def test_functions_with_defaults_may_be_wrapped():
    def f(acc, slope=0.5): ...

    with pytest.raises(
        EpilogueError, match=r"parameter slope has a default(?s:.)*wrap it: lambda acc: f\(acc, \.\.\.\)"
    ):
        epilogue(f)


def test_dtypes_that_operands_cannot_have():
    with pytest.raises(ep.DtypeError, match=r"torch\.int8"):
        Row[torch.int8]
    with pytest.raises(ep.DtypeError, match=r"'float8'.*expected one of torch\.float32"):
        Row["float8"]


def test_dtypes_of_operands_by_name():
    @epilogue
    def f(acc, r: Row["float16"], c: Column["fp32"], s: Scalar["torch.bfloat16"], t: "ep.Aux['fp16']"):  # noqa: F821
        return acc + r + c + s + t

    assert [operand.dtype for operand in f.tree.operands] == ["f16", "f32", "bf16", "f16"]


def test_values_of_another_epilogue():
    kept = []
    epilogue(lambda acc: kept.append(acc) or acc, name="first")
    with pytest.raises(EpilogueError, match="a value of epilogue first was used in epilogue second"):
        epilogue(lambda acc: acc + kept[0], name="second")
    with pytest.raises(EpilogueError, match="a value of epilogue first"):
        epilogue(lambda acc: kept[0], name="second")


@pytest.mark.parametrize(
    "function",
    [
        lambda acc: ep.gelu(acc, "erf"),
        lambda acc: F.gelu(acc, approximate="erf"),
        lambda acc: nn.GELU(approximate="erf")(acc),
    ],
)
def test_unknown_approximation(function):
    with pytest.raises(EpilogueError, match='expected approximate="none" or "tanh", got \'erf\''):
        epilogue(function)


@pytest.mark.parametrize("clamp", [ep.clamp, torch.clamp, lambda x: x.clamp()])
def test_clamp_needs_a_bound(clamp):
    with pytest.raises(EpilogueError, match=r"neither bound(?s:.)*test_epilogues_tracing"):
        epilogue(lambda acc: clamp(acc))


def test_integers_too_large():
    with pytest.raises(EpilogueError, match="too large"):
        epilogue(lambda acc: acc * 10**400)


def test_attributes_of_symbols():
    def f(acc):
        assert not hasattr(acc, "_no_such_thing")
        assert repr(acc) == "Symbol(accumulator)"
        assert {acc: 1}[acc] == 1
        assert f"{acc}" == str(acc) == repr(acc)
        return acc

    epilogue(f)


def test_gradients_are_not_held_back():
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

    with pytest.raises(UnsupportedOperationError, match="without gradients"):
        epilogue(lambda acc: Straight.apply(acc))

    def partly(acc):
        with torch.no_grad():
            gate = torch.sigmoid(acc)
        return acc * gate

    with pytest.raises(UnsupportedOperationError, match=r"without gradients(?s:.)*gate = torch\.sigmoid"):
        epilogue(partly)
    with torch.no_grad():  # where nothing has a gradient, nothing is held back
        assert epilogue(lambda acc: torch.sigmoid(acc)).tree


def test_nan_to_num_wants_its_limits():
    with pytest.raises(UnsupportedOperationError, match="nan_to_num without posinf and neginf"):
        epilogue(lambda acc: torch.nan_to_num(acc))
    assert epilogue(lambda acc: torch.nan_to_num(acc, posinf=1.0, neginf=-1.0)).tree


def test_to_another_value():
    with pytest.raises(UnsupportedOperationError, match="type_as"):
        epilogue(lambda acc: (acc > 0).to(acc))

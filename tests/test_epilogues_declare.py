"""The decorator and its object, the ep.* functions, and the ready-made epilogues."""

import inspect
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, BroadcastError, Column, Epilogue, EpilogueError, Kind, Row, Scalar, builders, epilogue
from epilogues.errors import DtypeError
from epilogues.tree import Apply, Cast


@epilogue
def bias_gelu(acc, bias: Row):
    """Adds a bias."""
    return ep.gelu(acc + bias)


@epilogue
def with_preactivation(acc, bias: Row):
    z = acc + bias
    return {"D": ep.silu(z), "preact": z}


def test_the_object_tells_about_itself():
    assert bias_gelu.name == bias_gelu.__name__ == "bias_gelu"
    assert bias_gelu.__doc__ == "Adds a bias."
    assert bias_gelu.__module__ == __name__
    assert bias_gelu.operands == {"bias": Kind.ROW}
    assert bias_gelu.outputs == ("D",)
    assert repr(bias_gelu) == "<epilogue bias_gelu(acc, bias: row) -> D>"
    assert repr(with_preactivation).endswith("-> D, preact>")
    assert list(inspect.signature(bias_gelu).parameters) == ["acc", "bias"]
    with pytest.raises(TypeError):
        bias_gelu.operands["bias"] = Kind.AUX


def test_names():
    named = epilogue(name="mine")(lambda acc: acc + 1)
    assert named.name == "mine" and "mine" in repr(named)
    assert epilogue(lambda acc: acc + 1, name="other").name == "other"
    assert epilogue(bias_gelu) is bias_gelu
    assert epilogue(bias_gelu, name="again").name == "again"


def test_equality_goes_by_tree_and_names():
    @epilogue
    def twin(acc, bias: Row):
        return ep.gelu(acc + bias)

    @epilogue
    def renamed(acc, c: Row):
        return ep.gelu(acc + c)

    assert twin == bias_gelu and hash(twin) == hash(bias_gelu)
    assert renamed.tree == bias_gelu.tree and renamed != bias_gelu
    assert twin != "bias_gelu"


def composed():
    @epilogue
    def outer(acc, first: Row, second: Row, residual: Aux):
        return bias_gelu(bias_gelu(acc * 2, first), bias=second) + residual

    @epilogue
    def inlined(acc, first: Row, second: Row, residual: Aux):
        return ep.gelu(ep.gelu(acc * 2 + first) + second) + residual

    return outer, inlined


def test_epilogues_compose():
    outer, inlined = composed()
    assert outer.tree == inlined.tree
    gelu = next(node for node in outer.tree if isinstance(node, Apply) and node.operation == "gelu_erf")
    assert gelu.location.text == "return ep.gelu(acc + bias)"  # the inner function's line


@pytest.mark.parametrize("copy", [lambda e: pickle.loads(pickle.dumps(e)), lambda e: Epilogue.from_tree(e.tree)])
def test_epilogues_made_of_trees_compose(copy):
    inner, both = copy(bias_gelu), copy(with_preactivation)

    @epilogue
    def outer(acc, first: Row, second: Row, residual: Aux):
        return inner(inner(acc * 2, first), bias=second) + residual

    assert outer.tree == composed()[1].tree

    @epilogue
    def several(acc, bias: Row, scale: Column):
        inside = both(acc * scale, bias=bias)
        return {"D": inside["D"], "preact": inside["preact"].half()}

    @epilogue
    def inlined(acc, bias: Row, scale: Column):
        z = acc * scale + bias
        return {"D": ep.silu(z), "preact": z.half()}

    assert several.tree == inlined.tree


def test_composing_shares_equal_values():
    @epilogue
    def f(acc, bias: Row):
        return bias_gelu(acc, bias) + bias_gelu(acc, bias)

    assert sum(isinstance(node, Apply) for node in f.tree) == 3


def test_numbers_as_operands_of_an_inner_epilogue():
    f = epilogue(lambda acc: bias_gelu(acc, 0.5))
    assert f.tree == epilogue(lambda acc: ep.gelu(acc + 0.5)).tree


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda acc: bias_gelu(acc), "epilogue bias_gelu: missing operand bias"),
        (lambda acc: bias_gelu(acc, 1, 2), "expected the accumulator and 1 operands .*got 2"),
        (lambda acc: bias_gelu(acc, 1, bias=2), "operand bias given twice"),
        (lambda acc: bias_gelu(acc, scale=1), "missing operand bias and unknown operand scale"),
        (lambda acc: bias_gelu(acc, torch.ones(3)), "a tensor of shape"),
    ],
)
def test_wrong_calls_inside_an_epilogue(call, message):
    with pytest.raises(EpilogueError, match=rf"{message}(?s:.)*test_epilogues_declare\.py"):
        epilogue(call)


def test_calling_on_tensors_is_the_reference():
    acc, bias = torch.randn(3, 5), torch.randn(5)
    expected = F.gelu(acc + bias)
    assert torch.equal(bias_gelu(acc, bias), expected)
    assert torch.equal(bias_gelu(acc, bias=bias), expected)
    assert torch.equal(bias_gelu.reference(acc, bias=bias), expected)
    both = with_preactivation(acc, bias)
    assert list(both) == ["D", "preact"] and torch.equal(both["preact"], acc + bias)


def test_an_operand_may_be_called_acc():
    @epilogue
    def f(x0, acc: Row):
        return x0 + acc

    assert torch.equal(f.reference(torch.ones(2, 3), acc=torch.ones(3)), torch.full((2, 3), 2.0))


# the functions, eagerly

EAGER = [
    (ep.identity, lambda x: x),
    (ep.neg, torch.neg),
    (ep.relu, F.relu),
    (ep.leaky_relu, F.leaky_relu),
    (ep.exp, torch.exp),
    (ep.sigmoid, torch.sigmoid),
    (ep.tanh, torch.tanh),
    (ep.silu, F.silu),
    (ep.swish, F.silu),
    (ep.gelu, F.gelu),
    (lambda x: ep.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    (lambda x: ep.leaky_relu(x, 0.3), lambda x: F.leaky_relu(x, 0.3)),
    (lambda x: ep.clamp(x, -1, 0.5), lambda x: x.clamp(-1, 0.5)),
    (lambda x: ep.clamp(x, max=0.5), lambda x: x.clamp(max=0.5)),
    (lambda x: ep.add(x, 2), lambda x: x + 2),
    (lambda x: ep.sub(2, x), lambda x: 2 - x),
    (lambda x: ep.mul(x, x), lambda x: x * x),
    (lambda x: ep.div(1, x), lambda x: 1 / x),
    (lambda x: ep.maximum(x, 0.1), lambda x: x.clamp(min=0.1)),
    (lambda x: ep.minimum(0.1, x), lambda x: x.clamp(max=0.1)),
]


@pytest.mark.parametrize(("ours", "torchs"), EAGER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_functions_on_tensors(ours, torchs, dtype):
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    result = ours(x)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(result, torchs(x.to(result.dtype)))


def test_functions_on_numbers():
    assert ep.relu(-2.0) == 0.0
    assert ep.exp(1) == math.exp(1)
    assert ep.cast(1 / 3, torch.bfloat16) == torch.tensor(1 / 3).bfloat16().item()
    assert isinstance(ep.add(1, 2), float)


def test_functions_on_something_else():
    with pytest.raises(EpilogueError, match="got str '1'"):
        ep.relu("1")
    with pytest.raises(EpilogueError, match="expected a floating dtype"):
        ep.relu(torch.ones(3, dtype=torch.int32))
    with pytest.raises(EpilogueError, match="neither bound"):
        ep.clamp(torch.ones(3))
    with pytest.raises(DtypeError, match=r"torch\.int8"):
        ep.cast(torch.ones(3), torch.int8)


def test_casting_tensors():
    x = torch.randn(8)
    assert torch.equal(ep.cast(x, "f16"), x.half())
    assert torch.equal(ep.cast(x, "float16"), x.half())


# the ready-made ones

FORMULAS = [
    (builders.identity(), lambda acc: acc),
    (builders.bias(), lambda acc, bias: acc + bias),
    (builders.activation("leaky_relu", negative_slope=0.2), lambda acc: F.leaky_relu(acc, 0.2)),
    (builders.activation(None), lambda acc: acc),
    (builders.bias_activation("exp"), lambda acc, bias: torch.exp(acc + bias)),
    (
        builders.bias_activation("gelu", approximate="tanh"),
        lambda acc, bias: F.gelu(acc + bias, approximate="tanh"),
    ),
    (builders.residual(), lambda acc, bias, residual: acc + bias + residual),
    (builders.residual("swish"), lambda acc, bias, residual: F.silu(acc + bias) + residual),
    (
        builders.scaled_residual(),
        lambda acc, scale, bias, alpha, residual: (acc * scale + bias) * alpha + residual,
    ),
    (builders.gate(), lambda acc, bias, gate: F.silu(acc + bias) * gate),
    (builders.gate("sigmoid"), lambda acc, bias, gate: torch.sigmoid(acc + bias) * gate),
    (
        builders.dequantize("relu"),
        lambda acc, row_scale, col_scale, bias: F.relu(acc * row_scale[:, None] * col_scale + bias),
    ),
    (
        builders.cast("bf16", builders.bias_activation("tanh")),
        lambda acc, bias: torch.tanh(acc + bias).bfloat16(),
    ),
    (builders.cast(torch.float16), lambda acc: acc.half()),
]


@pytest.mark.parametrize(("made", "formula"), FORMULAS, ids=lambda value: getattr(value, "name", ""))
def test_builders(made, formula):
    acc = torch.randn(4, 6)
    shapes = {Kind.ROW: (6,), Kind.COLUMN: (4,), Kind.SCALAR: (), Kind.AUX: (4, 6)}
    given = {name: torch.randn(shapes[kind]) for name, kind in made.operands.items()}
    assert list(given) == list(inspect.signature(formula).parameters)[1:]
    assert torch.equal(made.reference(acc, **given), formula(acc, **given))


def test_builder_kinds():
    assert builders.dequantize().operands == {
        "row_scale": Kind.COLUMN,
        "col_scale": Kind.ROW,
        "bias": Kind.ROW,
    }
    assert builders.scaled_residual().operands == {
        "scale": Kind.ROW,
        "bias": Kind.ROW,
        "alpha": Kind.SCALAR,
        "residual": Kind.AUX,
    }


def test_training_stores_the_preactivation():
    outputs = builders.train("silu").reference(acc := torch.randn(4, 6), bias=torch.ones(6))
    assert torch.equal(outputs["preact"], acc + 1)
    assert torch.equal(outputs["D"], F.silu(acc + 1))


def test_the_same_call_gives_the_same_object():
    assert builders.bias_activation("gelu") is builders.bias_activation("gelu")
    assert builders.bias_activation("gelu") is not builders.bias_activation("relu")
    assert builders.cast("bf16") is builders.cast(torch.bfloat16, builders.identity())
    assert builders.cast("bf16") is builders.cast("bfloat16")
    for make in builders.SUITE.values():
        assert make() is make()


def test_casting_keeps_the_names_of_each_epilogue():
    @epilogue
    def renamed(acc, offset: Row):
        return acc + offset

    assert renamed.tree == builders.bias().tree
    assert list(builders.cast("f16", builders.bias()).operands) == ["bias"]
    assert list(builders.cast("f16", renamed).operands) == ["offset"]


def test_casting_leaves_other_outputs_alone():
    main, preact = builders.cast("f32", builders.train()).tree.outputs
    assert isinstance(main.value, Cast) and main.value.dtype == "f32"
    assert not isinstance(preact.value, Cast)


def test_unknown_activations():
    with pytest.raises(EpilogueError, match="unknown activation 'geglu'; expected one of identity, relu"):
        builders.bias_activation("geglu")
    with pytest.raises(EpilogueError, match="activation relu takes no arguments, got slope"):
        builders.activation("relu", slope=1)
    with pytest.raises(EpilogueError, match="activation leaky_relu takes negative_slope, got slope"):
        builders.activation("leaky_relu", slope=1)
    with pytest.raises(DtypeError):
        builders.cast(torch.int8)


def test_the_public_names():
    assert set(ep.__all__) >= {
        "epilogue",
        "Epilogue",
        "EpilogueTree",
        "Row",
        "Column",
        "Scalar",
        "Aux",
        "Kind",
    }
    assert all(hasattr(ep, name) for name in ep.__all__)
    assert issubclass(ep.EpilogueError, ValueError)
    assert Scalar.kind is Kind.SCALAR


# composing keeps what the inner epilogue declares


@epilogue
def by_column(acc, s: Column):
    return acc * s


@epilogue
def by_wide_row(acc, t: Row[torch.float32]):
    return acc * t


COPIES = [
    lambda e: e,
    lambda e: pickle.loads(pickle.dumps(e)),
    lambda e: Epilogue.from_tree(e.tree, e.name),
]


@pytest.mark.parametrize("copy", COPIES, ids=["itself", "pickled", "from_tree"])
class TestHandingOn:
    def test_another_kind(self, copy):
        inner = copy(by_column)

        def f(acc, scale: Row):
            return inner(acc, scale)

        with pytest.raises(BroadcastError) as caught:
            epilogue(f)
        assert str(caught.value).startswith(
            "epilogue by_column declares operand s as Column, and operand scale, given for it, is Row"
        )
        assert "return inner(acc, scale)" in str(caught.value)

    def test_another_dtype(self, copy):
        inner = copy(by_wide_row)

        def f(acc, scale: Row[torch.float16]):
            return inner(acc, t=scale)

        with pytest.raises(DtypeError, match=r"operand t as torch\.float32, and operand scale.* is torch\.float16"):
            epilogue(f)

    def test_the_same(self, copy):
        inner = copy(by_wide_row)

        @epilogue
        def f(acc, scale: Row[torch.float32]):
            return inner(inner(acc, scale), scale)

        assert (f.operands, f.tree.operands[0].dtype) == ({"scale": Kind.ROW}, "f32")

    def test_what_the_outer_one_leaves_open(self, copy):
        inner, wide = copy(by_column), copy(by_wide_row)

        @epilogue
        def f(acc, first, second, third: Row, fourth):
            return inner(wide(wide(acc, second), third) + first, first) + fourth

        kinds = {"first": Kind.COLUMN, "second": Kind.ROW, "third": Kind.ROW, "fourth": Kind.AUTO}
        assert f.operands == kinds
        assert [operand.dtype for operand in f.tree.operands] == [None, "f32", "f32", None]

        @epilogue
        def declared(acc, first: Column, second: Row[torch.float32], third: Row[torch.float32], fourth):
            return (acc * second * third + first) * first + fourth

        assert f.tree == declared.tree

    def test_two_that_disagree(self, copy):
        inner, wide = copy(by_column), copy(by_wide_row)

        def kinds(acc, scale):
            return inner(wide(acc, scale), scale)

        with pytest.raises(
            BroadcastError, match=r"by_column declares .* is Row by the declaration of epilogue by_wide_row"
        ):
            epilogue(kinds)

        @epilogue
        def by_half_row(acc, t: Row[torch.float16]):
            return acc * t

        def dtypes(acc, scale: Row):
            return by_half_row(wide(acc, scale), scale)

        with pytest.raises(DtypeError, match=r"float32 by the declaration of epilogue by_wide_row"):
            epilogue(dtypes)

    def test_through_several(self, copy):
        inner = copy(by_column)
        middle = copy(epilogue(lambda acc, u: inner(acc, u), name="middle"))
        assert middle.operands == {"u": Kind.COLUMN}

        def f(acc, scale: Row):
            return middle(acc, scale)

        with pytest.raises(BroadcastError, match="epilogue middle declares operand u as Column"):
            epilogue(f)

    def test_computed_values(self, copy):
        inner, wide = copy(by_column), copy(by_wide_row)

        @epilogue
        def f(acc, scale: Row, half: Row[torch.float16]):
            return wide(inner(inner(acc, 2 * scale), ep.identity(scale)), half.float()) + inner(acc, acc)

        assert f.operands == {"scale": Kind.ROW, "half": Kind.ROW}

    def test_numbers_have_the_dtype(self, copy):
        @epilogue
        def scaled(acc, s: Scalar[torch.bfloat16]):
            return acc * s

        inner, acc = copy(scaled), torch.ones(2, 3)
        f = epilogue(lambda acc: inner(acc, 0.1), name="f")
        assert torch.equal(f.reference(acc), inner.reference(acc, s=0.1))
        assert f.reference(acc)[0, 0] == torch.tensor(0.1).bfloat16()


# modules


class Gate(nn.Module):
    def __init__(self, name="gate"):
        super().__init__()
        self._name = name
        self.act = nn.Sequential(nn.SiLU(), nn.Dropout())
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, acc, bias: Row, *, gate: "Aux"):
        return self.act(acc + bias) * gate


def test_modules_go_by_forward():
    f = epilogue(Gate().eval())
    assert f.name == f.__name__ == "Gate" and f.operands == {"bias": Kind.ROW, "gate": Kind.AUX}
    assert f.tree == builders.gate("silu").tree
    assert list(inspect.signature(f).parameters) == ["acc", "bias", "gate"]
    assert epilogue(Gate().eval(), name="mine").name == "mine"
    assert epilogue(nn.Sequential(nn.ReLU(), nn.Tanh())).tree == epilogue(lambda x: torch.tanh(torch.relu(x))).tree
    assert pickle.loads(pickle.dumps(f)) == f


def test_modules_are_called_with_their_hooks():
    module = nn.ReLU()
    module.register_forward_hook(lambda module, args, output: output * 2)
    assert epilogue(module).tree == epilogue(lambda acc: torch.relu(acc) * 2).tree


def test_modules_are_traced_as_they_are():
    module = Gate()
    with pytest.raises(EpilogueError, match=r"dropout cannot be used in an epilogue(?s:.)*module\.eval\(\)"):
        epilogue(module)
    f = epilogue(module.eval())
    module.train()

    @epilogue
    def outer(acc, bias: Row, gate: Aux):
        return f(acc, bias, gate)

    assert outer.tree == f.tree


def test_parameters_and_buffers_of_modules_are_refused():
    class Scaled(Gate):
        def forward(self, acc):
            return acc * self.weight

    with pytest.raises(EpilogueError, match=r"a tensor of shape \(3,\) was used that is not an operand"):
        epilogue(Scaled())
    with pytest.raises(EpilogueError, match="linear communicates between elements"):
        epilogue(nn.Linear(3, 3))


def test_modules_without_a_fitting_forward():
    class Wrong(nn.Module):
        def forward(self, acc, bias: Row = 0): ...

    with pytest.raises(EpilogueError, match=r"epilogue Wrong: parameter bias has a default(?s:.)*at .*declare\.py"):
        epilogue(Wrong())
    with pytest.raises(EpilogueError, match=r"epilogue Module: parameter \*input stands for"):
        epilogue(nn.Module())


def test_objects_that_can_be_called():
    class Scale:
        def __init__(self, by):
            self.by, self._name, self._tree = by, "not the epilogue's", None

        def __call__(self, acc, bias: "Row"):
            return acc * self.by + bias

    f = epilogue(Scale(2))
    assert (f.name, f.operands) == ("Scale", {"bias": Kind.ROW})
    assert torch.equal(f.reference(torch.ones(2, 3), bias=torch.ones(3)), torch.full((2, 3), 3.0))


def test_composing_means_what_was_traced():
    """Not what the function would give now."""
    factor = 2.0

    @epilogue
    def scaled(acc):
        return acc * factor

    factor = 5.0
    outer = epilogue(lambda acc: scaled(acc) + 0)
    assert outer.reference(torch.ones(1, 1)).item() == scaled.reference(torch.ones(1, 1)).item() == 2.0
    again = epilogue(lambda acc: pickle.loads(pickle.dumps(scaled))(acc) + 0)
    assert again.tree == outer.tree

"""The ready-made epilogues, each against its formula in PyTorch written out."""

import inspect
import math

import pytest
import torch
from torch.nn import functional as F

from epilogues import DtypeError, EpilogueError, Kind, builders
from epilogues.dtypes import DTYPES
from epilogues.validation import validate

M, N = 4, 6
#: builder, its arguments -> the same in PyTorch; parameters are the operands, in order
FORMULAS = {
    ("scale",): lambda acc, alpha: alpha * acc,
    ("scale", "sigmoid"): lambda acc, alpha: torch.sigmoid(alpha * acc),
    ("alpha_beta",): lambda acc, alpha, beta, c: alpha * acc + beta * c,
    ("alpha_beta", "relu"): lambda acc, alpha, beta, c: F.relu(alpha * acc + beta * c),
    ("softcap",): lambda acc: 30 * torch.tanh(acc / 30),
    ("softcap", 50): lambda acc: 50 * torch.tanh(acc / 50),
    ("logit_scaling",): lambda acc, log_scale, logit_bias: acc * log_scale.exp() + logit_bias,
    ("residual_activation",): lambda acc, bias, residual: F.relu(acc + bias + residual),
    ("residual_activation", "silu"): lambda acc, bias, residual: F.silu(acc + bias + residual),
    ("residual_activation", None): lambda acc, bias, residual: acc + bias + residual,
    ("layer_scale",): lambda acc, bias, gamma, residual: (acc + bias) * gamma + residual,
    ("parallel_residual",): lambda acc, bias, branch, residual: acc + bias + branch + residual,
    ("gate", "gelu"): lambda acc, bias, gate: F.gelu(acc + bias) * gate,
    ("gate", "gelu_tanh"): lambda acc, bias, gate: F.gelu(acc + bias, approximate="tanh") * gate,
    ("gate", "relu"): lambda acc, bias, gate: F.relu(acc + bias) * gate,
    ("gate", None): lambda acc, bias, gate: (acc + bias) * gate,
    ("dequantize_per_tensor",): lambda acc, scale, bias: acc * scale + bias,
    ("dequantize_per_tensor", "gelu"): lambda acc, scale, bias: F.gelu(acc * scale + bias),
    ("dequantize_asymmetric",): lambda acc, zero_point, weight_sum, row_scale, col_scale, bias: (
        (acc - zero_point[:, None] * weight_sum) * row_scale[:, None] * col_scale + bias
    ),
    ("dequantize_asymmetric", "relu"): lambda acc, zero_point, weight_sum, row_scale, col_scale, bias: F.relu(
        (acc - zero_point[:, None] * weight_sum) * row_scale[:, None] * col_scale + bias
    ),
}
#: Where derivatives jump, and on both sides.
KINKS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, 20.0, -20.0]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def given_for(made):
    shapes = {Kind.ROW: (N,), Kind.COLUMN: (M,), Kind.SCALAR: (), Kind.AUX: (M, N)}
    return {name: torch.randn(shapes[kind]) for name, kind in made.operands.items()}


@pytest.mark.parametrize("call", FORMULAS, ids=str)
def test_formulas(call):
    name, *arguments = call
    made, formula = getattr(builders, name)(*arguments), FORMULAS[call]
    validate(made.tree)
    acc, given = torch.randn(M, N), given_for(made)
    assert list(given) == list(inspect.signature(formula).parameters)[1:]
    torch.testing.assert_close(made.reference(acc, **given), formula(acc, **given), rtol=1e-6, atol=1e-6)


def test_every_builder_is_tried():
    elsewhere = "identity bias activation bias_activation residual scaled_residual dequantize train cast"
    here = {call[0] for call in FORMULAS} | {"quantize", "activation_backward"}
    functions = {name for name in builders.__all__ if inspect.isfunction(getattr(builders, name))}
    assert functions == here | set(elsewhere.split())
    for name in functions:
        assert "D = " in getattr(builders, name).__doc__ or name == "cast"


def test_the_zero_point_of_the_left_matrix_is_taken_out():
    q = torch.randint(0, 256, (M, 8)).float()
    weight = torch.randint(-128, 128, (N, 8)).float()
    zero_point, row_scale, col_scale = torch.randint(0, 256, (M,)).float(), torch.rand(M), torch.rand(N)
    real = (q - zero_point[:, None]) * row_scale[:, None] @ (weight * col_scale[:, None]).T
    output = builders.dequantize_asymmetric().reference(
        q @ weight.T,
        zero_point=zero_point,
        weight_sum=weight.sum(dim=1),
        row_scale=row_scale,
        col_scale=col_scale,
        bias=torch.zeros(N),
    )
    torch.testing.assert_close(output, real, rtol=1e-5, atol=1e-3)


# quantised outputs


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("zero_point", [0, 3, -7])
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.37, 3.0])
def test_quantize_to_int8_as_pytorch(scale, zero_point):
    acc = torch.cat([torch.randn(4000) * 200, torch.arange(-260, 260).repeat(2) * 0.5 * scale])[None]
    expected = torch.quantize_per_tensor(acc, scale, zero_point, torch.qint8).int_repr()
    made = builders.quantize("int8")
    output = made.reference(acc, bias=torch.zeros(acc.shape[1]), scale=scale, zero_point=zero_point)
    assert torch.equal(output.to(torch.int8), expected)
    assert torch.equal(output.trunc(), output)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantize_to_floats_as_pytorch(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = codes[codes.isfinite()].unique()
    halfway = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(t, t + s) for t in (values, halfway) for s in (1, -1)]
    acc = torch.cat([values, halfway, *beside, torch.randn(4000) * 100, torch.randn(4000) * 0.01, -values * 0.0])[None]
    largest = torch.finfo(dtype).max
    acc = acc.clamp(-largest, largest)
    output = builders.quantize(dtype).reference(acc, bias=torch.full((acc.shape[1],), -0.0), scale=1.0)
    assert torch.equal(output, acc.to(dtype).float())


@pytest.mark.parametrize("name", builders.QUANTIZED)
def test_quantized_ranges(name):
    limits = builders.QUANTIZED[name]
    acc = torch.tensor([[math.inf, -math.inf, 1e30, -1e30, math.nan, 0.3]])
    operands = {"bias": torch.zeros(6), "scale": 1.0} | ({"zero_point": 0.0} if limits.digits is None else {})
    output = builders.quantize(name, "identity").reference(acc, **operands)[0]
    assert output[:4].tolist() == [limits.high, limits.low] * 2
    assert output[4].isnan()
    assert output[5] == (0 if limits.digits is None else 0.3125)
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and not name.endswith("int4"):
        info = torch.iinfo(dtype) if limits.digits is None else torch.finfo(dtype)
        assert (limits.low, limits.high) == (info.min, info.max)
        assert builders.quantize(dtype).tree == builders.quantize(name).tree
    for kept in ("f16", "bf16"):  # what a kernel stores
        values = torch.arange(limits.low, limits.high + 1) if limits.digits is None else torch.tensor([limits.high])
        assert torch.equal(values.to(DTYPES[kept]).double(), values.double())


def test_an_activation_before_quantizing():
    acc = torch.tensor([[-3.0, 3.2]])
    output = builders.quantize("uint8", "relu").reference(acc, bias=torch.ones(2), scale=0.1, zero_point=2)
    assert output.tolist() == [[2.0, 44.0]]


def test_a_range_of_ones_own():
    e2m1 = builders.QuantizedRange("float4_e2m1", -6, 6, digits=1, exponent=0)
    acc = torch.tensor([[0.2, 0.25, 0.3, 0.75, 1.2, 1.3, 2.4, 2.6, 3.4, 4.9, 5.1, 9.0, -1.75]])
    output = builders.quantize(e2m1).reference(acc, bias=torch.zeros(13), scale=1.0)
    assert output.tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0, 3.0, 4.0, 6.0, 6.0, -2.0]]


# backward

PARAMS = [
    *((name, {}) for name in builders.ACTIVATIONS),
    ("leaky_relu", {"negative_slope": 0.2}),
    ("elu", {"alpha": 0.5}),
    ("celu", {"alpha": 2.0}),
    ("softplus", {"beta": 2.0, "threshold": 4.0}),
    ("hardtanh", {"min_val": -2.0, "max_val": 0.5}),
    ("hardshrink", {"lambd": 1.0}),
    ("softshrink", {"lambd": 2.0}),
    ("gelu", {"approximate": "tanh"}),
]
EAGER = {
    "identity": lambda x: x,
    "swish": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: F.relu(x).square(),
}


def eager(name):
    return EAGER.get(name) or getattr(F, name, None) or getattr(torch, name)


@pytest.mark.parametrize(("name", "params"), PARAMS, ids=str)
def test_backward_of_every_activation(name, params):
    preact = torch.cat([torch.tensor(KINKS).double(), torch.linspace(-8, 8, 131, dtype=torch.float64)])[None]
    if name == "sqrt":
        preact = preact.abs()
    gradient = torch.randn(preact.shape, dtype=torch.float64)
    made = builders.activation_backward(name, **params)
    given = {"preact": preact} if made.operands else {}
    output = made.reference(gradient, compute_dtype=torch.float64, keep_casts=False, **given)

    leaf = preact.clone().requires_grad_()
    (expected,) = torch.autograd.grad(eager(name)(leaf, **params), leaf, gradient)
    # PyTorch's own backward of hardsigmoid has 1/6 in float32, of float64 tensors too
    torch.testing.assert_close(output, expected, rtol=1e-7 if name == "hardsigmoid" else 1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh", "leaky_relu", "elu", "hardsigmoid", "hardswish"])
def test_backward_selects_where_autograd_does(name):
    preact = torch.tensor([[-9.0, -4.0, 7.0, 9.0]])
    gradient = torch.full((1, 4), math.inf)
    leaf = preact.clone().requires_grad_()
    (expected,) = torch.autograd.grad(eager(name)(leaf), leaf, gradient)
    assert torch.equal(builders.activation_backward(name).reference(gradient, preact=preact), expected)


@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh"])
def test_backward_of_a_mask_multiplies_nothing(name):
    operations = {getattr(node, "operation", None) for node in builders.activation_backward(name).tree}
    assert "mul" not in operations and "where" in operations


def test_training_and_its_backward_fit_together():
    acc, bias, gradient = torch.randn(M, N), torch.randn(N), torch.randn(M, N)
    saved = builders.train("mish").reference(acc, bias=bias)
    leaf = acc.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.mish(leaf + bias), leaf, gradient)
    output = builders.activation_backward("mish").reference(gradient, preact=saved["preact"])
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


# identity, and errors


@pytest.mark.parametrize("call", FORMULAS, ids=str)
def test_the_same_call_gives_the_same_object(call):
    name, *arguments = call
    build = getattr(builders, name)
    assert build(*arguments) is build(*arguments)
    assert "acc" in inspect.getdoc(build)


def test_defaults_may_be_left_out_or_not():
    assert builders.gate() is builders.gate("silu") is builders.gate(activation="silu")
    assert builders.softcap() is builders.softcap(cap=30.0)
    assert builders.gate("gelu", approximate="tanh") == builders.gate("gelu_tanh")
    assert builders.softcap(30.0) != builders.softcap(50.0)
    assert builders.quantize("int8") != builders.quantize("int4")


def test_names():
    assert builders.residual_activation().name == "residual_then_relu"
    assert builders.activation_backward("gelu").name == "backward_gelu"
    assert builders.quantize("float8_e5m2", "relu").name == "quantize_float8_e5m2_relu"
    assert builders.softcap().name == "softcap"


@pytest.mark.parametrize(
    "build",
    [
        builders.scale,
        builders.alpha_beta,
        builders.residual_activation,
        builders.gate,
        builders.dequantize_per_tensor,
        builders.dequantize_asymmetric,
        builders.train,
        builders.activation_backward,
        lambda name, **params: builders.quantize("int8", name, **params),
    ],
)
def test_unknown_activations(build):
    with pytest.raises(EpilogueError, match="unknown activation 'gleu'; expected one of identity, relu"):
        build("gleu")
    with pytest.raises(EpilogueError, match="activation elu takes alpha, got beta"):
        build("elu", beta=1)


@pytest.mark.parametrize("cap", [0, -1.0, math.inf, math.nan, "30"])
def test_caps(cap):
    with pytest.raises(EpilogueError, match="softcap: expected a positive, finite number for the cap, got"):
        builders.softcap(cap)


@pytest.mark.parametrize("dtype", ["int7", torch.float64, torch.bfloat16, 8])
def test_unknown_ranges(dtype):
    with pytest.raises(DtypeError, match=r"quantize: expected one of int8, uint8, .*, got"):
        builders.quantize(dtype)


def test_arguments_that_cannot_be_hashed():
    with pytest.raises(EpilogueError, match=r"bias_activation: expected names and numbers, got list \['gelu'\]"):
        builders.bias_activation(["gelu"])


NOT_NAMES = (
    0,
    -1.5,
    True,
    b"relu",
    torch.ones(2),
    F.relu,
    torch.nn.ReLU(),
    torch.bfloat16,
    int,
    object(),
    [1],
    {"a": 1},
)
BUILDERS = [getattr(builders, name) for name in builders.__all__ if inspect.isfunction(getattr(builders, name))]


@pytest.mark.parametrize(
    "given", ["relu", "", *NOT_NAMES, builders.identity, 10**5000], ids=lambda given: type(given).__name__
)
def test_cast_takes_epilogues_only(given):
    with pytest.raises(
        EpilogueError, match=r"^cast: expected an Epilogue, or None for the product itself, got "
    ) as error:
        builders.cast("bf16", given)
    assert "\n" not in str(error.value)


def test_cast_says_how_to_name_an_epilogue():
    for given, advice in (
        ("relu", r"write cast\('bf16', builders.activation\('relu'\)\)"),
        (F.relu, "function decorated with @epilogues.epilogue, which may call it"),
        (torch.nn.ReLU(), "function decorated with @epilogues.epilogue, which may call it"),
        (builders.gate, r"call the builder: gate\(...\)"),
    ):
        with pytest.raises(EpilogueError, match=advice):
            builders.cast("bf16", given)
        if given != "relu":
            with pytest.raises(EpilogueError, match=advice):
                builders.activation(given)
    with pytest.raises(EpilogueError, match="it is an epilogue already: call it inside a function"):
        builders.gate(builders.identity())


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_wrong_arguments_are_the_packages_own_errors(build):
    for given in (*NOT_NAMES, "no such name", builders.identity, builders.identity(), 10**5000, 1j, math.nan):
        for arguments in ((given,), ("bf16" if build is builders.cast else "int8", given)):
            try:
                build(*arguments)
            except EpilogueError as error:
                assert len(str(error)) < 1000
            except TypeError as error:
                assert "; it takes " in str(error) and str(error).startswith(build.__name__)


def test_wrong_parameters_are_the_packages_own_errors():
    for given in (None, *NOT_NAMES[3:]):
        with pytest.raises(EpilogueError):
            builders.bias_activation("elu", alpha=given)


def test_arguments_that_a_builder_does_not_take():
    with pytest.raises(TypeError, match=r"^bias: too many positional arguments; it takes no arguments"):
        builders.bias("relu")
    with pytest.raises(TypeError, match=r"^activation: missing a required argument: 'name'; it takes name, \*\*params"):
        builders.activation()


def test_names_that_are_close():
    with pytest.raises(EpilogueError, match=r"unknown activation 'gleu'; .*; did you mean .*gelu"):
        builders.activation("gleu")
    with pytest.raises(DtypeError, match=r"got 'INT8'; did you mean .*int8"):
        builders.quantize("INT8")
    with pytest.raises(DtypeError, match=r"dtype 'bf17' has no place .*; did you mean bf16"):
        builders.cast("bf17")
    assert builders.cast("BF16") is builders.cast(torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", 5, 1), "expected finite numbers low < high, got 5, 1"),
        (("x", float("nan"), 1), "expected finite numbers low < high"),
        (("x", 0, float("inf")), "expected finite numbers low < high"),
        (("x", "a", 1), "expected finite numbers low < high"),
        ((3, 0, 1), "expected a name such as 'int6', got 3"),
        (("a b", 0, 1), "expected a name"),
        (("x", 0, 1, 2.5), "expected a number of binary digits or None, got 2.5"),
        (("x", 0, 1, 3, "low"), "expected a whole number for the exponent"),
    ],
)
def test_ranges_that_make_no_sense(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(EpilogueError, match=message):
        builders.QuantizedRange(*arguments)
    builders.quantize(builders.QuantizedRange("int6", -32, 31))

"""Every spelling that PyTorch has for what the language computes, against PyTorch on tensors."""

import functools
import math
import operator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, EpilogueError, Row, builders, epilogue
from epilogues.operations import OPERATIONS
from epilogues.torch_calls import CALLS
from epilogues.torch_losses import LOSSES

INF, NAN = math.inf, math.nan
X = torch.cat([torch.tensor([0.0, -0.0, INF, -INF, NAN, 3.0, -3.0, 0.5, -0.5]), torch.linspace(-7, 7, 63)]).reshape(
    8, 9
)
Y = X.flip(0).contiguous()


def words(text):
    return text.split()


UNARY = words(
    """
    abs absolute sign sgn floor ceil trunc fix frac reciprocal square sqrt rsqrt deg2rad rad2deg neg negative
    positive exp exp2 expm1 log log2 log10 log1p erf erfc sin cos tan asin arcsin acos arccos atan arctan sinh
    cosh tanh asinh arcsinh acosh arccosh atanh arctanh sigmoid relu round logit
    """
)
UNARY_CONDITIONS = words(
    """
    isnan isinf isfinite isposinf isneginf signbit logical_not
    """
)
BINARY = words(
    """
    add sub subtract mul multiply div divide true_divide minimum maximum fmin fmax copysign hypot fmod remainder
    floor_divide pow atan2 arctan2 logaddexp logaddexp2 xlogy
    """
)
BINARY_CONDITIONS = words(
    """
    gt greater ge greater_equal lt less le less_equal eq ne not_equal logical_and logical_or logical_xor
    """
)
#: Functions of torch.nn.functional, with the arguments they are tried with besides the defaults.
FUNCTIONAL = {
    "relu": [{}],
    "relu6": [{}],
    "silu": [{}],
    "mish": [{}],
    "hardswish": [{}],
    "hardsigmoid": [{}],
    "selu": [{}],
    "softsign": [{}],
    "tanhshrink": [{}],
    "logsigmoid": [{}],
    "sigmoid": [{}],
    "tanh": [{}],
    "gelu": [{}, {"approximate": "tanh"}],
    "leaky_relu": [{}, {"negative_slope": 0.2}],
    "hardtanh": [{}, {"min_val": -2.0, "max_val": 0.5}],
    "elu": [{}, {"alpha": 0.5}],
    "celu": [{}, {"alpha": 0.5}],
    "softplus": [{}, {"beta": 2, "threshold": 3}],
    "hardshrink": [{}, {"lambd": 1.0}],
    "softshrink": [{}, {"lambd": 1.0}],
    "threshold": [{"threshold": 0.1, "value": 7}],
}
MODULES = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.SiLU(),
    nn.Mish(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.SELU(),
    nn.Softsign(),
    nn.Tanhshrink(),
    nn.LogSigmoid(),
    nn.Sigmoid(),
    nn.Tanh(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.LeakyReLU(0.2),
    nn.Hardtanh(),
    nn.Hardtanh(-2.0, 0.5),
    nn.ELU(),
    nn.ELU(0.5),
    nn.CELU(),
    nn.CELU(0.5),
    nn.Softplus(),
    nn.Softplus(2, 3),
    nn.Hardshrink(),
    nn.Hardshrink(1.0),
    nn.Softshrink(1.0),
    nn.Threshold(0.1, 7.0),
    nn.Sequential(nn.ELU(), nn.Hardswish()),
]
#: What is written with operators, with numbers, and by names that have arguments of their own.
EXPRESSIONS = {
    "abs()": lambda x, y: abs(x),
    "round to hundredths": lambda x, y: torch.round(x, decimals=2),
    "round to tens": lambda x, y: x.round(decimals=-1),
    "special.round": lambda x, y: torch.special.round(x, decimals=1),
    "x % y": lambda x, y: x % y,
    "x % 2.5": lambda x, y: x % 2.5,
    "7 % x": lambda x, y: 7 % x,
    "x // y": lambda x, y: x // y,
    "x // 0.1": lambda x, y: x // 0.1,
    "7 // x": lambda x, y: 7 // x,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div None": lambda x, y: x.div(y, rounding_mode=None),
    "x ** y": lambda x, y: x**y,
    "2 ** x": lambda x, y: 2**x,
    "pow(2, x)": lambda x, y: torch.pow(2, x),
    "x ** 2.5": lambda x, y: x**2.5,
    "x.pow(3)": lambda x, y: x.pow(3),
    "pow(exponent=)": lambda x, y: torch.pow(x, exponent=-1),
    **{f"x ** {n}": lambda x, y, n=n: x**n for n in (0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.0, 2.0)},
    "float_power": lambda x, y: torch.float_power(x, 2).float(),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcmul method": lambda x, y: x.addcmul(x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "addcdiv method": lambda x, y: x.addcdiv(x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp by a value": lambda x, y: x.lerp(y, weight=y),
    "clamp by values": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp by a value": lambda x, y: x.clamp(min=y),
    "clamp_min": lambda x, y: x.clamp_min(0.5),
    "clamp_max by a value": lambda x, y: torch.clamp_max(x, y),
    "nan_to_num": lambda x, y: torch.nan_to_num(x, 1.0, posinf=2.0, neginf=-2.0),
    "heaviside": lambda x, y: torch.heaviside(x, y),
    "ldexp": lambda x, y: torch.ldexp(x, torch.round(y)),
    "logit": lambda x, y: torch.logit(x, eps=0.1),
    "special.logit": lambda x, y: torch.special.logit(x, 0.1),
    "expit": lambda x, y: torch.special.expit(x),
    "prelu": lambda x, y: torch.where(x > 0, x, x * y) if isinstance(x, torch.Tensor) else F.prelu(x, y),
    "x > 0": lambda x, y: torch.where(x > 0, x, y),
    "0 < x": lambda x, y: torch.where(0 < x, x, y),  # noqa: SIM300
    "x >= y": lambda x, y: torch.where(x >= y, x, y),
    "x < 1": lambda x, y: torch.where(x < 1, 1.0, 0.0),
    "x <= 1": lambda x, y: torch.where(x <= 1, x, 0),
    "x == 3": lambda x, y: torch.where(x == 3, 5.0, x),
    "3 == x": lambda x, y: torch.where(3 == x, 5.0, x),  # noqa: SIM300
    "x != y": lambda x, y: torch.where(x != y, x, 5.0),
    "where method": lambda x, y: x.where(x > y, y),
    "where method, number": lambda x, y: x.where(x > y, 0.5),
    "where(condition=...)": lambda x, y: torch.where(condition=x > 0, input=x, other=y),
    "masked_fill": lambda x, y: x.masked_fill(torch.isnan(x), 0.0),
    "torch.masked_fill": lambda x, y: torch.masked_fill(x, x < y, value=-1),
    "&": lambda x, y: torch.where((x > 0) & (y > 0), x, y),
    "|": lambda x, y: torch.where((x > 0) | (y > 0), x, y),
    "^": lambda x, y: torch.where((x > 0) ^ (y > 0), x, y),
    "~": lambda x, y: torch.where(~(x > 0), x, y),
    "& True": lambda x, y: torch.where((x > 0) & True, x, y),
    "False | ": lambda x, y: torch.where(False | (x > 0), x, y),
    "bitwise": lambda x, y: torch.where(torch.bitwise_and(x > 0, torch.bitwise_not(y > 0)), x, y),
    "logical_not": lambda x, y: torch.where((x > 0).logical_not(), x, y),
    "conditions compared": lambda x, y: torch.where((x > 0) == (y > 0), x, y),
    "where of conditions": lambda x, y: torch.where(torch.where(x > 0, y > 0, y < -1), x, y),
    "condition * value": lambda x, y: (x > 0) * y,
    "value + condition": lambda x, y: y + (x > 0),
    "1 - condition": lambda x, y: (1 - (x > 0).float()) * y,
    "condition * 2": lambda x, y: (x > 0) * 2 * y,
    "condition + condition": lambda x, y: ((x > 0) + (y > 0)) * x,
    "condition * condition": lambda x, y: torch.where((x > 0) * (y > 0), x, y),
    "condition / value": lambda x, y: (x > 0) / y,
    "exp(condition)": lambda x, y: torch.exp(x > 0) * y,
    "condition.float()": lambda x, y: (x > 0).float(),
    "condition.to()": lambda x, y: (x > 0).to(torch.bfloat16).float() * y,
    "value.bool()": lambda x, y: torch.where(x.bool(), y, 1.0),
    "value.to(bool)": lambda x, y: torch.where(x.to(torch.bool), y, 1.0),
    "isnan": lambda x, y: torch.where(x.isnan(), y, x),
    "square, sum of products": lambda x, y: torch.square(x) * 0.5 + y**2 * 0.5,
    "operator": lambda x, y: operator.abs(operator.mod(x, 2)),
}
#: Methods of numpy's scalars and functions, that on symbols go by torch's names.
NUMPY = {
    "power": (lambda x: np.power(x, 2), lambda x: x**2),
    "equal": (lambda x: torch.where(np.float32(3) == x, 1.0, 0.0), lambda x: (x == 3).float()),
    "less": (lambda x: torch.where(np.float32(1) < x, 1.0, 0.0), lambda x: (x > 1).float()),
    "absolute": (lambda x: np.absolute(x), torch.abs),
    "fabs": (lambda x: np.fabs(x), torch.abs),
    "rint": (lambda x: np.rint(x), torch.round),
    "arctan2": (lambda x: np.arctan2(x, 2.0), lambda x: torch.atan2(x, torch.tensor(2.0))),
    "floor_divide": (lambda x: np.float32(7) // x, lambda x: 7 // x),
}


def check(traced, eager=None, tolerance=1e-5):
    """What is traced computes what PyTorch does on the tensors: NaN, infinities, and within rounding."""
    made = epilogue(lambda acc, other: traced(acc, other) + 0 * other.nan_to_num(0, 0, 0))
    actual = made.reference(X, other=Y)
    expected = (eager or traced)(X, Y)
    assert expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-7, equal_nan=True)


def as_value(result):
    return torch.where(result, 1.0, 0.0)


def test_every_name_is_tried():
    tried = {*UNARY, *UNARY_CONDITIONS, *BINARY, *BINARY_CONDITIONS, *FUNCTIONAL}
    tried |= {name for text in EXPRESSIONS for name in CALLS if name in text}
    elsewhere = "rrelu dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout"
    python = "truediv floordiv mod pos and or xor invert bitwise_or bitwise_xor bitwise_and bitwise_not"
    casts = "to type half bfloat16 min max clip log_sigmoid special_round zeros_like ones_like"
    special = "sinc entr ndtr xlog1py angle conj conj_physical resolve_conj resolve_neg is_floating_point is_complex"
    rest = set(f"{elsewhere} {python} {casts} {special}".split()) | set(LOSSES)  # the last two: test_epilogues_losses
    assert set(CALLS) - tried - rest == set()


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    check(lambda x, y: getattr(torch, name)(x))
    if hasattr(torch.Tensor, name):
        check(lambda x, y: getattr(x, name)())
    if hasattr(torch.special, name):
        check(lambda x, y: getattr(torch.special, name)(x))


@pytest.mark.parametrize("name", UNARY_CONDITIONS)
def test_unary_conditions(name):
    check(lambda x, y: as_value(getattr(torch, name)(x)))
    check(lambda x, y: as_value(getattr(x, name)()))


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    check(lambda x, y: getattr(torch, name)(x, y))
    if hasattr(torch.Tensor, name):
        check(lambda x, y: getattr(x, name)(y))
    if hasattr(torch.special, name):
        check(lambda x, y: getattr(torch.special, name)(x, y))


@pytest.mark.parametrize("name", BINARY_CONDITIONS)
def test_binary_conditions(name):
    check(lambda x, y: as_value(getattr(torch, name)(x, y)))
    check(lambda x, y: as_value(getattr(x, name)(y)))
    if not name.startswith("logical"):
        check(lambda x, y: as_value(getattr(torch, name)(x, 3)))


@pytest.mark.parametrize(("name", "arguments"), [(name, given) for name, many in FUNCTIONAL.items() for given in many])
def test_functional(name, arguments):
    function = getattr(F, name)
    check(lambda x, y: function(x, **arguments))
    if name != "gelu":  # whose argument is a keyword
        check(lambda x, y: function(x, *arguments.values()))
    if callable(getattr(torch, name, None)):
        check(lambda x, y: getattr(torch, name)(x, **arguments))
    if hasattr(torch.Tensor, name):
        check(lambda x, y: getattr(x, name)(**arguments))


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_modules(module):
    check(lambda x, y: module(x))
    torch.testing.assert_close(epilogue(module).reference(X), module(X), rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name):
    check(EXPRESSIONS[name])


@pytest.mark.parametrize("name", NUMPY)
def test_numpy(name):
    traced, eager = NUMPY[name]
    check(lambda x, y: traced(x), lambda x, y: eager(x))


@pytest.mark.parametrize("name", [name for name, row in OPERATIONS.items() if "gelu_" not in name])
def test_every_row_is_a_function(name):
    row, function = OPERATIONS[name], getattr(ep, name)
    given = [X, Y, X * 0.5][: row.arity]
    mixed = [t > 0 if position in row.conditions else t for position, t in enumerate(given)]
    expected = row.reference(*mixed).float()
    assert torch.equal(function(*mixed).float().nan_to_num(), expected.nan_to_num())  # eagerly

    def traced(x, y):
        values = [x, y, x * 0.5][: row.arity]
        values = [v > 0 if position in row.conditions else v for position, v in enumerate(values)]
        result = function(*values)
        return as_value(result) if row.result == "condition" else result

    check(traced, lambda x, y: expected)


def test_round_of_python():
    check(lambda x, y: round(x), lambda x, y: torch.round(x))
    check(lambda x, y: round(x, 2), lambda x, y: torch.round(x, decimals=2))


def test_functions_of_numbers():
    assert ep.pow(2.0, 3) == 8 and ep.pow(2.0, 1) == 2 and ep.sqrt(4) == 2 and ep.floor_divide(1.0, 0.1) == 1.0 // 0.1
    assert ep.gt(2, 1) is True and ep.where(ep.lt(2, 1), 3.0, 4.0) == 4
    assert ep.hardtanh(3.0) == 1 and ep.nan_to_num(NAN) == 0 and ep.round(2.346, 2) == 2.35


def test_hardtanh_has_the_gradient_of_torch():
    for name in ("relu6", "hardtanh"):
        x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 6.0, 7.0, -0.0], requires_grad=True)
        (ours,) = torch.autograd.grad(getattr(ep, name)(x).sum(), x)
        (theirs,) = torch.autograd.grad(getattr(F, name)(x).sum(), x)
        assert torch.equal(ours, theirs)


def test_names_of_activations():
    assert len(builders.ACTIVATIONS) > 25
    for name in builders.ACTIVATIONS:
        made = builders.activation(name)
        function = getattr(F, name, None) or getattr(torch, name, None)
        if function is not None:
            expected = function(X)
            torch.testing.assert_close(made.reference(X), expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert builders.activation("elu", alpha=0.5).reference(-X)[0, 5] == F.elu(-X, 0.5)[0, 5]
    with pytest.raises(EpilogueError, match="activation elu takes alpha, got beta"):
        builders.activation("elu", beta=1)


def test_tensors_of_zeros_and_ones_are_the_numbers():
    made = epilogue(lambda acc: torch.where(acc > 0, torch.ones_like(acc), torch.zeros_like(acc)) * acc)
    assert made.tree == epilogue(lambda acc: torch.where(acc > 0, 1.0, 0.0) * acc).tree


def test_to_takes_where_and_when():
    made = epilogue(lambda acc: acc.to(torch.bfloat16, copy=True, non_blocking=True))
    assert made.tree == epilogue(lambda acc: acc.to(torch.bfloat16)).tree


def _leaky(acc, bias: Row, alpha, gate: Aux):
    return torch.where(acc > 0, acc, acc * alpha) * gate + bias


def test_a_partial_function():
    made = epilogue(functools.partial(_leaky, alpha=2.0), name="leaky")
    assert {name: kind.value for name, kind in made.operands.items()} == {"bias": "row", "gate": "aux"}
    acc, bias, gate = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    assert torch.equal(made.reference(acc, bias=bias, gate=gate), torch.where(acc > 0, acc, acc * 2) * gate + bias)

"""The operation table against PyTorch: references, derivatives, device functions, on ordinary and on edge values."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from eager_functions import eager_functions
from torch.nn import functional as F

import epilogues as ep
from epilogues import functions
from epilogues.dtypes import torch_dtype
from epilogues.operations import OPERATIONS, is_condition
from epilogues.tree import Accumulator, Apply, Constant, EpilogueTree, Kind, Operand, Store
from epilogues.validation import validate

INF, NAN = math.inf, math.nan
TINY = 1e-40  # subnormal in float32
EDGES = [0.0, -0.0, INF, -INF, NAN, TINY, -TINY, 1e-45, 3e38, -3e38, 88.8, -88.8, -104.0, -5.5, -13.4]
EDGES += [1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 2.0, 6.0, 20.0]

#: The PyTorch computation of each row, as a user would write it, written independently of the table.
EXPECTED = {
    "identity": lambda x: x,
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "fma": lambda x, y, z: (x.double() * y.double() + z.double()).to(x.dtype),
    "clamp": torch.clamp,
    "square": lambda x: x**2,
    "relu": F.relu,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope.item()),
    "threshold": lambda x, threshold, value: F.threshold(x, threshold.item(), value.item()),
    "silu": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": lambda x, beta, threshold: F.softplus(x, beta.item(), threshold.item()),
    "mish": F.mish,
    "elu": lambda x, alpha: F.elu(x, alpha.item()),
    "selu": F.selu,
    "celu": lambda x, alpha: F.celu(x, alpha.item()),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": lambda x, lambd: F.hardshrink(x, lambd.item()),
    "softshrink": lambda x, lambd: F.softshrink(x, lambd.item()),
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "entr": torch.special.entr,
}
#: Rows whose name is that of the torch function.
EXPECTED |= {name: getattr(torch, name) for name in OPERATIONS if name not in EXPECTED}

#: Further inputs of rows that take parameters where PyTorch takes numbers.
PARAMETERS = {
    "leaky_relu": [(0.01,), (0.0,), (-0.5,), (2.0,), (INF,)],
    "threshold": [(0.1, 20.0), (0.0, 0.0), (-1.0, NAN), (NAN, 1.0), (-INF, 0.0)],
    "softplus": [(1.0, 20.0), (2.0, 5.0), (0.5, -1.0)],
    "elu": [(1.0,), (0.3,), (2.0,)],
    "celu": [(1.0,), (0.3,), (2.0,)],
    "hardshrink": [(0.5,), (0.0,), (2.5,)],
    "softshrink": [(0.5,), (0.0,), (2.5,)],
}
BOUNDS = [(-1.0, 1.0), (2.0, -2.0), (-INF, INF), (-INF, 0.5), (0.5, INF), (NAN, 1.0), (-1.0, NAN), (1.0, 1.0)]

#: Formulas of several torch operations, where PyTorch has one kernel that may round otherwise: within these ulps.
ULPS = {"softplus": 4, "elu": 4, "celu": 4}

#: PyTorch's vectorised and scalar kernels differ: in the derivative at NaN, and in the sign of a zero result.
UNSETTLED_AT_NAN = {"hardshrink", "softshrink", "selu", "hardswish"}
UNSETTLED_ZEROS = {"softshrink"}

BINARY = [name for name, row in OPERATIONS.items() if row.arity == 2 and name not in PARAMETERS]
NUMBERS = [name for name in BINARY if not OPERATIONS[name].conditions]


def same(actual: torch.Tensor, expected: torch.Tensor, ulps: float = 0) -> None:
    """Equal bit for bit, but for the payload of NaNs; or up to some units in the last place, signs of zero included."""
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.bool:
        assert torch.equal(actual, expected)
        return
    assert torch.equal(torch.isnan(actual), torch.isnan(expected))
    finite = ~torch.isnan(expected)
    left, right = actual[finite], expected[finite]
    if ulps:
        unit = torch.finfo(left.dtype)
        torch.testing.assert_close(left, right, rtol=ulps * unit.eps, atol=ulps * unit.smallest_normal * unit.eps)
    else:
        assert torch.equal(left, right)
    assert torch.equal(torch.signbit(left), torch.signbit(right))


def values(dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return torch.cat(
        [
            torch.tensor([*EDGES, largest, -largest, torch.finfo(dtype).smallest_normal], dtype=dtype),
            torch.linspace(-12, 12, 97, dtype=dtype),
            torch.arange(-9.5, 9.5, 1, dtype=dtype),  # halves, for round
        ]
    )


def test_every_row_is_compared():
    assert EXPECTED.keys() == OPERATIONS.keys()
    assert all(name == row.name == row.functor for name, row in OPERATIONS.items())
    assert all(len(row.derivatives) == row.arity for row in OPERATIONS.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [n for n, row in OPERATIONS.items() if row.arity == 1 and not row.conditions])
def test_unary(name, dtype):
    x = values(dtype)
    same(OPERATIONS[name].reference(x), EXPECTED[name](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_binary(name, dtype):
    x, y = values(dtype)[:, None], torch.tensor(EDGES, dtype=dtype)[None, :]
    x, y = (t.contiguous() for t in torch.broadcast_tensors(x, y))
    same(OPERATIONS[name].reference(x, y), EXPECTED[name](x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "given"), [(name, given) for name, many in PARAMETERS.items() for given in many])
def test_parameters(name, given, dtype):
    x, given = values(dtype), [torch.tensor(number, dtype=dtype) for number in given]
    actual, expected = OPERATIONS[name].reference(x, *given), EXPECTED[name](x, *given)
    if name in UNSETTLED_ZEROS:
        actual, expected = actual + 0.0, expected + 0.0
    same(actual, expected, ULPS.get(name, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["fma", "lerp", "clamp"])
def test_ternary(name, dtype):
    sides = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0, -2.5, 0.5, 1 / 3, TINY], dtype=dtype)
    x, y, z = torch.broadcast_tensors(values(dtype)[:, None, None], sides[:, None], sides)
    x, y, z = x.contiguous(), y.contiguous(), z.contiguous()
    same(OPERATIONS[name].reference(x, y, z), EXPECTED[name](x, y, z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_clamp_by_numbers(bounds, dtype):
    x = values(dtype)
    low, high = (torch.tensor(bound, dtype=dtype) for bound in bounds)
    same(OPERATIONS["clamp"].reference(x, low, high), torch.clamp(x, *bounds))


def test_fma_rounds_once():
    x = torch.tensor(1 + 2**-12)
    assert OPERATIONS["fma"].reference(x, x, torch.tensor(-1 - 2**-11)) == 2**-24
    assert x * x - (1 + 2**-11) == 0


def test_where_and_logic():
    condition = torch.tensor([True, False])[:, None]
    same(
        OPERATIONS["where"].reference(condition, values(torch.float32), torch.tensor(2.0)),
        torch.where(condition, values(torch.float32), 2.0),
    )
    for name in ("logical_and", "logical_or", "logical_xor"):
        same(OPERATIONS[name].reference(condition, condition.T), EXPECTED[name](condition, condition.T))
    same(OPERATIONS["logical_not"].reference(condition), ~condition)


def inputs_of(row, points):
    """The row's inputs at each point of a product of the points; conditions alternate."""
    if row.name in PARAMETERS:
        given = [(x, *rest) for rest in PARAMETERS[row.name] for x in points if all(map(math.isfinite, rest))]
    else:
        given = list(itertools.product(points if row.arity < 3 else points[:14], repeat=row.arity))
    columns = list(zip(*given, strict=True))
    made = [torch.tensor(column, dtype=torch.float64) for column in columns]
    for position in row.conditions:
        made[position] = torch.arange(len(given)) % 2 == 0
    return made


def derivative(row, position, inputs, f=functions):
    """What the row says the derivative is, as a tensor like the output."""
    output = row.reference(*inputs)
    value = row.derivatives[position](f, tuple(inputs), output)
    return torch.as_tensor(value, dtype=torch.float64).expand_as(output)


def by_autograd(row, position, inputs):
    """The derivative as PyTorch has it, of its own function where that takes tensors, else of the reference."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    if row.name in PARAMETERS and position == 0:
        # PyTorch takes numbers there: one call for each of them
        parts = []
        for x, *rest in zip(*leaves, strict=True):
            parts.append(EXPECTED[row.name](x.repeat(8), *rest)[0])
        output = torch.stack(parts)
    else:
        output = row.reference(*leaves) if row.name in PARAMETERS else EXPECTED[row.name](*leaves)
    (gradient,) = torch.autograd.grad(output.sum(), leaves[position], allow_unused=True)
    return torch.zeros_like(inputs[position]) if gradient is None else gradient


DIFFERENTIABLE = [
    (name, position)
    for name, row in OPERATIONS.items()
    for position, rule in enumerate(row.derivatives)
    if rule is not None
]
CONSTANT = [
    (name, position)
    for name, row in OPERATIONS.items()
    for position in range(row.arity)
    if row.no_derivative(position) == "zero everywhere" and row.result == "value"
]
POINTS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 2.5, -2.5, 1e-3, INF, -INF, NAN, 30.0, -30.0, 2.0, 1e-310]

#: For a derivative with respect to what is a parameter of F.softplus and the like there is no autograd; and there
#: the reference's where() leaks NaN and infinity out of the branch that is not taken.
LEAKS = {("leaky_relu", 1), ("softplus", 1), ("elu", 1), ("celu", 1), ("softshrink", 1)}


@pytest.mark.parametrize(("name", "position"), DIFFERENTIABLE)
def test_derivatives_are_those_of_autograd(name, position):
    row = OPERATIONS[name]
    generator = torch.Generator().manual_seed(0)
    random = (torch.randn(12, generator=generator, dtype=torch.float64) * 2).tolist()
    for points in (POINTS, random):
        inputs = inputs_of(row, points)
        actual, expected = derivative(row, position, inputs), by_autograd(row, position, inputs)
        keep = torch.ones(actual.shape, dtype=torch.bool)
        if (name, position) in LEAKS:
            keep = torch.stack([torch.isfinite(t) for t in inputs]).all(0) & torch.isfinite(expected)
        if name in UNSETTLED_AT_NAN:
            keep &= ~torch.isnan(inputs[0])
        if name == "remainder":  # PyTorch's vectorised fmod gives up where the quotient overflows
            keep &= torch.isfinite(inputs[0] / inputs[1]) | (inputs[1] == 0)
        # PyTorch computes those of hardsigmoid and celu with 1/6 and 1/alpha of float32
        torch.testing.assert_close(actual[keep], expected[keep], rtol=1e-6, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(("name", "position"), CONSTANT)
def test_derivatives_that_are_zero_everywhere(name, position):
    row = OPERATIONS[name]
    inputs = inputs_of(row, [x for x in POINTS if math.isfinite(x)])
    gradient = by_autograd(row, position, inputs)
    assert not gradient.any()


#: Points inside the domain, away from kinks.
SMOOTH = [0.3, 0.7, -0.4, 1.7, 2.2, -1.3]
DOMAIN = {"acosh": (1.1, 9.0), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "atanh": (-0.9, 0.9), "log1p": (-0.9, 9.0)}
DOMAIN |= dict.fromkeys(["sqrt", "rsqrt", "log", "log2", "log10", "pow", "xlogy", "reciprocal", "entr"], (0.1, 9.0))
DOMAIN["logit"] = (0.1, 0.9)


@pytest.mark.parametrize(("name", "position"), DIFFERENTIABLE)
def test_derivatives_are_those_of_finite_differences(name, position):
    row = OPERATIONS[name]
    low, high = DOMAIN.get(name, (-INF, INF))
    inputs = inputs_of(row, [x for x in SMOOTH if low < x < high])
    step = 1e-6
    above, below = list(inputs), list(inputs)
    above[position], below[position] = inputs[position] + step, inputs[position] - step
    actual, expected = (
        derivative(row, position, inputs),
        (row.reference(*above) - row.reference(*below)) / (2 * step),
    )
    # ties of minimum and the like, and the jumps of fmod, are no place for finite differences
    smooth = torch.ones(actual.shape, dtype=torch.bool)
    for left, right in itertools.combinations(inputs, 2):
        smooth &= ~torch.eq(left, right) if left.dtype == right.dtype else True
    assert smooth.any()
    torch.testing.assert_close(actual[smooth], expected[smooth], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "position"), DIFFERENTIABLE)
def test_derivatives_trace_to_valid_trees(name, position):
    row = OPERATIONS[name]

    def gradient(acc, y: ep.Aux, z: ep.Aux, g: ep.Aux):
        given = [acc > y if i in row.conditions else x for i, x in enumerate((acc, y, z)[: row.arity])]
        output = getattr(functions, name.removesuffix("_erf").removesuffix("_tanh"), None)
        output = ep.gelu(acc, "tanh" if name == "gelu_tanh" else "none") if "gelu_" in name else output(*given)
        return row.derivatives[position](functions, tuple(given), output) * g + 0 * (acc + y + z)

    tree = ep.Epilogue(gradient).tree
    validate(tree)
    assert EpilogueTree.from_json(tree.to_json()) == tree
    torch.manual_seed(0)
    acc, y, z, g = (torch.rand(4, 5, dtype=torch.float64) + 0.1 for _ in range(4))
    inputs = [acc > y if i in row.conditions else x for i, x in enumerate((acc, y, z)[: row.arity])]
    expected = derivative(row, position, inputs) * g
    actual = ep.Epilogue(gradient).reference(acc, compute_dtype=torch.float64, keep_casts=False, y=y, z=z, g=g)
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_reasons_for_no_derivative(name):
    row = OPERATIONS[name]
    for position, rule in enumerate(row.derivatives):
        reason = row.no_derivative(position)
        assert (reason == "") == (rule is not None)
        if row.result == "condition":
            assert reason == "the result is a condition"
        elif position in row.conditions:
            assert reason == "the input is a condition"


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_arity_and_result_are_those_of_the_reference(name):
    row = OPERATIONS[name]
    inputs = [torch.tensor([0.5, 2.0]) for _ in range(row.arity)]
    for position in row.conditions:
        inputs[position] = torch.tensor([True, False])
    result = row.reference(*inputs)
    assert result.shape == (2,)
    assert result.dtype == (torch.bool if row.result == "condition" else torch.float32)
    with pytest.raises(TypeError):
        row.reference(*inputs, *inputs, *inputs, *inputs)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_row_in_a_tree(name):
    row = OPERATIONS[name]
    leaves = (Accumulator(), Operand("y", Kind.ROW, 0), Constant(0.5))[: row.arity]
    inputs = tuple(Apply("gt", (leaf, Constant(0.0))) if i in row.conditions else leaf for i, leaf in enumerate(leaves))
    node = Apply(name, inputs)
    assert is_condition(node) == (row.result == "condition")
    value = Apply("where", (node, Constant(1.0), Constant(0.0))) if is_condition(node) else node
    tree = EpilogueTree.from_json(EpilogueTree((Store("D", value),)).to_json())
    acc, y = torch.randn(3, 4), torch.rand(4)
    given = [acc, y, torch.tensor(0.5)][: row.arity]
    given = [t > 0 if i in row.conditions else t for i, t in enumerate(given)]
    operands = {"y": y} if row.arity > 1 else {}
    same(ep.Epilogue.from_tree(tree).reference(acc, **operands), row.reference(*given).float())


def test_every_row_has_its_device_function():
    source = (Path(__file__).parents[1] / "gemm_ops" / "cuda" / "functors.cuh").read_text()
    exact = source[source.index("namespace exact {") : source.index("namespace fast {")]
    types = {"value": "float", "condition": "bool"}
    device = {
        name: (result, [parameter.split()[0] for parameter in parameters.split(",")])
        for result, name, parameters in re.findall(r"^EP_DEVICE (float|bool) (\w+)\((.*?)\)", exact, re.MULTILINE)
    }
    assert device == {
        row.functor: (
            types[row.result],
            ["bool" if position in row.conditions else "float" for position in range(row.arity)],
        )
        for row in OPERATIONS.values()
    }


@pytest.mark.parametrize("name", OPERATIONS)
def test_pytorch_computes_it_in_the_dtypes_that_the_row_names(name: str) -> None:
    for dtype in map(torch_dtype, OPERATIONS[name].dtypes):
        x = torch.linspace(-2, 2, 12).reshape(3, 4).to(dtype)
        assert eager_functions()[name](x, x.abs() + 0.5).shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", [F.elu, F.celu, F.softplus, lambda x: F.elu(x, 0.3), lambda x: F.softplus(x, 3.0)])
def test_autograd_through_the_reference_is_pytorchs_at_large_values(function, dtype):
    """A branch that is not taken overflows for large values, which must not reach the gradient."""
    x = torch.tensor([0.0, -0.0, 20.0, -20.0, 50.0, 89.0, -89.0, 1e4, -1e4, 1e30, INF], dtype=dtype)[None]
    traced = ep.epilogue(lambda acc: function(acc), name="traced")
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (found,) = torch.autograd.grad(traced.reference(ours, compute_dtype=dtype).sum(), ours)
    (expected,) = torch.autograd.grad(function(theirs).sum(), theirs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [name for name in eager_functions() if name in OPERATIONS])
def test_autograd_through_the_reference_is_pytorchs_for_every_row(name: str) -> None:
    function = eager_functions()[name]
    points = [0.0, -0.0, 20.0, -20.0, 50.0, -50.0, 89.0, -89.0, 1e4, -1e4, 1e30, -1e30]
    x, y = torch.tensor([points], dtype=torch.float64), torch.full((1, len(points)), 0.7, dtype=torch.float64)
    theirs = x.clone().requires_grad_()
    result = function(theirs, y)
    if not result.requires_grad:
        pytest.skip("PyTorch has no gradient of it")
    try:
        traced = ep.epilogue(lambda acc, y: function(acc, y), name="traced")
    except ep.EpilogueError:  # it does not use y
        traced = ep.epilogue(lambda acc: function(acc, None), name="traced")
    ours = x.clone().requires_grad_()
    found = traced.reference(ours, compute_dtype=torch.float64, **dict.fromkeys(traced.operands, y))
    (expected,) = torch.autograd.grad(result.sum(), theirs)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), ours)[0], expected, equal_nan=True)

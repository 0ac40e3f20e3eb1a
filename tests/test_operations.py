"""The operation table against PyTorch, on ordinary and on edge values."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from epilogues.operations import OPERATIONS

INF, NAN = math.inf, math.nan
EDGES = [
    0.0,
    -0.0,
    INF,
    -INF,
    NAN,
    1e-40,
    -1e-40,
    1e-45,
    3e38,
    -3e38,
    88.8,
    -88.8,
    -104.0,
    -5.5,
    -13.4,
    1.0,
    -1.0,
]

#: The PyTorch computation of each row, as a user would write it, written independently of the table.
EXPECTED = {
    "identity": lambda x: x,
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "clamp": lambda x, low, high: torch.clamp(x, low.item(), high.item()),
    "relu": F.relu,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope.item()),
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, but for the payload of NaNs."""
    assert actual.dtype == expected.dtype
    assert torch.equal(torch.isnan(actual), torch.isnan(expected))
    finite = ~torch.isnan(expected)
    assert torch.equal(actual[finite], expected[finite])
    assert torch.equal(torch.signbit(actual)[finite], torch.signbit(expected)[finite])


def values(dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.tensor(EDGES, dtype=dtype), torch.linspace(-12, 12, 97, dtype=dtype)])


def test_every_row_is_compared():
    assert EXPECTED.keys() == OPERATIONS.keys()
    assert all(name == row.name for name, row in OPERATIONS.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name, row in OPERATIONS.items() if row.arity == 1])
def test_unary(name, dtype):
    x = values(dtype)
    same(OPERATIONS[name].reference(x), EXPECTED[name](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "minimum", "maximum"])
def test_binary(name, dtype):
    x, y = values(dtype)[:, None], torch.tensor(EDGES, dtype=dtype)[None, :]
    same(OPERATIONS[name].reference(x, y), EXPECTED[name](*torch.broadcast_tensors(x, y)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slope", [0.01, 0.0, -0.5, 2.0, INF])
def test_leaky_relu(slope, dtype):
    x, slope = values(dtype), torch.tensor(slope, dtype=dtype)
    same(OPERATIONS["leaky_relu"].reference(x, slope), EXPECTED["leaky_relu"](x, slope))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "bounds", [(-1.0, 1.0), (2.0, -2.0), (-INF, INF), (-INF, 0.5), (0.5, INF), (NAN, 1.0), (-1.0, NAN)]
)
def test_clamp(bounds, dtype):
    x = values(dtype)
    low, high = (torch.tensor(bound, dtype=dtype) for bound in bounds)
    same(OPERATIONS["clamp"].reference(x, low, high), EXPECTED["clamp"](x, low, high))


def test_clamp_has_the_gradient_of_torch_clamp_at_its_bounds():
    gradients = []
    for clamp in (OPERATIONS["clamp"].reference, EXPECTED["clamp"]):
        x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], requires_grad=True)
        clamp(x, torch.tensor(-1.0), torch.tensor(1.0)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_arity_is_what_the_reference_takes(name):
    row = OPERATIONS[name]
    inputs = [torch.tensor([0.5, 2.0]) for _ in range(row.arity)]
    assert row.reference(*inputs).shape == (2,)
    with pytest.raises(TypeError):
        row.reference(*inputs, *inputs, *inputs, *inputs)


def test_every_row_has_its_device_function():
    source = (Path(__file__).parents[1] / "gemm_ops" / "cuda" / "functors.cuh").read_text()
    exact = source[source.index("namespace exact {") : source.index("namespace fast {")]
    device = {
        name: len(parameters.split(","))
        for name, parameters in re.findall(r"^EP_DEVICE float (\w+)\((.*?)\)", exact, re.MULTILINE)
    }
    assert device == {row.functor: row.arity for row in OPERATIONS.values()}

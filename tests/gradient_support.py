"""What the tests of gradients share: epilogues, operands, and gradients by autograd and by backward trees."""

import math

import pytest
import torch
from gemm_support import every_kind

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar, builders, epilogue
from epilogues.reference import evaluate
from epilogues.tree import Kind

INF, NAN = math.inf, math.nan
M, N = 6, 5
EXACT = {"compute_dtype": torch.float64, "keep_casts": False}


@epilogue
def shared(acc, scale: Row, residual: Aux):
    z = acc * scale
    y = ep.silu(z)
    return y * z + ep.tanh(y) * residual + z / (1 + ep.abs(residual))


@epilogue
def several(acc, bias: Row, column: Column, other: Aux):
    z = acc + bias
    return {"D": ep.gelu(z) * column, "preact": z, "mixed": ep.sigmoid(z * other)}


@epilogue
def side_output(acc, bias: Row, extra: Aux, factor: Scalar):
    """``extra`` and ``factor`` feed the second output only."""
    return {"D": ep.relu(acc + bias), "side": ep.tanh(acc * factor) + extra}


@epilogue
def kinks(acc, low: Row, high: Column, slope: Scalar, other: Aux):
    z = ep.clamp(acc, low, 3.0) + ep.relu(acc) + ep.abs(other)
    y = ep.maximum(z, other) + ep.minimum(acc, high)
    return torch.where(y > low, y, slope * y) + ep.leaky_relu(acc, slope)


@epilogue
def unannotated(acc, scale, bias, alpha, residual):
    return (acc * scale + bias) * alpha + residual * acc


@epilogue
def masked(acc, mask: Aux, bias: Row):
    return torch.where(mask > 0, acc + bias, 0.0) + ep.sign(acc) * ep.floor(bias)


@epilogue
def of_operands(acc, p: Row, q: Row, column: Column):
    """What operands alone are computed with, before they meet the accumulator."""
    return acc * ep.exp(p * q) + ep.square(column) * p


CASES = {name: make() for name, make in builders.SUITE.items()}
CASES |= {f.name: f for f in (shared, several, side_output, kinks, unannotated, masked, of_operands, every_kind)}
CASES |= {name: builders.bias_activation(name) for name in builders.ACTIVATIONS}

#: Of AUTO operands, what the tests give.
AUTO = {"scale": Kind.ROW, "bias": Kind.COLUMN, "alpha": Kind.SCALAR, "residual": Kind.AUX}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def operands_of(tree, m_shape=(M,), n=N, dtype=torch.float64):
    shapes = {Kind.ROW: (n,), Kind.COLUMN: m_shape, Kind.SCALAR: (1,), Kind.AUX: (*m_shape, n)}
    kinds = {op.name: AUTO[op.name] if op.kind is Kind.AUTO else op.kind for op in tree.operands}
    return {name: torch.randn(shapes[kind], dtype=torch.float64).to(dtype) for name, kind in kinds.items()}


def grads_of(tree, shape, dtype=torch.float64):
    return {store.name: torch.randn(shape, dtype=torch.float64).to(dtype) for store in tree.outputs}


def by_autograd(tree, acc, operands, grads, **how):
    """Gradients by name as PyTorch has them, of the reference; zeros where there are none."""
    leaves = {"accumulator": acc, **operands}
    leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    given = {name: leaf for name, leaf in leaves.items() if name != "accumulator"}
    outputs = evaluate(tree, leaves["accumulator"], given, **how)
    used = [name for name in grads if outputs[name].requires_grad]
    found = torch.autograd.grad(
        [outputs[name] for name in used],
        list(leaves.values()),
        [grads[name] for name in used],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True))


def by_backward(backward, acc, operands, grads, **how):
    outputs = evaluate(backward.forward.tree, acc, operands, **how)
    return backward.gradients(grads, outputs, operands, **how)

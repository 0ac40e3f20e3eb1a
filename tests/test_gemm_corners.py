"""Corners of calls that a new user ran into: fake and odd tensors, compiled callers, unusual layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import epilogues as ep
import gemm_ops
from epilogues import Row, Scalar
from gemm_ops import FallbackWarning, FusedLinear, ProblemError
from gemm_ops.outputs import overlap


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield


@ep.epilogue
def scaled(acc, bias: Row, alpha: Scalar):
    return ep.gelu(acc + bias) * alpha


def test_one_row_by_a_batch() -> None:
    a, b = torch.randn(33), torch.randn(2, 3, 33, 19)
    result = gemm_ops.matmul(a, b)
    assert isinstance(result, torch.Tensor) and result.shape == (2, 3, 19)
    torch.testing.assert_close(result, torch.matmul(a, b))


def test_meta() -> None:
    layer = FusedLinear(33, 19, device="meta", epilogue="gelu")
    result = layer(torch.empty(7, 33, device="meta"))
    assert isinstance(result, torch.Tensor) and result.is_meta and result.shape == (7, 19)
    with pytest.raises(ProblemError, match="on one device, got meta and cpu"):
        gemm_ops.linear(torch.empty(7, 33, device="meta"), torch.empty(19, 33))


def test_vmap_and_higher_derivatives() -> None:
    """The reference backend is ordinary PyTorch, so that function transforms go through it."""
    x, weight, bias = torch.randn(5, 33), torch.randn(19, 33), torch.randn(4, 19)
    rows = torch.vmap(lambda row: gemm_ops.linear(row, weight, "silu"))(x)
    torch.testing.assert_close(rows, torch.nn.functional.silu(x @ weight.t()))
    biases = torch.vmap(lambda entry: gemm_ops.linear(x, weight, "relu", bias=entry))(bias)
    torch.testing.assert_close(biases, torch.relu(x @ weight.t() + bias[:, None]))
    hessian = torch.func.hessian(lambda row: gemm_ops.linear(row, weight, "tanh").sum())(x[0])  # type: ignore[union-attr]
    expected = torch.func.hessian(lambda row: torch.tanh(row @ weight.t()).sum())(x[0])
    torch.testing.assert_close(hessian, expected)


def test_compiled_with_a_scalar_that_changes() -> None:
    x, weight, bias = torch.randn(5, 33), torch.randn(19, 33), torch.randn(19)

    def call(x: torch.Tensor, alpha: float) -> torch.Tensor:
        result = gemm_ops.linear(x, weight, scaled, bias=bias, alpha=alpha)
        assert isinstance(result, torch.Tensor)
        return result + 1

    compiled = torch.compile(call, backend="eager")
    for alpha in (1.0, 2.0, 3.5):
        torch.testing.assert_close(compiled(x, alpha), call(x, alpha))


def test_compiled_training_step() -> None:
    model = nn.Sequential(FusedLinear(33, 19, epilogue="gelu"), nn.Linear(19, 3))
    x = torch.randn(5, 33)
    compiled = torch.compile(model, backend="eager")
    compiled(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_lazily_negated_tensors() -> None:
    """Memory holds the opposite of what such a tensor is."""
    z = torch.randn(6, 6, dtype=torch.complex64)
    negated = z.conj().imag
    assert negated.is_neg()
    weight = torch.randn(4, 6)
    torch.testing.assert_close(gemm_ops.linear(negated, weight), negated.clone() @ weight.t())
    torch.testing.assert_close(gemm_ops.linear(weight, negated), weight @ negated.clone().t())
    row = torch.randn(4, dtype=torch.complex64).conj().imag
    result = gemm_ops.linear(negated, weight, "relu", bias=row)
    torch.testing.assert_close(result, torch.relu(negated @ weight.t() + row))


def test_sparse_matrices_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"b: expected a dense tensor .*got a tensor of layout torch\.sparse_csr"):
        gemm_ops.matmul(torch.randn(3, 4), torch.eye(4).to_sparse_csr())
    with pytest.raises(ep.EpilogueError, match="operand bias: expected a dense tensor"):
        gemm_ops.linear(torch.randn(3, 4), torch.randn(5, 4), "relu", bias=torch.randn(5).to_sparse())


def test_halves_of_a_buffer_do_not_overlap() -> None:
    buffer = torch.empty(8, 40)
    left, right = buffer[:, :20], buffer[:, 20:]
    assert not overlap(left, right) and not overlap(right, left)
    assert not overlap(buffer[:, :7], buffer[1:, 7:])
    assert overlap(left, buffer[:, 19:]) and overlap(buffer[:, 19:], left)
    assert overlap(left, buffer) and overlap(buffer[3:], left)
    assert overlap(buffer[:, 30:], buffer.view(-1)[39:])
    assert not overlap(buffer[:4], buffer[4:])
    outputs = {"D": left[:, :19], "preact": right[:, :19]}
    x, weight, bias = torch.randn(8, 33), torch.randn(19, 33), torch.randn(19)
    gemm_ops.linear(x, weight, ep.builders.train(), bias=bias, out=outputs)
    torch.testing.assert_close(outputs["preact"], x @ weight.t() + bias)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _hooked() -> nn.Linear:
    layer = nn.Linear(3, 4)
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), "is computed"),
        (nn.LazyLinear(4), "does not know its in_features"),
        (Doubled(3, 4), "Doubled has a forward of its own"),
        (_hooked(), "has hooks"),
    ],
    ids=["weight_norm", "lazy", "subclass", "hooked"],
)
def test_from_linear_refuses_what_it_would_not_replace(layer: nn.Linear, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FusedLinear.from_linear(layer, epilogue="gelu")


def test_from_linear_takes_a_lazy_layer_that_has_run() -> None:
    layer = nn.LazyLinear(4)
    layer(torch.randn(2, 3))
    fused = FusedLinear.from_linear(layer, epilogue="relu")
    x = torch.randn(5, 3)
    torch.testing.assert_close(fused(x), torch.relu(layer(x)))

"""Gradients at the corners: extents of 0, results that are changed in place, and gradients that are what came in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, Row
from gemm_ops import FusedLinear, linear, matmul, recording

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


EMPTY = [
    ((4, 0), (0, 5)),
    ((4, 3), (3, 0)),
    ((0, 3), (3, 5)),
    ((2, 4, 0), (0, 5)),
    ((2, 4, 3), (3, 0)),
    ((0, 4, 3), (3, 5)),
    ((2, 4, 0), (2, 0, 5)),
    ((2, 4, 3), (2, 3, 0)),
    ((0, 2, 3), (0, 3, 2)),
    ((0, 1, 4, 5), (3, 5, 3)),
    ((0,), (0, 5)),
    ((3,), (3, 0)),
    ((0,), (2, 0, 3)),
    ((3,), (0, 3, 2)),
]


@pytest.mark.parametrize("way", ["eager", "static", "dynamic", "twice"])
@pytest.mark.parametrize(("shape_a", "shape_b"), EMPTY, ids=str)
def test_extents_of_0(shape_a: tuple[int, ...], shape_b: tuple[int, ...], way: str) -> None:
    def fused(a: Tensor, b: Tensor) -> Tensor:
        return matmul(a, b, "gelu")  # type: ignore[return-value]

    call: Callable[[Tensor, Tensor], Tensor] = fused
    if way in ("static", "dynamic"):
        call = torch.compile(fused, fullgraph=True, backend="aot_eager", dynamic=way == "dynamic")
    found = []
    for each in (call, lambda a, b: F.gelu(a @ b)):
        torch.manual_seed(0)
        leaves = leaf(*shape_a), leaf(*shape_b)
        result = each(*leaves)
        grads = torch.autograd.grad(result.sum(), leaves, create_graph=way == "twice")
        if way == "twice":
            grads += torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
        found.append((result, *grads))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("k", "n", "m"), [(0, 3, 4), (3, 0, 4), (3, 2, 0), (0, 0, 0)])
def test_a_layer_of_extents_of_0(k: int, n: int, m: int) -> None:
    layer, plain, x = FusedLinear(k, n, epilogue="gelu"), nn.Linear(k, n), leaf(m, k)
    plain.load_state_dict(layer.state_dict())
    found = torch.autograd.grad(layer(x).sum(), (x, *layer.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(F.gelu(plain(x)).sum(), (x, *plain.parameters())))


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.ReLU(inplace=True),
    "add": lambda y: y.add_(torch.ones_like(y)),
    "rows": lambda y: y.index_fill_(-1, torch.tensor([1]), 2.0),
    "a view": lambda y: (y[..., 1:].mul_(3.0), y)[1],
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("epilogue", [None, "gelu"])
@pytest.mark.parametrize("n", [5, 8])
def test_a_padded_result_may_be_changed_in_place(
    change: Callable[[Tensor], Tensor], compiled: bool, epilogue: str | None, n: int
) -> None:
    """As one that is not padded: it is a view of memory, and none to autograd."""
    found = []
    for padded in (True, False):
        torch.manual_seed(0)
        x, weight, bias = leaf(2, 4, 3), leaf(n, 3), leaf(n)

        def step(x: Tensor, weight: Tensor, bias: Tensor, padded: bool = padded) -> Tensor:
            result = linear(x, weight, epilogue, bias=bias, padded_output=padded)
            return change(result)  # type: ignore[arg-type]

        call = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled and padded else step
        result = call(x, weight, bias)
        if not compiled:  # a graph has the changed values in memory of its own
            assert result.stride(-2) == (8 if padded else n)
        found.append((result, *torch.autograd.grad(result.square().sum(), (x, weight, bias))))
    torch.testing.assert_close(*found)


@ep.epilogue
def gated_residual(acc, residual: Aux, scale: Row):
    return acc + residual * scale


@pytest.mark.parametrize(
    ("epilogue", "written"),
    [
        (gated_residual, [2]),  # the accumulator's is what comes in
        (ep.builders.bias_activation(None), []),
        (ep.builders.residual(), []),
        (ep.builders.residual("gelu"), [1]),  # the residual's gradient is what comes in
        (ep.builders.bias_activation("gelu"), [1]),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_comes_in_is_not_written_again(
    epilogue: ep.Epilogue, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs of each elementwise pass of a backward."""
    found: list[int] = []
    compute = recording.run_elementwise

    def watched(x: Tensor, passed: ep.Epilogue, *arguments: object) -> dict[str, Tensor]:
        found.append(len(passed.outputs))
        return compute(x, passed, *arguments)

    monkeypatch.setattr(recording, "run_elementwise", watched)
    x, weight, bias, residual = leaf(4, 7), leaf(5, 7), leaf(5), leaf(4, 5)
    known = {"bias": bias, "residual": residual, "scale": leaf(5)}
    operands = {name: known[name] for name in epilogue.operands}
    inputs = [x, weight, *operands.values()]
    result = linear(x, weight, epilogue, **operands)
    grads = torch.autograd.grad(result.square().sum(), inputs)
    assert found == written
    reference = epilogue.reference(x @ weight.t(), **operands)
    for one, other in zip(grads, torch.autograd.grad(reference.square().sum(), inputs), strict=True):
        torch.testing.assert_close(one, other)

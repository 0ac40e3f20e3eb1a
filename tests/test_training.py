"""Gradients of ``matmul``, ``linear`` and ``FusedLinear``: against autograd through PyTorch, and what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sample_epilogues import every_kind
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import epilogues as ep
import gemm_ops
from epilogues import Aux, EpilogueError, Row
from gemm_ops import FusedLinear, linear, matmul
from gemm_ops.gradients import storing_forward

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@ep.epilogue
def two_outputs(acc, bias: Row, gate: Aux):
    z = acc + bias
    return {"D": ep.silu(z) * gate, "z": z}


def leaf(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def operands_of(lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    shapes = {"scale": (n,), "offset": (*lead, 1), "alpha": (1,), "residual": (*lead, n)}
    return {name: leaf(*shape) for name, shape in shapes.items()}


SHAPES = {
    "matrices": ((4, 5), (5, 3)),
    "leading dimensions": ((2, 3, 5), (5, 3)),
    "a vector": ((5,), (5, 3)),
    "batches": ((2, 4, 5), (2, 5, 3)),
    "batches of b": ((4, 5), (2, 5, 3)),
    "batches that broadcast": ((2, 1, 4, 5), (3, 5, 3)),
    "a vector and batches": ((5,), (2, 5, 3)),
    "one row": ((1, 5), (5, 3)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_gradcheck(name: str) -> None:
    torch.manual_seed(0)
    shape_a, shape_b = SHAPES[name]
    a, b = leaf(*shape_a), leaf(*shape_b)
    lead = tuple(torch.matmul(a, b).shape[:-1])
    operands = operands_of(lead, shape_b[-1])

    def call(a: Tensor, b: Tensor, *values: Tensor) -> Any:
        return matmul(a, b, every_kind, **dict(zip(operands, values, strict=True)))

    assert torch.autograd.gradcheck(call, [a, b, *operands.values()])
    if name in ("matrices", "batches"):
        assert torch.autograd.gradgradcheck(call, [a, b, *operands.values()])


def test_gradcheck_of_several_outputs() -> None:
    torch.manual_seed(0)
    x, weight, bias, gate = leaf(4, 5), leaf(3, 5), leaf(3), leaf(4, 3)

    def call(*values: Tensor) -> Any:
        x, weight, bias, gate = values
        return tuple(linear(x, weight, two_outputs, bias=bias, gate=gate).values())  # type: ignore[union-attr]

    assert torch.autograd.gradcheck(call, [x, weight, bias, gate])
    assert torch.autograd.gradgradcheck(call, [x, weight, bias, gate])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "mish": F.mish,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_trains_as_pytorchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fused = FusedLinear(7, 5, epilogue=name, dtype=dtype)
    plain = nn.Linear(7, 5, dtype=F64)
    plain.load_state_dict({key: value.double() for key, value in fused.state_dict().items()})
    x = torch.randn(2, 4, 7).to(dtype).requires_grad_()
    y = x.detach().double().requires_grad_()
    grad = torch.randn(2, 4, 5).to(dtype)
    fused(x).backward(grad)
    ACTIVATIONS[name](plain(y)).backward(grad.double())
    limit = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
    for one, other in ((x, y), (fused.weight, plain.weight), (fused.bias, plain.bias)):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == dtype
        assert one.grad.stride() == one.stride(), "as the parameter lies, so that nothing is copied"
        assert (one.grad.double() - other.grad).norm() <= limit * other.grad.norm()


def test_only_what_requires_grad_gets_a_gradient() -> None:
    names = ("x", "weight", "bias", "gate")
    for wanted in range(1, 2 ** len(names)):
        values = {name: leaf(*shape) for name, shape in zip(names, ((4, 5), (3, 5), (3,), (4, 3)), strict=True)}
        for place, name in enumerate(names):
            values[name].requires_grad_(bool(wanted >> place & 1))
        x, weight, bias, gate = values.values()
        linear(x, weight, two_outputs, bias=bias, gate=gate)["D"].sum().backward()  # type: ignore[call-overload]
        expected = [value.detach().clone().requires_grad_(value.requires_grad) for value in values.values()]
        (F.silu(F.linear(*expected[:3])) * expected[3]).sum().backward()
        for value, other in zip(values.values(), expected, strict=True):
            assert (value.grad is None) == (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(value.grad, other.grad)


def kept(call: Callable[[], object]) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        call()
    return found


def test_what_is_kept() -> None:
    """The matrices, and of the accumulator what the backward reads: nothing, an output, or one matrix more."""
    x, weight, bias = leaf(4, 5, dtype=torch.float32), leaf(3, 5, dtype=torch.float32), leaf(3, dtype=torch.float32)

    def count(epilogue: Any, **operands: Tensor) -> list[tuple[int, ...]]:
        return sorted(tuple(tensor.shape) for tensor in kept(lambda: linear(x, weight, epilogue, **operands)))

    assert count(ep.builders.bias(), bias=bias) == [(4, 5), (5, 3)]
    assert count("relu", bias=bias) == [(4, 3), (4, 5), (5, 3)], "relu is told by its output"
    assert count("gelu", bias=bias) == [(4, 3), (4, 5), (5, 3)], "the pre-activation"
    weight.requires_grad_(False)
    assert count("gelu", bias=bias) == [(4, 3), (5, 3)], "x is for a weight that takes no gradient not needed"
    with torch.no_grad():
        assert kept(lambda: linear(x, weight, "gelu", bias=bias)) == []


def test_the_forward_stores_what_the_backward_reads() -> None:
    gelu = ep.builders.bias_activation("gelu")
    forward = storing_forward(gelu, ("accumulator", "bias"), torch.bfloat16)
    assert len(forward.outputs) == 2 and storing_forward(gelu, (), torch.bfloat16) == gelu
    relu = ep.builders.bias_activation("relu")
    assert storing_forward(relu, ("accumulator", "bias"), torch.bfloat16) == relu
    result = linear(leaf(4, 5), leaf(3, 5), "gelu", bias=leaf(3))
    assert isinstance(result, Tensor), "one output, whatever is stored besides"


def test_a_backward_that_cannot_be_differentiated_says_so() -> None:
    """Where the second derivative needs what was not kept; the reference backend can."""

    @ep.epilogue
    def cubes(acc, shift: Row):
        return ep.exp(acc * acc) * shift

    x, weight, shift = leaf(4, 5), leaf(3, 5), leaf(3)

    def twice() -> Tensor:
        result = linear(x, weight, cubes, shift=shift)
        (grad,) = torch.autograd.grad(result.sum(), x, create_graph=True)  # type: ignore[union-attr]
        return torch.autograd.grad(grad.sum(), x)[0]

    plain = torch.exp(F.linear(x, weight).square()) * shift
    (first,) = torch.autograd.grad(plain.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), x)
    try:
        torch.testing.assert_close(twice(), expected)
    except EpilogueError as error:
        assert "cannot be differentiated again" in str(error)


def test_checkpointing_accumulation_and_none() -> None:
    torch.manual_seed(0)
    layer = FusedLinear(6, 6, epilogue="gelu", dtype=F64)
    x = leaf(3, 6)
    for function in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        x.grad = None
        layer.zero_grad()
        for _ in range(2):  # accumulated
            function(x).sum().backward()
        assert layer.weight.grad is not None and x.grad is not None
        found = layer.weight.grad.clone(), x.grad.clone()
        y = x.detach().clone().requires_grad_()
        weight, bias = (value.detach().clone().requires_grad_() for value in (layer.weight, layer.bias))
        (2 * F.gelu(F.linear(y, weight, bias)).sum()).backward()
        torch.testing.assert_close(found, (weight.grad, y.grad))


def test_a_changed_tensor_is_noticed() -> None:
    x, weight = leaf(4, 5), leaf(3, 5)
    result = linear(x, weight, "gelu")
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()  # type: ignore[union-attr]


def test_autocast_trains_in_its_dtype() -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x)
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    y = x.detach().clone().requires_grad_()
    F.gelu(F.linear(y, layer.weight, layer.bias)).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert (x.grad - y.grad).norm() < 2e-2 * y.grad.norm()


def test_padded_outputs_train() -> None:
    x, weight = leaf(4, 5), leaf(7, 5)
    result = linear(x, weight, "gelu", padded_output=True)
    assert isinstance(result, Tensor) and result.stride() == (8, 1)
    result.sum().backward()
    found = x.grad, weight.grad
    y, other = (value.detach().clone().requires_grad_() for value in (x, weight))
    F.gelu(F.linear(y, other)).sum().backward()
    torch.testing.assert_close(found, (y.grad, other.grad))


def test_out_does_not_go_with_gradients() -> None:
    with pytest.raises(gemm_ops.ProblemError, match="out= does not go with gradients"):
        linear(leaf(4, 5), leaf(3, 5), "gelu", out=torch.empty(4, 3, dtype=F64))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_model_compiles_without_graph_breaks(backend: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        FusedLinear(6, 9, epilogue="gelu"), FusedLinear(9, 9, epilogue="silu", bias=False), FusedLinear(9, 4)
    )
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(2, rows, 6)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, result = model(one), compiled(two)
        torch.testing.assert_close(result, expected)
        model.zero_grad()
        other.zero_grad()
        expected.square().sum().backward()
        result.square().sum().backward()
        torch.testing.assert_close(two.grad, one.grad)
        for left, right in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected)


def test_compiled_calls_with_operands_padding_out_and_autocast() -> None:
    x, weight = torch.randn(4, 6), torch.randn(7, 6)
    scale, residual = torch.randn(7), torch.randn(4, 7)
    epilogue = ep.builders.SUITE["residual"]()

    def call(x: Tensor, out: Tensor) -> Any:
        operands = {"scale": scale, "bias": scale, "alpha": 0.5, "residual": residual}
        first = linear(x, weight, epilogue, padded_output=True, **operands)
        return first, linear(x, weight, epilogue, out=out, **operands), matmul(x, weight.t(), "relu")

    out = torch.full((4, 7), float("nan"))
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(x, out)
    expected = call(x, torch.empty(4, 7))
    torch.testing.assert_close(found, expected)
    assert found[0].stride() == (8, 1)
    torch.testing.assert_close(out, expected[1])
    layer = FusedLinear(6, 7, epilogue="gelu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compiled(x)
        torch.testing.assert_close(result, layer(x))
    assert result.dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_opcheck(grad: bool) -> None:
    from gemm_ops.operators import describe, flatten

    x, weight = torch.randn(4, 6, requires_grad=grad), torch.randn(5, 6, requires_grad=grad)
    for epilogue, operands in (
        ("gelu", {"bias": torch.randn(5, requires_grad=grad)}),
        (ep.builders.scale(), {"alpha": 0.5}),
        (two_outputs, {"bias": torch.randn(5), "gate": torch.randn(4, 5, requires_grad=grad)}),
    ):
        text, names, _ = describe(epilogue, operands)  # type: ignore[arg-type]
        trained = [name for name in names if getattr(operands[name], "requires_grad", False)]
        needs = ",".join(["accumulator", *trained]) if grad else ""
        arguments = (x, weight.t(), *flatten(text, names, operands), needs, False)  # type: ignore[arg-type]
        torch.library.opcheck(torch.ops.gemm_ops.matmul.default, arguments)
        if not grad:
            *described, _, padded_output = arguments
            torch.library.opcheck(torch.ops.gemm_ops.matmul_inference.default, (*described, padded_output))


def test_graphs_without_gradients_have_the_operator_without_autograd() -> None:
    layer, x, graphs = FusedLinear(6, 4, epilogue="gelu"), torch.randn(3, 6), []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=keep)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    assert torch.equal(compiled(x), layer(x)), "compiled anew where gradients are recorded"
    operators = [torch.ops.gemm_ops.matmul_inference, torch.ops.gemm_ops.matmul]
    assert [operator in targets for operator, targets in zip(operators, graphs, strict=True)] == [True, True]


def test_export() -> None:
    model = nn.Sequential(FusedLinear(6, 9, epilogue="gelu"), FusedLinear(9, 4))
    rows = torch.export.Dim("rows")
    for strict in (False, True):
        exported = torch.export.export(model, (torch.randn(3, 6),), dynamic_shapes=({0: rows},), strict=strict)
        targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
        assert targets.count(torch.ops.gemm_ops.matmul.default) == 2
        x = torch.randn(5, 6)
        torch.testing.assert_close(exported.module()(x), model(x))


def test_transforms_of_torch_func() -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    x = torch.randn(3, 6)
    plain = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (row,)).square().sum()

    def other(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return F.gelu(F.linear(row, parameters["weight"], parameters["bias"])).square().sum()

    for transform in (torch.func.grad, lambda f: torch.vmap(torch.func.grad(f), (None, 0))):
        found, expected = transform(loss)(plain, x), transform(other)(plain, x)
        for name in plain:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_products_of_a_backward_at_odd_extents_are_fused_in_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuBLAS is slow: by the kernels directly, and in a graph by the operator, not by PyTorch's operations."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from gemm_ops import product_gradients, recording

    monkeypatch.setattr(product_gradients, "runs_kernels", lambda device: True)
    fused: list[tuple[int, ...]] = []
    direct = recording.multiply_fused
    watched = lambda a, b: fused.append((*a.shape, b.shape[1])) or direct(a, b)  # noqa: E731
    monkeypatch.setattr(recording, "multiply_fused", watched)

    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        result = linear(x, weight, "relu")
        return torch.autograd.grad(result, (x, weight), torch.ones_like(result))  # type: ignore[arg-type]

    for (m, n, k), count in (((16, 8, 24), 0), ((16, 7, 24), 2), ((16, 8, 23), 2)):
        x, weight = leaf(m, k, dtype=torch.bfloat16), leaf(n, k, dtype=torch.bfloat16)
        fused.clear()
        expected = step(x, weight)
        assert len(fused) == count, (m, n, k)
        graph = make_fx(step)(x, weight)
        targets = [node.target for node in graph.graph.nodes]
        assert targets.count(torch.ops.gemm_ops.matmul.default) == 1
        assert targets.count(torch.ops.gemm_ops.matmul_inference.default) == count
        torch.testing.assert_close(graph(x, weight), expected)

"""Gradients of ``gemm_ops.apply``: against autograd through the reference, and what the backward launches and keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_device import HostDevice
from operation_support import packs
from sample_epilogues import every_kind, two_outputs
from torch import Tensor

import epilogues as ep
import gemm_ops
from epilogues import Aux, Row
from gemm_ops.gradients import find_pass

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@ep.epilogue
def plus(acc, residual: Aux):
    return acc + residual


def inputs(dtype: torch.dtype, *lead: int) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    m, n = 5, 7
    x = torch.randn(*lead, m, n).to(dtype)
    shapes = {"scale": (n,), "offset": (m, 1), "alpha": (1,), "residual": (*lead, m, n)}
    return x, {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_gradcheck_once_and_twice(lead: tuple[int, ...]) -> None:
    x, operands = inputs(F64, *lead)
    given = leaves(x, *operands.values())

    def call(x: Tensor, *values: Tensor) -> Any:
        return gemm_ops.apply(x, every_kind, **dict(zip(operands, values, strict=True)))

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_gradcheck_of_several_outputs() -> None:
    x, bias, gate = leaves(torch.randn(4, 6).double(), torch.randn(6).double(), torch.randn(4, 6).double())

    def call(x: Tensor, bias: Tensor, gate: Tensor) -> Any:
        return tuple(gemm_ops.apply(x, plain_outputs, bias=bias, gate=gate).values())  # type: ignore[union-attr]

    @ep.epilogue
    def plain_outputs(acc, bias: Row, gate: Aux):
        z = acc + bias
        return {"D": ep.silu(z) * gate, "z": z, "w": z * gate}

    assert torch.autograd.gradcheck(call, [x, bias, gate])
    assert torch.autograd.gradgradcheck(call, [x, bias, gate])


@pytest.mark.parametrize("pack", packs("f32"), ids=lambda pack: pack.name)
def test_every_operation_has_autograds_gradient(pack: ep.Epilogue) -> None:
    torch.manual_seed(1)
    x, row = torch.rand(3, 7).double() + 0.3, torch.rand(7).double() + 0.3
    grads = []
    for call in (gemm_ops.apply, reference):
        given = leaves(x, row)
        results = call(given[0], pack, row=given[1])
        outputs = [results[name] for name in pack.outputs if results[name].requires_grad]
        ones = [torch.ones_like(output) for output in outputs]
        grads.append(torch.autograd.grad(outputs, given, ones, allow_unused=True))
    for one, other in zip(*grads, strict=True):
        wanted = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def reference(x: Tensor, epilogue: ep.Epilogue, **operands: Tensor) -> Any:
    return epilogue.reference(x, compute_dtype=F64, **operands)


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_kernels_give_the_gradients_of_fp64(dtype: torch.dtype, lead: tuple[int, ...], host: HostDevice) -> None:
    x, operands = inputs(dtype, *lead)
    given = leaves(x, *operands.values())
    grad = torch.randn(x.shape).to(dtype)
    result = gemm_ops.apply(given[0], every_kind, **dict(zip(operands, given[1:], strict=True)))
    assert isinstance(result, Tensor)
    result.backward(grad)
    truth = leaves(x.double(), *(value.double() for value in operands.values()))
    every_kind.reference(
        truth[0], compute_dtype=F64, keep_casts=False, **dict(zip(operands, truth[1:], strict=True))
    ).backward(grad.double())
    assert len(host.launched) == 2, "one kernel forward and one backward"
    limit = {BF16: 2.0**-7, torch.float16: 2.0**-10, F32: 2.0**-20}[dtype]
    for name, one, exact in zip(("x", *operands), given, truth, strict=True):
        assert one.grad is not None and exact.grad is not None
        assert one.grad.dtype == dtype and one.grad.shape == one.shape, name
        error = (one.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < limit, (name, error.item())


def test_only_what_is_needed_is_computed(host: HostDevice) -> None:
    x, operands = inputs(F32)
    for wanted in ("x", *operands):
        given = {name: value.clone().requires_grad_(name == wanted) for name, value in {"x": x, **operands}.items()}
        host.launched.clear()
        result = gemm_ops.apply(
            given.pop("x") if wanted != "x" else given["x"],
            every_kind,
            **{name: value for name, value in given.items() if name != "x"},
        )
        result.sum().backward()  # type: ignore[union-attr]
        kept = {name: value.grad for name, value in given.items() if value.grad is not None}
        assert set(kept) == {wanted}
        _, *backward = host.launched
        # the gradient of what is added last is what comes in
        assert [len(spec.outputs) for spec in backward] == ([] if wanted == "residual" else [1]), wanted


def test_a_gradient_that_is_expanded(host: HostDevice) -> None:
    """As ``sum().backward()`` gives it: one element for all."""
    x = torch.randn(4, 9).requires_grad_()
    result = gemm_ops.apply(x, "silu")
    result.sum().backward()  # type: ignore[union-attr]
    other = x.detach().clone().requires_grad_()
    torch.nn.functional.silu(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert "scalar" in host.launched[1].inputs


def test_an_output_without_a_gradient(host: HostDevice) -> None:
    x, bias, gate = torch.randn(4, 6), torch.randn(6), torch.randn(4, 6)
    for used in (("D",), ("z",), ("D", "z")):
        found, expected = [], []
        for kind, grads in (("apply", found), ("reference", expected)):
            given = leaves(x, bias, gate)
            named = {"bias": given[1], "gate": given[2]}
            results: Any = (
                gemm_ops.apply(given[0], two_outputs, **named)
                if kind == "apply"
                else two_outputs.reference(given[0], **named)
            )
            loss = sum((results[name] * (3 + i)).sum() for i, name in enumerate(used))
            grads += torch.autograd.grad(loss, given, allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None), "what no output with a gradient is made of has none"
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_is_kept_for_the_backward() -> None:
    """No more than what moves the fewest bytes."""

    def reads(epilogue: ep.Epilogue, *needs: str) -> frozenset[tuple[str, str]]:
        return find_pass(epilogue, ("D",), needs, BF16).reads

    assert reads(ep.builders.activation("relu"), "accumulator") == {("output", "D")}
    assert reads(ep.builders.bias_activation("gelu"), "accumulator", "bias") == {("x", ""), ("operand", "bias")}
    assert reads(plus, "accumulator", "residual") == frozenset()
    assert reads(two_outputs, "gate") == {("x", ""), ("operand", "bias")}, "fewer bytes than z in fp32"


def test_tensors_that_are_not_read_are_not_kept() -> None:
    kept: list[Tensor] = []
    x, residual = torch.randn(4, 9).requires_grad_(), torch.randn(4, 9).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = gemm_ops.apply(x, plus, residual=residual)
        assert not kept
        relu = gemm_ops.apply(result, "relu")
        assert [tensor.data_ptr() for tensor in kept] == [relu.data_ptr()]  # type: ignore[union-attr]


def test_gradients_that_are_one_value_are_not_one_tensor_in_the_end() -> None:
    """A residual's gradient is the accumulator's: adding to one in place must not change the other."""
    for shape in ((4, 6), (1, 4, 6)):
        x, residual = leaves(torch.randn(1, 4, 6), torch.randn(shape))
        for _ in range(2):
            gemm_ops.apply(x, plus, residual=residual).sum().backward()  # type: ignore[union-attr]
        assert x.grad is not None and residual.grad is not None
        before = residual.grad.clone()
        x.grad.add_(1.0)
        assert torch.equal(residual.grad, before)


def test_dtypes_of_gradients_are_those_of_what_they_are_of(host: HostDevice) -> None:
    x, residual = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(4, 8).requires_grad_()
    bias = torch.randn(8).half().requires_grad_()

    @ep.epilogue
    def mixed(acc, bias: Row, residual: Aux):
        return ep.cast((acc + bias) * residual, "f32")

    gemm_ops.apply(x, mixed, bias=bias, residual=residual).sum().backward()  # type: ignore[union-attr]
    assert [tensor.grad.dtype for tensor in (x, bias, residual)] == [BF16, torch.float16, F32]  # type: ignore[union-attr]
    exact = (x.detach().double() + bias.detach().double()).sum()
    torch.testing.assert_close(residual.grad.double().sum(), exact, rtol=1e-5, atol=1e-4)  # type: ignore[union-attr]


def test_no_grad_needs_no_backward(host: HostDevice) -> None:
    x = torch.randn(4, 8).requires_grad_()
    with torch.no_grad():
        assert not gemm_ops.apply(x, "relu").requires_grad  # type: ignore[union-attr]
    with torch.inference_mode():
        assert gemm_ops.apply(x, "relu").is_inference()  # type: ignore[union-attr]
    out = torch.empty(4, 8)
    with torch.no_grad():
        assert gemm_ops.apply(x, "relu", out=out) is out
    with pytest.raises(gemm_ops.ProblemError, match="out= does not go with gradients"):
        gemm_ops.apply(x, "relu", out=out)


def test_within_functional_transforms() -> None:
    x = torch.randn(3, 5)
    single = torch.func.grad(lambda x: gemm_ops.apply(x, "silu").sum())(x)  # type: ignore[union-attr]
    other = torch.func.grad(lambda x: torch.nn.functional.silu(x).sum())(x)
    torch.testing.assert_close(single, other)
    per_row = torch.vmap(torch.func.grad(lambda row: gemm_ops.apply(row, "silu").sum()))(x)  # type: ignore[union-attr]
    torch.testing.assert_close(per_row, other)


@pytest.mark.parametrize("row_dtype", [BF16, torch.float16, F32])
@pytest.mark.parametrize("x_dtype", [BF16, torch.float16, F32])
def test_sums_are_as_exact_as_eager_pytorchs_whatever_the_dtypes(
    x_dtype: torch.dtype, row_dtype: torch.dtype, host: HostDevice
) -> None:
    """Terms of a row's gradient do not pass through x's dtype where that holds less."""
    torch.manual_seed(0)
    row = torch.randn(8).to(row_dtype).requires_grad_()
    x = torch.randn(400, 8).to(x_dtype).requires_grad_()

    @ep.epilogue
    def add(acc, bias: Row):
        return ep.cast(acc + bias, "f32")

    grad = torch.randn(400, 8)
    gemm_ops.apply(x, add, bias=row).backward(grad)  # type: ignore[union-attr]
    exact = grad.double().sum(0)
    error = (row.grad.double() - exact).norm() / exact.norm()  # type: ignore[union-attr]
    assert error <= {BF16: 2.0**-8, torch.float16: 2.0**-11, F32: 2.0**-22}[row_dtype]
    assert x.grad is not None and torch.equal(x.grad, grad.to(x_dtype))
    assert len(host.launched) == 2


def test_large_and_small_gradients_of_an_fp32_bias() -> None:
    @ep.epilogue
    def add(acc, bias: Row):
        return ep.cast(acc + bias, "f32")

    for scale in (1e6, 1e-9):
        x, bias = torch.randn(64, 8).half().requires_grad_(), torch.zeros(8, requires_grad=True)
        (gemm_ops.apply(x, add, bias=bias) * scale).sum().backward()  # type: ignore[operator]
        torch.testing.assert_close(bias.grad, torch.full((8,), 64 * scale))


@pytest.mark.parametrize("name", ["elu", "selu", "celu"])
def test_second_derivatives_where_the_first_are_constant(name: str) -> None:
    function = getattr(torch.nn.functional, name)
    results = []
    for call in (lambda x: gemm_ops.apply(x, name), function):
        x = torch.tensor([[1000.0, 100.0, 1.0, -1.0, -100.0]], requires_grad=True)
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(*results)


def test_forward_mode_differentiation(host: HostDevice) -> None:
    """Kernels know nothing of tangents: PyTorch computes, operation by operation."""
    from torch.autograd import forward_ad

    x, tangent = torch.randn(3, 5), torch.randn(3, 5)
    expected = torch.func.jvp(torch.nn.functional.silu, (x,), (tangent,))[1]
    with forward_ad.dual_level():
        result = gemm_ops.apply(forward_ad.make_dual(x, tangent), "silu")
        torch.testing.assert_close(forward_ad.unpack_dual(result).tangent, expected)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.func.jvp(lambda x: gemm_ops.apply(x, "silu"), (x,), (tangent,))[1], expected)
    assert not host.launched

"""``gemm_ops.apply``: arguments, outputs, PyTorch's values; and whole calls through kernels that run on the host."""

from __future__ import annotations

import warnings

import pytest
import torch
from host_device import HostDevice
from torch import Tensor

import epilogues as ep
import gemm_ops
from epilogues import Aux, BroadcastError, Column, EpilogueError, Row
from gemm_ops import FallbackWarning, ProblemError, UnsupportedProblemError, elementwise_call


@ep.epilogue
def scaled(acc, scale: Row, offset: Column, residual: Aux):
    z = acc * scale + offset
    return {"D": torch.relu(z) + residual, "z": ep.cast(z, "f32")}


def operands_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    *lead, n = shape
    return {
        "scale": torch.randn(n).to(dtype),
        "offset": torch.randn(*lead, 1).to(dtype),
        "residual": torch.randn(*shape).to(dtype),
    }


def check(x: Tensor, operands: dict[str, Tensor], results: object) -> None:
    assert isinstance(results, dict)
    expected = scaled.reference(x.double(), compute_dtype=torch.float64, keep_casts=False, **operands)
    for name, dtype in (("D", x.dtype), ("z", torch.float32)):
        assert results[name].shape == x.shape and results[name].dtype == dtype
        limits = {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(results[name].double(), expected[name], **limits)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 8), (1, 16), (64, 1)])
def test_one_kernel_computes_the_call(shape: tuple[int, ...], host: HostDevice) -> None:
    x, operands = torch.randn(shape).bfloat16(), operands_of(*shape)
    check(x, operands, gemm_ops.apply(x, scaled, **operands))
    assert len(host.launched) == 1
    check(x, operands, scaled.elementwise(x, **operands))
    assert len(host.launched) == 2 and host.launched[0] == host.launched[1]


def test_outputs_lie_as_x_does_unless_given(host: HostDevice) -> None:
    x, operands = torch.randn(8, 6).bfloat16().t(), operands_of(6, 8)
    results = gemm_ops.apply(x, scaled, **operands)
    assert isinstance(results, dict) and all(result.stride() == (1, 6) for result in results.values())
    check(x, operands, results)
    out = {"D": torch.empty(6, 16).bfloat16()[:, ::2], "z": torch.empty(6, 9)[:, 1:]}
    given = gemm_ops.apply(x, scaled, out=out, **operands)
    assert isinstance(given, dict) and given["D"] is out["D"] and given["z"] is out["z"]
    check(x, operands, given)
    assert len(host.launched) == 2


def test_in_place(host: HostDevice) -> None:
    x, bias = torch.randn(5, 33).bfloat16(), torch.randn(33).bfloat16()
    before = x.clone()
    assert gemm_ops.apply(x, "gelu", bias=bias, out=x) is x
    torch.testing.assert_close(x, torch.nn.functional.gelu(before + bias), rtol=2e-2, atol=2e-2)
    gate = torch.randn(5, 33).bfloat16()
    kept = gate.clone()
    gate_tree = ep.builders.SUITE["gate"]()
    assert gemm_ops.apply(x, gate_tree, bias=bias, gate=gate, out=gate) is gate
    torch.testing.assert_close(gate, torch.nn.functional.silu(x + bias) * kept, rtol=2e-2, atol=2e-2)
    assert len(host.launched) == 2
    overlapping = torch.randn(200).bfloat16()
    with pytest.raises(ProblemError, match=r"shares memory with an input .*; it may be exactly an input"):
        gemm_ops.apply(overlapping[:165].view(5, 33), "relu", out=overlapping[8:173].view(5, 33))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_without_a_device_pytorch_computes(dtype: torch.dtype) -> None:
    x, bias = torch.randn(2, 3, 5).to(dtype), torch.randn(5).to(dtype)
    result = gemm_ops.apply(x, "silu", bias=bias)
    assert isinstance(result, Tensor) and result.dtype == dtype
    torch.testing.assert_close(result, torch.nn.functional.silu(x + bias), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(result.double(), torch.nn.functional.silu(x.double() + bias.double()).to(dtype).double())
    x.requires_grad_(True)
    out = gemm_ops.apply(x, "silu", bias=bias)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_what_no_kernel_takes(host: HostDevice) -> None:
    x = torch.randn(4, 6)
    for given in (x.double(), torch.randn(0, 6), torch.randn(4, 0)):
        result = gemm_ops.apply(given, "relu")
        assert isinstance(result, Tensor) and torch.equal(result, torch.relu(given))
    with gemm_ops.use_backend("reference"):
        gemm_ops.apply(x, "relu")
    torch.vmap(lambda row: gemm_ops.apply(row, "relu"))(x)
    assert not host.launched


def test_an_epilogue_that_is_a_constant(host: HostDevice) -> None:
    @ep.epilogue
    def nothing(acc):
        return acc * 0 + 2.0

    x = torch.randn(3, 5)
    for backend in ("auto", "reference"):
        with gemm_ops.use_backend(backend):
            result = gemm_ops.apply(x, nothing)
        assert isinstance(result, Tensor) and torch.equal(result, torch.full((3, 5), 2.0))


def test_bad_arguments() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ProblemError, match=r"x should be a torch\.Tensor, got list"):
        gemm_ops.apply([1.0], "relu")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"expected x of shape .* without dimensions"):
        gemm_ops.apply(torch.tensor(1.0), "relu")
    with pytest.raises(ProblemError, match=r"expected x of a floating-point dtype .* got torch\.int64"):
        gemm_ops.apply(torch.arange(3), "relu")
    with pytest.raises(EpilogueError, match="bias"):
        gemm_ops.apply(x, ep.builders.bias())
    with pytest.raises(BroadcastError):
        gemm_ops.apply(x, "relu", bias=torch.randn(5))
    with pytest.raises(ProblemError, match=r"out\['D'\] should be a tensor of shape \(4, 6\)"):
        gemm_ops.apply(x, "relu", out=torch.empty(6, 4))
    with pytest.raises(TypeError, match="epilogue should be"):
        gemm_ops.apply(x, 3)  # type: ignore[arg-type]


def test_falling_back_is_said_or_refused(host: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 6)
    with pytest.warns(FallbackWarning, match="not in one kernel: the kernels take .*, not float64"):
        gemm_ops.apply(x.double(), "relu")
    for backend in ("sm90", "sm80"):
        with gemm_ops.use_backend(backend):
            gemm_ops.apply(x, "relu")  # a kernel, as asked for
            with pytest.raises(
                UnsupportedProblemError, match=f"the backend '{backend}' cannot compute this: .*float64"
            ):
                gemm_ops.apply(x.double(), "relu")
    assert len(host.launched) == 2
    monkeypatch.setattr(elementwise_call, "runs_kernels", lambda device: False)
    with pytest.warns(FallbackWarning, match="the tensors are on the device 'cpu'"):
        ep.builders.activation("relu").elementwise(x)
    with gemm_ops.use_backend("sm90"), pytest.raises(UnsupportedProblemError, match="on the device 'cpu'"):
        gemm_ops.apply(x, "relu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gemm_ops.use_backend("reference"):
            gemm_ops.apply(x, "gelu")
        gemm_ops.apply(torch.randn(0, 6), "gelu")
        gemm_ops.apply(x.requires_grad_(True), "gelu")

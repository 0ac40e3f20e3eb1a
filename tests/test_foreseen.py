"""Which kernels calls would use on a device that is not there: against the rules, and against calls that run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from host_device import HostDevice
from sample_epilogues import every_kind, two_outputs
from torch import Tensor

import epilogues as ep
import gemm_ops
from epilogues import Row
from gemm_ops import dispatch
from gemm_ops.elementwise.spec import ElementwiseSpec
from gemm_ops.errors import ProblemError
from gemm_ops.explain import explain
from gemm_ops.foreseen import Foreseen, foresee
from gemm_ops.kernels.pad_spec import PadSpec
from gemm_ops.kernels.selection import Target
from gemm_ops.kernels.spec import KernelSpec
from gemm_ops.runtime import loading

BF16, F32 = torch.bfloat16, torch.float32
H200 = Target((9, 0), 132)
A100 = Target((8, 0), 108)
SUITE = ep.builders.SUITE


EPILOGUES = {**{name: make() for name, make in SUITE.items()}, "every_kind": every_kind, "two_outputs": two_outputs}


def tensors(
    epilogue: ep.Epilogue, m: int, n: int, k: int, dtype: torch.dtype = BF16, device: str = "meta"
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    shapes = {ep.Kind.ROW: (n,), ep.Kind.COLUMN: (m,), ep.Kind.AUX: (m, n)}
    operands = {
        name: 0.5 if kind is ep.Kind.SCALAR else torch.ones(shapes[kind], dtype=dtype, device=device)
        for name, kind in epilogue.operands.items()
    }
    make = torch.empty if device == "meta" else torch.ones
    return make(m, k, dtype=dtype, device=device), make(n, k, dtype=dtype, device=device).t(), operands


def of(name: str, m: int, n: int, k: int, target: Target = H200, dtype: torch.dtype = BF16, **options: Any) -> Foreseen:
    epilogue = EPILOGUES[name]
    a, b, operands = tensors(epilogue, m, n, k, dtype)
    return foresee(a, b, epilogue, operands, target, **options)


def kinds(found: Foreseen) -> list[str]:
    return [kernel.kind for kernel in found.kernels]


@pytest.mark.parametrize("name", SUITE)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 3000, 2000), (129, 72, 63), (16, 512, 512)])
@pytest.mark.parametrize("device", ["h200", "a100-80"])
def test_the_kernel_is_the_reports(name: str, shape: tuple[int, int, int], device: str) -> None:
    target = {"h200": H200, "a100-80": A100}[device]
    report = explain(EPILOGUES[name], *shape, dtype=BF16, device=device)
    found = of(name, *shape, target)
    assert report.kernel.spec is not None and report.kernel.way == "fused"
    assert found.kernels[0].key == report.kernel.spec.key and found.refusal == "" and found.notes == ()


def test_copies_into_padded_rows_have_a_kernel() -> None:
    assert kinds(of("bias_gelu", 128, 256, 64)) == ["gemm"]
    found = of("bias_gelu", 128, 256, 63)
    assert kinds(found) == ["gemm", "pad_rows"] and found.kernels[1].key == PadSpec("90").key
    assert kinds(of("bias_gelu", 128, 256, 63, A100)) == ["gemm"], "read as they are"
    # an output in padded rows is written otherwise
    contiguous, padded = (of("bias_gelu", 128, 255, 64, padded_output=padded) for padded in (False, True))
    assert contiguous.kernels[0].key != padded.kernels[0].key


def test_few_rows_and_two_passes() -> None:
    (kernel,) = of("bias_gelu", 16, 4096, 4096).kernels
    assert isinstance(kernel, KernelSpec) and kernel.config.family == "skinny" and kernel.arch == "90"
    (tail,) = of("bias_gelu", 16, 4096, 4096, backend="cublas").kernels
    assert isinstance(tail, ElementwiseSpec) and tail.x_dtype == "f32" and tail.arch == "90"
    assert tail.tree.operands[0].dtype == "bf16"
    assert kinds(of("bias_gelu", 16, 4096, 4096, backend="sm90")) == ["gemm"]
    assert kinds(of("bias_gelu", 64, 64, 64, dtype=F32)) == ["elementwise"]
    alone = of("identity", 64, 64, 64, dtype=F32)
    assert alone.kernels == () and not alone.refusal, "cuBLAS computes all of it"


def test_a_backend_by_name() -> None:
    (kernel,) = of("bias_gelu", 512, 512, 512, backend="sm80").kernels
    assert isinstance(kernel, KernelSpec) and kernel.config.family == "sm80" and kernel.arch == "90"
    refused = of("bias_gelu", 512, 512, 512, A100, backend="sm90", training=True)
    assert refused.kernels == () and refused.refusal == "no kernel family runs on compute capability 8.0"
    refused = of("bias_gelu", 64, 64, 64, dtype=F32, backend="sm80")
    assert "the kernels take float16 and bfloat16 matrices, not float32" in refused.refusal


def test_nothing_to_compute() -> None:
    found = of("bias_gelu", 0, 64, 64, training=True)
    assert found.kernels == () and found.refusal == "an extent is 0, so there is nothing to compute"


def test_training_adds_the_recorded_forward_and_the_backward() -> None:
    inference, recorded, backward = of("bias_gelu", 4096, 4096, 4096, training=True).kernels
    assert inference.key == of("bias_gelu", 4096, 4096, 4096).kernels[0].key
    assert isinstance(recorded, KernelSpec) and len(recorded.tree.outputs) == 2
    assert isinstance(backward, ElementwiseSpec) and backward.arch == "90"
    # what stores nothing for its backward has one forward
    assert kinds(of("identity", 4096, 4096, 4096, training=True)) == ["gemm"]
    # odd extents: the products of the backward are fused kernels, too
    found = of("identity", 33, 65, 127, training=True)
    assert kinds(found) == ["gemm", "pad_rows", "gemm", "gemm"]
    layouts = [(k.layout_a, k.layout_b) for k in found.kernels if isinstance(k, KernelSpec)]
    assert layouts == [("row", "column"), ("row", "row"), ("column", "row")]


def test_training_of_what_has_no_gradient() -> None:
    @ep.epilogue
    def named_so(acc, accumulator: Row):
        return acc + accumulator

    a, b, operands = tensors(named_so, 64, 64, 64)
    found = foresee(a, b, named_so, operands, H200, training=True)
    assert kinds(found) == ["gemm"] and found.refusal == ""
    (note,) = found.notes
    assert note.startswith("there are no gradients: an operand is named 'accumulator'")


def test_the_backward_does_not_know_of_the_backend_of_the_forward() -> None:
    """As where it runs: in autograd's threads."""
    found = of("identity", 33, 65, 127, training=True, backend="sm80")
    families = [kernel.config.family for kernel in found.kernels if isinstance(kernel, KernelSpec)]
    assert families == ["sm80", "sm90", "sm90"]


def test_what_is_refused() -> None:
    a, b, operands = tensors(EPILOGUES["bias_gelu"], 8, 8, 8)
    with pytest.raises(ProblemError, match="on the meta device"):
        foresee(torch.empty(8, 8, dtype=BF16), b, EPILOGUES["bias_gelu"], operands, H200)
    with pytest.raises(ProblemError, match=r"matrices \(M, K\) and \(K, N\)"):
        foresee(a[None], b, EPILOGUES["bias_gelu"], operands, H200)
    with pytest.raises(ep.EpilogueError, match="bias"):
        foresee(a, b, EPILOGUES["bias_gelu"], {}, H200)


# -- against calls that run -------------------------------------------------------------------------------


# of identity there is no second pass on a CUDA device
@pytest.mark.parametrize("name", [name for name in EPILOGUES if name != "identity"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(24, 40, 16), (5, 7, 3)], ids=str)
def test_calls_on_the_host_launch_what_is_foreseen(
    host: HostDevice, name: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """In two passes, for there the epilogue is a kernel that the host can run; inference, and training."""
    epilogue = EPILOGUES[name]
    foreseen = of(name, *shape, dtype=dtype, training=True, backend="cublas")
    x, right, operands = tensors(epilogue, *shape, dtype, "cpu")
    weight = right.t()
    with gemm_ops.use_backend("cublas"):
        gemm_ops.linear(x, weight, epilogue, **operands)
        for outputs in (list(epilogue.outputs), [epilogue.outputs[0]]):
            given: Mapping[str, Any] = {
                key: value.clone().requires_grad_() if isinstance(value, Tensor) else value
                for key, value in operands.items()
            }
            found = gemm_ops.linear(x.clone().requires_grad_(), weight.clone().requires_grad_(), epilogue, **given)
            results = {epilogue.outputs[0]: found} if isinstance(found, Tensor) else found
            torch.autograd.backward(
                [results[key] for key in outputs], [torch.ones_like(results[key]) for key in outputs]
            )
    launched = {spec.key: spec.title for spec in host.launched}
    assert launched == {kernel.key: kernel.title for kernel in foreseen.kernels if kernel.kind == "elementwise"}


class _Everything(dict[str, Any]):
    """As if each kernel were loaded."""

    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize("shape", [(64, 512, 512), (1000, 3001, 2000), (16, 4096, 4096)], ids=str)
def test_the_decision_is_the_dispatchs(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """``decide`` itself, which is told that the tensors are on a device and the kernel is built."""
    epilogue = EPILOGUES["gate"]
    a, b, operands = tensors(epilogue, *shape)
    call = dispatch.bind_call(a, b, epilogue, operands, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "multiprocessor_count", lambda device: 132)
    monkeypatch.setattr(loading, "_loaded", _Everything())
    monkeypatch.setattr("gemm_ops.elementwise_call.runs_kernels", lambda device: True)
    monkeypatch.setattr("gemm_ops.two_passes.product_dtype", lambda a, b, rounded: F32)
    object.__setattr__(call.problem, "device", torch.device("cuda"))
    decision = dispatch.decide(call)
    assert decision.spec is not None
    assert of("gate", *shape).kernels[0].key == decision.spec.key

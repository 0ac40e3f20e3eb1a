"""``matmul`` and ``linear`` on the CPU, through the reference backend.

What decides on kernels is tested in ``test_gemm_decisions.py``, what is refused in ``test_gemm_bad_input.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functional_support import (
    DTYPES,
    SUITE,
    accumulate,
    operands_for,
    outputs_of,
    three_outputs,
)
from torch import Tensor, nn
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from gemm_ops import FallbackWarning, FusedLinear, ProblemError, UnsupportedProblemError, linear, matmul

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Results.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SUITE)
def test_suite_is_the_epilogue_of_the_accumulator(name: str, dtype: torch.dtype) -> None:
    """To the bit, and near what plain PyTorch computes."""
    epilogue = SUITE[name]()
    a, b = torch.randn(7, 24).to(dtype), torch.randn(24, 10).to(dtype)
    operands = operands_for(epilogue, (7,), 10, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = outputs_of(epilogue.reference(accumulate(a, b), compute_dtype=wide, out_dtype=dtype, **operands))
    results = outputs_of(matmul(a, b, epilogue, **operands))
    assert list(results) == list(epilogue.outputs)
    for output, result in results.items():
        assert result.dtype == dtype and torch.equal(result, expected[output])
    z = (a.double() @ b.double(), {key: value.double() for key, value in operands.items()})
    plain = PLAIN[name](*z)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(results["D"].double(), plain, rtol=tolerance, atol=tolerance)


PLAIN: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "identity": lambda acc, o: acc,
    "bias_gelu": lambda acc, o: F.gelu(acc + o["bias"], approximate="tanh"),
    "bias_gelu_erf": lambda acc, o: F.gelu(acc + o["bias"]),
    "bias_silu": lambda acc, o: F.silu(acc + o["bias"]),
    "train_gelu": lambda acc, o: F.gelu(acc + o["bias"], approximate="tanh"),
    "residual": lambda acc, o: (acc * o["scale"] + o["bias"]) * o["alpha"] + o["residual"],
    "gate": lambda acc, o: F.silu(acc + o["bias"]) * o["gate"],
    "dequant": lambda acc, o: F.silu(acc * o["row_scale"][:, None] * o["col_scale"] + o["bias"]),
}

LEADING = ((), (1,), (5,), (2, 3), (2, 1, 3), (2, 1, 3, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_linear_of_any_leading_dimensions(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    """As ``F.linear`` has it, operands in the shape of the result."""
    x, weight, bias = torch.randn(*leading, 6).to(dtype), torch.randn(4, 6).to(dtype), torch.randn(4).to(dtype)
    result = linear(x, weight, "relu", bias=bias)
    assert isinstance(result, Tensor)
    expected = F.relu(F.linear(x.double(), weight.double(), bias.double()))
    assert result.shape == expected.shape and result.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    residual = torch.randn(*leading, 4).to(dtype)
    added = linear(x, weight, ep.builders.residual(), bias=torch.zeros_like(bias), residual=residual)
    assert isinstance(added, Tensor)
    torch.testing.assert_close(
        added.double(), F.linear(x.double(), weight.double()) + residual.double(), rtol=tolerance, atol=tolerance
    )


def test_columns_of_leading_dimensions() -> None:
    x, weight = torch.randn(2, 3, 6), torch.randn(4, 6)
    scale, row = torch.randn(2, 3), torch.randn(4)
    result = linear(x, weight, ep.builders.dequantize(), row_scale=scale, col_scale=row, bias=row)
    torch.testing.assert_close(result, F.linear(x, weight) * scale[..., None] * row + row)


BATCHES = (
    ((2, 5, 6), (2, 6, 4)),
    ((5, 6), (3, 6, 4)),
    ((2, 1, 5, 6), (3, 6, 4)),
    ((2, 3, 5, 6), (1, 6, 4)),
    ((1, 5, 6), (7, 6, 4)),
)


@pytest.mark.parametrize(("a_shape", "b_shape"), BATCHES, ids=str)
def test_batched_b(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = torch.randn(a_shape), torch.randn(b_shape)
    product = torch.matmul(a, b)
    residual, bias = torch.randn(product.shape), torch.randn(4)
    result = matmul(a, b, ep.builders.residual("relu"), bias=bias, residual=residual)
    torch.testing.assert_close(result, F.relu(product + bias) + residual)
    column = torch.randn(product.shape[:-1])
    scaled = matmul(a, b, ep.builders.dequantize(), row_scale=column, col_scale=bias, bias=bias)
    torch.testing.assert_close(scaled, product * column[..., None] * bias + bias)


VIEWS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "both transposed": lambda: (torch.randn(6, 5).t(), torch.randn(4, 6).t()),
    "every second column": lambda: (torch.randn(5, 12)[:, ::2], torch.randn(6, 8)[:, ::2]),
    "columns of a wider matrix": lambda: (torch.randn(5, 9)[:, 2:8], torch.randn(6, 7)[:, 3:]),
    "expanded": lambda: (torch.randn(1, 6).expand(5, 6), torch.randn(6, 1).expand(6, 4)),
    "permuted leading dimensions": lambda: (torch.randn(6, 3, 2).permute(2, 1, 0), torch.randn(6, 4)),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_views(make: Callable[[], tuple[Tensor, Tensor]]) -> None:
    a, b = make()
    result = matmul(a, b, "silu")
    assert torch.equal(result, F.silu(torch.matmul(a, b)))
    assert result.is_contiguous()  # type: ignore[union-attr]


def test_strided_operands() -> None:
    a, b = torch.randn(5, 6), torch.randn(6, 4)
    bias, residual = torch.randn(8)[::2], torch.randn(4, 5).t()
    result = matmul(a, b, ep.builders.residual(), bias=bias, residual=residual)
    torch.testing.assert_close(result, a @ b + bias + residual)


@pytest.mark.parametrize("shape", [(0, 4, 6), (5, 0, 6), (5, 4, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_extents(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    bias = torch.randn(n).to(dtype)
    result = matmul(torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), "relu", bias=bias)
    assert torch.equal(result, F.relu(bias).expand(m, n))
    assert linear(torch.randn(3, 0, k).to(dtype), torch.randn(n, k).to(dtype)).shape == (3, 0, n)  # type: ignore


def test_several_outputs_are_a_dictionary() -> None:
    a, b, bias = torch.randn(2, 3, 6).bfloat16(), torch.randn(6, 4).bfloat16(), torch.randn(4).bfloat16()
    result = matmul(a, b, three_outputs, bias=bias)
    assert isinstance(result, dict) and list(result) == ["D", "wide", "half"]
    acc = accumulate(a, b)
    assert torch.equal(result["D"], F.relu(acc + bias.float()).bfloat16())
    assert torch.equal(result["wide"], acc + bias.float())
    assert torch.equal(result["half"], acc.half())


def test_numbers_for_scalars() -> None:
    a, b, row, residual = torch.randn(5, 6), torch.randn(6, 4), torch.randn(4), torch.randn(5, 4)
    for alpha in (2, 0.5, torch.tensor(0.5), torch.tensor([[3.0]])):
        result = matmul(a, b, SUITE["residual"](), scale=row, bias=row, alpha=alpha, residual=residual)
        torch.testing.assert_close(result, (a @ b * row + row) * alpha + residual)


def test_epilogues_by_name() -> None:
    a, b, bias = torch.randn(5, 6), torch.randn(6, 4), torch.randn(4)
    assert torch.equal(matmul(a, b), a @ b)
    assert torch.equal(matmul(a, b, None, bias=bias), a @ b + bias)
    assert torch.equal(matmul(a, b, "tanh", bias=bias), torch.tanh(a @ b + bias))
    assert torch.equal(matmul(a, b, "tanh", bias=None), torch.tanh(a @ b))  # type: ignore[arg-type]
    assert torch.equal(linear(a, b.t(), "gelu_tanh"), F.gelu(a @ b, approximate="tanh"))


# The caller's outputs.


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, 6).to(dtype), torch.randn(6, 4).to(dtype), torch.randn(4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out(dtype: torch.dtype) -> None:
    a, b, bias = problem(dtype)
    expected = matmul(a, b, "gelu", bias=bias)
    for out in (
        torch.full((5, 4), torch.nan).to(dtype),
        torch.full((4, 5), torch.nan).to(dtype).t(),
        torch.full((5, 9), torch.nan).to(dtype)[:, 2:6],
        torch.full((10, 8), torch.nan).to(dtype)[::2, ::2],
    ):
        around = torch.isnan(out._base).sum() if out._base is not None else out.numel()
        assert matmul(a, b, "gelu", bias=bias, out=out) is out
        assert torch.equal(out, expected)  # type: ignore[arg-type]
        if out._base is not None:
            assert torch.isnan(out._base).sum() == around - out.numel(), "wrote outside of the view"
    by_name = {"D": torch.empty(5, 4, dtype=dtype)}
    assert matmul(a, b, "gelu", bias=bias, out=by_name) is by_name["D"]
    assert torch.equal(by_name["D"], expected)  # type: ignore[arg-type]


def test_out_of_leading_dimensions() -> None:
    x, weight, out = torch.randn(2, 3, 6), torch.randn(4, 6), torch.empty(3, 2, 4).transpose(0, 1)
    assert linear(x, weight, "relu", out=out) is out
    assert torch.equal(out, F.relu(F.linear(x, weight)))
    single = torch.empty(4)
    assert linear(x[0, 0], weight, "relu", out=single) is single
    assert torch.equal(single, F.relu(F.linear(x[0, 0], weight)))


def test_out_of_several_outputs() -> None:
    a, b, bias = problem(torch.bfloat16)
    out = {
        "half": torch.empty(5, 4, dtype=torch.float16),
        "D": torch.empty(5, 4, dtype=torch.bfloat16),
        "wide": torch.empty(5, 4, dtype=torch.float32),
    }
    result = matmul(a, b, three_outputs, bias=bias, out=out)
    expected = matmul(a, b, three_outputs, bias=bias)
    assert isinstance(result, dict) and isinstance(expected, dict) and set(result) == set(out)
    for name, buffer in out.items():
        assert result[name] is buffer and torch.equal(buffer, expected[name])


def test_out_dtype_of_float64_matrices() -> None:
    """Outputs that name their dtype have it; the others are float64."""
    a, b, bias = problem(torch.float64)
    out = {name: torch.empty(5, 4, dtype=dtype) for name, dtype in zip(("D", "wide", "half"), DTYPES, strict=False)}
    matmul(a, b, three_outputs, bias=bias, out=out)
    assert torch.equal(out["D"], F.relu(a @ b + bias))
    assert torch.equal(out["wide"], (a @ b + bias).float())


WRONG_OUT: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "shape": (
        lambda a, b: torch.empty(4, 5),
        r"out\['D'\] should be a tensor of shape \(5, 4\), dtype torch.float32.*got shape \(4, 5\)",
    ),
    "dimensions": (lambda a, b: torch.empty(1, 5, 4), r"shape \(5, 4\).*got shape \(1, 5, 4\)"),
    "dtype": (lambda a, b: torch.empty(5, 4).half(), "dtype torch.float32.*got .*dtype torch.float16"),
    "device": (lambda a, b: torch.empty(5, 4, device="meta"), "on cpu; got .*on meta"),
    "name": (lambda a, b: {"E": torch.empty(5, 4)}, "out should have the outputs D; got E"),
    "nothing": (lambda a, b: {}, "out should have the outputs D; got "),
    "one too many": (
        lambda a, b: {"D": torch.empty(5, 4), "E": torch.empty(5, 4)},
        "out should have the outputs D; got D, E",
    ),
    "no tensor": (lambda a, b: {"D": [1.0]}, r"out\['D'\] should be a tensor.*got list"),
    "a list": (lambda a, b: [torch.empty(5, 4)], "out should be a tensor, or tensors by output name, got list"),
    "a itself": (lambda a, b: a[:, :4], "shares memory with an input"),
    "part of b": (lambda a, b: b[:5], "shares memory with an input"),
    "expanded": (lambda a, b: torch.empty(1, 4).expand(5, 4), r"is expanded \(strides \(0, 1\)\)"),
    "requires grad": (lambda a, b: torch.empty(5, 4, requires_grad=True), r"out\['D'\] requires grad"),
}


@pytest.mark.parametrize(("make", "message"), WRONG_OUT.values(), ids=WRONG_OUT)
def test_out_that_does_not_fit(make: Callable[[Tensor, Tensor], Any], message: str) -> None:
    a, b, _ = problem()
    before = a.clone(), b.clone()
    with pytest.raises(ProblemError, match=message):
        matmul(a, b, "relu", out=make(a, b))
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_out_sharing_memory_with_another_output_or_an_operand() -> None:
    a, b, bias = problem()
    buffer = torch.empty(9, 4)
    train = SUITE["train_gelu"]()
    with pytest.raises(ProblemError, match=r"out\['preact'\] shares memory"):
        matmul(a, b, train, bias=bias, out={"D": buffer[:5], "preact": buffer[4:]})
    residual = torch.randn(5, 4)
    with pytest.raises(ProblemError, match=r"out\['D'\] shares memory"):
        matmul(a, b, ep.builders.residual(), bias=bias, residual=residual, out=residual)
    buffer = torch.empty(10, 4)
    matmul(a, b, train, bias=bias, out={"D": buffer[:5], "preact": buffer[5:]})  # side by side is fine
    assert torch.equal(buffer[5:], a @ b + bias)


def test_out_and_gradients() -> None:
    a, b, _ = problem()
    a.requires_grad_()
    out = torch.zeros(5, 4)
    with pytest.raises(ProblemError, match=r"requires grad; use torch.no_grad\(\)"):
        matmul(a, b, out=out)
    assert not out.any()
    with torch.no_grad():
        matmul(a, b, out=out)
    assert torch.equal(out, (a @ b).detach())


# Gradients.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_plain_pytorch(dtype: torch.dtype) -> None:
    def leaves() -> list[Tensor]:
        torch.manual_seed(1)
        shapes = ((2, 5, 6), (4, 6), (4,), (4,), (1,), (2, 5, 4))
        return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]

    names = ("scale", "bias", "alpha", "residual")
    x, weight, *operands = leaves()
    fused = linear(x, weight, SUITE["residual"](), **dict(zip(names, operands, strict=True)))
    assert isinstance(fused, Tensor)
    fused.float().square().sum().backward()
    plain_leaves = leaves()
    px, pw, scale, bias, alpha, residual = (leaf.double() for leaf in plain_leaves)
    ((F.linear(px, pw) * scale + bias) * alpha + residual).square().sum().backward()
    tolerance = 8 * torch.finfo(dtype).eps
    for leaf, plain in zip((x, weight, *operands), plain_leaves, strict=True):
        assert leaf.grad is not None and plain.grad is not None
        scale_of = plain.grad.double().abs().max().item()
        torch.testing.assert_close(
            leaf.grad.double(), plain.grad.double(), rtol=tolerance, atol=max(tolerance, 1e-4) * scale_of
        )


@pytest.mark.parametrize("epilogue", ["gelu", "gelu_tanh", "silu", None], ids=str)
def test_gradcheck(epilogue: str | None) -> None:
    layer = FusedLinear(4, 3, epilogue=epilogue, dtype=torch.float64)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x),
        (x, layer.weight, layer.bias),
    )


def test_gradients_of_several_outputs() -> None:
    layer = FusedLinear(6, 4, epilogue=SUITE["train_gelu"]())
    x = torch.randn(5, 6)
    outputs = layer(x)
    (outputs["D"].sum() + 2 * outputs["preact"].sum()).backward()
    plain = nn.Linear(6, 4)
    plain.load_state_dict(layer.state_dict())
    (F.gelu(plain(x), approximate="tanh").sum() + 2 * plain(x).sum()).backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)


# Autocast.


def test_autocast() -> None:
    """The matrices are rounded, as by ``F.linear``; the accumulator is not."""
    x, layer = torch.randn(5, 64), FusedLinear(64, 4, epilogue="gelu")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        result = layer(x)
        assert result.dtype == F.linear(x, layer.weight, layer.bias).dtype == torch.bfloat16
        wide = linear(x, layer.weight, ep.builders.cast("f32"))
    acc = x.bfloat16().float() @ layer.weight.detach().bfloat16().float().t()
    assert torch.equal(result, F.gelu(acc + layer.bias.detach()).bfloat16())
    assert wide.dtype == torch.float32 and torch.equal(wide, acc)  # type: ignore[union-attr, arg-type]
    assert not torch.equal(acc, acc.bfloat16().float())


def test_autocast_leaves_float64_alone_and_trains() -> None:
    a, b, _ = problem(torch.float64)
    layer, x = FusedLinear(6, 4, epilogue="relu"), torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(matmul(a, b), a @ b)
        layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16, enabled=False):
        assert layer(x).dtype == torch.float32


# Which backend, and why.


def test_backend_for_says_why() -> None:
    a, b, bias = problem(torch.bfloat16)
    decision = gemm_ops.backend_for(a, b, "gelu", bias=bias)
    assert (decision.backend, decision.kernel, decision.spec) == ("reference", None, None)
    assert "device 'cpu'" in decision.reason and "CUDA" in decision.reason
    assert gemm_ops.backend_for(a.requires_grad_(), b, "gelu", bias=bias) == decision, "of the forward pass"
    with gemm_ops.use_backend("reference"):
        assert gemm_ops.backend_for(a, b, "gelu", bias=bias).reason == "asked for with use_backend"
    with pytest.raises(ProblemError, match="inner extents differ"):
        gemm_ops.backend_for(a, b.t(), "gelu", bias=bias)


@pytest.mark.parametrize("variable", ["GEMM_OPS_TUNE", "GEMM_OPS_TUNE_SECONDS", "GEMM_OPS_BUILD", "GEMM_OPS_OVERLAP"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_variables_that_mean_nothing_are_refused(backend: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, which none of them concerns."""
    a, b, bias = problem(torch.bfloat16)
    monkeypatch.setenv(variable, "often")
    for call in (matmul, gemm_ops.backend_for):
        with gemm_ops.use_backend(backend), pytest.raises(ValueError, match=f"{variable} should be"):
            call(a, b, "gelu", bias=bias)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_falling_back_is_announced_once_per_reason(caught: list[warnings.WarningMessage]) -> None:
    a, b, _ = problem()
    for _ in range(3):
        matmul(a, b, "relu")
        matmul(a.half(), b.half(), "relu")
    assert [warning.category for warning in caught] == [FallbackWarning]
    assert "not fused: the tensors are on the device 'cpu'" in str(caught[0].message)
    meta = torch.empty(5, 6, device="meta")
    matmul(meta, torch.empty(6, 4, device="meta"))
    assert len(caught) == 2 and "'meta'" in str(caught[1].message)


ANNOUNCERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "matmul": lambda a, b: matmul(a, b, "relu"),
    "linear": lambda a, b: linear(a, b.t(), "relu"),
    "FusedLinear": lambda a, b: FusedLinear(6, 4)(a.detach()),
    "in a Sequential": lambda a, b: nn.Sequential(FusedLinear(6, 4))(a.detach()),
}


@pytest.mark.parametrize("call", ANNOUNCERS.values(), ids=ANNOUNCERS)
def test_the_announcement_names_the_callers_line(
    caught: list[warnings.WarningMessage], call: Callable[[Tensor, Tensor], object]
) -> None:
    a, b, _ = problem()
    with torch.no_grad():
        call(a, b)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)


def test_no_announcement_where_nothing_is_lost(caught: list[warnings.WarningMessage]) -> None:
    a, b, _ = problem()
    with gemm_ops.use_backend("reference"):
        matmul(a, b, "relu")  # asked for
        matmul(a.requires_grad_(), b, "relu")
    assert not caught


@pytest.mark.parametrize("backend", ["sm90", "sm80", "cublas"])
def test_a_backend_asked_for_does_not_fall_back(backend: str) -> None:
    a, b, bias = problem(torch.bfloat16)
    for call in (gemm_ops.backend_for, matmul):
        with gemm_ops.use_backend(backend), pytest.raises(UnsupportedProblemError) as caught:
            call(a, b, "gelu", bias=bias)
        assert f"the backend '{backend}' cannot compute this: the tensors are on the device 'cpu'" in str(caught.value)


def test_backends_nest() -> None:
    a, b, _ = problem(torch.bfloat16)

    def reason() -> str:
        return gemm_ops.backend_for(a, b).reason

    outside = reason()
    with gemm_ops.use_backend("sm90"):
        with gemm_ops.use_backend("reference"):
            assert reason() == "asked for with use_backend"
            with gemm_ops.use_backend("auto"):
                assert reason() == outside
            assert reason() == "asked for with use_backend"
        with pytest.raises(UnsupportedProblemError):
            reason()
    assert reason() == outside
    with pytest.raises(ZeroDivisionError), gemm_ops.use_backend("sm90"):
        raise ZeroDivisionError
    assert reason() == outside


def test_backend_that_does_not_exist() -> None:
    with (
        pytest.raises(ValueError, match="one of auto, skinny, sm90, sm80, cublas, reference, got 'nonsense'"),
        gemm_ops.use_backend("nonsense"),
    ):
        pytest.fail("entered")

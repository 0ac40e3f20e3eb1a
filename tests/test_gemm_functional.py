"""``matmul``, ``linear`` and ``FusedLinear`` on the CPU, through the reference backend; and what refuses what.

What decides on kernels is tested in ``test_gemm_decisions.py``.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from epilogues import Aux, BroadcastError, DtypeError, Row
from epilogues.errors import EpilogueError
from gemm_ops import FallbackWarning, FusedLinear, ProblemError, UnsupportedProblemError, linear, matmul

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUITE = ep.builders.SUITE

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """The accumulator: fp32, or fp64 of fp64 matrices."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return torch.matmul(a.to(wide), b.to(wide))


def operands_for(epilogue: ep.Epilogue, m_shape: tuple[int, ...], n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {ep.Kind.ROW: (n,), ep.Kind.COLUMN: m_shape, ep.Kind.SCALAR: (1,), ep.Kind.AUX: (*m_shape, n)}
    return {name: torch.randn(shapes[kind]).to(dtype) for name, kind in epilogue.operands.items()}


def outputs_of(result: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return result if isinstance(result, dict) else {"D": result}


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


@ep.epilogue
def three_outputs(acc, bias: Row):
    z = acc + bias
    return {"D": ep.relu(z), "wide": ep.cast(z, "f32"), "half": ep.cast(acc, "f16")}


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
    decision = gemm_ops.backend_for(a.requires_grad_(), b, "gelu", bias=bias)
    assert "requires grad" in decision.reason
    with gemm_ops.use_backend("reference"):
        assert gemm_ops.backend_for(a, b, "gelu", bias=bias).reason == "asked for with use_backend"
    with pytest.raises(ProblemError, match="inner extents differ"):
        gemm_ops.backend_for(a, b.t(), "gelu", bias=bias)


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
    matmul(a.requires_grad_(), b, "relu")  # training on a CPU
    assert not caught


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
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
        pytest.raises(ValueError, match="one of auto, sm90, sm80, reference, got 'nonsense'"),
        gemm_ops.use_backend("nonsense"),
    ):
        pytest.fail("entered")


# Bad input.

RESIDUAL = ep.builders.residual()


@ep.epilogue
def unannotated(acc, v):
    return acc * v


@ep.epilogue
def half_row(acc, bias: Row[torch.float16]):
    return acc + bias


@ep.epilogue
def reads_residual(acc, residual: Aux):
    return acc + residual


def call(a: Any = None, b: Any = None, epilogue: Any = None, **operands: Any) -> Callable[[], object]:
    """A call of ``matmul`` with 5 x 6 and 6 x 4 matrices, but for what is given."""
    a = torch.ones(5, 6) if a is None else a
    b = torch.ones(6, 4) if b is None else b
    return lambda: matmul(a, b, epilogue, **operands)


ones, zeros = torch.ones, torch.zeros
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "mismatched K": (call(ones(5, 7)), ProblemError, r"a has K=7 and b has K=6: a is \(5, 7\), b is \(6, 4\)"),
    "weight not transposed": (call(b=ones(4, 6)), ProblemError, r"K=6 and b has K=4.*weight of shape \(N, K\) is b.T"),
    "mixed dtypes": (
        call(ones(5, 6).half()),
        ProblemError,
        "should have one dtype, got torch.float16 and torch.float32",
    ),
    "int matrices": (call(ones(5, 6).int(), ones(6, 4).int()), ProblemError, "floating-point dtype, got torch.int32"),
    "bool matrices": (call(ones(5, 6) > 0, ones(6, 4) > 0), ProblemError, "floating-point dtype, got torch.bool"),
    "complex matrices": (
        call(ones(5, 6) + 0j, ones(6, 4) + 0j),
        ProblemError,
        "floating-point dtype, got torch.complex64",
    ),
    "fp8 matrices": (
        call(ones(5, 6).to(torch.float8_e4m3fn), ones(6, 4).to(torch.float8_e4m3fn)),
        DtypeError,
        "float8_e4m3fn has no place in an epilogue: expected one of torch.float32",
    ),
    "0-D a": (call(torch.tensor(1.0)), ProblemError, r"expected a of shape \(..., M, K\).*a is \(\)"),
    "0-D b": (call(b=torch.tensor(1.0)), ProblemError, r"and b of shape \(..., K, N\).*b is \(\)"),
    "1-D b": (call(b=ones(6)), ProblemError, r"b of shape \(..., K, N\): a is \(5, 6\), b is \(6,\)"),
    "list for a": (call([[1.0] * 6]), ProblemError, "a should be a torch.Tensor, got list"),
    "list for b": (call(b=[[1.0]]), ProblemError, "b should be a torch.Tensor, got list"),
    "devices of a and b": (
        call(b=ones(6, 4, device="meta")),
        ProblemError,
        "should be on one device, got cpu and meta",
    ),
    "batches": (
        call(ones(2, 5, 6), ones(3, 6, 4)),
        ProblemError,
        r"do not broadcast: a is \(2, 5, 6\), b is \(3, 6, 4\)",
    ),
    "weight 1-D": (
        lambda: linear(ones(5, 6), ones(6)),
        ProblemError,
        r"expected a weight of shape \(N, K\), got \(6,\)",
    ),
    "weight 3-D": (lambda: linear(ones(5, 6), ones(2, 4, 6)), ProblemError, r"shape \(N, K\), got \(2, 4, 6\)"),
    "weight a list": (lambda: linear(ones(5, 6), [1.0]), ProblemError, r"shape \(N, K\), got list"),  # type: ignore
    "missing operand": (
        call(epilogue=RESIDUAL, bias=ones(4)),
        EpilogueError,
        r"missing operand residual; the epilogue takes \(bias: Row, residual: Aux\)",
    ),
    "unknown operand": (
        call(epilogue="relu", bias=ones(4), scale=2.0),
        EpilogueError,
        r"unknown operand scale; the epilogue takes \(bias: Row\)",
    ),
    "None for an operand": (
        call(epilogue=RESIDUAL, bias=ones(4), residual=None),
        EpilogueError,
        "residual: expected a tensor, an int or a float, got NoneType",
    ),
    "row of wrong length": (
        call(epilogue="relu", bias=ones(5)),
        BroadcastError,
        r"operand bias \(Row\): expected shape \(4,\) .* got \(5,\)",
    ),
    "row as a column": (call(epilogue="relu", bias=ones(4, 1)), BroadcastError, r"\(4,\) .* got \(4, 1\)"),
    "matrix of another shape": (
        call(epilogue=reads_residual, residual=ones(4, 5)),
        BroadcastError,
        r"operand residual \(Aux\): expected shape \(5, 4\).*got \(4, 5\)",
    ),
    "ambiguous vector": (
        call(b=ones(6, 5), epilogue=unannotated, v=ones(5)),
        BroadcastError,
        r"operand v: shape \(5,\) is ambiguous.*\(5, 5\).*annotate it as Row or Column",
    ),
    "vector of no kind": (
        call(epilogue=unannotated, v=ones(3)),
        BroadcastError,
        r"operand v: shape \(3,\) does not spread over .*\(5, 4\); expected one of Row: \(4,\)",
    ),
    "number for a row": (
        call(epilogue="relu", bias=1.0),
        BroadcastError,
        r"\(Row\): expected a tensor of shape \(4,\), got the number 1.0",
    ),
    "int operand": (
        call(epilogue="relu", bias=ones(4).int()),
        DtypeError,
        "operand bias: dtype torch.int32 has no place in an epilogue: expected one of torch.float32",
    ),
    "complex operand": (call(epilogue="relu", bias=ones(4) + 0j), DtypeError, "operand bias: dtype torch.complex64"),
    "float64 operand": (call(epilogue="relu", bias=ones(4).double()), DtypeError, "operand bias: dtype torch.float64"),
    "operand of a fixed dtype": (
        call(epilogue=half_row, bias=ones(4)),
        DtypeError,
        "operand bias: the epilogue fixes its dtype to torch.float16, got torch.float32",
    ),
    "operand on another device": (
        call(epilogue="relu", bias=ones(4, device="meta")),
        ProblemError,
        "operand 'bias' is on meta, the matrices are on cpu: move it there",
    ),
    "scalar on another device": (
        call(epilogue=unannotated, v=ones(1, device="meta")),
        ProblemError,
        "operand 'v' is on meta, the matrices are on cpu: give a Python number",
    ),
    "bool for a scalar": (
        call(epilogue=unannotated, v=True),
        EpilogueError,
        "operand v: expected a tensor, an int or a float, got bool True",
    ),
    "complex number": (call(epilogue=unannotated, v=1j), EpilogueError, "expected a tensor, an int or a float, got c"),
    "string for a scalar": (call(epilogue=unannotated, v="2"), EpilogueError, "an int or a float, got str '2'"),
    "number that is too large": (call(epilogue=unannotated, v=10**400), EpilogueError, "operand v: the integer given"),
    # a list of one number looks like a shape
    "list for an operand": (call(epilogue="relu", bias=[4]), EpilogueError, "expected a tensor, .* got list"),
    "list of numbers": (call(epilogue="relu", bias=[1.0] * 4), EpilogueError, "expected a tensor, .* got list"),
    "epilogue a function": (
        call(epilogue=lambda acc: acc),
        TypeError,
        "an Epilogue, a name or None, got function; decorate the function with @epilogues.epilogue",
    ),
    "epilogue a module": (
        call(epilogue=nn.GELU()),
        TypeError,
        r"an Epilogue, a name or None, got GELU; make one of it, epilogues.epilogue\(module\)",
    ),
    "epilogue a number": (call(epilogue=3), TypeError, r"an Epilogue, a name or None, got int$"),
    "unknown activation": (
        call(epilogue="gulu"),
        EpilogueError,
        "unknown activation 'gulu'; expected one of identity, relu",
    ),
}


@pytest.mark.parametrize(("function", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(function: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        function()
    assert caught.type is error, "the exact class, not a subclass"


# only the reference backend asks for the dtype of outputs
FOR_ALL = {name: row for name, row in BAD.items() if name != "fp8 matrices"}


@pytest.mark.parametrize(("function", "error", "message"), FOR_ALL.values(), ids=FOR_ALL)
def test_bad_input_is_bad_for_every_backend(
    function: Callable[[], object], error: type[Exception], message: str
) -> None:
    """Arguments are checked before a backend is chosen."""
    with pytest.raises(error, match=message), gemm_ops.use_backend("sm90"):
        function()


# FusedLinear.

LAYERS: dict[str, Callable[[], FusedLinear]] = {
    "gelu": lambda: FusedLinear(6, 4, epilogue="gelu"),
    "no epilogue": lambda: FusedLinear(6, 4),
    "no bias": lambda: FusedLinear(6, 4, bias=False, epilogue="silu"),
    "several outputs": lambda: FusedLinear(6, 4, epilogue=SUITE["train_gelu"]()),
    "traced here": lambda: FusedLinear(6, 4, epilogue=three_outputs),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def same_results(one: nn.Module, other: nn.Module) -> bool:
    x = torch.randn(5, 6)
    first, second = outputs_of(one(x)), outputs_of(other(x))
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@each_layer
def test_layer_is_an_nn_linear(make: Callable[[], FusedLinear]) -> None:
    torch.manual_seed(3)
    layer = make()
    torch.manual_seed(3)
    plain = nn.Linear(6, 4, bias=layer.bias is not None)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert (layer.in_features, layer.out_features) == (6, 4)
    # the same numbers from the same seed
    for name, parameter in plain.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter)
    # both ways
    other = nn.Linear(6, 4, bias=layer.bias is not None)
    other.load_state_dict(layer.state_dict())
    again = make()
    assert not torch.equal(again.weight, layer.weight)
    again.load_state_dict(other.state_dict())
    assert same_results(again, layer)


def test_layer_computes_what_the_modules_did() -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    plain = nn.Sequential(nn.Linear(6, 4), nn.GELU())
    plain[0].load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(FusedLinear.from_linear(plain[0])(x), plain[0](x))  # type: ignore[arg-type]


def test_constructor_is_that_of_nn_linear() -> None:
    layer = FusedLinear(6, 4, False, "meta", torch.float16)
    assert layer.bias is None and layer.weight.device.type == "meta" and layer.weight.dtype == torch.float16
    layer = FusedLinear(in_features=6, out_features=4, bias=True, device=None, dtype=torch.bfloat16, epilogue="relu")
    assert layer.bias.dtype == torch.bfloat16 and layer.epilogue == ep.builders.bias_activation("relu")
    with pytest.raises(TypeError):
        FusedLinear(6, 4, True, None, None, "relu")  # type: ignore[misc]


def test_layer_without_bias() -> None:
    layer, x = FusedLinear(6, 4, bias=False, epilogue="relu"), torch.randn(5, 6)
    assert layer.bias is None and list(layer.state_dict()) == ["weight"]
    assert torch.equal(layer(x), F.relu(F.linear(x, layer.weight)))
    # an epilogue's bias is then an operand like others
    layer, bias = FusedLinear(6, 4, bias=False, epilogue=ep.builders.bias()), torch.randn(4)
    torch.testing.assert_close(layer(x, bias=bias), F.linear(x, layer.weight, bias))
    with pytest.raises(EpilogueError, match="missing operand bias"):
        layer(x)


def test_operands_of_a_layer() -> None:
    layer, x, residual = FusedLinear(6, 4, epilogue=RESIDUAL), torch.randn(2, 3, 6), torch.randn(2, 3, 4)
    torch.testing.assert_close(layer(x, residual=residual), F.linear(x, layer.weight, layer.bias) + residual)
    with pytest.raises(EpilogueError, match="missing operand residual"):
        layer(x)
    with pytest.raises(EpilogueError, match="unknown operand scale"):
        layer(x, residual=residual, scale=1.0)
    with pytest.raises(EpilogueError, match="operand bias: the layer gives its own"):
        layer(x, residual=residual, bias=torch.randn(4))
    with pytest.raises(ProblemError, match="K=5 and b has K=6"):
        layer(x[..., :5], residual=residual)


@pytest.mark.parametrize("epilogue", [reads_residual, ep.builders.activation("relu")], ids=str)
def test_a_bias_without_an_operand(epilogue: ep.Epilogue) -> None:
    with pytest.raises(ValueError, match=r"has no row operand called 'bias' for it: add one, or .* bias=False"):
        FusedLinear(6, 4, epilogue=epilogue)
    assert FusedLinear(6, 4, bias=False, epilogue=epilogue).epilogue is epilogue


def test_a_bias_of_another_kind() -> None:
    @ep.epilogue
    def column(acc, bias: ep.Column):
        return acc + bias

    with pytest.raises(ValueError, match="the epilogue column has no row operand called 'bias'"):
        FusedLinear(6, 4, epilogue=column)

    @ep.epilogue
    def automatic(acc, bias):
        return acc + bias

    layer, x = FusedLinear(6, 4, epilogue=automatic), torch.randn(5, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("epilogue", [3, nn.ReLU()], ids=["number", "module"])
def test_layer_of_no_epilogue(epilogue: Any) -> None:
    with pytest.raises(TypeError, match="epilogue should be an Epilogue, a name or None"):
        FusedLinear(6, 4, epilogue=epilogue)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_from_linear(bias: bool, training: bool) -> None:
    plain = nn.Linear(6, 4, bias=bias, dtype=torch.float64).train(training)
    plain.weight.requires_grad_(False)
    before = torch.get_rng_state()
    layer = FusedLinear.from_linear(plain, epilogue="tanh")
    assert torch.equal(torch.get_rng_state(), before), "drew random numbers"
    assert type(layer) is FusedLinear and layer.training == training
    assert layer.weight is plain.weight and layer.bias is plain.bias  # tied, not copied
    assert layer.weight.dtype == torch.float64 and layer.weight.device.type == "cpu"
    assert not layer.weight.requires_grad and (not bias or layer.bias.requires_grad)
    assert (layer.in_features, layer.out_features) == (6, 4)
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.tanh(plain(x)))
    with torch.no_grad():
        plain.weight.zero_()
    assert not layer.weight.any()


def test_from_linear_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"from_linear takes an nn\.Linear, got Conv2d"):
        FusedLinear.from_linear(nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no row operand called 'bias'"):
        FusedLinear.from_linear(nn.Linear(6, 4), epilogue=reads_residual)


@each_layer
def test_copies(make: Callable[[], FusedLinear]) -> None:
    """Of the layer alone and within a model; they share nothing, and compute the same."""
    layer = nn.Sequential(make()).eval()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False))
    for made in copies:
        assert type(made[0]) is FusedLinear and not made.training
        assert made[0].epilogue == layer[0].epilogue and made[0].weight.data_ptr() != layer[0].weight.data_ptr()
        assert same_results(made, layer)


def test_deepcopy_keeps_tied_parameters_tied() -> None:
    first = FusedLinear(6, 6, epilogue="relu")
    model = nn.ModuleList([first, FusedLinear.from_linear(first, epilogue="gelu")])
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight and copied[0].weight is not first.weight
    assert len(list(model.parameters())) == 2


def test_repr() -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    assert repr(layer) == "FusedLinear(in_features=6, out_features=4, bias=True, epilogue=bias_gelu)"
    assert "bias=False, epilogue=silu" in repr(FusedLinear(6, 4, bias=False, epilogue="silu"))


def test_meta_then_empty() -> None:
    layer = FusedLinear(6, 4, epilogue="relu", device="meta")
    x = torch.empty(2, 3, 6, device="meta")
    with torch.no_grad():
        assert layer(x).shape == (2, 3, 4) and layer(x).device.type == "meta"
    layer.to_empty(device="cpu").reset_parameters()
    source = FusedLinear(6, 4, epilogue="relu")
    layer.load_state_dict(source.state_dict())
    assert same_results(layer, source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to(dtype: torch.dtype) -> None:
    layer = FusedLinear(6, 4, epilogue="gelu")
    weight = layer.weight.detach().clone()
    assert layer.to(dtype) is layer and layer.weight.dtype == layer.bias.dtype == dtype
    assert layer(torch.randn(5, 6, dtype=dtype)).dtype == dtype
    assert torch.equal(layer.weight, weight.to(dtype))
    assert FusedLinear(6, 4).half().bias.dtype == torch.float16
    with pytest.raises(ProblemError, match="should have one dtype"):
        layer.half()(torch.randn(5, 6))


def test_layers_in_a_training_loop() -> None:
    """A step of an optimiser goes down, and eval mode and no_grad change nothing about the values."""
    model = nn.Sequential(FusedLinear(6, 16, epilogue="gelu"), FusedLinear(16, 1))
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.9
    training = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), training)

"""What ``matmul`` and ``linear`` refuse: each mistake has its exception, which says what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_support import (
    RESIDUAL,
    reads_residual,
)
from torch import nn

import epilogues as ep
import gemm_ops
from epilogues import BroadcastError, DtypeError, Row
from epilogues.errors import EpilogueError
from gemm_ops import ProblemError, linear, matmul

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@ep.epilogue
def unannotated(acc, v):
    return acc * v


@ep.epilogue
def half_row(acc, bias: Row[torch.float16]):
    return acc + bias


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
    "int matrices": (
        call(ones(5, 6).int(), ones(6, 4).int()),
        ProblemError,
        r"floating-point dtype \(.*\), got torch.int32",
    ),
    "bool matrices": (
        call(ones(5, 6) > 0, ones(6, 4) > 0),
        ProblemError,
        r"floating-point dtype \(.*\), got torch.bool",
    ),
    "complex matrices": (
        call(ones(5, 6) + 0j, ones(6, 4) + 0j),
        ProblemError,
        r"floating-point dtype \(.*\), got torch.complex64",
    ),
    "fp8 matrices": (
        call(ones(5, 6).to(torch.float8_e4m3fn), ones(6, 4).to(torch.float8_e4m3fn)),
        ProblemError,
        r"expected matrices of a floating-point dtype \(.*\), got torch.float8_e4m3fn",
    ),
    "0-D a": (call(torch.tensor(1.0)), ProblemError, r"expected a of shape \(..., M, K\).*a is \(\)"),
    "0-D b": (call(b=torch.tensor(1.0)), ProblemError, r"and b of shape \(..., K, N\).*b is \(\)"),
    "1-D b": (
        call(b=ones(6)),
        ProblemError,
        r"b of shape \(..., K, N\): a is \(5, 6\), b is \(6,\) .*give b\[:, None\]",
    ),
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
        r"unknown operand scale; the epilogue 'relu' takes bias alone",
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


@pytest.mark.parametrize(("function", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_bad_for_every_backend(
    function: Callable[[], object], error: type[Exception], message: str
) -> None:
    """Arguments are checked before a backend is chosen."""
    with pytest.raises(error, match=message), gemm_ops.use_backend("sm90"):
        function()

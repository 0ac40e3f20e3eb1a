"""How tensors reach a kernel, without a device: plans carried out by a simulated kernel, and what they copy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import kernel_simulator
import pytest
import torch
from kernel_simulator import run_simulated
from layouts import BATCH_WAYS, MATRIX_WAYS, OUTPUT_WAYS, lay_out
from torch import Tensor

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row
from gemm_ops import ProblemError, dispatch, empty_padded
from gemm_ops.addressing import address
from gemm_ops.addressing.views import ACCESS_BYTES
from gemm_ops.kernels.access import STRIDED

FAMILIES = ("sm90", "sm80")


@ep.epilogue
def everything(acc, scale: Row, offset: Column, residual: Aux):
    z = acc * scale + offset
    return {"D": torch.relu(z) + residual, "z": ep.cast(z, "f32")}


def check(
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    epilogue: ep.Epilogue,
    a: Tensor,
    b: Tensor,
    operands: dict[str, Any],
    out: dict[str, Tensor] | None = None,
    **keywords: Any,
) -> dispatch.Decision:
    """Runs a call on the simulated kernel and compares with plain PyTorch."""
    call = dispatch.bind_call(a, b, epilogue, operands, out, **keywords)
    results, decision = run_simulated(call, family, monkeypatch)
    expected = epilogue.reference(torch.matmul(a.float(), b.float()), out_dtype=a.dtype, **operands)
    if not isinstance(expected, dict):
        expected = {"D": expected}
    for name, value in expected.items():
        assert results[name].shape == value.shape and results[name].dtype == value.dtype
        torch.testing.assert_close(results[name], value, rtol=1.6e-2, atol=1e-2)
    return decision


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way_b", MATRIX_WAYS)
@pytest.mark.parametrize("way_a", MATRIX_WAYS)
def test_every_layout_of_both_matrices(way_a: str, way_b: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for m, n, k in ((5, 7, 9), (16, 24, 32), (1, 13, 3), (6, 1, 10), (4, 10, 1), (1, 1, 1)):
        a, b = lay_out((m, k), way_a), lay_out((k, n), way_b)
        check(family, monkeypatch, ep.builders.bias(), a, b, {"bias": torch.randn(n).bfloat16()})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", MATRIX_WAYS)
def test_every_layout_of_operands_and_outputs(way: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for m, n, k in ((5, 7, 8), (16, 24, 32), (1, 13, 8), (6, 1, 8), (8, 10, 8)):
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().t()
        operands = {
            "scale": torch.randn(2 * n)[::2].bfloat16() if "second" in way else torch.randn(n).bfloat16(),
            "offset": lay_out((m, 1), way) if "one" not in way else torch.randn(1, 1).bfloat16().expand(m, 1),
            "residual": lay_out((m, n), way),
        }
        out = None
        if "one" not in way:
            out = {"D": lay_out((m, n), way), "z": lay_out((m, n), way, torch.float32)}
        check(family, monkeypatch, everything, a, b, operands, out)


def test_random_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of any number of dimensions, broadcast and in any order in memory, with operands that broadcast too."""
    rng = random.Random(0)
    torch.manual_seed(0)
    merged = launched = 0
    for _ in range(400):
        family = rng.choice(FAMILIES)
        batch = tuple(rng.choice((1, 2, 3)) for _ in range(rng.randrange(4)))
        m, n, k = (rng.choice((1, 2, 5, 8, 16)) for _ in range(3))

        def broadcast(batch: tuple[int, ...] = batch) -> tuple[int, ...]:
            kept = batch[rng.randrange(len(batch) + 1) :]
            return tuple(extent if rng.random() < 0.7 else 1 for extent in kept)

        def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            ways = MATRIX_WAYS + (BATCH_WAYS if len(shape) > 2 else ())
            return lay_out(shape, rng.choice(ways), dtype)

        batch_a, batch_b = broadcast(), broadcast()
        shape = tuple(torch.broadcast_shapes(batch_a, batch_b))
        operands = {
            "scale": lay_out((*broadcast(shape), 1, n), rng.choice(("contiguous", "padded", "off", "every second"))),
            "offset": shaped(*broadcast(shape), m, 1),
            "residual": shaped(*broadcast(shape), m, n),
        }
        out = None
        if rng.random() < 0.4:
            ways = [way for way in OUTPUT_WAYS if shape or way not in BATCH_WAYS]
            out = {
                "D": lay_out((*shape, m, n), rng.choice(ways)),
                "z": lay_out((*shape, m, n), rng.choice(ways), torch.float32),
            }
        decision = check(family, monkeypatch, everything, shaped(*batch_a, m, k), shaped(*batch_b, k, n), operands, out)
        assert decision.addressing is not None
        merged += decision.addressing.m > m
        launched += bool(decision.addressing.loops)
    assert merged > 10 and launched > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vector_by_a_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(9).bfloat16(), torch.randn(3, 9, 6).bfloat16()
    check(family, monkeypatch, ep.builders.activation("relu"), a, b, {})
    check(family, monkeypatch, ep.builders.activation("relu"), a, b[0], {})


@pytest.mark.parametrize(("n", "k"), list(itertools.product((33, 40), (9, 16))))
def test_padded_outputs_need_no_copy_in_the_next_layer(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_simulator, "PADDING_MAY_BE_WRITTEN", True)
    a, b = torch.randn(2, 5, k).bfloat16(), torch.randn(n, k).bfloat16().t()
    call = dispatch.bind_call(a, b, ep.builders.activation("relu"), {}, None, padded_output=True)
    results, decision = run_simulated(call, "sm90", monkeypatch)
    assert decision.addressing is not None and decision.addressing.outputs[0].way == "tma"
    y = results["D"]
    assert y.shape == (2, 5, n) and y.stride() == (5 * (-(-n // 8) * 8), -(-n // 8) * 8, 1)
    torch.testing.assert_close(y, torch.relu(a @ b), rtol=1.6e-2, atol=1e-2)
    following = dispatch.bind_call(y, torch.randn(n, 8).bfloat16(), ep.builders.identity(), {}, None)
    found = address("sm90", following.request)
    assert not isinstance(found, str) and found.a.way == "tma" and not found.a.copy and found.m == 10


def routes(a: Tensor, b: Tensor, epilogue: ep.Epilogue | None = None, family: str = "sm90", **operands: Any) -> Any:
    call = dispatch.bind_call(a, b, epilogue or ep.builders.identity(), operands, None)
    found = address(family, call.request)
    assert not isinstance(found, str)
    return found


def matrix(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns).bfloat16()


def test_nothing_is_copied_where_strides_allow() -> None:
    """Slices of padded buffers, transposed views, broadcast batches; an odd extent is no reason either."""
    weight = matrix(40, 64).t()
    for a in (
        matrix(16, 72)[:, :63],
        matrix(16, 80)[:, 8:71],
        matrix(64, 16).t()[:, :63],
        matrix(16, 64)[::2, :63],
        matrix(16, 64)[3:, :63],
        matrix(1, 64)[:, :63],
        torch.empty(6, 16, 64).bfloat16()[:, :, :63],
        torch.empty(6, 16, 64).bfloat16()[:, :3, :63],
        torch.empty(16, 6, 64).bfloat16().transpose(0, 1)[..., :63],
        torch.empty(1, 16, 64).bfloat16().expand(6, 16, 64)[..., :63],
    ):
        found = routes(a, weight[:63])
        assert not found.a.copy and not found.b.copy, found.a.why
    assert routes(torch.empty(6, 16, 64).bfloat16(), weight).m == 96
    assert routes(torch.empty(6, 16, 64).bfloat16()[:, :3], weight).batch == 6
    batched = routes(torch.empty(6, 16, 64).bfloat16(), torch.empty(6, 64, 40).bfloat16())
    assert (batched.m, batched.batch, batched.loops) == (16, 6, ())
    shared = routes(matrix(16, 64), torch.empty(6, 64, 40).bfloat16())
    assert (shared.m, shared.batch, shared.a.batch) == (16, 6, 0)


@pytest.mark.parametrize(
    ("make", "kind", "why"),
    [
        (lambda: matrix(16, 63), "padded", "its leading dimension of 63 elements is not a multiple of 16 bytes"),
        (lambda: matrix(16, 72)[:, 1:64], "padded", "it starts 2 bytes after a multiple of 16 bytes"),
        (
            lambda: matrix(63, 17).t()[:16],
            "padded",
            "its leading dimension of 17 elements is not a multiple of 16 bytes",
        ),
        (lambda: matrix(16, 126)[:, ::2], "contiguous", "neither of its strides (126, 2) is 1"),
        (lambda: matrix(1, 64).expand(16, 64)[:, :63], "padded", "its rows are repeated"),
    ],
)
def test_what_is_copied_and_why(make: Callable[[], Tensor], kind: str, why: str) -> None:
    found = routes(make(), matrix(40, 64).t()[:63])
    assert (found.a.copy, found.a.why) == (kind, why) and not found.b.copy
    assert found.a.leading * 2 % ACCESS_BYTES == 0


def test_outputs_and_matrices_are_reached_at_their_own_alignment() -> None:
    weight = matrix(41, 64).t()
    found = routes(matrix(16, 64), weight, ep.builders.gate(), gate=matrix(16, 41), bias=torch.empty(41).bfloat16())
    ways = {placement.way for placement in (*found.operands, *found.outputs)}
    assert ways == {"unaligned", "row"} and not found.copies
    assert found.access.outputs == (1,) and sorted(found.access.operands) == [0, 1]
    turned = routes(
        matrix(16, 64), weight, ep.builders.gate(), gate=matrix(41, 16).t(), bias=torch.empty(41).bfloat16()
    )
    assert STRIDED in turned.access.operands and not turned.copies
    even = routes(matrix(16, 64), matrix(40, 64).t(), ep.builders.gate(), gate=matrix(16, 40), bias=torch.empty(40))
    assert even.access.operands == even.access.outputs == ()


def test_columns_are_written_out_rather_than_keeping_rows_apart() -> None:
    @ep.epilogue
    def shifted(acc, offset: Column):
        return acc + offset

    found = routes(torch.empty(6, 16, 64).bfloat16(), matrix(40, 64).t(), shifted, offset=torch.empty(16, 1).bfloat16())
    assert found.m == 96 and found.operands[0].copy == "contiguous"
    # a batched weight keeps them apart anyway
    batched = torch.empty(6, 64, 40).bfloat16()
    found = routes(torch.empty(6, 16, 64).bfloat16(), batched, shifted, offset=torch.empty(16, 1).bfloat16())
    assert found.batch == 6 and not found.operands[0].copy and found.operands[0].batch == 0


def test_sm80_takes_the_width_that_everything_allows() -> None:
    for n, k, width, loads in ((40, 64, (), 8), (40, 66, (), 2), (40, 63, (), 1), (42, 64, (2,), 8), (41, 64, (1,), 8)):
        found = routes(matrix(16, k), matrix(n, k).t(), family="sm80")
        assert (found.access.outputs, found.access.a, found.access.b) == (width, loads, loads), (n, k)
    assert isinstance(
        address(
            "sm80",
            dispatch.bind_call(
                torch.empty(70000, 2, 8).bfloat16(),
                torch.empty(70000, 8, 8).bfloat16(),
                ep.builders.identity(),
                {},
                None,
            ).request,
        ),
        str,
    )


def test_outputs_that_overlap_themselves_are_refused() -> None:
    a, b = matrix(4, 8), matrix(8, 8)
    out = torch.empty(64).bfloat16().as_strided((4, 8), (4, 1))
    with pytest.raises(ProblemError, match=r"rows that overlap in memory \(strides \(4, 1\)\)"):
        dispatch.bind_call(a, b, ep.builders.identity(), {}, out)


def test_empty_padded() -> None:
    x = empty_padded((3, 5, 33), dtype=torch.float16, device="cpu")
    assert x.shape == (3, 5, 33) and x.stride() == (200, 40, 1)
    assert empty_padded((4, 32), dtype=torch.float32, device="cpu").is_contiguous()


def test_outputs_that_interleave_or_do_not_nest_are_taken_where_no_element_is_shared() -> None:
    a, b = torch.randn(3, 4).bfloat16(), torch.randn(4, 2).bfloat16()
    odd = torch.empty(100).bfloat16().as_strided((3, 2), (2, 3))  # elements 0, 3, 2, 5, 4, 7
    dispatch.bind_call(a, b, ep.builders.identity(), {}, odd)
    with pytest.raises(ProblemError, match="overlap in memory"):
        dispatch.bind_call(a, b, ep.builders.identity(), {}, torch.empty(100).bfloat16().as_strided((3, 2), (2, 2)))
    wide = torch.empty(3, 4).bfloat16()
    train = ep.builders.train("relu")
    bias = torch.randn(2).bfloat16()
    dispatch.bind_call(a, b, train, {"bias": bias}, {"D": wide[:, ::2], "preact": wide[:, 1::2]})
    with pytest.raises(ProblemError, match="shares memory"):
        dispatch.bind_call(a, b, train, {"bias": bias}, {"D": wide[:, ::2], "preact": wide[:, 2:]})


def test_outputs_on_the_meta_device() -> None:
    a, b, out = (torch.empty(shape, device="meta") for shape in ((3, 4), (4, 5), (3, 5)))
    assert gemm_ops.matmul(a, b, "relu", out=out) is out


@pytest.mark.parametrize("shape", [(3, -5), (), 5, None, "ab", (-1, 5), (2.0, 3), (True, 3)])
def test_empty_padded_refuses_what_is_no_shape(shape: Any) -> None:
    with pytest.raises(ProblemError, match="empty_padded: expected a shape of whole numbers"):
        empty_padded(shape, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", None, torch.quint8, torch.int32])
def test_empty_padded_refuses_other_dtypes(dtype: Any) -> None:
    with pytest.raises(ProblemError, match="empty_padded: expected a floating-point dtype"):
        empty_padded((3, 5), dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("epilogue", "out", "message"),
    [
        ("relu", {}, "out should have the outputs D; got none"),
        (ep.builders.train("relu"), torch.empty(3, 5), "out is one tensor, and the epilogue has the outputs D, preact"),
        ("relu", torch.eye(3, 5).to_sparse(), r"out\['D'\]: expected a dense tensor"),
    ],
)
def test_outputs_that_do_not_fit(epilogue: Any, out: Any, message: str) -> None:
    bias = {} if isinstance(epilogue, str) else {"bias": torch.randn(5)}
    with pytest.raises(ProblemError, match=message):
        gemm_ops.matmul(torch.randn(3, 4), torch.randn(4, 5), epilogue, out=out, **bias)


def test_matrices_of_other_dtypes_are_refused_as_matrices() -> None:
    a, b = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((3, 4), (4, 5)))
    with pytest.raises(ProblemError, match=r"expected matrices of a floating-point dtype \(float16, bfloat16, float32"):
        gemm_ops.matmul(a, b)

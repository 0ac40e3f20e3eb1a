"""Any layout on a GPU: misaligned, strided, transposed, broadcast, batched and huge tensors, guards around outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from layouts import GuardedBuffer, lay_out
from torch import Tensor

import epilogues as ep
import gemm_ops
from epilogues import Aux, Column, Row
from gemm_ops import dispatch, plan
from gemm_ops.kernels import families
from gemm_ops.kernels.config import KernelConfig
from gemm_ops.kernels.pad_spec import PadSpec
from gemm_ops.runtime.pad_rows import pad_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@ep.epilogue
def everything(acc, scale: Row, offset: Column, residual: Aux):
    z = acc * scale + offset
    return {"D": torch.relu(z) + residual, "z": ep.cast(z, "f32")}


@ep.epilogue
def both_sizes(acc, residual: Aux, wide: Aux):
    z = acc + wide
    return {"D": torch.relu(z) * residual, "z": ep.cast(z, "f32")}


@ep.epilogue
def beside_every_tile(acc, residual: Aux):
    return {"D": torch.relu(acc) * residual, "z": ep.cast(acc, "f32")}


@dataclass(frozen=True)
class Layout:
    """One call: shapes of a and b as batch dimensions, M, N, K, and how each tensor lies."""

    m: int
    n: int
    k: int
    a: str = "contiguous"
    b: str = "transposed"
    residual: str = "contiguous"
    out: str = ""  # "": new ones
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    batch_operands: tuple[int, ...] = ()

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.batch_a, self.batch_b, self.batch_operands))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        torch.manual_seed(0)
        a = lay_out((*self.batch_a, self.m, self.k), self.a, device="cuda")
        b = lay_out((*self.batch_b, self.k, self.n), self.b, device="cuda")
        batch = self.batch_operands
        operands = {
            "scale": torch.randn(*batch, 1, self.n, device="cuda").bfloat16()
            if batch
            else torch.randn(self.n + 3, device="cuda").bfloat16()[3:],
            "offset": torch.randn(*batch, self.m, 1, device="cuda").bfloat16(),
            "residual": lay_out((*batch, self.m, self.n), self.residual, device="cuda"),
        }
        return a, b, operands

    def outputs(self) -> dict[str, GuardedBuffer]:
        shape = (*self.batch, self.m, self.n)
        dtypes = {"D": torch.bfloat16, "z": torch.float32}
        return (
            {name: GuardedBuffer(shape, self.out, dtype, "cuda") for name, dtype in dtypes.items()} if self.out else {}
        )


CASES = [
    # every alignment of each kind of tensor
    Layout(200, 264, 136, out="contiguous"),
    Layout(200, 257, 130, out="contiguous"),
    # one side through TMA, the other not
    Layout(200, 264, 136, out="off"),
    Layout(200, 264, 136, residual="off", out="contiguous"),
    Layout(200, 264, 136, residual="every second", out="off"),
    Layout(129, 260, 72, out="contiguous"),
    Layout(129, 257, 133, a="off", b="transposed padded", residual="off", out="off"),
    Layout(129, 266, 133, a="transposed", b="contiguous", residual="padded", out="padded"),
    Layout(129, 100, 72, a="transposed padded", residual="transposed", out="transposed"),
    Layout(129, 41, 72, a="every second", b="every second", residual="every second", out="every second"),
    Layout(
        129, 41, 72, a="every second row", b="every second row", residual="every second row", out="every second row"
    ),
    Layout(129, 41, 72, a="one row", b="one row", residual="one row"),
    Layout(129, 41, 72, a="one column", b="one column", residual="one column"),
    # extremes
    Layout(1, 50257, 64, residual="off"),
    Layout(1, 1, 1),
    Layout(257, 1, 129),
    Layout(3, 5, 7, out="off"),
    Layout(17, 31, 1),
    # batches
    Layout(65, 104, 72, batch_a=(3,), batch_b=(3,), batch_operands=(3,), out="contiguous"),
    Layout(65, 101, 70, batch_a=(3,), batch_b=(3,), batch_operands=(3,), residual="off", out="off"),
    Layout(33, 41, 50, batch_a=(2, 3), batch_b=(3,), batch_operands=(2, 1)),
    Layout(33, 40, 56, batch_a=(2, 3), batch_b=(1, 3), a="batch inside", b="batch last", out="batch inside"),
    Layout(33, 40, 56, batch_a=(4,), a="batch inside", out="batch inside"),
    Layout(1, 9, 64, batch_a=(5,), batch_b=(5,), a="batch last"),
    Layout(33, 41, 50, batch_a=(4,), a="one matrix", batch_b=(4,), batch_operands=(1,)),
    Layout(17, 9, 33, batch_a=(1000,), batch_b=(1000,)),
    Layout(1, 24, 16, batch_a=(1000,), batch_b=(1,), batch_operands=(1000,)),
]


def specs_of(backend: str) -> list[Any]:
    """The kernels of the cases."""
    found: list[Any] = []
    for case in CASES:
        a, b, operands = case.tensors()
        out = {name: guarded.view for name, guarded in case.outputs().items()} or None
        with gemm_ops.use_backend(backend):
            found.append(gemm_ops.backend_for(a, b, everything, out=out, **operands).spec)
    return found


def misaligned(m: int, n: int, way: str) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, GuardedBuffer]]:
    """A problem of :func:`both_sizes`: 16-bit and 32-bit matrices are loaded and stored, laid out in one way."""
    torch.manual_seed(0)
    a, b = lay_out((m, 72), "contiguous", device="cuda"), lay_out((72, n), "transposed", device="cuda")
    operands = {
        "residual": lay_out((m, n), way, device="cuda"),
        "wide": lay_out((m, n), way, torch.float32, device="cuda"),
    }
    dtypes = {"D": torch.bfloat16, "z": torch.float32}
    return a, b, operands, {name: GuardedBuffer((m, n), way, dtype, "cuda") for name, dtype in dtypes.items()}


@contextlib.contextmanager
def only(config: KernelConfig) -> Iterator[None]:
    """The sm90 family with one configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "SM90_CONFIGS", (config,))
        forget_choices()
        yield
    forget_choices()


def forget_choices() -> None:
    dispatch._select.cache_clear()
    plan.forget_plans()  # in C++ too: a plan kept there would launch the kernel of another configuration


#: Those that take matrices at any alignment.
ANYWHERE = [config for config in families.CONFIGS["sm90"] if not config.swapped and config.tile[1] % 32 == 0]


def tile_specs() -> list[Any]:
    """The kernels of the tests of every tile."""
    found: list[Any] = []
    for configs, epilogue, problem in (
        (ANYWHERE, both_sizes, misaligned(129, 257, "off")),
        (families.CONFIGS["sm90"], beside_every_tile, whole(128, 256)),
    ):
        a, b, operands, guarded = problem
        out = {name: one.view for name, one in guarded.items()}
        for config in configs:
            with only(config), gemm_ops.use_backend("sm90"):
                found.append(gemm_ops.backend_for(a, b, epilogue, out=out, **operands).spec)
    return found


def whole(m: int, n: int) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, GuardedBuffer]]:
    """A problem of :func:`beside_every_tile`, all of whose matrices lie in 16 bytes."""
    a, b, operands, guarded = misaligned(m, n, "contiguous")
    return a, b, {"residual": operands["residual"]}, guarded


def other_specs() -> list[Any]:
    """Those of the tests that have tensors of their own."""
    found: list[Any] = []
    for m, n, k, name, extra in (
        (66_000_001, 8, 33, "relu", {}),
        (65_537, 40_001, 16, "relu", {}),
        (300, 40, 64, None, {}),
        (40, 65, 63, "gelu", {"padded_output": True}),
        (40, 33, 65, "relu", {}),
    ):
        x, weight = torch.empty(m, k, device="cuda").bfloat16(), torch.empty(n, k, device="cuda").bfloat16()
        bias = {"bias": torch.empty(n, device="cuda").bfloat16()} if m == 40 else {}
        found.append(gemm_ops.backend_for(x, weight.t(), name, **bias, **extra).spec)
    major, minor = torch.cuda.get_device_capability()
    return [*found, PadSpec(f"{major}{minor}")]


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> None:
    """The kernels of the selected tests, built in parallel."""
    selected = " ".join(item.name for item in request.session.items)
    specs = [spec for backend in ("sm90", "sm80") if backend in selected for spec in specs_of(backend)]
    gemm_ops.build_kernels([*specs, *(tile_specs() if "tile" in selected else []), *other_specs()])


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout(case: Layout, backend: str) -> None:
    a, b, operands = case.tensors()
    guarded = case.outputs()
    with gemm_ops.use_backend(backend):
        check(everything, a, b, operands, guarded)


def check(
    epilogue: ep.Epilogue, a: Tensor, b: Tensor, operands: dict[str, Any], guarded: dict[str, GuardedBuffer]
) -> None:
    """A call against fp64, and what is around its outputs."""
    results = gemm_ops.matmul(a, b, epilogue, out={name: one.view for name, one in guarded.items()} or None, **operands)
    assert isinstance(results, dict)
    truth = epilogue.reference(
        torch.matmul(a.double(), b.double()), compute_dtype=torch.float64, keep_casts=False, **operands
    )
    for name, limit in (("D", 2.5e-3), ("z", 2e-6)):
        assert results[name].shape == truth[name].shape
        # of a single element the truth may be 0
        error = (results[name].double() - truth[name]).norm() / truth[name].norm().clamp(min=1)
        assert error < limit, (name, tuple(truth[name].shape), error.item())
    for one in guarded.values():
        one.check()


@pytest.mark.parametrize("config", families.CONFIGS["sm90"], ids=lambda config: config.name)
def test_every_tile_of_whole_matrices(config: KernelConfig) -> None:
    """By TMA, whose last pieces of 16 bytes end where the rows do."""
    rows, columns, _ = config.tile
    with only(config), gemm_ops.use_backend("sm90"):
        for m in (1, 7, rows - 1, rows, rows + 1, 3 * rows + 5):
            for n in (8, columns - 8, columns, columns + 8, 2 * columns + 24):
                check(beside_every_tile, *whole(m, n))


@pytest.mark.parametrize("config", ANYWHERE, ids=lambda config: config.name)
def test_every_tile_at_every_edge(config: KernelConfig) -> None:
    """Misaligned rows whose ends lie anywhere in a tile, in a piece of 16 bytes and in the matrix's last piece."""
    rows, columns, _ = config.tile
    shapes = {(2, 1), (3, 7), (rows + 1, columns + 1), (2 * rows, columns), (rows - 1, 3 * columns - 5)}
    shapes |= {(rows + 9, columns - 33 + more) for more in range(0, 34, 3)} if columns > 33 else set()
    shapes |= {(17, 2 * columns + more) for more in range(-8, 9)}
    with only(config), gemm_ops.use_backend("sm90"):
        for m, n in sorted(shapes):
            for way in ("off", "contiguous"):
                if way == "off" or n % 4:  # else TMA stores the 32-bit output
                    check(both_sizes, *misaligned(m, n, way))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (513, 2049), (100, 8), (2, 65, 33), (4, 3, 5, 9), (70000, 3)])
def test_pad_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    per_access = 16 // dtype.itemsize
    for make in (
        lambda: torch.randn(shape, device="cuda").to(dtype),
        lambda: lay_out(shape, "off", dtype, "cuda"),
        lambda: lay_out(shape, "every second row", dtype, "cuda"),
        lambda: lay_out(shape, "one row", dtype, "cuda"),
        lambda: lay_out(shape, "every second", dtype, "cuda"),
    ):
        source = make()
        padded = pad_rows(source)
        assert padded.shape == (*shape[:-1], -(-shape[-1] // per_access) * per_access)
        assert torch.equal(padded[..., : shape[-1]], source) and not padded[..., shape[-1] :].any()


def test_more_than_2_31_elements() -> None:
    """Offsets beyond 32 bits in the copy, in A, and in an output whose rows are misaligned."""
    tall = torch.randn(66_000_001, 33, device="cuda").bfloat16()
    weight = torch.randn(8, 33, device="cuda").bfloat16()
    result = gemm_ops.linear(tall, weight, "relu")
    assert gemm_ops.backend_for(tall, weight.t(), "relu").backend == "sm90"
    for rows in (slice(0, 5), slice(2**31 // 33 - 3, 2**31 // 33 + 3), slice(65_999_990, None)):
        expected = torch.relu(tall[rows].double() @ weight.double().t())
        torch.testing.assert_close(result[rows].double(), expected, rtol=1e-2, atol=1e-2)
    del tall, result
    x, weight = torch.randn(65_537, 16, device="cuda").bfloat16(), torch.randn(40_001, 16, device="cuda").bfloat16()
    result = gemm_ops.linear(x, weight, "relu")
    edge = 2**31 // 40_001
    for rows in (slice(0, 3), slice(edge - 2, edge + 3), slice(65_534, None)):
        expected = torch.relu(x[rows].double() @ weight.double().t())
        torch.testing.assert_close(result[rows].double(), expected, rtol=1e-2, atol=1e-2)
    assert torch.isfinite(result.sum(dtype=torch.float32))


def test_overlapping_windows_are_read_as_they_are() -> None:
    """Rows of a matrix may overlap in memory, as those of an unfolded signal do."""
    signal = torch.randn(8 * 300 + 64, device="cuda").bfloat16()
    windows = signal.as_strided((300, 64), (8, 1))
    weight = torch.randn(40, 64, device="cuda").bfloat16()
    decision = gemm_ops.backend_for(windows, weight.t())
    assert decision.addressing is not None and not decision.addressing.copies
    result = gemm_ops.linear(windows, weight)
    torch.testing.assert_close(result.float(), windows.float() @ weight.float().t(), rtol=2e-2, atol=1e-1)


def test_a_chain_of_odd_layers_copies_nothing_but_the_first_x() -> None:
    torch.manual_seed(0)
    first = gemm_ops.FusedLinear(63, 65, epilogue="gelu", padded_output=True, device="cuda", dtype=torch.bfloat16)
    second = gemm_ops.FusedLinear(65, 33, epilogue="relu", device="cuda", dtype=torch.bfloat16)
    plain = [layer.weight.detach().clone() for layer in (first, second)]
    first, second = first.eval(), second.eval()
    assert first.weight.stride() == (64, 1) and second.weight.stride() == (72, 1)
    x = torch.randn(2, 20, 63, device="cuda").bfloat16()
    with torch.no_grad():
        hidden = first(x)
        y = second(hidden)
        assert hidden.stride() == (20 * 72, 72, 1) and y.is_contiguous()
        routes = gemm_ops.backend_for(hidden, second.weight.t(), "relu", bias=second.bias).routes
        assert not any("copied" in route for route in routes), routes
        expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, plain[0], first.bias))
        expected = torch.relu(torch.nn.functional.linear(expected, plain[1], second.bias))
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
    # in-place updates, .data too, reach the next call; training mode is contiguous for fused optimisers
    with torch.no_grad():
        second.weight.data.mul_(2)
        second.bias.zero_()
        torch.testing.assert_close(
            second(hidden), torch.relu(torch.nn.functional.linear(hidden, 2 * plain[1])), rtol=3e-2, atol=3e-2
        )
    second.train()
    assert second.weight.is_contiguous()
    optimiser = torch.optim.AdamW(second.parameters(), fused=True)
    second(hidden.detach()).sum().backward()
    optimiser.step()
    assert second.weight.grad is not None and second.weight.grad.is_contiguous()
    assert torch.equal(second.eval().weight, second.weight.contiguous())

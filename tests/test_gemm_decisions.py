"""What decides on a kernel, without a device: layouts, families, configurations, keys of plans."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_support import aligned, resolved, shifted
from torch import Tensor

import epilogues as ep
from epilogues.tree import Accumulator, Apply, EpilogueTree, Kind, Operand, Store
from gemm_ops import dispatch
from gemm_ops.addressing import Addressing, address
from gemm_ops.addressing.views import given_view, has_memory, new_view
from gemm_ops.errors import UnsupportedProblemError
from gemm_ops.forcing import use_backend
from gemm_ops.kernels.access import UNALIGNED, Access
from gemm_ops.kernels.config import SKINNY_CONFIGS, SM80_CONFIGS, SM90_CONFIGS, KernelConfig
from gemm_ops.kernels.families import arch_of, choose_config, families_for, sm90_stages, takes
from gemm_ops.kernels.waves import choose_raster, tiles
from gemm_ops.outputs import empty_padded
from gemm_ops.plan import plan_key
from gemm_ops.problem import read_problem
from gemm_ops.runtime.abi import MAX_OPERANDS

# Layouts.


@dataclass(frozen=True)
class Expected:
    """How SM90 kernels reach a matrix A: from which side, at which leading dimension; copied, and why."""

    layout: str
    leading: int
    why: str = ""
    copy: str = ""


def padded(layout: str, leading: int, why: str) -> Expected:
    return Expected(layout, leading, why, "padded")


def gathered(leading: int, strides: tuple[int, int]) -> Expected:
    return Expected("row", leading, f"neither of its strides {strides} is 1", "contiguous")


ODD = "its leading dimension of {} elements is not a multiple of 16 bytes"
OFF = "it starts {} bytes after a multiple of 16 bytes"
LAYOUTS: dict[str, tuple[Callable[[], Tensor], Expected]] = {
    "contiguous": (lambda: aligned(16, 32), Expected("row", 32)),
    "transposed": (lambda: aligned(32, 16).t(), Expected("column", 16)),
    "square": (lambda: aligned(16, 16), Expected("row", 16)),
    "columns of a wider one": (lambda: aligned(16, 64)[:, 8:40], Expected("row", 64)),
    "rows of a higher one": (lambda: aligned(16, 32)[3:9], Expected("row", 32)),
    "every second row": (lambda: aligned(16, 32)[::2], Expected("row", 64)),
    "odd columns, padded rows": (lambda: aligned(16, 40)[:, :33], Expected("row", 40)),
    "transposed, padded": (lambda: aligned(32, 24)[:, :17].t(), Expected("column", 24)),
    "odd columns": (lambda: aligned(16, 33), padded("row", 40, ODD.format(33))),
    "odd rows, transposed": (lambda: aligned(32, 17).t(), padded("column", 24, ODD.format(17))),
    "starts 2 bytes off": (lambda: shifted(16, 32, 1), padded("row", 32, OFF.format(2))),
    "starts 8 bytes off": (lambda: shifted(16, 32, 4), padded("row", 32, OFF.format(8))),
    "every second column": (lambda: aligned(16, 64)[:, ::2], gathered(32, (64, 2))),
    "one row expanded": (lambda: aligned(1, 32).expand(16, 32), padded("row", 32, "its rows are repeated")),
    "one column expanded": (lambda: aligned(16, 1).expand(16, 32), padded("column", 16, "its columns are repeated")),
    "one number expanded": (lambda: aligned(1, 1).expand(16, 32), gathered(32, (0, 0))),
    "windows": (lambda: aligned(1, 256).as_strided((16, 32), (8, 1)), Expected("row", 8)),
    "narrow windows": (lambda: aligned(1, 64).as_strided((16, 32), (2, 1)), padded("row", 32, ODD.format(2))),
    # the stride of an extent of 1 means nothing, so one that is aligned is taken
    "one odd row": (lambda: aligned(1, 33), Expected("row", 40)),
    "one row of a wider one": (lambda: aligned(16, 33)[:1], Expected("row", 40)),
    "one column of many": (lambda: aligned(32, 1), Expected("column", 32)),
    "one odd column": (lambda: aligned(33, 1), Expected("column", 40)),
    "one column of a padded one": (lambda: aligned(16, 8)[:, :1], Expected("row", 8)),
    "one column of an odd one": (lambda: aligned(16, 9)[:, :1], padded("row", 8, ODD.format(9))),
    "one number": (lambda: aligned(1, 1), Expected("row", 8)),
    "one number off": (lambda: shifted(1, 1, 1), padded("row", 8, OFF.format(2))),
}


@pytest.mark.parametrize(("make", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_a(make: Callable[[], Tensor], expected: Expected) -> None:
    a = make()
    found = address("sm90", dispatch.bind_call(a, aligned(a.shape[1], 8), ep.builders.identity(), {}, None).request)
    assert isinstance(found, Addressing)
    placement = found.a
    assert Expected(placement.layout, placement.leading, placement.why, placement.copy) == expected
    if not expected.copy:
        # the addresses that a kernel computes from it are those of the elements
        rows, columns = a.shape
        outer, inner = (0, 1) if expected.layout == "row" else (1, 0)
        for element in ((0, 0), (rows - 1, 0), (0, columns - 1), (rows - 1, columns - 1)):
            offset = element[outer] * expected.leading + element[inner]
            assert a.data_ptr() + offset * a.element_size() == a[element].data_ptr()


def test_read_problem() -> None:
    x, weight = torch.empty(2, 3, 16, 64).bfloat16(), torch.empty(32, 64).bfloat16()
    problem = read_problem(x, weight.t())
    assert (problem.m, problem.n, problem.k) == (96, 32, 64) and problem.m_shape == problem.extents == (2, 3, 16)
    assert problem.output_shape == (2, 3, 16, 32) and problem.element == "bf16"
    problem = read_problem(x[0, 0, 0], weight.t())
    assert (problem.m, problem.m_shape, problem.extents, problem.output_shape) == (1, (), (1,), (32,))
    problem = read_problem(x, torch.empty(3, 64, 32).bfloat16())
    assert (problem.m, problem.m_shape) == (96, (2, 3, 16))
    assert read_problem(x.double(), weight.t().double()).element is None


def test_views_of_new_outputs_are_those_that_pytorch_gives() -> None:
    for m, n, dtype in (
        (16, 32, torch.float32),
        (16, 33, torch.bfloat16),
        (1, 33, torch.half),
        (16, 34, torch.float32),
    ):
        for padding in (False, True):
            problem = read_problem(torch.empty(3, m, 64), torch.empty(64, n))
            make = empty_padded if padding else torch.empty
            fresh = make(problem.output_shape, dtype=dtype, device="cpu")  # as a plan does
            promised = new_view(problem.extents, n, dtype.itemsize, padded=padding)
            assert promised.view == given_view(fresh, problem.extents).view and promised.padding == padding


# Families.


def addressing_of(m: int, n: int, k: int = 64, family: str = "sm90") -> Addressing:
    """That of ``linear`` with tensors without memory: as PyTorch allocates them."""
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    found = address(family, dispatch.bind_call(x, weight.t(), ep.builders.identity(), {}, None).request)
    assert isinstance(found, Addressing)
    return found


def test_extents_beyond_32_bits_are_refused() -> None:
    x = torch.empty(2**31, 8, dtype=torch.bfloat16, device="meta")
    call = dispatch.bind_call(
        x, torch.empty(8, 8, dtype=torch.bfloat16, device="meta"), ep.builders.identity(), {}, None
    )
    for family in ("sm90", "sm80"):
        assert address(family, call.request) == "an extent is larger than 2^31 - 1"
    # as rows of a batch they are taken, in more than one launch if need be
    halves = dispatch.bind_call(
        x.view(2, 2**30, 8), torch.empty(8, 8, dtype=torch.bfloat16, device="meta"), ep.builders.identity(), {}, None
    )
    found = address("sm90", halves.request)
    assert isinstance(found, Addressing) and (found.m, found.batch) == (2**30, 2)


def test_families_by_capability() -> None:
    expected = {
        (7, 5): (),
        (8, 0): ("skinny", "sm80"),
        (8, 9): ("skinny", "sm80"),
        (9, 0): ("skinny", "sm90", "sm80"),
        (10, 0): ("skinny", "sm80"),
    }
    assert {capability: families_for(capability) for capability in expected} == expected
    assert [arch_of("sm90", (9, 0)), arch_of("sm80", (9, 0)), arch_of("sm80", (8, 6))] == ["90a", "90", "86"]
    assert arch_of("sm80", (12, 0)) == "120"


BIAS_GELU = resolved(ep.builders.SUITE["bias_gelu"]())
CHOICES = {
    (4096, 4096, 4096): "sm90_pingpong_128x128x64_1x2",
    (8192, 8192, 8192): "sm90_pingpong_128x128x64_1x2",
    (4096, 11008, 4096): "sm90_pingpong_128x128x64_1x2",
    (8192, 14336, 4096): "sm90_pingpong_128x128x64_1x2",
    (1024, 4096, 4096): "sm90_cooperative_128x256x64_2x1",
    (1000, 3000, 2000): "sm90_cooperative_128x192x64_2x1",
    (4088, 4104, 4088): "sm90_cooperative_128x208x64_2x1",
    (3000, 5000, 1000): "sm90_pingpong_128x160x64_2x1",
    (777, 1544, 1032): "sm90_pingpong_160x64x64_1x2_swapped",
    (128, 4096, 4096): "sm90_pingpong_64x64x128_2x1_swapped",
    (64, 4096, 4096): "sm90_pingpong_32x64x128_2x1_swapped",
    (17, 4096, 4096): "sm90_pingpong_32x64x128_2x1_swapped",
    # epilogues bound the time of one warp group, not of two
    (4096, 4096, 64): "sm90_cooperative_128x256x64_2x1",
}


@pytest.mark.parametrize(("shape", "name"), CHOICES.items(), ids=str)
def test_choice_of_configuration(shape: tuple[int, int, int], name: str) -> None:
    """The measured choices of ``kernels/config.py``, on 132 multiprocessors."""
    config = choose_config("sm90", addressing_of(*shape), BIAS_GELU, 132)
    assert isinstance(config, KernelConfig) and config.name == name


def test_raster_of_the_pingpong_tiles() -> None:
    for shape, swizzle in (((4096, 11008, 4096), 1), ((8192, 14336, 4096), 8)):
        config = choose_config("sm90", addressing_of(*shape), BIAS_GELU, 132)
        assert isinstance(config, KernelConfig) and config.swizzle == swizzle


def test_bands_of_the_raster_add_no_wave() -> None:
    """CUTLASS rounds tiles up to whole bands along both extents and computes what that adds."""
    config = next(each for each in SM90_CONFIGS if each.name == "sm90_pingpong_128x128x64_1x2")
    tall = addressing_of(12608, 768, 3072)  # 99 x 6 tiles
    assert [tiles(config, tall, swizzle) for swizzle in (1, 2, 4, 8)] == [99 * 6, 100 * 8, 100 * 8, 104 * 16]
    assert choose_raster(config, tall, 132) == 1
    for m in range(128, 16384, 640):
        for n in (768, 1024, 4104, 5120):
            problem = addressing_of(m, n, 512)
            for each in SM90_CONFIGS:
                swizzle = choose_raster(each, problem, 132)
                assert -(-tiles(each, problem, swizzle) // 132) == -(-tiles(each, problem) // 132)


def test_every_configuration_is_chosen_for_some_shape() -> None:
    """A row of the table that nothing chooses is a row too many."""
    rows = (16, 128, 512, 1024, 2048, 4096, 8192)
    shapes = [(m, n + odd, 4096) for m in rows for n in range(512, 16384, 512) for odd in (0, 1)]
    few = [(m, n, k) for m in (1, 9) for n in (1024, 11008) for k in (512, 4096)]
    shapes += [(m, n, 4096) for m in (17, 40, 777) for n in (1544, 4096)] + [(4088, 4104, 4088)]
    tables = (("sm90", SM90_CONFIGS, shapes), ("sm80", SM80_CONFIGS, shapes), ("skinny", SKINNY_CONFIGS, few))
    for family, table, shapes in tables:
        chosen = {choose_config(family, addressing_of(*shape, family=family), BIAS_GELU, 132).name for shape in shapes}  # type: ignore
        assert chosen == {config.name for config in table}


def test_sm80_takes_large_tiles_where_they_fill_the_device() -> None:
    large, small = SM80_CONFIGS
    assert choose_config("sm80", addressing_of(4096, 4096, family="sm80"), BIAS_GELU, 132) == large  # 1024 tiles
    assert choose_config("sm80", addressing_of(1408, 1536, family="sm80"), BIAS_GELU, 132) == large  # 11 x 12 = 132
    assert choose_config("sm80", addressing_of(1280, 1664, family="sm80"), BIAS_GELU, 132) == small  # 10 x 13 = 130


def tree_of(matrices: int, dtype: str = "bf16", outputs: int = 1) -> EpilogueTree:
    value: Any = Accumulator()
    for position in range(matrices):
        value = Apply("add", (value, Operand(f"m{position}", Kind.AUX, position, dtype)))
    return EpilogueTree(tuple(Store("D" if i == 0 else f"o{i}", value, dtype) for i in range(outputs)))


def test_matrices_of_the_epilogue_take_their_share_of_shared_memory() -> None:
    problem = addressing_of(1024, 4096, 4096)
    stages = {config.name: sm90_stages(config, tree_of(0)) for config in SM90_CONFIGS}
    # (232448 - 1024 - 2 * 128 * 32 * 2 bytes) / ((128 + 256) * 64 * 2), and so on
    assert stages["sm90_cooperative_128x256x64_2x1"] == 4
    assert stages["sm90_pingpong_128x128x64_1x2"] == 6
    areas = []
    for matrices in range(MAX_OPERANDS + 1):
        tree = tree_of(matrices)
        config = choose_config("sm90", problem, tree, 132)
        taken = [each for each in SM90_CONFIGS if takes(each, tree, problem)]
        areas.append(max((each.tile[0] * each.tile[1] for each in taken), default=0))
        assert isinstance(config, KernelConfig) == bool(taken)
        if isinstance(config, KernelConfig):
            assert sm90_stages(config, tree) >= 2
            if any(sm90_stages(other, tree) >= 3 for other in taken):
                assert sm90_stages(config, tree) >= 3
    # ever smaller tiles, and then none
    assert areas == sorted(areas, reverse=True) and areas[-1] == 0 and len(set(areas)) >= 3
    assert choose_config("sm80", problem, tree_of(MAX_OPERANDS), 132) == SM80_CONFIGS[0]


def test_misaligned_matrices_are_staged() -> None:
    """Rows of 112 bytes where elements have two, 176 where they have four: 16 of them for each warp."""
    small = next(config for config in SM90_CONFIGS if config.tile == (64, 32, 128))
    value = Apply("relu", (Accumulator(),))
    stores = tuple(Store("D" if i == 0 else f"o{i}", value, "f32" if i else "bf16") for i in range(8))
    access = Access(outputs=(UNALIGNED,) * 8)
    # (232448 - 1024 - 4 * 16 * (112 + 7 * 176)) / ((64 + 32) * 128 * 2)
    assert sm90_stages(small, EpilogueTree(stores), access) == 5
    assert sm90_stages(small, EpilogueTree(stores[:2]), Access(outputs=(UNALIGNED,) * 2)) == 8
    large = SM90_CONFIGS[0]
    # (232448 - 1024 - 8 * 16 * (112 + 4 * 176)) / ((128 + 256) * 64 * 2)
    assert sm90_stages(large, EpilogueTree(stores[:5]), Access(outputs=(UNALIGNED,) * 5)) == 2


def test_wider_elements_take_more() -> None:
    config = SM90_CONFIGS[0]
    row = EpilogueTree((Store("D", Apply("add", (Accumulator(), Operand("r", Kind.ROW, 0, "f32"))), "bf16"),))
    assert sm90_stages(config, tree_of(4, "f32")) < sm90_stages(config, tree_of(4)) < sm90_stages(config, tree_of(0))
    assert sm90_stages(config, tree_of(0, outputs=6)) < sm90_stages(config, row) == sm90_stages(config, tree_of(0))


def test_the_suite_has_a_configuration_for_every_aligned_shape() -> None:
    suite = Path(__file__).parent.parent.parent / "shared" / "suite.json"
    shapes = [[4096, 4096, 4096], [1, 4096, 4096], [777, 1544, 1032]]
    if suite.is_file():
        listed = json.loads(suite.read_text())["shapes"]
        shapes = [shape for group in ("large", "medium", "decode") for shape in listed[group]]
    for build in ep.builders.SUITE.values():
        for m, n, k in shapes:
            for family in ("sm90", "sm80"):
                assert choose_config(family, addressing_of(m, n, k, family), resolved(build()), 132) is not None


def test_few_rows_are_for_skinny_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "multiprocessor_count", lambda device: 132)

    def decide(m: int, backend: str, k: int = 4096, padded: bool = False) -> dispatch.Decision:
        x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(4096, -(-k // 8) * 8 if padded else k, dtype=torch.bfloat16, device="meta")[:, :k]
        call = dispatch.bind_call(x, weight.t(), ep.builders.activation("gelu"), {}, None)
        there = dataclasses.replace(call.problem, device=torch.device("cuda", 0))
        with use_backend(backend):
            return dispatch.decide(dataclasses.replace(call, problem=there))

    for m in (1, 8, 9, 16):
        found = decide(m, "auto")
        assert found.backend == "skinny" and found.kernel is not None, m
        assert int(found.kernel.split("_")[1].split("x")[0]) >= m
    assert decide(17, "auto").backend == "sm90" == decide(16, "sm90").backend
    assert decide(16, "cublas").backend == "cublas"
    with pytest.raises(UnsupportedProblemError, match="17 rows"):
        decide(17, "skinny")
    # one row lies at any pitch; more of an odd one would be copied, which is for SM90 kernels
    assert decide(1, "auto", 4095, padded=True).backend == "skinny"
    assert decide(2, "auto", 4095, padded=True).backend == "sm90"
    with pytest.raises(UnsupportedProblemError, match="a would be copied"):
        decide(2, "skinny", 4095, padded=True)


def test_skinny_kernels_want_both_matrices_along_k() -> None:
    x, weight = torch.empty(8, 64).bfloat16(), torch.empty(32, 64).bfloat16()
    for a, b, expected in (
        (x, weight.t(), ""),
        (torch.empty(64, 8).bfloat16().t(), weight.t(), "a is not contiguous along K"),
        (x, torch.empty(64, 32).bfloat16(), "b is not contiguous along K"),
    ):
        found = address("skinny", dispatch.bind_call(a, b, ep.builders.identity(), {}, None).request)
        assert (found if isinstance(found, str) else "") == expected


def test_tiles_that_are_not_of_32_columns_store_at_16_bytes_only() -> None:
    odd = next(config for config in SM90_CONFIGS if config.tile[1] == 208)
    swapped = next(config for config in SM90_CONFIGS if config.swapped)
    aligned_problem, unaligned_problem = addressing_of(300, 400, 64), addressing_of(300, 401, 64)
    for config in (odd, swapped):
        assert takes(config, BIAS_GELU, aligned_problem) and not takes(config, BIAS_GELU, unaligned_problem)


# Calls, as far as they go without a device.


@pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")
def test_resolved_trees_go_by_structure() -> None:
    """One tree for epilogues that differ in names, and the names of each in its results."""

    def one(acc: Any, bias: ep.Row) -> Any:
        return {"D": acc + bias, "first": acc}

    def two(acc: Any, offset: ep.Row) -> Any:
        return {"D": acc + offset, "second": acc}

    a, b, row = aligned(16, 64), aligned(64, 32), torch.ones(32)
    calls = [
        dispatch.bind_call(a, b, ep.epilogue(one), {"bias": row}, None),
        dispatch.bind_call(a, b, ep.epilogue(two), {"offset": row}, None),
    ]
    assert calls[0].tree is calls[1].tree
    assert [list(dispatch.compute_by_operations(call, transformed=False)) for call in calls] == [
        ["D", "first"],
        ["D", "second"],
    ]


def test_bound_operands() -> None:
    a, b = aligned(16, 64), aligned(64, 32)
    residual = aligned(16, 48)[:, :32]
    call = dispatch.bind_call(
        a,
        b,
        ep.builders.SUITE["residual"](),
        {"scale": torch.ones(33)[1:], "bias": aligned(1, 32), "alpha": 2, "residual": residual},
        None,
    )
    facts = [operand.facts for operand in call.operands]
    assert [fact.kind for fact in facts] == [Kind.ROW, Kind.ROW, Kind.SCALAR, Kind.AUX]
    assert [fact.dtype for fact in facts] == ["f32", "bf16", "f32", "bf16"]
    scale, _, _, matrix = call.request.operands
    assert scale.view is not None and (scale.view.offset, scale.view.n) == (4, 1)
    assert matrix.view is not None and (matrix.view.lead, matrix.view.n) == ((48,), 1)
    assert call.operands[2].tensor is None and call.operands[2].value == 2.0
    assert [str(operand.dtype) for operand in call.tree.operands] == ["f32", "bf16", "f32", "bf16"]
    assert call.tree.outputs[0].dtype == "bf16"


def test_tensors_inside_vmap_have_no_memory() -> None:
    """A kernel could read nothing there: no plan is looked up, and the decision is the reference backend."""
    seen = []

    def look(row: Tensor) -> Tensor:
        matrix = row.reshape(1, -1)
        seen.append((has_memory(matrix), plan_key((matrix, weight), ep.builders.activation("relu"), {}, None, "auto")))
        return row

    weight = torch.randn(4, 5)
    torch.vmap(look)(torch.randn(3, 4))
    assert seen == [(False, None)] and has_memory(weight)

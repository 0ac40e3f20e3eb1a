"""Elementwise kernels run on the host: every access, dtype and alignment, against fp64, with poison and guards."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from elementwise_host import check_outputs, expected, host_kernel, plan, run_on_host
from gemm_support import every_kind, resolved
from operation_support import packs
from torch import Tensor

import epilogues as ep
from epilogues import Aux, Row
from epilogues.tree import Accumulator, Constant, EpilogueTree, Kind, Operand, Store
from gemm_ops.elementwise import layout as layout_module
from gemm_ops.elementwise.body import compute_function
from gemm_ops.elementwise.layout import Layout
from gemm_ops.runtime.elementwise import block_template, fill_block

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@ep.epilogue
def bias_relu(acc, bias: Row):
    z = acc + bias
    return {"D": torch.relu(z), "preact": ep.cast(z, "f32")}


@ep.epilogue
def gate_two(acc, gate: Aux):
    """No two outputs of one dtype."""
    z = acc * gate
    return {"D": z - 0.5, "half": ep.cast(torch.relu(z), "f16"), "brain": ep.cast(-z, "bf16")}


@ep.epilogue
def product_sum(acc, scale: Aux, shift: Aux):
    return acc * scale + shift


class Guarded:
    """A tensor of given strides and misalignment, in the middle of memory that holds a pattern."""

    GUARD = 64  # bytes before and after

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None, offset: int = 0
    ) -> None:
        strides = torch.empty(tuple(shape), device="meta").stride() if strides is None else tuple(strides)
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1
        memory = torch.full((reach * dtype.itemsize + 2 * self.GUARD + 64,), 0x5A, dtype=torch.uint8)
        start = self.GUARD + -memory.data_ptr() % 32 + offset
        memory = memory[start % dtype.itemsize :][: (memory.numel() - 8) // 8 * 8]
        self.memory = memory
        self.view = memory.view(dtype).as_strided(tuple(shape), strides, start // dtype.itemsize)
        assert self.view.data_ptr() % 32 == offset % 32
        outside = torch.ones(memory.numel() // dtype.itemsize, dtype=torch.bool)
        outside.as_strided(tuple(shape), strides, start // dtype.itemsize).fill_(False)
        self.outside = outside.repeat_interleave(dtype.itemsize)

    def poisoned(self) -> Guarded:
        self.view.fill_(math.nan)
        return self

    def random(self) -> Guarded:
        self.view.copy_(torch.randn(self.view.shape))
        return self

    def check(self) -> None:
        """Fails if anything around the tensor was written."""
        changed = (self.memory[: self.outside.numel()][self.outside] != 0x5A).sum().item()
        assert changed == 0, f"{changed} bytes outside of the tensor were written"


def run(
    tree: EpilogueTree,
    x: Guarded | Tensor,
    operands: Sequence[Guarded | Tensor | float],
    outputs: Sequence[Guarded],
    **keywords: bool,
) -> Layout:
    """Runs a kernel on poisoned outputs and compares every element with fp64."""
    tensor = x.view if isinstance(x, Guarded) else x
    given = [operand.view if isinstance(operand, Guarded) else operand for operand in operands]
    shape = tuple(outputs[0].view.shape)
    truth = expected(tree, tensor, given, shape)
    views = [output.view for output in outputs]
    layout = run_on_host(tree, tensor, given, views, **keywords)  # type: ignore[arg-type]
    check_outputs(views, truth)
    for guarded in (x, *operands, *outputs):
        if isinstance(guarded, Guarded):
            guarded.check()
    return layout


@pytest.fixture(autouse=True)
def fewest(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Tensors as small as these are cut into short pieces; here long ones, unless asked for."""
    torch.manual_seed(0)

    def threads(count: int) -> None:
        monkeypatch.setattr(layout_module, "FEWEST_THREADS", count)

    threads(0)
    return threads


def ways_of(layout: Layout) -> list[str]:
    """How inputs are reached; whether they need shifting is up to the rows' lengths."""
    return [placement.access.replace("shifted", "pieces") for placement in layout.inputs]


@pytest.mark.parametrize("columns", range(1, 41))
def test_rows_of_every_length_at_every_misalignment(columns: int, fewest: Callable[[int], None]) -> None:
    tree = resolved(bias_relu)
    rng = random.Random(columns)
    seen = set()
    for phase in range(8):
        fewest(rng.choice((0, 2**16)))  # pieces of 16 and of 8 bytes
        pitches = [columns + rng.randrange(10) for _ in range(3)]

        def place(pitch: int, dtype: torch.dtype, step: int) -> Guarded:
            return Guarded((4, columns), dtype, (pitch, 1), step * dtype.itemsize)

        x = place(pitches[0], BF16, rng.randrange(8)).random()
        bias = Guarded((columns,), BF16, offset=2 * rng.randrange(8)).random()
        outputs = [
            place(pitches[1], BF16, phase).poisoned(),
            place(pitches[2], F32, rng.randrange(4)).poisoned(),
        ]
        keywords = {"backwards": rng.random() < 0.5, "wide": rng.random() < 0.3}
        layout = run(tree, x, [bias], outputs, **keywords)
        seen.add(layout.columns)
    assert columns in seen or columns == 1


@pytest.mark.parametrize("columns", [*range(1, 16), 17, 31, 33, 63])
def test_short_rows_that_make_a_long_one(columns: int, fewest: Callable[[int], None]) -> None:
    """What begins anew in each row is read element by element, whichever element a piece begins with."""
    tree = resolved(every_kind, "bf16", {"offset": "f32", "alpha": "f16", "residual": "f16"})
    rng, rows = random.Random(columns), 7
    for phase in range(8):
        fewest(rng.choice((0, 2**16)))
        x = Guarded((rows, columns), BF16, offset=2 * rng.randrange(8)).random()
        operands: list[Guarded | Tensor | float] = [
            Guarded((columns,), BF16, (rng.randrange(1, 3),), 2 * phase).random(),
            Guarded((rows, 1), F32, (rng.randrange(1, 4), 1), 4).random(),
            0.3,
            Guarded((rows, columns), F16, (columns + rng.randrange(3), 1), 2).random(),
        ]
        outputs = [
            Guarded((rows, columns), BF16, offset=2 * phase).poisoned(),
            Guarded((rows, columns), F32, offset=4 * rng.randrange(4)).poisoned(),
        ]
        keywords = {"backwards": rng.random() < 0.5, "wide": rng.random() < 0.3}
        layout = run(tree, x, operands, outputs, **keywords)
        if columns > 1 and columns % 8:
            assert layout.wrap == columns and ways_of(layout)[:3] == ["pieces", "wrapped", "wrapped"]


@pytest.mark.parametrize("columns", [3, 8, 16, 37, 96])
def test_rows_that_are_aligned_need_no_shifting(columns: int) -> None:
    """Both instantiations give the same; each 16 bytes are read once."""
    tree = resolved(bias_relu)
    pitch = -(-columns // 8) * 8
    for offset in (0, 6):
        x, z = (Guarded((5, columns), kind, (pitch, 1), offset * kind.itemsize // 2) for kind in (BF16, F32))
        bias = Guarded((columns,), BF16, offset=offset).random()
        out = Guarded((5, columns), BF16, (pitch, 1), offset).poisoned()
        x.random()
        layout = run(tree, x, [bias], [out, z.poisoned()])
        assert {placement.access for placement in (*layout.inputs, *layout.outputs)} == {"pieces"}
        for guarded in (out, z):
            guarded.poisoned()
        run(tree, x, [bias], [out, z], wide=True)


def whole_accesses(x: Tensor, out: Tensor) -> tuple[int, int]:
    tree = EpilogueTree((Store("D", Accumulator(), "bf16"),))
    spec, layout = plan(tree, x, [], [out])
    return host_kernel(spec).run(fill_block(block_template(layout), x, [], [out]))


def test_whole_16_bytes_are_read_and_written() -> None:
    x, out = torch.randn(4096).to(BF16), torch.empty(4096, dtype=BF16)
    assert whole_accesses(x, out) == (512, 512)
    assert whole_accesses(x[8:-8], out[8:-8]) == (510, 510)
    # elements 3 to 7 and 4088 to 4090 are less than 16 bytes, and what is around them belongs to others
    assert whole_accesses(x[3:-5], out[3:-5]) == (510, 510)
    # shifted: two parts for each piece, but for the first and the last, where they would reach beyond the tensor
    assert whole_accesses(x[3:-13], out[8:-8]) == (2 * 508, 510)
    assert torch.equal(out[8:-8], x[3:-13])


def test_every_bit_pattern_of_16_bits() -> None:
    """NaN stays NaN, and everything else is what PyTorch converts it to."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype, name in ((BF16, "bf16"), (F16, "f16")):
        x = bits.view(dtype)
        stores = [Store("D", Accumulator(), "f32"), *(Store(to, Accumulator(), to) for to in ("bf16", "f16"))]
        outputs = [torch.empty(2**16, dtype=to) for to in (F32, BF16, F16)]
        run_on_host(EpilogueTree(tuple(stores)), x, [], outputs)
        for output in outputs:
            assert torch.equal(output.isnan(), x.isnan()), name
            assert torch.equal(output.nan_to_num(0.25), x.to(output.dtype).nan_to_num(0.25)), name


@pytest.mark.parametrize("pack", packs("f32"), ids=lambda pack: pack.name)
def test_every_operation(pack: ep.Epilogue) -> None:
    tree = resolved(pack, "f32")
    x, row = 16 * torch.randn(2, 37), torch.randn(37)
    outputs = [torch.full((2, 37), math.nan) for _ in tree.outputs]
    run_on_host(tree, x, [row], outputs)
    for output, (name, exact) in zip(outputs, expected(tree, x, [row], (2, 37)).items(), strict=True):
        torch.testing.assert_close(output.double(), exact, rtol=2.0**-19, atol=2.0**-19, equal_nan=True, msg=name)


@pytest.mark.parametrize("alpha", [0.3, "tensor", "view"])
@pytest.mark.parametrize("residual", ["rows", "transposed", "every third"])
@pytest.mark.parametrize("threads", [0, 2**16], ids=["long", "short"])
def test_every_access(residual: str, alpha: float | str, threads: int, fewest: Callable[[int], None]) -> None:
    """A row, a column, a number or a tensor of one element, and a matrix that lies in several ways."""
    fewest(threads)
    tree = resolved(every_kind, "bf16", {"offset": "f32", "alpha": "f16", "residual": "f16"})
    m, n = 6, 37
    strides = {"rows": (41, 1), "transposed": (1, 7), "every third": (120, 3)}[residual]
    operands: list[Guarded | Tensor | float] = [
        Guarded((n,), BF16, offset=10).random(),
        Guarded((m, 1), F32, (3, 1), 4).random(),
        {"tensor": torch.tensor(0.7, dtype=F16), "view": torch.randn(1, 1).to(F16)}.get(str(alpha), 0.3),
        Guarded((m, n), F16, strides, 2).random(),
    ]
    x = Guarded((m, n), BF16, (n, 1), 14).random()
    for keywords in ({}, {"wide": True}, {"backwards": True}):
        outputs = [Guarded((m, n), BF16, offset=6).poisoned(), Guarded((m, n), F32, (n + 2, 1), 8).poisoned()]
        layout = run(tree, x, operands, outputs, **keywords)
    last = "pieces" if residual == "rows" else "strided"
    assert ways_of(layout) == ["pieces", "pieces", "repeated", "scalar", last]


@pytest.mark.parametrize("dtypes", [(F16, "f16"), (BF16, "bf16"), (F32, "f32")], ids=["f16", "bf16", "f32"])
def test_several_outputs_of_different_dtypes_and_phases(
    dtypes: tuple[torch.dtype, str], fewest: Callable[[int], None]
) -> None:
    x_dtype, name = dtypes
    tree = resolved(gate_two, name, {"gate": "f32"})
    for phase, columns in itertools.product(range(4), (1, 5, 16, 61)):
        fewest(2**16 * (phase % 2))
        x = Guarded((3, columns), x_dtype, (columns + 3, 1), phase * x_dtype.itemsize).random()
        gate = Guarded((3, columns), F32, (columns + 1, 1), 4 * (3 - phase)).random()
        outputs = [
            Guarded((3, columns), dtype, (columns + 5 + step, 1), dtype.itemsize * (phase + step) % 16).poisoned()
            for step, dtype in enumerate((x_dtype, F16, BF16))
        ]
        run(tree, x, [gate], outputs)


def test_fp32_throughout_goes_in_pieces_of_four() -> None:
    tree = resolved(product_sum, "f32")
    for columns, phase in itertools.product((2, 3, 4, 5, 19, 20), range(4)):
        x, scale = (Guarded((3, columns), F32, (columns + 1, 1), 4 * phase).random() for _ in range(2))
        shift = Guarded((3, columns), F32, (columns + 2, 1), 4 * (phase ^ 1)).random()
        out = Guarded((3, columns), F32, (columns + 4, 1), 4 * (3 - phase)).poisoned()
        layout = run(tree, x, [scale, shift], [out])
        assert layout.width == 4


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("threads", [0, 2**16], ids=["long", "short"])
def test_in_place(threads: int, backwards: bool, fewest: Callable[[int], None]) -> None:
    """An output that is exactly an input, whichever of its pieces are written before others are read."""
    fewest(threads)
    tree = resolved(bias_relu, "f32")
    tree = EpilogueTree(
        (tree.outputs[0], Store("copy", Accumulator(), "f32"), Store("preact", tree.outputs[1].value, "bf16"))
    )
    for columns, phase in itertools.product((5, 16, 45), range(4)):
        bias = Guarded((columns,), F32).random()
        shared = Guarded((5, columns), F32, (columns + 3, 1), 4 * phase).random()
        main, other = (
            Guarded((5, columns), dtype, (columns + 1, 1), offset).poisoned() for dtype, offset in ((F32, 4), (BF16, 6))
        )
        for place in range(2):  # the main output is x, or the second one, whose pieces begin elsewhere than x's words
            shared.random()
            outputs = [shared, main] if place == 0 else [main, shared]
            truth = expected(tree, shared.view.clone(), [bias.view], (5, columns))
            views = [*(output.view for output in outputs), other.view]
            run_on_host(tree, shared.view, [bias.view], views, backwards=backwards)
            check_outputs(views, truth)
            for guarded in (shared, main, other):
                guarded.check()


def test_transposed_problems() -> None:
    tree = resolved(product_sum)
    layouts = []
    for pitch in (9, 12):  # all along the other dimension, without and with gaps
        x, scale, shift, out = (Guarded((9, 21), BF16, (1, pitch), 2 * step) for step in range(4))
        layouts.append(run(tree, x.random(), [scale.random(), shift.random()], [out.poisoned()]))
    assert [(layout.outer, layout.columns) for layout in layouts] == [((), 189), ((21,), 9)]
    # one that goes another way is read element by element
    across = Guarded((9, 21), BF16).random()
    layout = run(tree, x, [across, shift], [out.poisoned()])
    assert ways_of(layout) == ["pieces", "strided", "pieces"]
    # an output that has no elements side by side
    sparse = Guarded((9, 21), BF16, (80, 3)).poisoned()
    layout = run(tree, across, [across, across], [sparse])
    assert layout.outputs[0].access == "strided"


@pytest.mark.parametrize("shape", [(16, 37), (35, 8), (17, 2), (3, 20, 45)], ids=str)
def test_tensors_that_run_across_the_rows(shape: tuple[int, ...]) -> None:
    """Neighbouring threads take neighbouring rows; every element is reached nevertheless, and once."""
    tree = resolved(gate_two, "bf16", {"gate": "f32"})
    rows, columns = shape[-2:]
    lead = ((rows + 1) * columns + 7,) if len(shape) == 3 else ()
    turned, straight = (*lead, 1, rows + 1), (*(2 * step for step in lead), columns + 3, 1)
    for phase, keywords in itertools.product((0, 3), ({}, {"wide": True}, {"backwards": True})):
        x = Guarded(shape, BF16, turned, 2 * phase).random()
        gate = Guarded(shape, F32, straight, 4).random()
        outputs = [
            Guarded(shape, BF16, straight, 2 * phase).poisoned(),
            Guarded(shape, F16, turned, 6).poisoned(),
            Guarded(shape, BF16, straight, 10).poisoned(),
        ]
        layout = run(tree, x, [gate], outputs, **keywords)
        assert layout.tiled and layout.columns == columns


def test_threads_side_by_side_take_a_tile() -> None:
    """Two pieces of each of 16 rows for the 32 of a warp; what is beyond the last row or piece is empty."""
    tree = EpilogueTree((Store("D", Accumulator(), "bf16"),))
    x, out = torch.empty(70, 35).bfloat16().t(), torch.empty(35, 70).bfloat16()
    spec, layout = plan(tree, x, [], [out])
    assert layout.tiled and layout.pieces_per_row in (9, 10)
    kernel, block = host_kernel(spec), fill_block(block_template(layout), x, [], [out])
    reached: list[tuple[int, int]] = []
    for wide in (False, True):
        for tile, lane in itertools.product(range(3 * 5), range(32)):
            (column, begin, end), (source, target) = kernel.find(block, 32 * tile + lane, wide=wide)
            row = tile // 5 * 16 + lane % 16
            if begin < end:
                assert (source, target) == (2 * row, 140 * row)
                assert column // 8 in (2 * (tile % 5) + lane // 16, 2 * (tile % 5) + lane // 16 - 1)
                reached += [(row, column + i) for i in range(begin, end)]
    assert sorted(reached) == sorted(2 * list(itertools.product(range(35), range(70))))


def test_batches_that_broadcast() -> None:
    tree = resolved(product_sum)
    shape = (3, 4, 5, 19)
    x = Guarded((4, 1, 19), BF16, offset=2).random()
    scale = Guarded((3, 1, 5, 1), BF16, offset=4).random()
    shift = Guarded((4, 5, 19), BF16, (110, 20, 1), 8).random()
    for keywords in ({}, {"wide": True}):
        out = Guarded(shape, BF16, (400, 96, 19, 1), 10).poisoned()
        layout = run(tree, x, [scale, shift], [out], **keywords)
    assert layout.outer == (3, 4, 5)
    assert ways_of(layout) == ["pieces", "repeated", "pieces"]


@pytest.mark.parametrize("rank", [5, 6])
def test_many_dimensions(rank: int) -> None:
    """None of them merge; the output's order in memory is not that of its dimensions."""
    tree = resolved(product_sum)
    shape = (3, 2, 4, 2, 9, 3)[:rank]

    def gaps(order: Sequence[int]) -> list[int]:
        strides, step = [0] * rank, 1
        for place in order:
            strides[place] = step
            step = step * shape[place] + 1
        return strides

    turned = [rank - 2, *range(rank - 2), rank - 1]
    x, scale, shift = (Guarded(shape, BF16, gaps(turned), 2 * step).random() for step in (1, 4, 7))
    for keywords in ({}, {"wide": True}):
        layout = run(tree, x, [scale, shift], [Guarded(shape, BF16, gaps(turned), 6).poisoned()], **keywords)
    assert len(layout.outer) == rank - 1 and layout.columns == shape[turned[0]]


def test_one_element() -> None:
    tree = resolved(product_sum)
    out = Guarded((1, 1), BF16, offset=30).poisoned()
    layout = run(tree, Guarded((1, 1), BF16, offset=2).random(), [0.5, torch.randn(1).to(BF16)], [out])
    assert layout.pieces_per_row == 1


def test_what_a_tree_does_not_read_is_no_input() -> None:
    residual = Operand("residual", Kind.AUX, 0, "bf16")
    tree = EpilogueTree((Store("D", residual, "bf16"), Store("ones", Constant(1.0), "f32")))
    assert "in0" not in compute_function(tree)
    given = Guarded((3, 11), BF16).random()
    run(tree, torch.empty(3, 11, dtype=BF16), [given], [Guarded((3, 11), d).poisoned() for d in (BF16, F32)])


def test_pieces_of_tensors_larger_than_any_memory() -> None:
    """Offsets beyond 32 bits, and pieces around the 31st: the arithmetic alone."""
    tree = resolved(product_sum)
    example = Guarded((3, 4, 5, 19), BF16, (400, 96, 19, 1))
    views = [Guarded((4, 1, 19), BF16).view, Guarded((3, 1, 5, 1), BF16).view, Guarded((4, 5, 19), BF16).view]
    spec, layout = plan(tree, views[0], views[1:], [example.view])
    kernel = host_kernel(spec)
    block = fill_block(block_template(layout), views[0], views[1:], [example.view])
    rng = random.Random(0)
    large = [((7, 1, 306_783_378), 1), ((46_341, 3, 15_446), 1), ((3, 1_000_003, 11), 65), ((1, 1, 5), 2**28)]
    for extents, per_row in large:
        pieces = math.prod(extents) * per_row
        assert 2**30 < pieces < 2**31
        # for the 64-bit walk as many again, and dimensions of more than 32 bits
        for wide, factor in ((False, 1), (True, 2**20 + 1)):
            outer = (extents[0] * factor, *extents[1:])
            columns = 8 * per_row
            pitches = [(0, 2 * columns, 0), (2, 0, 4), (0, 16, 2 * columns)]
            pitches.append((2 * columns * outer[1] * outer[2], 2 * columns * outer[2], 2 * columns))
            block.columns, block.pieces_per_row = columns, per_row
            for place in range(3):
                block.outer[place] = outer[place]
                for tensor, strides in zip([*block.inputs[:3], block.outputs[0]], pitches, strict=True):
                    tensor.strides[place] = strides[place]
            tried = [0, 1, per_row, pieces * factor - 1, *(rng.randrange(pieces * factor) for _ in range(200))]
            for piece in tried:
                row, in_row = divmod(piece, per_row)
                index = (row // (outer[1] * outer[2]), row // outer[2] % outer[1], row % outer[2])
                phase = (block.outputs[0].data // 2) % 8
                (column, begin, end), offsets = kernel.find(block, piece, wide=wide)
                assert column == in_row * 8 - phase
                assert (begin, end) == (max(-column, 0), min(columns - column, 8))
                wanted = [sum(i * stride for i, stride in zip(index, strides, strict=True)) for strides in pitches]
                assert list(offsets) == wanted, (piece, wide)

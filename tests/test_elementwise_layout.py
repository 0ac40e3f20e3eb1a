"""How the tensors of an elementwise call are walked through: the planner alone, without a kernel."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch

from gemm_ops.elementwise import layout as layout_module
from gemm_ops.elementwise.layout import Layout, Placement, TensorView, plan_layout, view_of


@pytest.fixture(autouse=True)
def _long_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors as small as these are cut into short pieces; here long ones, unless asked for."""
    monkeypatch.setattr(layout_module, "FEWEST_THREADS", 0)


def planned(shape: tuple[int, ...], inputs: list[TensorView | None], outputs: list[TensorView]) -> Layout:
    layout = plan_layout(shape, inputs, outputs)
    assert isinstance(layout, Layout), layout
    return layout


def dense(*shape: int, size: int = 2, offset: int = 0) -> TensorView:
    return TensorView(torch.empty(shape, device="meta").stride(), size, offset)


def accesses(layout: Layout) -> list[str]:
    return [placement.access for placement in (*layout.inputs, *layout.outputs)]


def test_what_is_contiguous_is_one_row() -> None:
    layout = planned((3, 4, 5, 6), [dense(3, 4, 5, 6)], [dense(3, 4, 5, 6)])
    assert (layout.outer, layout.columns, layout.width, layout.pieces_per_row) == ((), 360, 8, 45)
    assert layout.inputs == (Placement("pieces", (), 2, 720),)


def test_broadcast_operands_keep_apart_what_they_have_to() -> None:
    bias, offset, alpha = TensorView((0, 0, 1), 2), TensorView((7, 1, 0), 4), TensorView((0, 0, 0), 4)
    both = [dense(5, 7, 64), bias]
    assert planned((5, 7, 64), both, [dense(5, 7, 64)]).outer == (35,)
    layout = planned((5, 7, 64), [*both, offset, alpha, None], [dense(5, 7, 64)])
    assert (layout.outer, layout.columns) == ((35,), 64)
    assert accesses(layout) == ["pieces", "pieces", "repeated", "scalar", "scalar", "pieces"]
    assert [placement.strides for placement in layout.inputs] == [(128,), (0,), (4,), (0,), ()]
    per_batch = TensorView((64, 0, 1), 2)
    assert planned((5, 7, 64), [dense(5, 7, 64), per_batch], [dense(5, 7, 64)]).outer == (5, 7)


def test_a_transposed_problem_is_contiguous_again() -> None:
    turned = TensorView((1, 48), 2)
    layout = planned((48, 32), [turned, turned], [turned])
    assert (layout.outer, layout.columns, accesses(layout)) == ((), 48 * 32, ["pieces"] * 3)
    # an input that goes another way than the output does not
    layout = planned((48, 32), [dense(48, 32), TensorView((1, 0), 2)], [turned])
    assert (layout.outer, layout.columns) == ((32,), 48)
    assert accesses(layout) == ["strided", "pieces", "pieces"]
    assert layout.inputs[0] == Placement("strided", (2,), 64, 48 * 32 * 2)


def test_rows_go_together_where_a_tensor_runs_across_them() -> None:
    across = TensorView((1, 48), 2)
    assert planned((48, 32), [across], [dense(48, 32)]).tiled
    assert planned((3, 48, 32), [TensorView((2000, 1, 48), 2)], [dense(3, 48, 32)]).tiled
    assert planned((48, 32), [dense(48, 32)], [dense(48, 32), across]).tiled, "an output, too"
    assert not planned((15, 32), [across], [dense(15, 32)]).tiled, "fewer rows than go together"
    assert not planned((48, 32), [TensorView((96, 2), 2)], [dense(48, 32)]).tiled, "runs along the rows"
    assert not planned((48, 32), [TensorView((0, 2), 2)], [dense(48, 32)]).tiled, "the same in all rows"
    assert not planned((48, 3, 32), [TensorView((1, 2000, 48), 2)], [dense(48, 3, 32)]).tiled, "along another one"


def test_short_rows_without_gaps_are_one_long_row_although_a_bias_begins_anew_in_each() -> None:
    bias, offset, alpha = TensorView((0, 1), 2), TensorView((3, 0), 4), TensorView((0, 0), 4)
    layout = planned((6, 10), [dense(6, 10), bias, offset, alpha, None], [dense(6, 10)])
    assert (layout.outer, layout.columns, layout.wrap, layout.pieces_per_row) == ((), 60, 10, 8)
    assert accesses(layout) == ["pieces", "wrapped", "wrapped", "scalar", "scalar", "pieces"]
    assert layout.inputs[1] == Placement("wrapped", (0,), 2, 20)
    assert layout.inputs[2] == Placement("wrapped", (12,), 0, 64)
    gaps = planned((6, 10), [TensorView((11, 1), 2), bias], [dense(6, 10)])
    assert (gaps.outer, gaps.columns, accesses(gaps)) == ((), 60, ["wrapped", "wrapped", "pieces"])

    def is_wrapped(shape: tuple[int, ...], *inputs: TensorView, main: TensorView | None = None) -> bool:
        return planned(shape, list(inputs), [main or dense(*shape)]).wrap > 0

    assert not is_wrapped((6, 16), dense(6, 16), bias), "rows that are aligned"
    assert is_wrapped((6, 12), dense(6, 12), bias)
    assert not is_wrapped((6, 12), dense(6, 12), bias, main=dense(6, 12, size=4)), "aligned as well"
    assert not is_wrapped((6, 4097), dense(6, 4097), bias), "long rows"
    assert not is_wrapped((6, 10), dense(6, 10), bias, main=TensorView((11, 1), 2)), "the output has gaps"
    assert not is_wrapped((20, 10), dense(20, 10), TensorView((1, 20), 2)), "runs across the rows"
    assert not is_wrapped((2, 3, 10), dense(2, 3, 10), TensorView((10, 0, 1), 2)), "more dimensions than two"
    assert not is_wrapped((6, 10), dense(6, 10)), "nothing begins anew"


def test_whole_pieces_where_rows_begin_and_end_with_them() -> None:
    bias = TensorView((0, 1), 2)

    def is_whole(columns: int, pitch: int, offset: int = 0, size: int = 2) -> bool:
        return planned((6, columns), [TensorView((99, 1), 2), bias], [TensorView((pitch, 1), size, offset)]).whole

    assert is_whole(64, 64) and is_whole(64, 72) and is_whole(8, 8, 16)
    assert not is_whole(65, 72) and not is_whole(60, 64), "rows that end within a piece"
    assert not is_whole(64, 68) and not is_whole(64, 65), "rows that begin within one"
    assert not is_whole(64, 64, 2) and not is_whole(64, 64, 8), "so does the first"
    assert is_whole(64, 64, size=4) and not is_whole(64, 68, size=4)
    assert not is_whole(64, 64, 16, size=4), "pieces of eight elements of four bytes"
    assert planned((64,), [dense(64)], [dense(64)]).whole and not planned((63,), [dense(63)], [dense(63)]).whole
    across = planned((48, 32), [TensorView((1, 48), 2)], [dense(48, 32)])
    assert across.tiled and not across.whole


def test_dimensions_of_extent_one_have_no_say() -> None:
    odd = TensorView((99, 8, 13, 1, 7), 2)
    layout = planned((1, 16, 1, 8, 1), [odd], [dense(1, 16, 1, 8, 1)])
    assert (layout.outer, layout.columns, accesses(layout)) == ((), 128, ["pieces", "pieces"])


def test_a_single_element() -> None:
    for shape in ((), (1,), (1, 1, 1)):
        layout = planned(shape, [TensorView((1,) * len(shape), 2, 6)], [TensorView((5,) * len(shape), 2, 30)])
        assert (layout.outer, layout.columns, layout.pieces_per_row) == ((), 1, 1)
        assert accesses(layout) == ["scalar", "pieces"]
        assert layout.outputs[0].bytes == 2


@pytest.mark.parametrize(
    ("sizes", "width"), [((2, 2), 8), ((4, 2), 8), ((2, 4), 8), ((4, 4), 4)], ids=["16", "in 32", "out 32", "32"]
)
def test_pieces_are_as_wide_as_the_smallest_elements_want(sizes: tuple[int, int], width: int) -> None:
    assert planned((64,), [TensorView((1,), sizes[0])], [TensorView((1,), sizes[1])]).width == width


def test_small_tensors_are_cut_into_shorter_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "FEWEST_THREADS", 1024)

    def width(elements: int, *sizes: int) -> int:
        return planned((elements,), [TensorView((1,), size) for size in sizes], [dense(elements)]).width

    assert [width(elements, 2) for elements in (8192, 8191, 4095, 1)] == [8, 4, 4, 4]
    assert width(8191, 4) == 4 and width(8192, 4) == 8

    def single(elements: int) -> int:
        return planned((elements,), [dense(elements, size=4)], [dense(elements, size=4)]).width

    assert [single(elements) for elements in (4096, 4095, 1)] == [4, 2, 2]


def test_only_tensors_that_are_reached_in_pieces_decide_the_width() -> None:
    narrow = [TensorView((1, 0), 2), TensorView((2, 64), 2), None]
    assert planned((32, 64), [dense(32, 64, size=4), *narrow], [dense(32, 64, size=4)]).width == 4
    assert planned((32,), [TensorView((3,), 2)], [TensorView((2,), 2)]).width == 4


def test_pieces_per_row_are_enough_and_no_more() -> None:
    """For every row the pieces of its own phase; the bound is met wherever the rows go through all phases."""
    for columns, pitch, size, offset in itertools.product(range(1, 35), range(34, 50), (2, 4), range(0, 32, 2)):
        if offset % size:
            continue
        main = TensorView((pitch, 1), size, offset)
        layout = planned((16, columns), [TensorView((0, 1), size)], [main])
        if not layout.outer:
            continue
        width = layout.width
        needed = [
            -(-((offset + row * pitch * size) // size % width + columns) // width) for row in range(layout.outer[0])
        ]
        assert max(needed) == layout.pieces_per_row, (columns, pitch, size, offset)


def test_a_tensor_that_goes_along_with_the_main_output_needs_no_shifting() -> None:
    def accesses(*inputs: TensorView, main: TensorView) -> list[str]:
        return [placement.access for placement in planned((6, 24), list(inputs), [main]).inputs]

    assert accesses(TensorView((40, 1), 2), main=TensorView((32, 1), 2)) == ["pieces"]
    # begins in the middle of a piece, as the output does
    assert accesses(TensorView((40, 1), 2, 6), main=TensorView((32, 1), 2, 22)) == ["pieces"]
    assert accesses(TensorView((40, 1), 2, 6), main=TensorView((32, 1), 2, 8)) == ["shifted"]
    assert accesses(TensorView((36, 1), 2), main=TensorView((32, 1), 2)) == ["shifted"]
    assert accesses(TensorView((40, 1), 2), main=TensorView((28, 1), 2)) == ["shifted"]
    # rows begin anywhere in a piece, but those of both tensors in the same place; a row operand's do not
    odd = TensorView((25, 1), 2, 14)
    assert accesses(odd, TensorView((0, 1), 2), TensorView((33, 1), 2, 30), main=odd) == ["pieces", "shifted", "pieces"]
    # an fp32 output beside 16-bit ones, its pieces 32 bytes long
    assert accesses(TensorView((40, 1), 2, 8), main=TensorView((32, 1), 4, 16)) == ["pieces"]
    assert accesses(TensorView((40, 1), 2), main=TensorView((32, 1), 4, 16)) == ["shifted"]
    assert accesses(TensorView((40, 1), 2), main=TensorView((28, 1), 4)) == ["shifted"]
    assert accesses(TensorView((36, 1), 2), main=TensorView((28, 1), 4)) == ["pieces"]
    # pieces of a main output that is written element by element begin where rows do
    turned = TensorView((48, 2), 2)
    assert accesses(TensorView((40, 1), 2), TensorView((40, 1), 2, 2), main=turned) == ["pieces", "shifted"]


def test_what_cannot_be_walked_through_is_said_in_words() -> None:
    shape = (2, 3) * 4
    every_other = torch.empty(*(2 * extent for extent in shape), device="meta").stride()
    view = TensorView(tuple(2 * stride for stride in every_other), 2)
    assert plan_layout(shape, [view], [view]) == (
        "8 dimensions are left after merging those that all tensors go through in even steps; kernels walk through 6"
    )
    assert isinstance(
        plan_layout(shape[:6], [TensorView(view.strides[:6], 2)], [TensorView(view.strides[:6], 2)]), Layout
    )
    assert plan_layout((4, 0), [dense(4, 0)], [dense(4, 0)]) == "the shape has no elements: there is nothing to launch"
    repeated = plan_layout((4, 8), [dense(4, 8)], [TensorView((0, 1), 2)])
    assert repeated == "an output is repeated along a dimension: several elements would be written to one place"
    assert plan_layout((8,), [TensorView((1,), 4, 2)], [dense(8)]) == "a tensor starts 2 bytes into an element of 4"
    assert plan_layout((8,), [dense(8)] * 18, [dense(8)]) == "a kernel takes at most 17 inputs and 8 outputs"
    assert plan_layout((8,), [dense(8)], [dense(8)] * 9) == "a kernel takes at most 17 inputs and 8 outputs"


def test_layouts_are_hashable_and_equal_where_calls_are_alike() -> None:
    def layout(offset: int) -> Layout:
        return planned((4, 9), [dense(4, 9, offset=offset), TensorView((0, 1), 2)], [dense(4, 9)])

    assert {layout(0), layout(0)} == {layout(0)}
    assert layout(2) == layout(4), "an address matters only for what depends on it"


def test_views_of_tensors() -> None:
    memory = torch.zeros(64, dtype=torch.bfloat16)
    begin = memory.data_ptr() % 32
    assert view_of(memory[3:11], (4, 8)) == TensorView((0, 1), 2, (begin + 6) % 32)
    assert view_of(memory[:4].reshape(4, 1), (2, 4, 8)) == TensorView((0, 1, 0), 2, begin)
    assert view_of(torch.zeros(()), (2, 3)).strides == (0, 0)


# Every element's address, by brute force.


def walked(layout: Layout) -> Iterator[tuple[int, ...]]:
    """The byte offsets of one element after another, of every tensor that is not a number."""
    tensors = [*layout.inputs, *layout.outputs]
    for place in itertools.product(*(range(extent) for extent in layout.outer)):
        for column in range(layout.columns):
            yield tuple(offset_of(tensor, place, column, layout.wrap) for tensor in tensors)


def offset_of(tensor: Placement, place: tuple[int, ...], column: int, wrap: int) -> int:
    """Of an element, in bytes."""
    if tensor.access == "wrapped":
        place, column = (column // wrap,), column % wrap
    return sum(i * step for i, step in zip(place, tensor.strides, strict=False)) + column * tensor.column_stride


def goes_along(layout: Layout, placement: Placement, tensor: TensorView, main: TensorView) -> bool:
    """Whether a tensor is at a multiple of 16 bytes in every row where pieces of the main output begin."""
    in_pieces = layout.outputs[0].access in ("pieces", "shifted")
    for row in itertools.product(*map(range, layout.outer)):
        begin, at = (sum(map(math.prod, zip(row, way.strides, strict=True))) for way in (layout.outputs[0], placement))
        phase = (main.offset + begin) // main.size % layout.width if in_pieces else 0
        if (tensor.offset + at - phase * tensor.size) % 16:
            return False
    return True


def test_random_problems_reach_every_element_once() -> None:
    rng = random.Random(0)
    ranks, ways = set(), set()
    for _ in range(600):
        shape = tuple(rng.choice((1, 2, 3, 4, 5)) for _ in range(rng.randrange(7)))

        def view(broadcast: bool, shape: tuple[int, ...] = shape) -> TensorView:
            """Any order of the dimensions in memory, gaps between them, and repetition of some."""
            strides, step = [0] * len(shape), rng.choice((1, 1, 1, 2))
            mixed = rng.random() < 0.3
            for place in sorted(range(len(shape)), key=lambda place: rng.random() if mixed else -place):
                strides[place] = step
                step *= shape[place]
                step += rng.choice((0, 0, 0, 1, 8))
            if broadcast:
                strides = [0 if rng.random() < 0.3 else stride for stride in strides]
            return TensorView(tuple(strides), rng.choice((2, 4)), rng.randrange(8) * 4)

        inputs = [view(True) for _ in range(rng.randrange(1, 4))]
        outputs = [view(False) for _ in range(rng.randrange(1, 3))]
        layout = planned(shape, list(inputs), outputs)
        assert layout.columns * math.prod(layout.outer) == math.prod(shape)
        tensors = [*inputs, *outputs]
        wanted = sorted(
            tuple(
                sum(i * stride for i, stride in zip(place, tensor.strides, strict=True)) * tensor.size
                for tensor in tensors
            )
            for place in itertools.product(*(range(extent) for extent in shape))
        )
        found = list(walked(layout))
        assert sorted(found) == wanted
        placements = [*layout.inputs, *layout.outputs]
        for index, (placement, tensor) in enumerate(zip(placements, tensors, strict=True)):
            reached = [offsets[index] for offsets in found]
            assert placement.bytes == max(reached) + tensor.size
            if placement.access == "scalar":
                assert not any(reached) and index < len(inputs)
            elif placement.access in ("pieces", "shifted"):
                assert placement.column_stride == tensor.size
                assert (placement.access == "pieces") == goes_along(layout, placement, tensor, outputs[0])
            elif placement.access == "wrapped":
                assert index < len(inputs) and layout.wrap > 0 and not layout.outer
            else:
                assert placement.column_stride == 0 if placement.access == "repeated" else placement.column_stride > 0
        ranks.add(len(layout.outer))
        ways |= set(accesses(layout))
    assert ranks >= {0, 1, 2, 3, 4, 5} and ways == {"pieces", "shifted", "repeated", "strided", "wrapped", "scalar"}

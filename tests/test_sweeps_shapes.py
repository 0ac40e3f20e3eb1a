"""Shapes: the named sets and the reading of MxNxK."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shape_sweeps.errors import InputError
from shape_sweeps.shapes import SHAPE_SETS, Shape, parse_shapes


def test_shapes_and_sets_mix_and_duplicates_go() -> None:
    found = parse_shapes(["33x65x127,quick", "1X2X3", "33x65x127"])
    assert found[0] == Shape(33, 65, 127)
    assert found[1:-1] == SHAPE_SETS["quick"].shapes
    assert found[-1] == Shape(1, 2, 3)


def test_a_shape_reads_back_what_it_prints() -> None:
    for entry in SHAPE_SETS.values():
        assert parse_shapes([",".join(map(str, entry.shapes))]) == entry.shapes


@pytest.mark.parametrize(
    "text", ["12x13", "12x13x14x15", "axbxc", "1x-2x3", "1.5x2x3", "1x2x", "", "1x2x3,", "nope", "\u0663x3x3"]
)
def test_malformed_shapes_are_named(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_shapes([text])
    message = str(caught.value)
    assert message.startswith("--shapes: ") and "\n" not in message
    assert repr(text.split(",")[-1]) in message or "empty" in message


@pytest.mark.parametrize("extent", [2**31, 10**20, "9" * 5000])
def test_extents_are_limited(extent: object) -> None:
    with pytest.raises(InputError, match=r"beyond 2\*\*31 - 1") as caught:
        parse_shapes([f"1x{extent}x1"])
    assert "\n" not in str(caught.value)
    assert parse_shapes([f"1x{'0' * 5000}7x{2**31 - 1}"]) == (Shape(1, 7, 2**31 - 1),)


def test_sets_hold_what_they_promise() -> None:
    def primes(shape: Shape) -> bool:
        extents = (shape.m, shape.n, shape.k)
        return all(e > 2 and all(e % d for d in range(2, int(e**0.5) + 1)) for e in extents)

    for name in ("quick", "default"):
        shapes = SHAPE_SETS[name].shapes
        extents = {extent for shape in shapes for extent in (shape.m, shape.n, shape.k)}
        assert any(shape.m == 1 and shape.n > 1 for shape in shapes)
        assert any(shape.k == 1 for shape in shapes)
        assert any(map(primes, shapes))
        assert {63, 65, 127, 129, 255, 257} <= extents
        assert len(set(shapes)) == len(shapes)


def test_the_suite_is_the_one_that_kernels_are_judged_by() -> None:
    source = Path(__file__).parents[2] / "shared" / "suite.json"
    if not source.exists():
        pytest.skip("the benchmark suite's own file does not ship with the package")
    suite = json.loads(source.read_text())["shapes"]
    for name, shapes in suite.items():
        assert [(s.m, s.n, s.k) for s in SHAPE_SETS[f"suite-{name}"].shapes] == [tuple(s) for s in shapes]
    assert len(SHAPE_SETS["suite"].shapes) == sum(map(len, suite.values()))

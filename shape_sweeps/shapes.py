"""Problem shapes: the named sets, and the reading of ``MxNxK``.

    >>> from shape_sweeps.shapes import parse_shapes
    >>> parse_shapes(["suite-decode", "33x65x127"])[-1]
    Shape(m=33, n=65, k=127)

A GEMM multiplies an M x K matrix by a K x N matrix.  A set is a name, one sentence on what it looks for, and
its shapes in the order in which they run.  Small and awkward shapes come first: a kernel that is wrong is
most often wrong there, and there a case costs least.

A new set is a new row of :data:`SHAPE_SETS`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import InputError


@dataclass(frozen=True, order=True)
class Shape:
    """The extents of one GEMM: (M, K) @ (K, N).  Zero is an extent like any other."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class ShapeSet:
    """A named list of shapes and what it is for."""

    name: str
    purpose: str
    shapes: tuple[Shape, ...]


def _shapes(*extents: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple(Shape(*mnk) for mnk in extents)


def _tile_edges(edges: Iterable[int], steps: Iterable[int]) -> tuple[Shape, ...]:
    """Shapes just below and above a tile edge, in one extent at a time: the last tile is almost empty or
    almost full there.  Steps of 8 keep 16-bit rows on 16-byte boundaries, steps of 1 do not (except in M).
    """
    steps = tuple(steps)
    found = []
    for edge in edges:
        for step in (sign * size for size in steps for sign in (-1, 1)):
            found += [(edge + step, edge, edge), (edge, edge + step, edge), (edge, edge, edge + step)]
    return _shapes(*found)


QUICK = _shapes(
    (1, 1, 1),
    (1, 256, 64),
    (64, 64, 1),
    (17, 19, 23),
    (63, 64, 64),
    (64, 65, 64),
    (65, 72, 63),
    (96, 160, 224),
    (127, 131, 137),
    (129, 128, 136),
    (128, 255, 128),
    (256, 257, 128),
)

DEFAULT = (
    _shapes((1, 1, 1), (1, 4096, 4096), (4096, 1, 64), (64, 64, 1), (7, 2056, 1032))
    + _shapes((17, 19, 23), (127, 131, 137), (509, 521, 523), (1021, 1031, 1033))
    + _tile_edges((64, 128, 256), (1, 8))
    + _shapes((96, 160, 224), (384, 768, 320), (777, 1544, 1032), (1000, 3000, 2000), (3000, 5000, 1000))
    + _shapes(*((edge, edge, edge) for edge in (64, 128, 256, 512, 1024, 2048, 4096)))
)

# The shapes of the benchmark suite by which the kernels are judged.
SUITE_LARGE = _shapes(
    (4096, 4096, 4096), (8192, 8192, 8192), (4096, 11008, 4096), (8192, 14336, 4096), (2048, 5120, 5120)
)
SUITE_MEDIUM = _shapes(
    (1024, 4096, 4096),
    (512, 4096, 4096),
    (1000, 3000, 2000),
    (4088, 4104, 4088),
    (3000, 5000, 1000),
    (777, 1544, 1032),
    (12608, 3072, 768),
)
SUITE_DECODE = _shapes((1, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (128, 4096, 4096))
SUITE_MISALIGNED = _shapes(
    (4095, 4097, 4093),
    (8191, 8191, 8191),
    (1000, 3001, 2000),
    (2048, 5121, 5120),
    (513, 1025, 2049),
    (64, 4097, 4095),
    (4096, 4096, 4095),
    (4096, 50257, 768),
)

#: name -> set; what ``--shapes`` takes by name
SHAPE_SETS: dict[str, ShapeSet] = {
    entry.name: entry
    for entry in (
        ShapeSet("quick", "a first check, also on a machine without a GPU", QUICK),
        ShapeSet("default", "degenerate, prime, tile edges ±1 and ±8, non-powers and powers of two", DEFAULT),
        ShapeSet("suite-large", "layers of large models, compute bound", SUITE_LARGE),
        ShapeSet("suite-medium", "a few waves of tiles or less, some not multiples of a tile", SUITE_MEDIUM),
        ShapeSet("suite-decode", "few tokens, bound by reading the weight", SUITE_DECODE),
        ShapeSet("suite-misaligned", "rows that do not start on 16-byte boundaries", SUITE_MISALIGNED),
        ShapeSet(
            "suite",
            "all of the suite: large, medium, decode and misaligned",
            SUITE_LARGE + SUITE_MEDIUM + SUITE_DECODE + SUITE_MISALIGNED,
        ),
    )
}

#: the largest extent: kernels and BLAS libraries count rows and columns in 32 bits
MAX_EXTENT = 2**31 - 1

_SHAPE = re.compile(r"([0-9]+)x([0-9]+)x([0-9]+)")


def parse_shapes(values: Iterable[str], where: str = "--shapes") -> tuple[Shape, ...]:
    """Shapes from names of sets and ``MxNxK`` strings, each value a comma-separated list of them.

    Duplicates are dropped; the order is otherwise the one given.

    Raises:
        InputError: for an item that is neither, an extent that is too large, or if there is no item at all.
    """
    found: dict[Shape, None] = {}
    for item in split_list(values, where):
        if item in SHAPE_SETS:
            found.update(dict.fromkeys(SHAPE_SETS[item].shapes))
            continue
        match = _SHAPE.fullmatch(item.lower())
        if match is None:
            raise InputError(
                f"{where}: {item!r} is neither a shape MxNxK, such as 128x256x64, nor one of the sets"
                f" {', '.join(SHAPE_SETS)}"
            )
        found[Shape(*read_extents(match.groups(), item, where))] = None
    return tuple(found)


def add_positional(parser: argparse.ArgumentParser) -> None:
    """Shapes without an option before them."""
    parser.add_argument("more_shapes", nargs="*", metavar="SHAPES", help="as --shapes")


def has_shapes(options: argparse.Namespace) -> bool:
    """Whether shapes are named, with ``--shapes`` or without."""
    return bool(options.shapes or getattr(options, "more_shapes", None))


def given_shapes(options: argparse.Namespace) -> dict[Shape, str]:
    """The shapes that are named, and where each is: what an error about it begins with.

    Raises:
        InputError: as :func:`parse_shapes`; of shapes without an option it names the command.
    """
    places = {"--shapes": options.shapes, options.command: getattr(options, "more_shapes", None)}
    found: dict[Shape, str] = {}
    for where, values in places.items():
        for shape in parse_shapes(values, where) if values else ():
            found.setdefault(shape, where)
    return found


def read_extents(digits: Iterable[str], item: str, where: str) -> tuple[int, ...]:
    """Extents from their digits.

    Raises:
        InputError: for one that is too large; it names the item.
    """
    # by their digits first: Python refuses to read numbers of thousands of digits
    short = [extent.lstrip("0") or "0" for extent in digits]
    if any(len(extent) > 10 or int(extent) > MAX_EXTENT for extent in short):
        raise InputError(f"{where}: {item!r} has an extent beyond 2**31 - 1")
    return tuple(map(int, short))


def split_list(values: Iterable[str], where: str) -> tuple[str, ...]:
    """The items of comma-separated lists.

    Raises:
        InputError: for an empty item or an empty list.
    """
    items = tuple(item.strip() for value in values for item in value.split(","))
    if not items or not all(items):
        raise InputError(f"{where}: an item of the comma-separated list {','.join(values)!r} is empty")
    return items

"""Code that keeps something from call to call, in places that are no attributes: ``gemm_ops.fuse`` leaves it.

What a call has put there must not come of tracing either.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conversion_support import Net
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops

numpy = pytest.importorskip("numpy")

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


class Counts(Net):
    """Multiplies by 1, 2, 3, ... at its calls."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x)) * self.count()

    def count(self) -> Any:
        raise NotImplementedError


class ADefault(Net):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return F.gelu(self.fc(x)) * len(seen)


class AKeywordDefault(Net):
    def forward(self, x: Tensor, *, memo: dict[str, int] = {}) -> Tensor:  # noqa: B006
        memo["n"] = memo.get("n", 0) + 1
        return F.gelu(self.fc(x)) * memo["n"]


def counted(seen: list[int] = []) -> int:  # noqa: B006
    seen.append(1)
    return len(seen)


class ADefaultOfAHelper(Counts):
    def count(self) -> Any:
        return counted()


def counted_by(append: Callable[[list[int], int], Any], seen: list[int] = []) -> int:  # noqa: B006
    append(seen, 1)
    return len(seen)


class ADefaultChangedByAFunction(Counts):
    def count(self) -> Any:
        return counted_by(list.append)


class AnIterator(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Iterator[int] = itertools.count(1)

    def count(self) -> Any:
        return next(self.numbers)


class AGenerator(AnIterator):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(1, 100))

    def count(self) -> Any:
        for number in self.numbers:
            return number


class OfAList(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"of": [iter(range(1, 100))]}

    def count(self) -> Any:
        return next(self.held["of"][0])


class OfAnObject(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def count(self) -> Any:
        return next(self.holder.numbers)


class Holder:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)


class OfAPart(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.act.numbers = iter(range(1, 100))  # type: ignore[assignment]

    def count(self) -> Any:
        return next(getattr(self.act, "num" + "bers"))


class OfTheModule(Counts):
    def count(self) -> Any:
        return next(NUMBERS[0])


NUMBERS = [itertools.count(1)]


def tick_and_peek() -> tuple[Callable[[], int], Callable[[], int]]:
    n = 0

    def tick() -> int:
        nonlocal n
        n += 1
        return n

    return tick, lambda: n


class AClosure(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.tick, self.peek = tick_and_peek()

    def count(self) -> Any:
        return self.tick()


class AClosureWithin(AClosure):
    """In a place where its code is not looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks, self.tick = [functools.partial(self.tick)], None  # type: ignore[assignment]

    def count(self) -> Any:
        return self.ticks[0]()


class OfRandom(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Any = random.Random(0)

    def count(self) -> Any:
        return self.numbers.gauss(0, 1)


class OfNumpy(OfRandom):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = numpy.random.default_rng(0)

    def count(self) -> Any:
        return float(self.numbers.standard_normal())


KEEPS: dict[type[Net], str] = {
    ADefault: "its code changes seen",
    AKeywordDefault: "its code changes memo",
    ADefaultOfAHelper: "its code changes seen",
    ADefaultChangedByAFunction: "its code changes a default of counted_by's arguments",
    AnIterator: "its code may move self.numbers on, an iterator",
    AGenerator: "its code may move self.numbers on, an iterator",
    OfAList: "its code may move self.held on, an iterator",
    OfAnObject: "its code may move self.holder on, an iterator",
    OfAPart: "its code may move self.numbers on, an iterator",
    OfTheModule: "its code may move NUMBERS on, an iterator",
    AClosure: "its code writes n, a variable outside it",
    AClosureWithin: "its code changes a variable outside it",
    OfRandom: "its code may move self.numbers on, a generator of random numbers",
    OfNumpy: "its code may move self.numbers on, a generator of random numbers",
}


@pytest.mark.parametrize("kind", KEEPS, ids=lambda kind: kind.__name__)
def test_what_is_kept_is_noticed_and_put_back(kind: type[Net]) -> None:
    torch.manual_seed(0)
    model, other, x = kind(), kind(), torch.randn(5, 6)
    other.load_state_dict(model.state_dict())
    first = F.gelu(model.fc(x))
    fused, report = gemm_ops.fuse(model, inplace=True)
    assert not report.fused and KEEPS[kind] in report.left[0].reason, report
    drawn = random.Random(0).gauss(0, 1), numpy.random.default_rng(0).standard_normal()
    expected = {OfRandom: drawn[0], OfNumpy: drawn[1]}.get(kind, 1)
    torch.testing.assert_close(fused(x), first * expected)
    if expected == 1:
        torch.testing.assert_close(fused(x), first * 2)


class CountingActivation(nn.Module):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return x * len(seen)


class IteratingActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1, 100))

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


class ListedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * self.factors[0]


ACTIVATIONS: dict[type[nn.Module], str] = {
    CountingActivation: "a CountingActivation: its code changes seen",
    IteratingActivation: "a IteratingActivation: its code may move self.numbers on, an iterator",
    ListedActivation: "a ListedActivation, which reads self.factors, whose values may change",
}


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_activations_that_keep_something(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    model = nn.Sequential(nn.Linear(6, 6), kind())
    fused, report = gemm_ops.fuse(model, inplace=True)
    assert not report.fused and ACTIVATIONS[kind] in report.left[0].reason, report
    first = model[0](x) if kind is not ListedActivation else F.relu(model[0](x))
    torch.testing.assert_close(fused(x), first)
    if kind is ListedActivation:
        model[1].factors[0] = 2.0
    torch.testing.assert_close(fused(x), first * 2)

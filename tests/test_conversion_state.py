"""What traced code asks about its modules, and what changes it after ``gemm_ops.fuse``."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import operator
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, Net, check_calls, fuse_copy, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops

numpy = pytest.importorskip("numpy")

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Asks(Net):
    """Computes by what :meth:`factor` makes of what it and its parts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.frozen = {1, 2}, frozenset({1})
        self.options: dict[str, Any] = {"a": {"k": 1.0}, "functions": [F.gelu]}
        self.nest: tuple[Any, ...] = ([2.0], (3.0,))
        self.queue = collections.deque([2.0])
        self.number = numpy.float32(2.0)
        self.part = nn.Sequential(nn.Identity(), nn.Tanh())
        self.wide = functools.partial(F.leaky_relu, negative_slope=0.5)
        self.bound = self.doubled
        self.config = SimpleNamespace(factor=2.0)
        self.range, self.tensor, self.tensors = range(3), torch.ones(4), [torch.ones(4)]
        self.act.tensor = torch.ones(2)
        self.mode, self.listed = Mode.ONE, [nn.GELU()]
        self.sum_of = functools.partial(sum, [1.0, 2.0])

    def doubled(self) -> float:
        return 2.0

    def tripled(self) -> float:
        return 3.0

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x)) * self.factor()

    def factor(self) -> Any:
        raise NotImplementedError


class Hasattr(Asks):
    def factor(self) -> Any:
        return self.extra if hasattr(self, "extra") else 1.0


class Getattr(Asks):
    def factor(self) -> Any:
        return getattr(self, "extra", 1.0)


class OfAPart(Asks):
    def factor(self) -> Any:
        return getattr(self.part, "extra", 1.0)


class ByANameMadeUp(Asks):
    def factor(self) -> Any:
        return getattr(self, f"ex{'tra'}", 1.0)


class ByAnotherPackage(Asks):
    """Whose functions are not read."""

    def factor(self) -> Any:
        return operator.attrgetter("part.training")(self) + 1.0


class BiasIsNone(Asks):
    def factor(self) -> Any:
        return 1.0 if self.fc.bias is None else 2.0


class BiasIsNotNone(Asks):
    def factor(self) -> Any:
        return 1.0 if self.fc.bias is not None else 2.0


class Length(Asks):
    def factor(self) -> Any:
        return len(self.kinds)


class Frozen(Asks):
    def factor(self) -> Any:
        return len(self.frozen)


class Nested(Asks):
    def factor(self) -> Any:
        return self.options["a"]["k"]


class NestedInATuple(Asks):
    def factor(self) -> Any:
        return self.nest[0][0]


class Queue(Asks):
    def factor(self) -> Any:
        return self.queue[0]


class Order(Asks):
    def factor(self) -> Any:
        return 1.0 if next(iter(self.options)) == "a" else 2.0


class Kind(Asks):
    """Equal numbers of other types promote otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x)) * self.nest[1][0]


class Numpy(Asks):
    def factor(self) -> Any:
        return float(self.number)


class FunctionInAList(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.options["functions"][0](self.fc(x))


class Partial(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.fc(x))


class Configured(Asks):
    def factor(self) -> Any:
        return self.config.factor


class Range(Asks):
    def factor(self) -> Any:
        return len(self.range)


class SizeOfATensor(Asks):
    def factor(self) -> Any:
        return self.tensor.numel()


class ItemOfATensor(Asks):
    def factor(self) -> Any:
        return self.act.tensor[0].item()


class Listed(Asks):
    """Calls a module that is none of its parts."""

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[0](self.fc(x))


class PartialOfAList(Asks):
    def factor(self) -> Any:
        return self.sum_of()


class BoundMethod(Asks):
    def factor(self) -> Any:
        return self.bound()


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


class Member(Asks):
    def factor(self) -> Any:
        return self.mode.value


class Parts(Asks):
    """Goes through a sequence that is called part by part."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        for part in self.part:
            h = part(h)
        return h


Change = Callable[[Any], Any]
ASKED: dict[type[Asks], Change] = {
    Hasattr: lambda net: setattr(net, "extra", 3.0),
    Getattr: lambda net: setattr(net, "extra", 3.0),
    OfAPart: lambda net: setattr(net.part, "extra", 3.0),
    ByANameMadeUp: lambda net: setattr(net, "extra", 3.0),
    ByAnotherPackage: lambda net: net.part.eval(),
    BiasIsNone: lambda net: setattr(net.fc, "bias", None),
    BiasIsNotNone: lambda net: setattr(net.fc, "bias", None),
    Length: lambda net: net.kinds.add(3),
    Frozen: lambda net: setattr(net, "frozen", frozenset({1, 2})),
    Nested: lambda net: net.options["a"].update(k=5.0),
    NestedInATuple: lambda net: net.nest[0].__setitem__(0, 5.0),
    Queue: lambda net: net.queue.appendleft(5.0),
    Order: lambda net: net.options.__setitem__("a", net.options.pop("a")),
    Kind: lambda net: setattr(net, "nest", ([2.0], (3,))),
    FunctionInAList: lambda net: net.options["functions"].__setitem__(0, torch.tanh),
    Partial: lambda net: setattr(net, "wide", functools.partial(F.leaky_relu, negative_slope=0.2)),
    Configured: lambda net: setattr(net, "config", SimpleNamespace(factor=3.0)),
    Range: lambda net: setattr(net, "range", range(5)),
    Listed: lambda net: setattr(net.listed[0], "approximate", "tanh"),
    PartialOfAList: lambda net: net.sum_of.args[0].append(3.0),
    BoundMethod: lambda net: setattr(net, "bound", net.tripled),
    Member: lambda net: setattr(net, "mode", Mode.TWO),
    Parts: lambda net: net.part.append(nn.Sigmoid()),
}


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_what_code_asked_is_asked_again(kind: type[Asks], fused_calls: FusedCalls) -> None:
    model, x = kind(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert report.fused, report
    copied = pickle.loads(pickle.dumps(copy.deepcopy(fused)))
    for net in (fused, copied):
        check_calls(model, net, x, fused_calls, 1)
    for net in (model, fused, copied):
        ASKED[kind](net)
    for net in (fused, copied):
        check_calls(model, net, x, fused_calls, 0)


@pytest.mark.parametrize(
    "kind",
    [Hasattr, OfAPart, BiasIsNone, Nested, Length, Partial, Parts, BoundMethod, Member, Listed],
    ids=lambda kind: kind.__name__,
)
def test_compiled_code_asks_again(kind: type[Asks]) -> None:
    model, x = kind(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    for net in (model, fused):
        ASKED[kind](net)
    torch.testing.assert_close(compiled(x), model(x))


CHANGED_TENSORS: dict[type[Asks], Change] = {
    SizeOfATensor: lambda net: setattr(net, "tensor", torch.ones(7)),
    ItemOfATensor: lambda net: net.act.tensor.mul_(3),
}


@pytest.mark.parametrize("kind", CHANGED_TENSORS, ids=lambda kind: kind.__name__)
def test_tensors_that_are_plain_attributes(kind: type[Asks], fused_calls: FusedCalls) -> None:
    """They are read at every call, so that nothing has to be compared."""
    model, x = kind(), torch.randn(5, 6)
    fused, _ = fuse_copy(model)
    check_calls(model, fused, x, fused_calls, 1)
    for net in (model, fused):
        CHANGED_TENSORS[kind](net)
    check_calls(model, fused, x, fused_calls, 1)


class TensorInAList(Asks):
    def factor(self) -> Any:
        return self.tensors[0].sum().item()


class Array(Asks):
    def factor(self) -> Any:
        return float(self.array[0])

    def __init__(self) -> None:
        super().__init__()
        self.array = numpy.ones(3)


class ArrayWithin(Asks):
    def factor(self) -> Any:
        return float(self.arrays[0][0])

    def __init__(self) -> None:
        super().__init__()
        self.arrays = [numpy.ones(3)]


class Large(Asks):
    def factor(self) -> Any:
        return self.table[3]

    def __init__(self) -> None:
        super().__init__()
        self.table = list(range(1000))


class Endless(Asks):
    def factor(self) -> Any:
        return self.endless[0]

    def __init__(self) -> None:
        super().__init__()
        self.endless: list[Any] = [2.0]
        self.endless.append(self.endless)


class DefaultDtype(Asks):
    def factor(self) -> Any:
        return 1.0 if torch.get_default_dtype() == torch.float32 else 2.0


class Deterministic(Asks):
    def factor(self) -> Any:
        return 1.0 if torch.are_deterministic_algorithms_enabled() else 2.0


class Threads(Asks):
    def factor(self) -> Any:
        return torch.get_num_threads()


class Backends(Asks):
    def factor(self) -> Any:
        return 1.0 if torch.backends.cudnn.benchmark else 2.0


NOT_COMPARED = {
    Numpy: "its code reads self.number, a numpy float32, which is not compared at every call",
    TensorInAList: "its code reads self.tensors, which has tensors, whose values are not compared",
    Array: "its code reads self.array, a numpy ndarray, which is not compared at every call",
    ArrayWithin: "its code reads self.arrays, a numpy ndarray, which is not compared at every call",
    Large: "its code reads self.table, a list of more values than are compared at every call",
    Endless: "its code reads self.endless, a list of more values than are compared at every call",
    DefaultDtype: "its code calls get_default_dtype",
    Deterministic: "its code calls are_deterministic_algorithms_enabled",
    Threads: "its code calls get_num_threads",
    Backends: "its code reads torch.backends",
}


@pytest.mark.parametrize("kind", NOT_COMPARED, ids=lambda kind: kind.__name__)
def test_what_is_not_compared_is_left(kind: type[Asks], fused_calls: FusedCalls) -> None:
    model, x = kind(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert not report.fused and NOT_COMPARED[kind] in report.left[0].reason, report
    check_calls(model, fused, x, fused_calls, 0)
    assert "__getattribute__" not in vars(nn.Module)

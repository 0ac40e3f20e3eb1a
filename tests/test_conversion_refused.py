"""Code that ``gemm_ops.fuse`` must not trace: what it would do once, or otherwise."""

from __future__ import annotations

import bisect
import collections
import heapq
import operator
import random
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, Net, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops
from gemm_ops.conversion.functions import NotTraceableError
from gemm_ops.conversion.undisturbed import undisturbed

numpy = pytest.importorskip("numpy")

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


COUNT = [0]


class Holds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.store: dict[str, Any] = {"n": 0, "list": []}
        self.queue: collections.deque[Any] = collections.deque()
        self.names: set[Any] = set()


class Appends(Holds):
    def forward(this, x: Tensor) -> Tensor:
        h = F.relu(this.fc(x))
        this.seen.append(h.mean())
        return h + x


class ByAnotherName(Holds):
    def forward(self, x: Tensor) -> Tensor:
        held = self.store
        held["n"] += 1
        return F.relu(self.fc(x)) * held["n"]


class ByGetattr(Holds):
    def forward(self, x: Tensor) -> Tensor:
        held = getattr(self, "store", None)
        held["list"] += [1]
        return F.relu(self.fc(x))


class InALoop(Holds):
    def forward(self, x: Tensor) -> Tensor:
        for value in self.store.values():
            if value == []:
                value.append(x)
        return F.relu(self.fc(x))


class Extends(Holds):
    def forward(self, x: Tensor) -> Tensor:
        held = self.seen
        held += [x]
        return F.relu(self.fc(x))


class AGlobal(Holds):
    def forward(self, x: Tensor) -> Tensor:
        COUNT[0] += 1
        return F.relu(self.fc(x)) * COUNT[0]


class ByAFunction(Holds):
    """Of another package, so that its code is not read."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc(x))
        bisect.insort(self.queue, h)
        return h


class ByANumberOfFunctions(Holds):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc(x))
        set.add(self.names, 1)
        operator.setitem(self.store, "h", h)
        heapq.heappush(self.store["list"], h)
        return h


class Asks(Net):
    """Asks what its input is."""

    def forward(self, x: Any) -> Tensor:
        return F.relu(self.fc(x * 2 if self.asks(x) else x))

    def asks(self, x: Any) -> Any:
        raise NotImplementedError


class IsTensor(Asks):
    def asks(self, x: Any) -> Any:
        return torch.is_tensor(x)


class ItsClass(Asks):
    def asks(self, x: Any) -> Any:
        return x.__class__ is Tensor


class Matches(Asks):
    def asks(self, x: Any) -> Any:
        match x:
            case Tensor():
                return True
        return False


class Getattr(Asks):
    def asks(self, x: Any) -> Any:
        return getattr(x, "mask", None) is None


class Hasattr(Asks):
    def asks(self, x: Any) -> Any:
        return not hasattr(x, "mask")


class Callable_(Asks):
    def asks(self, x: Any) -> Any:
        return not callable(x)


class Static(Asks):
    @staticmethod
    def asks(x: Any) -> Any:
        return isinstance(x, Tensor)


class OfItsBase(Static):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x)


class Tries(Asks):
    def asks(self, x: Any) -> Any:
        try:
            return bool(x.sum() > -1e9)
        except Exception:
            return False


class DtypeIs(Asks):
    def asks(self, x: Any) -> Any:
        return x.dtype is torch.float32


class IsTheSame(Asks):
    def asks(self, x: Any) -> Any:
        return x is x.contiguous()


class OfItsParameters(Asks):
    def asks(self, x: Any) -> Any:
        return next(self.parameters()).dtype == torch.float32


class OfAProperty(Asks):
    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def asks(self, x: Any) -> Any:
        return self.dtype == torch.float32


class Flag(nn.Module):
    def asks(self, x: Any) -> Any:
        return isinstance(x, Tensor)


class OfASubmodule(Asks):
    def __init__(self) -> None:
        super().__init__()
        self.flag = Flag()

    def asks(self, x: Any) -> Any:
        return self.flag.asks(x)


class TorchNumbers(Asks):
    def asks(self, x: Any) -> Any:
        return torch.empty(()).uniform_().item() < 0.5


class Draws:
    def __call__(self) -> float:
        return float(numpy.random.rand())


class Random:
    """Of which no source is read: a function of another package."""

    __call__ = staticmethod(random.random)


class NumpyNumbers(Asks):
    def __init__(self) -> None:
        super().__init__()
        self.draw: Any = Draws()

    def asks(self, x: Any) -> Any:
        return self.draw() < 0.5


class PythonNumbers(NumpyNumbers):
    def __init__(self) -> None:
        super().__init__()
        self.draw = Random()


REFUSED = {
    Appends: "its code changes this.seen",
    ByAnotherName: "its code changes held",
    ByGetattr: "its code changes held",
    InALoop: "its code changes value",
    Extends: "its code changes held",
    AGlobal: "its code changes COUNT",
    ByAFunction: "its code changes self.queue",
    ByANumberOfFunctions: "its code changes self.",
    IsTensor: "its code calls is_tensor",
    ItsClass: "its code asks for __class__",
    Matches: "its code has a match statement",
    Getattr: "its code calls getattr",
    Hasattr: "its code calls hasattr",
    Callable_: "its code calls callable",
    Static: "its code calls isinstance",
    OfItsBase: "its code calls isinstance",
    Tries: "its code has a try statement",
    DtypeIs: "its code asks whether two values are the same object",
    IsTheSame: "its code asks whether two values are the same object",
    OfItsParameters: "its code reads its parameters",
    OfAProperty: "its code reads its parameters",
    OfASubmodule: "its code calls flag.asks, a method of a submodule",
    TorchNumbers: "its code draws random numbers",
    NumpyNumbers: "its code calls rand",
    PythonNumbers: "its code draws random numbers",
}


def _generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_refused(kind: type[Net], fused_calls: FusedCalls) -> None:
    model, x = kind().eval(), torch.randn(5, 6)
    before, states = _containers(model), _generators()
    fused, report = gemm_ops.fuse(model, inplace=True)
    assert _generators() == states, "it drew random numbers"
    assert _containers(fused) == before, "the trace left something"
    assert not report.fused and REFUSED[kind] in report.left[0].reason, report
    assert fused_calls.during(lambda: fused(x)) == 0


def _containers(model: nn.Module) -> str:
    held = [value for name, value in vars(model).items() if not name.startswith("_")]
    return repr((held, COUNT))


def test_undisturbed_restores() -> None:
    net, held = Holds(), [1, 2]
    with pytest.raises(NotTraceableError, match=r"its code changes self\.seen"), undisturbed([net], []):
        net.seen.append(1)
        net.fresh = 2
    assert net.seen == [] and not hasattr(net, "fresh")
    with pytest.raises(NotTraceableError, match="its code changes"), undisturbed([net], []):
        net.seen = held
    assert net.seen is not held
    with pytest.raises(ValueError, match="another"), undisturbed([net], []):
        net.store["list"].append(3)
        raise ValueError("another")
    assert net.store == {"n": 0, "list": []}
    with undisturbed([net], []):
        net.train()
    for draw in (lambda: torch.rand(1), random.random, numpy.random.rand):
        states = _generators()
        with pytest.raises(NotTraceableError, match="random numbers"), undisturbed([net], []):
            draw()
        assert _generators() == states

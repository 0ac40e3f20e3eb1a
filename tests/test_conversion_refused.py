"""Code that ``gemm_ops.fuse`` must not trace, or must not move a product over: what it would do once, or otherwise."""

from __future__ import annotations

import bisect
import collections
import functools
import heapq
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, Net, fuse_copy, fused_calls
from torch import Tensor, fx, nn
from torch.nn import functional as F

import gemm_ops
from gemm_ops.conversion.functions import NotTraceableError
from gemm_ops.conversion.undisturbed import undisturbed
from gemm_ops.conversion.writing import may_write, writes

numpy = pytest.importorskip("numpy")

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class AddsABranch(Net):
    """The branch runs between the product and its use."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.branch(x)


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Augmented(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[..., 0] = 0
        return x


class Out(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, 2, out=x)


class ByPosition(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x, True)


class ByName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


def _scale(x: Tensor) -> Tensor:
    return x.mul_(2)


class InAHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _scale(x)


class InAStaticMethod(nn.Module):
    @staticmethod
    def scale(x: Tensor) -> Tensor:
        return x.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


class ByAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = _scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


class Applies(nn.Module):
    """Functions of which no code is read, or that are not called by their names."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.functions = [function]

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


RELU = torch.relu_


class ByAnotherGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return RELU(x)


class OfTheBase(Method):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def _hooked() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    return layer


WRITING: dict[str, Callable[[], nn.Module]] = {
    "inplace": lambda: nn.ReLU(inplace=True),
    "inplace within": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "deeper": lambda: nn.Sequential(nn.Sequential(Method()), nn.Linear(6, 6)),
    "hook": _hooked,
    **{kind.__name__: kind for kind in (Method, Augmented, Item, Out, ByPosition, ByName)},
    "builtin": lambda: Applies(torch.relu_),
    "partial": lambda: Applies(functools.partial(F.relu, inplace=True)),
    "lambda": lambda: Applies(lambda x: x.mul_(2)),
    **{kind.__name__: kind for kind in (ByAnotherGlobal, OfTheBase)},
    **{kind.__name__: kind for kind in (InAHelper, InAStaticMethod, ByAnAttribute)},
}


@pytest.mark.parametrize("name", WRITING)
def test_no_call_moves_over_what_writes_into_its_input(name: str) -> None:
    model, x = AddsABranch(WRITING[name]()).eval().requires_grad_(False), torch.randn(5, 6)
    assert may_write(model.branch)
    fused, report = fuse_copy(model)
    torch.testing.assert_close(fused(x.clone()), model(x.clone()))
    assert "branch" in {each.path: each.reason for each in report.left}["fc"]


class Harmless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(x, False) * 2)


@pytest.mark.parametrize("kind", [Harmless, lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 6)), Net])
def test_calls_move_over_what_does_not(kind: Callable[[], nn.Module], fused_calls: FusedCalls) -> None:
    model, x = AddsABranch(kind()).eval(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert "residual" in {each.pattern for each in report.fused}
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) >= 1


def test_a_crossed_module_that_changes_after_fusing(fused_calls: FusedCalls) -> None:
    """A call has moved over it, which holds as long as it does not write."""
    model, x = AddsABranch(nn.Sequential(nn.ReLU(), nn.Linear(6, 6))).eval().requires_grad_(False), torch.randn(5, 6)
    # the residual is of the layer that is called first
    model.fc, model.branch[1] = nn.Linear(6, 6), nn.LayerNorm(6)
    model.requires_grad_(False)
    fused, _ = fuse_copy(model)
    for inplace, expected in ((False, 1), (True, 0), (False, 1)):
        for net in (model, fused):
            net.branch[0].inplace = inplace
        calls = fused_calls.during(lambda: torch.testing.assert_close(fused(x.clone()), model(x.clone())))
        assert calls == expected
    for net in (model, fused):
        net.branch = Method()
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x.clone()), model(x.clone()))) == 0


def test_what_writes() -> None:
    assert (
        writes(F.relu, {}, (None, True)) and not writes(F.relu, {}, (None, False)) and not writes(F.relu, {}, (None,))
    )
    assert writes(torch.ops.aten.add_.Tensor, {}) and writes(torch.ops.aten.add_, {})
    assert not writes(torch.ops.aten.add, {})
    assert may_write(fx.symbolic_trace(nn.ReLU())), "whose code is not written by hand"
    assert not may_write(nn.TransformerEncoderLayer(8, 2, 16))


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


class OfAChild(Net):
    """Asks whether a submodule trains, which may be switched by itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        if self.dropout.training:
            h = h * 2
        return F.gelu(h) + x


def test_flags_of_submodules(fused_calls: FusedCalls) -> None:
    model, x = OfAChild().eval(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert report.fused
    for training, expected in ((False, 1), (True, 0), (False, 1)):
        for net in (model, fused):
            net.dropout.train(training)
        calls = fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x)))
        assert calls == expected

    class ByAnotherName(Net):
        def forward(self, x: Tensor) -> Tensor:
            part = self.dropout
            return F.gelu(self.fc(x)) * (2 if part.training else 1)

    _, report = fuse_copy(ByAnotherName())
    assert "its code asks whether another module trains" in report.left[0].reason


def test_methods_patched_on_the_instance(fused_calls: FusedCalls) -> None:
    class Calls(Net):
        def activate(self, x: Tensor) -> Tensor:
            return F.relu(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.activate(self.fc(x))

    model, x = Calls(), torch.randn(5, 6)
    fused, _ = fuse_copy(model)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1
    for net in (model, fused):
        net.activate = torch.tanh
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 0
    del model.activate, fused.activate
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1


def test_flags_read_with_getattr(fused_calls: FusedCalls) -> None:
    class Optional(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return F.relu(h) if getattr(self, "flag", False) else F.gelu(h)

    model, x = Optional(), torch.randn(5, 6)
    fused, _ = fuse_copy(model)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1
    model.flag = fused.flag = True
    torch.testing.assert_close(fused(x), model(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0


class Reads(Net):
    """Plain values in what it and its parts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scaled()
        self.factors, self.sizes, self.options = [2.0], (2.0, 3.0), {"k": 2.0}
        self.kind = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        part = self.part
        h = self.fc(x * self.factors[0] * self.sizes[1]) * self.options["k"] * part.scale * self.part.scale
        return F.relu(h.to(self.kind))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "list": lambda net: net.factors.append(1) or net.factors.__setitem__(0, 3.0),
    "tuple": lambda net: setattr(net, "sizes", (2.0, 5.0)),
    "dictionary": lambda net: net.options.update(k=7.0),
    "part": lambda net: setattr(net.part, "scale", 5.0),
    "dtype": lambda net: setattr(net, "kind", torch.float64),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_that_change_after_fusing(name: str, fused_calls: FusedCalls) -> None:
    model, x = Reads(), torch.randn(5, 6)
    fused, _ = fuse_copy(model)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1
    for net in (model, fused):
        CHANGES[name](net)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 0


def test_types_of_parts_are_not_asked() -> None:
    class OfAPart(Net):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x)) if isinstance(self.act, nn.GELU) else self.fc(x)

    _, report = fuse_copy(OfAPart())
    assert "its code calls isinstance" in report.left[0].reason


def test_compiled_anew_when_what_was_remembered_changes() -> None:
    class Calls(Reads):
        def activate(self, x: Tensor) -> Tensor:
            return F.relu(x) if self.part.training else F.gelu(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.activate(self.fc(x * self.factors[0])) * self.part.scale

    model, x = Calls(), torch.randn(5, 6)
    fused, report = gemm_ops.fuse(model)
    assert report.fused
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    changes: list[Callable[[Any], Any]] = [
        lambda net: None,
        lambda net: setattr(net.part, "scale", 5.0),
        lambda net: net.part.eval(),
        lambda net: net.factors.__setitem__(0, 4.0),
        lambda net: setattr(net, "activate", torch.tanh),
    ]
    for change in changes:
        for net in (model, fused):
            change(net)
        torch.testing.assert_close(compiled(x), model(x))

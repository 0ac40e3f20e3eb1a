"""What changes after ``gemm_ops.fuse``: flags, methods and values that a trace took for granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, Net, fuse_copy, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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

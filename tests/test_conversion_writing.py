"""Modules that write into what they are given: ``gemm_ops.fuse`` moves no product over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, Net, fuse_copy, fused_calls
from torch import Tensor, fx, nn
from torch.nn import functional as F

from gemm_ops.conversion.writing import may_write, writes

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

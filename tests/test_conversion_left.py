"""What ``gemm_ops.fuse`` leaves alone, and the reasons."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from conversion_support import Counting, FusedCalls, Net, check_calls, fuse_copy, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import gemm_ops
from gemm_ops.conversion.functions import NotTraceableError
from gemm_ops.conversion.inspection import read_code, read_parameters

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Subclass(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def with_hook() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(lambda module, args, result: result + 1)
    return layer


def with_forward_of_its_own() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.forward = lambda x: x + 1  # type: ignore[method-assign]
    return layer


def with_bias(*shape: int) -> nn.Module:
    """PyTorch spreads such a bias over the result."""
    layer = nn.Linear(6, 6)
    layer.bias = nn.Parameter(torch.rand(shape))
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(6), "this LazyLinear does not know its in_features yet"),
    "subclass": (lambda: Subclass(6, 6), "Subclass has a forward of its own"),
    "fused by hand": (lambda: gemm_ops.FusedLinear(6, 6, epilogue="relu"), "FusedLinear has a forward of its own"),
    "hooks": (with_hook, "it has hooks, which a fused call would not run"),
    "patched": (with_forward_of_its_own, "its forward was replaced on the instance"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.5), r"is computed \(a parametrisation"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), r"is computed \(a parametrisation"),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), r"is computed \(a parametrisation"),
    "bias of one element": (lambda: with_bias(1), r"its bias has the shape \(1,\), not \(6,\)"),
    "bias of no dimensions": (lambda: with_bias(), r"its bias has the shape \(\), not \(6,\)"),
    "bias of two dimensions": (lambda: with_bias(1, 6), r"its bias has the shape \(1, 6\), not \(6,\)"),
    "8 bits": (lambda: nn.Linear(6, 6).to(torch.float8_e4m3fn), "not a matrix of floats"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_left_alone(name: str, fused_calls: FusedCalls) -> None:
    make, reason = LAYERS[name]
    model = Net(make()).eval()
    fused, report = gemm_ops.fuse(model, inplace=True)
    assert not report.fused and "forward" not in fused.__dict__
    (left,) = report.left
    assert left.path == "fc"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(left.reason)
    if name not in ("8 bits", "lazy"):
        assert fused_calls.during(lambda: fused(torch.randn(5, 6))) == 0


class ReturnsIt(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Unused(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.fc(x)
        return x


class Norm(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


class Prelu(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.prelu(self.fc(x))


class Softmax(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.fc(x), dim=-1)


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.counting(self.fc(x))


class View(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).view(-1, 3).relu()


class UsedTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return F.relu(h) * h.sum()


class ReturnsBoth(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x)
        return F.relu(h), h


class AddsInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y += self.fc(x)
        return y


class ActivatesInPlace(Net):
    """By another name the result is what it was, until it is written over."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h.relu_()
        return h + x


class ActivatesAnAlias(Net):
    """Dropout gives what it is given in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        dropped = self.dropout(h)
        return dropped.relu_() + h


class Fills(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).fill_(1.0)


class Masks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).masked_fill(x > 0, 0.0)


class MakesZeros(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.fc(x)) + x


class Output(NamedTuple):
    h: Tensor
    number: int = 0


class MakesAnOutput(Net):
    def forward(self, x: Tensor) -> Output:
        return Output(h=self.fc(x))


@dataclass
class Result:
    h: Tensor


class MakesAResult(Net):
    def forward(self, x: Tensor) -> Result:
        return Result(h=self.fc(x))


class AssignsItems(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h[0] = 1.0
        return h


class ActivatesInPlaceWhatIsRead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return self.relu(h) + h


class WritesBetween(Net):
    """The layer's input is no longer what it was where its result is used."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        h = self.fc(x)
        x.add_(1)
        return F.gelu(h) + x


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) if x.sum() > 0 else self.fc(x)


class AsksTypes(Net):
    def forward(self, x: Any) -> Tensor:
        return self.act(self.fc(x if isinstance(x, Tensor) else x[0]))


class KeepsState(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.act(self.fc(x))
        return self.last


class KeepsAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Tensor]] = {"h": []}

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc(x))
        self.seen["h"].append(h.detach())
        return h


class KeepsADictionary(KeepsAList):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc(x))
        self.seen["last"] = [h.detach()]
        return h


class AnyArguments(Net):
    def forward(self, *xs: Tensor) -> Tensor:
        return self.act(self.fc(xs[0]))


class MakesATensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.arange(6.0)


class Functional(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.fc.weight, self.fc.bias))


class NoGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.fc(x)
        return F.relu(h)


class NoGradByDecorator(Net):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class OwnBackward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(self.fc(x))


class StochasticDepth(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.5:
            return x
        return F.relu(self.fc(x)) + x


class DropoutLast(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc(x))


REASONS: dict[type[Net], str] = {
    ReturnsIt: "its result is what the method returns",
    Unused: "nothing uses its result",
    Norm: "its result goes into norm: a LayerNorm, which has parameters or buffers",
    Prelu: "its result goes into prelu: a PReLU, which has parameters or buffers",
    Softmax: "its result goes into softmax: softmax",
    Counted: "its result goes into counting: a Counting: its code writes calls",
    View: "its result goes into view: view",
    UsedTwice: "its result is used several times, and goes into sum: sum",
    ReturnsBoth: "its result is what the method returns",
    AddsInPlace: "its result goes into iadd: which writes in place",
    ActivatesInPlace: "its result goes into relu_: which writes in place into a value that is read elsewhere",
    ActivatesAnAlias: "its result is used several times, and goes into relu_: which writes in place into a value that",
    Fills: "its result goes into fill_: which writes in place",
    Masks: "its result goes into masked_fill: its condition or mask is a tensor",
    MakesZeros: "its result goes into zeros_like: it computes nothing with the values that it is given",
    AssignsItems: "AssignsItems.forward is not traced: its code assigns to a part of a tensor, as in x[0] = y",
    ActivatesInPlaceWhatIsRead: "its result goes into relu: a ReLU, which writes in place into a value that is read",
    WritesBetween: "add_, computed before its result is used, writes in place",
    Branches: "Branches.forward is not traced: TraceError: symbolically traced variables cannot be used",
    AsksTypes: "AsksTypes.forward is not traced: its code calls isinstance",
    KeepsState: "KeepsState.forward is not traced: its code writes last",
    KeepsAList: "KeepsAList.forward is not traced: its code changes self.seen['h']",
    KeepsADictionary: "KeepsADictionary.forward is not traced: its code changes self.seen",
    AnyArguments: "AnyArguments.forward is not traced: it takes any number of arguments, *xs",
    MakesATensor: "MakesATensor.forward is not traced: its code makes or closes over a tensor",
    Functional: "no code that was traced calls it",
    NoGrad: "NoGrad.forward is not traced: its code has a with statement",
    NoGradByDecorator: "NoGradByDecorator.forward is not traced: it has a decorator that enters a context",
    OwnBackward: "OwnBackward.forward is not traced: its code computes without gradients",
    StochasticDepth: "StochasticDepth.forward is not traced: its code calls rand",
    DropoutLast: "its result is what the method returns",
}


@pytest.mark.parametrize("kind", [MakesAnOutput, MakesAResult], ids=lambda kind: kind.__name__)
def test_results_that_are_no_tensors(kind: type[Net]) -> None:
    model, x = kind(), torch.randn(5, 6)
    fused, report = gemm_ops.fuse(model)
    assert re.fullmatch(r"its result goes into (\w+): it makes a \1, which is no tensor", report.left[0].reason), report
    torch.testing.assert_close(fused(x).h, model(x).h)


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_uses_left_alone(kind: type[Net], fused_calls: FusedCalls) -> None:
    model, x = kind().eval(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert not report.fused and [left.path for left in report.left] == ["fc"]
    assert report.left[0].reason.startswith(REASONS[kind]), report.left[0].reason
    assert not set(vars(fused)) - set(vars(model)), "attributes were left by the trace"
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 0


def test_a_shared_layer_is_fused_where_it_can_be(fused_calls: FusedCalls) -> None:
    """Tied layers stay tied: each call is another matter, and the layer itself is not touched."""

    class Tied(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(self.act(self.fc(x))))

    model, x = Tied(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert [each.path for each in report.fused] == ["fc"]
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1
    both = nn.ModuleList([Net(), ReturnsIt()])
    both[1].fc = both[0].fc
    assert fuse_copy(both)[0][0].fc.weight.shape == (6, 6)
    fused, _ = gemm_ops.fuse(both, inplace=True)
    assert fused[0].fc is fused[1].fc and torch.equal(fused[1](x), F.linear(x, fused[0].fc.weight, fused[0].fc.bias))


def test_methods_of_what_does_not_trace(fused_calls: FusedCalls) -> None:
    class Chunks(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.chunk(part) for part in x.split(2)]) if x.shape[0] > 2 else self.chunk(x)

        def chunk(self, x: Tensor) -> Tensor:
            return self.act(self.fc(x))

        def reset(self, x: Tensor) -> Tensor:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)
            return self.act(self.fc(x))

        @staticmethod
        def fc_of(x: Tensor) -> Tensor:
            return x

    model, x = Chunks(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert [each.method for each in report.fused] == ["chunk"] and not report.left
    assert set(vars(fused)) - set(vars(model)) == {"chunk"}
    check_calls(model, fused, x, fused_calls, 3)
    assert set(vars(gemm_ops.unfuse(fused))) == set(vars(model))


def test_reading_code() -> None:
    assert [each.role for each in read_parameters(WritesBetween(), "forward", frozenset())] == ["tensor"]
    with pytest.raises(NotTraceableError, match="its code calls isinstance"):
        read_code(AsksTypes(), "forward")
    with pytest.raises(NotTraceableError, match=r"Net\.missing is no plain function"):
        read_code(Net(), "missing")

    class Calls(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.helper(x)

        def helper(self, x: Tensor) -> Tensor:
            print(x)
            return self.act(self.fc(x))

    with pytest.raises(NotTraceableError, match="its code calls print"):
        read_code(Calls(), "forward")


def test_modes_are_restored_after_tracing() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("not in training")
            return self.act(self.fc(x))

    for training in (True, False):
        model = Fails().train(training)
        _, report = gemm_ops.fuse(model, inplace=True)
        assert "RuntimeError: not in training" in report.left[0].reason
        assert model.training == training and torch.is_grad_enabled()


def test_scripted_modules_are_left() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(6, 6), nn.ReLU())
    fused, report = gemm_ops.fuse(model, inplace=True)
    assert [each.path for each in report.fused] == ["1"]
    x = torch.randn(5, 6)
    torch.testing.assert_close(fused(x), copy.deepcopy(gemm_ops.unfuse(fused))(x))

"""What ``gemm_ops.fuse`` leaves alone, with reasons, and when a fused call computes unfused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, fuse_copy, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import gemm_ops
from gemm_ops.conversion.inspection import NotTraceableError, read_code, read_parameters

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, fc: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6) if fc is None else fc
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(6)
        self.prelu = nn.PReLU()
        self.dropout = nn.Dropout(0.5)
        self.flag = False
        self.function = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


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


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(6), "this LazyLinear does not know its in_features yet"),
    "subclass": (lambda: Subclass(6, 6), "Subclass has a forward of its own"),
    "fused by hand": (lambda: gemm_ops.FusedLinear(6, 6, epilogue="relu"), "FusedLinear has a forward of its own"),
    "hooks": (with_hook, "it has hooks, which a fused call would not run"),
    "patched": (with_forward_of_its_own, "its forward was replaced on the instance"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.5), r"is computed \(a parametrisation"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), r"is computed \(a parametrisation"),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), r"is computed \(a parametrisation"),
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


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.relu(x)


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
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu_()


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
    ActivatesInPlace: "its result goes into relu_: which writes in place",
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
    NoGradByDecorator: "NoGradByDecorator.forward is not traced: its code has a with statement",
    OwnBackward: "OwnBackward.forward is not traced: its code computes without gradients",
    StochasticDepth: "StochasticDepth.forward is not traced: its code calls rand",
    DropoutLast: "its result is what the method returns",
}


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


def _unfused(model: nn.Module, fused: nn.Module, x: Tensor, fused_calls: FusedCalls, expected: int = 0) -> None:
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == expected


def test_a_layer_that_changes_after_fusing(fused_calls: FusedCalls) -> None:
    x = torch.randn(5, 6)

    def both(change: Callable[[Net], Any], expected: int = 0) -> None:
        model = Net().eval()
        fused, _ = gemm_ops.fuse(model)
        _unfused(model, fused, x, fused_calls, 1)
        torch.manual_seed(1)
        change(model)
        torch.manual_seed(1)
        change(fused)  # type: ignore[arg-type]
        _unfused(model, fused, x, fused_calls, expected)

    both(lambda net: net.fc.register_forward_hook(lambda module, args, result: result * 2))
    both(lambda net: net.fc.register_forward_pre_hook(lambda module, args: (args[0] + 1,)))
    both(lambda net: prune.random_unstructured(net.fc, "weight", 0.5))
    both(lambda net: parametrizations.weight_norm(net.fc))
    both(lambda net: setattr(net, "fc", nn.Sequential(net.fc, nn.Tanh())))
    both(lambda net: setattr(net.fc, "forward", lambda x: x * 3))
    both(lambda net: net.act.register_forward_hook(lambda module, args, result: result * 2))
    both(lambda net: setattr(net, "act", nn.LayerNorm(6)))
    both(lambda net: setattr(net, "act", Counting()))
    both(lambda net: setattr(net.act, "forward", torch.cos))
    # what is as plain as before is fused as before, with what is there now
    both(lambda net: setattr(net, "act", nn.SiLU()), expected=1)
    both(lambda net: setattr(net.act, "approximate", "tanh"), expected=1)
    both(lambda net: setattr(net, "fc", nn.Linear(6, 9, bias=False)), expected=1)
    both(lambda net: nn.init.zeros_(net.fc.weight), expected=1)  # type: ignore[arg-type]


def test_hooks_of_all_modules(fused_calls: FusedCalls) -> None:
    fused, _ = gemm_ops.fuse(Net())
    x, seen = torch.randn(5, 6), []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append(module)):
        assert fused_calls.during(lambda: fused(x)) == 0
        assert seen == [fused.fc, fused.act, fused]
    assert fused_calls.during(lambda: fused(x)) == 1


def test_a_part_in_another_mode_than_its_host(fused_calls: FusedCalls) -> None:
    """What is traced with its host is called by itself where only one of the two is in training."""

    class Part(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return -h if self.training else h

    class Host(Net):
        def __init__(self) -> None:
            super().__init__()
            self.fc = Part()

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x))

    model, x = Host(), torch.randn(5, 6)
    fused, report = gemm_ops.fuse(model)
    assert "forward" in {each.method for each in report.fused}
    for host, part in ((True, True), (False, False), (True, False), (False, True)):
        for net in (model, fused):
            net.train(host)
            net.fc.train(part)
        _unfused(model, fused, x, fused_calls, 1 if part or host == part else 0)


def test_attributes_that_change_after_fusing(fused_calls: FusedCalls) -> None:
    class Flags(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.function(self.fc(x))
            return h * 2 if self.flag else h

    model, x = Flags(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    _unfused(model, fused, x, fused_calls, 1)
    for name, value in (("flag", True), ("function", torch.tanh)):
        before = getattr(model, name)
        for net in (model, fused):
            setattr(net, name, value)
        _unfused(model, fused, x, fused_calls, 0)
        for net in (model, fused):
            setattr(net, name, before)
        _unfused(model, fused, x, fused_calls, 1)


def test_structure_that_changes_after_fusing(fused_calls: FusedCalls) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    for net in (model, fused):
        net.append(nn.Tanh())
    _unfused(model, fused, x, fused_calls, 0)
    assert len(gemm_ops.fuse(fused)[1].fused) == 1

    class Optional(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.fc(x))
            return h if self.norm is None else self.norm(h)

    other = Optional()
    fused, _ = gemm_ops.fuse(other)
    _unfused(other, fused, x, fused_calls, 1)
    other.norm = fused.norm = None  # type: ignore[assignment]
    _unfused(other, fused, x, fused_calls, 0)


def test_dropout_is_fused_through_in_evaluation(fused_calls: FusedCalls) -> None:
    class Block(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.dropout(self.act(self.fc(x)))

    class Functional(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.act(self.fc(x)), 0.5, self.training)

    x = torch.randn(5, 6)
    for kind in (Block, Functional):
        model = kind()
        fused, report = fuse_copy(model)
        notes = {each.epilogue: each.note for each in report.fused}
        assert notes["act, dropout, add(residual)"] == "in evaluation mode"
        for training in (True, False, True):
            model.train(training), fused.train(training)
            torch.manual_seed(5)
            wanted = model(x)
            torch.manual_seed(5)
            fused_calls.epilogues.clear()
            torch.testing.assert_close(fused(x), wanted)
            (epilogue,) = fused_calls.epilogues
            assert ("residual" in epilogue.operands) != training
    # without dropout to speak of, it is the same in training
    quiet = Block()
    quiet.dropout.p = 0.0
    fused, report = gemm_ops.fuse(quiet)
    fused_calls.epilogues.clear()
    fused.train()(x)
    assert "residual" in fused_calls.epilogues[0].operands and report.fused[0].note == ""


class WithResidual(Net):
    def forward(self, x: Tensor, other: Any) -> Tensor:
        return F.relu(self.fc(x)) + other


OTHERS: dict[str, Any] = {
    "a row": torch.randn(6),
    "a column": torch.randn(4, 5, 1),
    "a matrix for each batch entry": torch.randn(4, 5, 6),
    "the same for all": torch.randn(5, 6),
    "one element": torch.randn(1),
    "no dimensions": torch.tensor(0.5),
    "wider in dtype": torch.randn(4, 5, 6, dtype=torch.float64),
    "integers": torch.ones(6, dtype=torch.int64),
    "a vector of M": torch.randn(4, 1, 6),
    "larger than the product": torch.randn(2, 4, 5, 6),
}
#: How far results may lie apart that were rounded at different places; float32 has PyTorch's defaults.
ROUNDING: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
FUSED_OTHERS = (*tuple(OTHERS)[:6], "a vector of M")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_that_spread(name: str, dtype: torch.dtype, fused_calls: FusedCalls) -> None:
    """As PyTorch broadcasts and promotes; what an epilogue cannot read is computed after it."""
    model = WithResidual().to(dtype)
    fused, _ = gemm_ops.fuse(model)
    x, other = torch.randn(4, 5, 6, dtype=dtype), OTHERS[name]
    found, wanted = fused(x, other), model(x, other)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, **ROUNDING[dtype])
    (epilogue,) = fused_calls.epilogues
    assert ("residual" in epilogue.operands) == (name in FUSED_OTHERS)


def test_square_operands_are_not_mixed_up(fused_calls: FusedCalls) -> None:
    """M == N: a vector is a row, as PyTorch has it."""
    model, x, row = WithResidual(), torch.randn(6, 6), torch.randn(6)
    fused, _ = gemm_ops.fuse(model)
    torch.testing.assert_close(fused(x, row), model(x, row))
    torch.testing.assert_close(fused(x, row[:, None]), model(x, row[:, None]))
    assert [epilogue.operands["residual"].value for epilogue in fused_calls.epilogues] == ["row", "column"]


def test_arguments_that_are_no_tensors(fused_calls: FusedCalls) -> None:
    model = WithResidual()
    fused, _ = gemm_ops.fuse(model)
    x = torch.randn(5, 6)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x, 2), model(x, 2))) == 0


def test_tensors_that_pytorch_refuses() -> None:
    """In its own words."""
    model = Net()
    fused, _ = gemm_ops.fuse(model)
    for wrong in (torch.randn(5, 7), torch.randn(5, 6, dtype=torch.float64), torch.tensor(1.0)):
        messages = []
        for net in (model, fused):
            with pytest.raises(RuntimeError) as caught:
                net(wrong)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


class Promotes(Net):
    """A residual stream that is wider than the product, and an activation that autocast computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.softplus(self.fc(x))


@pytest.mark.parametrize("kind", [Net, Promotes])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(kind: type[Net], dtype: torch.dtype, fused_calls: FusedCalls) -> None:
    model, x = kind(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    with torch.autocast("cpu", dtype=dtype):
        found, wanted = fused(x), model(x)
    assert found.dtype == wanted.dtype and len(fused_calls.epilogues) == 1
    torch.testing.assert_close(found, wanted, **ROUNDING[dtype])
    _unfused(model, fused, x, fused_calls, 1)
    assert fused(x).dtype == torch.float32


def test_optional_arguments(fused_calls: FusedCalls) -> None:
    """At their defaults they are the trace's; what is only handed on may be anything."""

    class Inner(nn.Module):
        def forward(self, x: Tensor, mask: Any = None, **rest: Any) -> tuple[Tensor, int]:
            return x if mask is None else x * mask, len(rest)

    class Block(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor, mask: Any = None, shift: Tensor | None = None, **rest: Any) -> Tensor:
            y, _ = self.inner(x, mask=mask, **rest)
            h = self.act(self.fc(y))
            return h if shift is None else h + shift

    model, x = Block(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    shift = torch.randn(6)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], int]] = [
        ((x,), {}, 1),
        ((x, None), {"anything": object()}, 1),
        ((x, 3.0), {}, 1),
        ((x,), {"mask": torch.rand(6), "more": {}}, 1),
        ((x, None, None), {}, 1),
        ((x,), {"shift": shift}, 0),
        ((x, None, shift), {}, 0),
    ]
    for args, kwargs, expected in calls:
        found = fused_calls.during(lambda: torch.testing.assert_close(fused(*args, **kwargs), model(*args, **kwargs)))  # noqa: B023
        assert found == expected, (args, kwargs)


def test_grad_mode(fused_calls: FusedCalls) -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.fc(x))
            return h * 2 if torch.is_grad_enabled() else h

    model, x = Asks(), torch.randn(5, 6)
    fused, report = gemm_ops.fuse(model)
    assert {(each.epilogue, each.note) for each in report.fused} == {
        ("act", "without gradients"),
        ("act, mul", "with gradients"),
    }
    for context in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            _unfused(model, fused, x, fused_calls, 1)


def test_vmap_and_functional_call() -> None:
    model, x = Net(), torch.randn(3, 5, 6)
    fused, _ = gemm_ops.fuse(model)
    torch.testing.assert_close(torch.vmap(fused)(x), model(x))
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    found = torch.func.functional_call(fused, other, (x,))
    torch.testing.assert_close(found, torch.func.functional_call(model, other, (x,)))


def test_tracing_a_fused_model_gives_the_original() -> None:
    model, x = Net(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    assert torch.equal(torch.fx.symbolic_trace(fused)(x), fused.act(fused.fc(x)))


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
    _unfused(model, fused, x, fused_calls, 3)
    assert set(vars(gemm_ops.unfuse(fused))) == set(vars(model))


def test_reading_code() -> None:
    assert [each.role for each in read_parameters(WithResidual(), "forward", frozenset())] == ["tensor", "tensor"]
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

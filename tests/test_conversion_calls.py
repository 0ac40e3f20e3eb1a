"""When a converted model's calls are fused, and what they compute where they are not as they were traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import Counting, FusedCalls, Net, check_calls, fuse_copy, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import gemm_ops

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_layer_that_changes_after_fusing(fused_calls: FusedCalls) -> None:
    x = torch.randn(5, 6)

    def both(change: Callable[[Net], Any], expected: int = 0) -> None:
        model = Net().eval()
        fused, _ = gemm_ops.fuse(model)
        check_calls(model, fused, x, fused_calls, 1)
        torch.manual_seed(1)
        change(model)
        torch.manual_seed(1)
        change(fused)  # type: ignore[arg-type]
        check_calls(model, fused, x, fused_calls, expected)

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
    both(lambda net: setattr(net.fc, "bias", nn.Parameter(torch.rand(1))))
    both(lambda net: setattr(net.fc, "bias", nn.Parameter(torch.rand(1, 6))))
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
        check_calls(model, fused, x, fused_calls, 1 if part or host == part else 0)


def test_attributes_that_change_after_fusing(fused_calls: FusedCalls) -> None:
    class Flags(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.function(self.fc(x))
            return h * 2 if self.flag else h

    model, x = Flags(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    check_calls(model, fused, x, fused_calls, 1)
    for name, value in (("flag", True), ("function", torch.tanh)):
        before = getattr(model, name)
        for net in (model, fused):
            setattr(net, name, value)
        check_calls(model, fused, x, fused_calls, 0)
        for net in (model, fused):
            setattr(net, name, before)
        check_calls(model, fused, x, fused_calls, 1)


def test_structure_that_changes_after_fusing(fused_calls: FusedCalls) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    for net in (model, fused):
        net.append(nn.Tanh())
    check_calls(model, fused, x, fused_calls, 0)
    assert len(gemm_ops.fuse(fused)[1].fused) == 1

    class Optional(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.fc(x))
            return h if self.norm is None else self.norm(h)

    other = Optional()
    fused, _ = gemm_ops.fuse(other)
    check_calls(other, fused, x, fused_calls, 1)
    other.norm = fused.norm = None  # type: ignore[assignment]
    check_calls(other, fused, x, fused_calls, 0)


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
    check_calls(model, fused, x, fused_calls, 1)
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
            check_calls(model, fused, x, fused_calls, 1)


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

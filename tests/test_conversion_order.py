"""Who draws random numbers before whom, and which hooks run before which, in converted models."""

from __future__ import annotations

import pytest
import torch
from conversion_support import FusedCalls, Net, check_calls, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Two(Net):
    """Layers of which several go through dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop_path = DropPath()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)


class DropPath(nn.Module):
    """Draws, and is none of PyTorch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full((len(x), 1), 0.5)) if self.training else x


class Sum(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.gelu(self.fc(x))) + self.dropout(self.other(x))


class Parallel(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.dropout(self.fc(h)) + self.dropout(self.down(F.gelu(self.other(h))))


class AFunctionBetween(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.fc(x))
        return h + F.dropout(x, 0.5, self.training)


class AMethodBetween(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.fc(x))
        return h + (x * 0).bernoulli(0.5)


class AnotherModuleBetween(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.fc(x))
        return h + self.drop_path(x)


class AttentionBetween(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.fc(x))
        return h + self.attention(x, x, x)[0]


class Before(Two):
    """What draws before is not between."""

    def forward(self, x: Tensor) -> Tensor:
        residual = self.dropout(x)
        return residual + self.dropout(self.fc(x))


class NothingDrawn(Two):
    """What is between draws, and what is moved does not."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc(x))
        return h + self.dropout(x)


class NoneBetween(Two):
    """What is between draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.fc(x))
        return h + self.norm(x)


#: How many calls are fused in evaluation, and their steps.
ORDERS: dict[type[Two], tuple[int, str]] = {
    Sum: (2, "gelu | dropout, add(residual)"),
    Parallel: (3, "gelu | dropout, add(residual) | dropout, add(residual)"),
    AFunctionBetween: (0, ""),
    AMethodBetween: (0, ""),
    AnotherModuleBetween: (0, ""),
    AttentionBetween: (0, ""),
    Before: (1, "dropout, add(residual)"),
    NothingDrawn: (1, "gelu, add(residual)"),
    NoneBetween: (1, "dropout, add(residual)"),
}


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
def test_random_numbers_are_drawn_in_the_order_of_the_code(kind: type[Two], fused_calls: FusedCalls) -> None:
    model, x = kind(), torch.randn(5, 3, 6) if kind is AttentionBetween else torch.randn(5, 6)
    fused, report = gemm_ops.fuse(model)
    expected, steps = ORDERS[kind]
    assert " | ".join(sorted((each.epilogue for each in report.fused), key=lambda text: text != "gelu")) == steps
    for training in (True, False):
        for net in (model, fused):
            net.train(training)
        results = []
        for net in (model, fused):
            torch.manual_seed(1)
            results.append(net(x))
        torch.testing.assert_close(results[1], results[0])
    assert kind is AMethodBetween or fused_calls.during(lambda: fused(x)) == expected
    if not expected:
        (reason,) = [each.reason for each in report.left if each.path == "fc"]
        assert "computed before its result is used, may draw random numbers" in reason


def test_hooks_run_in_the_order_of_the_code(fused_calls: FusedCalls) -> None:
    class Gate(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.fc(x)) * self.other(x)

    model, x = Gate(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    check_calls(model, fused, x, fused_calls, 1)
    seen: list[str] = []
    for name in ("fc", "act", "other"):
        part = fused.get_submodule(name)
        part.register_forward_hook(lambda module, args, result, name=name: seen.append(name))
    check_calls(model, fused, x, fused_calls, 0)
    assert seen == ["fc", "act", "other"]

"""What a class puts around or in the place of what ``gemm_ops.fuse`` traces: ``__call__``, methods patched later."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

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


class Triples:
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 3  # type: ignore[misc]


class TriplesWithin:
    def _call_impl(self, *args: Any) -> Any:
        return super()._call_impl(*args) * 3  # type: ignore[misc]


class TripledNorm(Triples, nn.LayerNorm):
    pass


class TripledGelu(Triples, nn.GELU):
    pass


class TripledDropout(Triples, nn.Dropout):
    pass


class TripledLinear(Triples, nn.Linear):
    pass


class TripledSequential(Triples, nn.Sequential):
    pass


class GeluWithin(TriplesWithin, nn.GELU):
    pass


class LinearWithin(TriplesWithin, nn.Linear):
    pass


class SequentialWithin(TriplesWithin, nn.Sequential):
    pass


def called_otherwise() -> nn.Module:
    """A call replaced on one module, as tools that profile do."""
    layer = nn.GELU()
    layer._call_impl = lambda x: torch.tanh(x)  # type: ignore[method-assign]
    return layer


#: The parts of a sequence, and how many calls of it may be fused.
CALLS: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "before": (lambda: [TripledNorm(6), nn.Linear(6, 6), nn.GELU()], 0),
    "activation": (lambda: [nn.Linear(6, 6), TripledGelu()], 0),
    "dropout": (lambda: [nn.Linear(6, 6), nn.GELU(), TripledDropout(0.5)], 0),
    "product": (lambda: [TripledLinear(6, 6), nn.GELU()], 0),
    "inner": (lambda: [nn.Linear(6, 6), nn.Sequential(TripledGelu())], 0),
    "container": (lambda: [TripledSequential(nn.Linear(6, 6), nn.GELU()), nn.Linear(6, 6), nn.ReLU()], 1),
    "traced with its host": (lambda: [TripledSequential(nn.Linear(6, 6)), nn.GELU()], 0),
    "within: activation": (lambda: [nn.Linear(6, 6), GeluWithin()], 0),
    "within: product": (lambda: [LinearWithin(6, 6), nn.GELU()], 0),
    "within: traced with its host": (lambda: [SequentialWithin(nn.Linear(6, 6)), nn.GELU()], 0),
    "of one module": (lambda: [nn.Linear(6, 6), called_otherwise()], 0),
    "torch.fx": (lambda: [torch.fx.symbolic_trace(nn.Sequential(nn.Tanh())), nn.Linear(6, 6), nn.ReLU()], 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_a_class_overrides_run_once(name: str, fused_calls: FusedCalls) -> None:
    make, expected = CALLS[name]
    model, x = nn.Sequential(*make()).eval(), torch.randn(5, 6)
    before = model(x)
    fused, report = gemm_ops.fuse(model)
    torch.testing.assert_close(fused(x), before)
    assert fused_calls.during(lambda: fused(x)) == expected == len(report.fused)
    if not expected:
        assert "of its own" in str(report) or "what the method returns" in str(report), report


def test_a_part_replaced_by_one_that_overrides_its_call(fused_calls: FusedCalls) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.GELU()).eval()

    model, x = made(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    check_calls(model, fused, x, fused_calls, 1)
    for net in (model, fused):
        net[0] = TripledSequential(*net[0])
    check_calls(model, fused, x, fused_calls, 0)


def test_a_host_may_override_its_call(fused_calls: FusedCalls) -> None:
    class Host(Triples, Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.fc(x))

    model, x = Host(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    check_calls(model, fused, x, fused_calls, 1)


class Patched(Net):
    """Its class is changed in tests, in which it has a base of that name."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.fc(x)) * self.factor * self.number()

    def after(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    @property
    def factor(self) -> float:
        return 2.0

    @staticmethod
    def number() -> float:
        return 2.0


def _reload(net: type[Patched]) -> None:
    """What tools that reload modules do."""
    net.after.__code__ = (lambda self, h: h.relu()).__code__


PATCHES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda kind: setattr(kind, "forward", lambda self, x: self.fc(x)),
    "method": lambda kind: setattr(kind, "after", lambda self, h: F.relu(h)),
    "property": lambda kind: setattr(kind, "factor", property(lambda self: self.fc.weight.mean())),
    "static method": lambda kind: setattr(kind, "number", staticmethod(lambda: 3.0)),
    "code": _reload,
}


@pytest.mark.parametrize("copied", ["", "copied", "inherited"])
@pytest.mark.parametrize("name", PATCHES)
def test_classes_patched_after_fusing(
    name: str, copied: str, fused_calls: FusedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Base(Patched):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

        def after(self, h: Tensor) -> Tensor:
            return F.gelu(h)

    class Derived(Base):
        def after(self, h: Tensor) -> Tensor:
            return super().after(h)

    model, x = (Derived if copied == "inherited" else Base)(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    check_calls(model, fused, x, fused_calls, 1)
    PATCHES[name](Base)
    if copied == "copied":
        fused = copy.deepcopy(fused)
    check_calls(model, fused, x, fused_calls, 0)


def test_activations_whose_class_is_patched(fused_calls: FusedCalls) -> None:
    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.then(x)

        def then(self, x: Tensor) -> Tensor:
            return F.relu(x)

    model, x = nn.Sequential(nn.Linear(6, 6), Activation()), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(model)
    check_calls(model, fused, x, fused_calls, 1)
    Activation.then = lambda self, x: F.gelu(x)  # type: ignore[method-assign]
    check_calls(model, fused, x, fused_calls, 1)
    Activation.then.__code__ = (lambda self, x: x.tanh()).__code__
    check_calls(model, fused, x, fused_calls, 1)
    Activation.forward = lambda self, x: F.silu(x)  # type: ignore[method-assign]
    check_calls(model, fused, x, fused_calls, 1)


def test_pickles_of_classes_that_were_patched() -> None:
    """A function that has no name to be pickled by is no part of a pickle."""
    model, x = Named(), torch.randn(5, 6)
    fused, report = gemm_ops.fuse(model)
    assert report.fused
    torch.testing.assert_close(pickle.loads(pickle.dumps(fused))(x), model(x))


class Named(Patched):
    pass


Named.after = lambda self, h: F.silu(h)  # type: ignore[method-assign]

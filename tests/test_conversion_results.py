"""``gemm_ops.fuse``: what is true of a converted module: copies, reports, state, calls."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_cases import Gate, Layers, LayerScale, Residual, each_case
from conversion_support import FusedCalls, check_agreement, fuse_copy, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_copy_and_in_place() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU())
    fused, report = gemm_ops.fuse(model)
    assert "forward" not in model.__dict__ and "forward" in fused.__dict__
    assert fused[0].weight is not model[0].weight
    same, again = gemm_ops.fuse(model, inplace=True)
    assert same is model and again == report and "forward" in model.__dict__
    # the parameters are the model's own
    parameter = model[0].weight
    assert parameter is next(model.parameters()) and type(model[0]) is nn.Linear and type(model[1]) is nn.GELU


@each_case
def test_unfuse(kind: type[Layers], fused_calls: FusedCalls) -> None:
    model, x = kind().eval(), torch.randn(5, 6)
    before, attributes = model(x), set(model.__dict__)
    fused, _ = gemm_ops.fuse(model, inplace=True)
    assert fused_calls.during(lambda: fused(x)) == 1
    assert gemm_ops.unfuse(fused) is model
    assert set(model.__dict__) == attributes and model.forward.__func__ is kind.forward
    assert fused_calls.during(lambda: model(x)) == 0
    assert torch.equal(model(x), before)


@each_case
def test_fusing_twice(kind: type[Layers], fused_calls: FusedCalls) -> None:
    model, x = kind().eval(), torch.randn(5, 6)
    once, report = gemm_ops.fuse(model)
    twice, again = gemm_ops.fuse(once)
    assert again == report and torch.equal(once(x), twice(x))
    assert fused_calls.during(lambda: twice(x)) == 1
    assert gemm_ops.unfuse(twice).forward.__func__ is kind.forward
    # with other patterns it is fused anew, not further
    assert not gemm_ops.fuse(once, patterns=[])[1].fused


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
}


@each_case
@pytest.mark.parametrize("way", COPIES)
def test_copies(kind: type[Layers], way: str, fused_calls: FusedCalls) -> None:
    """They are fused too, of their own parameters, and unfuse to their class."""
    fused, _ = gemm_ops.fuse(kind().eval())
    x = torch.randn(5, 6)
    before = fused(x)
    made = COPIES[way](fused)
    assert fused_calls.during(lambda: torch.testing.assert_close(made(x), before, rtol=0, atol=0)) == 1
    with torch.no_grad():
        made.fc.weight.zero_()
    assert not torch.equal(made(x), before) and torch.equal(fused(x), before)
    assert gemm_ops.unfuse(made).forward.__func__ is kind.forward and "forward" in fused.__dict__


def test_state_dicts_both_ways() -> None:
    model, x = LayerScale().eval(), torch.randn(5, 6)
    fused, _ = gemm_ops.fuse(LayerScale().eval())
    assert not torch.allclose(fused(x), model(x))
    fused.load_state_dict(model.state_dict())
    torch.testing.assert_close(fused(x), model(x))
    other = LayerScale().eval()
    other.load_state_dict(fused.state_dict())
    torch.testing.assert_close(other(x), model(x))


def test_to_another_dtype_and_meta(fused_calls: FusedCalls) -> None:
    fused, _ = gemm_ops.fuse(LayerScale().eval())
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = torch.randn(5, 6, dtype=dtype)
        assert fused_calls.during(lambda: fused.to(x.dtype)(x)) == 1  # noqa: B023
        assert fused(x).dtype == dtype
    with torch.no_grad():
        assert fused.to("meta")(torch.empty(5, 6, dtype=torch.bfloat16, device="meta")).shape == (5, 6)


def test_signature_and_positional_and_keyword_arguments() -> None:
    class Several(Layers):
        def forward(self, x: Tensor, residual: Tensor, *, scale: Tensor) -> Tensor:
            return residual + scale * self.fc(x)

    model = Several()
    fused, report = gemm_ops.fuse(model)
    assert report.fused[0].epilogue == "mul(gate), add(residual)"
    assert inspect.signature(fused.forward) == inspect.signature(model.forward)
    x, residual, scale = torch.randn(3, 2, 6).unbind()
    for args, kwargs in (((x, residual), {"scale": scale}), ((x,), {"scale": scale, "residual": residual})):
        torch.testing.assert_close(fused(*args, **kwargs), model(*args, **kwargs))
    for args, kwargs in (((), {}), ((x, residual, scale), {}), ((x, residual), {"scale": scale, "x": x})):
        with pytest.raises(TypeError):
            fused(*args, **kwargs)


def test_report() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    _, report = gemm_ops.fuse(model)
    assert str(report).splitlines() == [
        "fused 1 of 2 linear layers",
        "  0  6 -> 8  activation  1  in forward",
        "left as they are",
        "  2  8 -> 3  its result is what the method returns",
    ]
    assert json.loads(report.to_json()) == {
        "fused": [
            {
                "path": "0",
                "pattern": "activation",
                "epilogue": "1",
                "k": 6,
                "n": 8,
                "method": "forward",
                "note": "",
                "calls": 1,
            }
        ],
        "left": [{"path": "2", "kind": "Linear", "k": 8, "n": 3, "reason": "its result is what the method returns"}],
    }
    assert str(gemm_ops.fuse(nn.ReLU())[1]) == "fused 0 of 0 linear layers"


def test_report_of_a_layer_that_is_called_twice(fused_calls: FusedCalls) -> None:
    """Layers are counted as layers, and calls where they are more."""

    class Twice(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.relu(self.fc(F.relu(self.fc(x)))))

    class Once(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.relu(self.fc(x)))

    model, x = Twice(), torch.randn(5, 6)
    del model.other
    fused, report = fuse_copy(model)
    assert str(report).splitlines() == [
        "fused 1 of 1 linear layers, in 2 calls",
        "  fc  6 -> 6  activation  relu  in forward, 2 times",
    ]
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 2
    model = Once()
    del model.other
    _, report = fuse_copy(model)
    assert str(report).startswith("fused 1 of 1 linear layers\n")
    assert [each.reason for each in report.left] == ["in another call its result is what the method returns"]


ACTIVATION = nn.GELU()


def test_modules_that_are_no_submodules(fused_calls: FusedCalls) -> None:
    """Such as a library's activation: they are functions, if they hold nothing that may change."""

    class OfTheLibrary(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(ACTIVATION(self.fc(x)))

    model, x = OfTheLibrary(), torch.randn(5, 6)
    fused, report = fuse_copy(model)
    assert [(each.pattern, each.epilogue) for each in report.fused] == [("activation", "gelu")]
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1


def test_what_cannot_be_copied() -> None:
    class NoCopy(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a generator")

    with pytest.raises(RuntimeError, match=r"cannot be copied .*generator.* inplace=True fuses the model itself"):
        gemm_ops.fuse(nn.Sequential(NoCopy(6, 6)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(fused_calls: FusedCalls) -> None:
    """Fused code says that it cannot be scripted; a trace is of the original code."""
    fused, _ = gemm_ops.fuse(nn.Sequential(nn.Linear(6, 8), nn.GELU()))
    x = torch.randn(5, 6)
    with pytest.raises(AttributeError, match=r"cannot be compiled by torch\.jit\.script: call gemm_ops\.unfuse"):
        torch.jit.script(fused)
    traced = torch.jit.trace(fused, x, check_trace=False)
    assert not fused_calls.epilogues
    torch.jit.trace(fused, x)
    torch.testing.assert_close(traced(x), fused(x))
    torch.jit.script(gemm_ops.unfuse(fused))


def test_submodule_traced_with_its_host(fused_calls: FusedCalls) -> None:
    """``x + self.mlp(x)``: the residual joins the MLP's last layer, and the MLP on its own is fused as well."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)
            self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout(0.0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x))

    model, x = Block(), torch.randn(4, 6)
    fused, report = fuse_copy(model)
    assert [(each.path, each.pattern, each.method) for each in report.fused] == [
        ("mlp.0", "activation", "forward"),
        ("mlp.2", "residual", "forward"),
    ]
    assert not report.left
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 2
    check_agreement(model, fused, (x,), torch.bfloat16)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused.mlp(x), model.mlp(x))) == 1
    # a hook of the MLP runs: then it is called
    seen: list[nn.Module] = []
    handle = fused.mlp.register_forward_hook(lambda module, args, result: seen.append(module))
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1 and seen == [fused.mlp]
    handle.remove()
    assert fused_calls.during(lambda: fused(x)) == 2
    fused.mlp = nn.Linear(6, 6)
    assert torch.equal(fused(x), x + fused.mlp(fused.norm(x)))


def test_the_result_of_one_call_as_an_operand_of_another(fused_calls: FusedCalls) -> None:
    class Layer(nn.Module):
        """As in timm: a module of one's own, with a parameter, after what is traced with its host."""

        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.rand(6))
            self.inplace = False

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(self.gamma) if self.inplace else x * self.gamma

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale, self.other = nn.LayerNorm(6), Layer(), Layer()
            self.first = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
            self.second = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.scale(self.first(x))
            return x + self.other(self.second(self.norm(x)))

    model, x = Blocks(), torch.randn(4, 6)
    fused, report = fuse_copy(model)
    assert [(each.path, each.pattern, each.epilogue) for each in report.fused] == [
        ("first.0", "activation", "first.1"),
        ("first.2", "residual + scale", "mul(scale), add(residual)"),
        ("second", "residual + scale", "mul(scale), add(residual)"),
    ]
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 3
    check_agreement(model, fused, (x,), torch.bfloat16)
    for net in (model, fused):
        net.scale.inplace = True
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1
    for net in (model, fused):
        net.scale.inplace = False
        net.other.register_forward_hook(lambda module, args, result: result * 2)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1


def test_compiled() -> None:
    model, x = nn.Sequential(Gate(), Residual()).eval(), torch.randn(4, 6)
    fused, _ = gemm_ops.fuse(model)
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x), model(x))


def test_checkpointed() -> None:
    """Activation checkpointing runs the rewritten code again in the backward pass."""
    fused, _ = gemm_ops.fuse(Residual())
    x = torch.randn(4, 6, requires_grad=True)
    fused(x).sum().backward()
    wanted = [x.grad, *(p.grad for p in fused.parameters() if p.grad is not None)]
    x.grad = None
    fused.zero_grad()
    torch.utils.checkpoint.checkpoint(fused, x, use_reentrant=False).sum().backward()
    found = [x.grad, *(p.grad for p in fused.parameters() if p.grad is not None)]
    assert len(found) == 5 and all(map(torch.equal, found, wanted))


def test_a_training_step_goes_down() -> None:
    fused, _ = gemm_ops.fuse(nn.Sequential(Gate(), Residual(), nn.Linear(6, 1)))
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    optimiser = torch.optim.SGD(fused.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = F.mse_loss(fused(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


class Optionally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
        x = F.relu(self.fc(x))
        return x if states is None else x + states.sum()


def test_the_report_says_what_a_call_must_leave_out(fused_calls: FusedCalls) -> None:
    model, x = Optionally(), torch.randn(3, 6)
    fused, report = fuse_copy(model)
    assert [each.note for each in report.fused] == ["without states"]
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x, x), model(x, x))) == 0

"""``gemm_ops.fuse``: each pattern, and what is true of a converted module."""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, check_agreement, fuse_copy, fused_calls
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops
from gemm_ops.conversion.patterns import NAMES, Traits, classify
from gemm_ops.conversion.writing import writes

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Layers(nn.Module):
    """Two linear layers of 6 features and some parameters, for the classes below to compute with."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6, bias=bias)
        self.other = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.act = nn.GELU()
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.gamma = nn.Parameter(torch.rand(6))
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mask", (torch.rand(6) > 0.5).float())


class ActivationModule(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.fc(x)))


class InPlaceModule(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.relu(self.fc(x)))


class ActivationFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.fc(x), 0.2)


class ActivationMethod(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).clamp(min=0.1).tanh()


class WrittenOut(Layers):
    """GPT-2's GELU, whose product is read twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


class Swish(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h * torch.sigmoid(1.702 * h)


class Residual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


class ResidualThenActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x) + x)


class ResidualOfDropout(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.fc(x))


class ResidualOfFunctionalDropout(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.fc(x), 0.5, self.training)


class Minus(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sub(x, self.fc(x), alpha=2)


class ScaleByNumber(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x) * 0.125)


class ScaleByParameter(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * self.fc(x)


class LayerScale(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.fc(self.norm(x))


class ScaleByBuffer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) / (1 + self.mask)


class Gate(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.silu(self.fc(x)) * self.other(x))


class GateFirst(Layers):
    """The multiplied half is computed before the activated one."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.other(x)
        return up * F.silu(self.fc(x))


class Elementwise(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(self.fc(x), x, 0.25)


class InPlaceMethod(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x).relu_())


class InPlaceFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.silu(self.fc(x), inplace=True))


class InPlaceByPosition(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.fc(x), True))


class InPlaceResidual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y += x
        return y.mul_(0.5)


class ByKeyword(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(input=self.fc(x), approximate="tanh")


#: The class, the pattern, the steps and operands.
CASES: dict[type[Layers], tuple[str, str]] = {
    ActivationModule: ("activation", "act"),
    InPlaceModule: ("activation", "relu"),
    ActivationFunction: ("activation", "leaky_relu"),
    ActivationMethod: ("activation", "clamp, tanh"),
    WrittenOut: ("activation", "mul, pow, mul, add, mul, tanh, add, mul"),
    Swish: ("activation", "mul, sigmoid, mul"),
    Residual: ("residual", "add(residual)"),
    ResidualThenActivation: ("activation + residual", "add(residual), relu"),
    ResidualOfDropout: ("residual", "dropout, add(residual)"),
    ResidualOfFunctionalDropout: ("residual", "dropout, add(residual)"),
    Minus: ("residual", "sub(residual)"),
    ScaleByNumber: ("scale", "mul"),
    ScaleByParameter: ("scale", "mul(scale)"),
    LayerScale: ("residual + scale", "mul(scale), add(residual)"),
    ScaleByBuffer: ("gate", "truediv(gate)"),
    Gate: ("activation + gate", "silu, mul(gate)"),
    GateFirst: ("activation + gate", "silu, mul(gate)"),
    Elementwise: ("elementwise", "lerp(operand)"),
    ByKeyword: ("activation", "gelu"),
    InPlaceMethod: ("activation", "relu"),
    InPlaceFunction: ("activation", "silu"),
    InPlaceByPosition: ("activation", "relu"),
    InPlaceResidual: ("residual + scale", "add(residual), mul"),
}
each_case = pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)


@each_case
def test_pattern(kind: type[Layers], fused_calls: FusedCalls) -> None:
    model = kind().eval()
    fused, report = fuse_copy(model)
    (found,) = report.fused
    assert (found.path, found.k, found.n, found.method) == ("fc", 6, 6, "forward")
    assert (found.pattern, found.epilogue) == CASES[kind]
    x = torch.randn(2, 3, 6)
    assert fused_calls.during(lambda: fused(x)) == 1
    torch.testing.assert_close(fused(x), model(x))
    for dtype in (torch.float32, torch.bfloat16):
        check_agreement(model, fused, (x,), dtype)


@each_case
def test_pattern_without_bias(kind: type[Layers], fused_calls: FusedCalls) -> None:
    model = kind(bias=False).eval()
    fused, report = fuse_copy(model)
    assert len(report.fused) == 1
    x = torch.randn(5, 6)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 6), (0, 6), (2, 1, 3, 6)], ids=str)
def test_shapes_of_x(shape: tuple[int, ...], fused_calls: FusedCalls) -> None:
    """Also those whose rows could be columns."""
    for kind in (LayerScale, Gate):
        model, x = kind().eval(), torch.randn(shape)
        fused, _ = fuse_copy(model)
        assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1  # noqa: B023


def test_patterns_asked_for() -> None:
    model = nn.Sequential(Gate(), Residual(), ScaleByNumber(), ActivationModule(), Elementwise()).eval()

    def found(*names: str) -> list[tuple[str, str]]:
        return [(each.path, each.pattern) for each in fuse_copy(model, patterns=names)[1].fused]

    assert found("activation") == [("0.fc", "activation"), ("3.fc", "activation")]
    assert found("gate") == [("0.other", "gate")]
    assert found("residual", "elementwise") == [("1.fc", "residual"), ("4.fc", "elementwise")]
    assert found("scale") == [("2.fc", "scale")]
    _, report = gemm_ops.fuse(model, patterns="scale")
    assert "of the pattern 'residual', not asked for" in {each.path: each.reason for each in report.left}["1.fc"]
    with pytest.raises(ValueError, match=r"unknown pattern gates; expected some of activation, residual, scale, gate"):
        gemm_ops.fuse(model, patterns=["gates"])
    with pytest.raises(TypeError, match=r"fuse takes an nn\.Module, got int"):
        gemm_ops.fuse(3)  # type: ignore[arg-type]


def test_classification() -> None:
    assert classify(Traits("add", ("value",), False, 1)).name == "residual"
    assert classify(Traits("add", ("parameter",), False, 1)).name == "elementwise"
    assert classify(Traits("where", ("value", "value"), False, 1)).name == "elementwise"
    assert len(set(NAMES)) == len(NAMES) == 5
    assert writes("add_", {}) and writes(operator.iadd, {}) and writes(F.relu, {"inplace": True})
    assert not writes("__add__", {}) and not writes(F.relu, {"inplace": False}) and not writes("add", {"out": None})


ACTIVATIONS = (
    "ReLU ReLU6 GELU SiLU Mish ELU SELU CELU Hardswish Hardsigmoid Hardtanh LeakyReLU LogSigmoid Sigmoid Softplus",
    "Softsign Tanh Tanhshrink Hardshrink Softshrink RReLU",
)


@pytest.mark.parametrize("name", [name for line in ACTIVATIONS for name in line.split()])
def test_activations_of_pytorch(name: str, fused_calls: FusedCalls) -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), getattr(nn, name)()).eval(), torch.randn(5, 6)
    fused, _ = fuse_copy(model)
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1


def test_activations_of_transformers(fused_calls: FusedCalls) -> None:
    """All but those with parameters, and the one that does nothing."""
    reason = "the package transformers is not installed (extra test)"
    table = pytest.importorskip("transformers.activations", reason=reason).ACT2FN
    names, x = [name for name in table if name not in ("linear", "prelu", "xielu")], torch.randn(5, 6)
    assert len(names) > 15
    for name in names:
        model = nn.Sequential(nn.Linear(6, 8), table[name])
        fused, _ = fuse_copy(model)
        assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), model(x))) == 1, name  # noqa: B023


def test_graph_modules(fused_calls: FusedCalls) -> None:
    model, x = torch.fx.symbolic_trace(Gate().eval()), torch.randn(5, 6)
    before = model(x)
    fused, report = gemm_ops.fuse(model, inplace=True)
    assert [each.pattern for each in report.fused] == ["activation + gate"]
    assert fused_calls.during(lambda: torch.testing.assert_close(fused(x), before)) == 1


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


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(self.norm(x))

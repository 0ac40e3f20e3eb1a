"""``torch.compile(fuse(model).model, fullgraph=True)``: at once, and compiled anew where a choice would be another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import Counting, Net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import gemm_ops

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def count_products(program: Any) -> int:
    return sum(str(node.target).startswith("gemm_ops.matmul") for node in program.graph.nodes)


class Compiled:
    """A model compiled without graph breaks: its graphs, and how many products are fused in the one that ran last."""

    def __init__(self, model: Callable[..., Any], dynamic: bool | None = False) -> None:
        self.fused = 0
        self.graphs = 0
        self.call = torch.compile(model, fullgraph=True, backend=self._compile, dynamic=dynamic)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        products = count_products(graph)
        run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def counted(*args: Any) -> Any:
            self.fused = products
            return run(*args)

        return counted

    def check(self, plain: Callable[..., Any], expected: int, *args: Any, seed: int = 3, **tolerance: float) -> None:
        torch.manual_seed(seed)
        wanted = plain(*args)
        torch.manual_seed(seed)
        found = self.call(*args)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, **tolerance)
        assert self.fused == expected


def guarded_hooks() -> Any:
    """Hooks of modules that come after compiling are seen if PyTorch is told to look: so it is with any module."""
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.up, self.act, self.down, self.dropout = nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.act(self.up(x))))


class Inlined(nn.Module):
    """The part is traced with its host."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6))
        self.gamma = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.mlp(self.norm(x))


class Whole(nn.Module):
    """Its own code calls the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def both(kind: Callable[[], nn.Module], *, training: bool = False) -> tuple[Any, Any]:
    model = kind().train(training)
    return model, gemm_ops.fuse(model).model


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_at_once(dynamic: bool, training: bool) -> None:
    model = nn.Sequential(Block(0.0), Block(0.0), Inlined()).train(training)
    fused, report = gemm_ops.fuse(model)
    assert len(report.fused) == 6
    compiled, graphs = Compiled(fused, dynamic), []
    for rows in (3, 5, 7):
        x = torch.randn(rows, 6)
        compiled.check(model, 6, x)
        wanted, found = (
            torch.autograd.grad(call(x).square().sum(), list(net.parameters()))
            for call, net in ((model, model), (compiled.call, fused))
        )
        torch.testing.assert_close(found, wanted)
        graphs.append(compiled.graphs)
    assert len(set(graphs)) == (1 if dynamic else 3)


def test_dropout_is_fused_through_in_evaluation_only() -> None:
    model, fused = both(Block)
    compiled, x = Compiled(fused), torch.randn(5, 6)
    for training in (False, True, False, True):
        model.train(training), fused.train(training)
        compiled.check(model, 2 if not training else 1, x)
    assert compiled.graphs == 2
    # its probability is read as well
    for net in (model, fused):
        net.dropout.p = 0.0
    compiled.check(model, 2, x)


def _in_dtype(dtype: torch.dtype) -> Callable[[nn.Module], Any]:
    return lambda net: net.to(dtype)


#: What people do to a layer after it was compiled, and whether the call is fused then.
CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "hook": (lambda net: net.fc.register_forward_hook(lambda module, args, result: result * 2), 0),
    "hook before": (lambda net: net.fc.register_forward_pre_hook(lambda module, args: (args[0] + 1,)), 0),
    "hook of the activation": (lambda net: net.act.register_forward_hook(lambda module, args, result: result * 2), 0),
    "pruned": (lambda net: prune.random_unstructured(net.fc, "weight", 0.5), 0),
    "parametrised": (lambda net: parametrizations.weight_norm(net.fc), 0),
    "another layer": (lambda net: setattr(net, "fc", nn.Sequential(net.fc, nn.Tanh())), 0),
    "without bias": (lambda net: setattr(net, "fc", nn.Linear(6, 6, bias=False)), 1),
    "another width": (lambda net: setattr(net, "fc", nn.Linear(6, 9)), 1),
    "a forward of its own": (lambda net: setattr(net.fc, "forward", torch.cos), 0),
    "no activation": (lambda net: setattr(net, "act", nn.LayerNorm(6)), 0),
    "another activation": (lambda net: setattr(net, "act", nn.SiLU()), 1),
    "an activation's option": (lambda net: setattr(net.act, "approximate", "tanh"), 1),
    "an activation's forward": (lambda net: setattr(net.act, "forward", torch.cos), 0),
    "an activation with a state": (lambda net: setattr(net, "act", Counting()), 0),
    "values": (lambda net: nn.init.zeros_(net.fc.weight), 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_compiling(name: str) -> None:
    change, expected = CHANGES[name]
    model, fused = both(Net)
    compiled, x = Compiled(fused), torch.randn(5, 6)
    with guarded_hooks():
        compiled.check(model, 1, x)
        for net in (model, fused):
            torch.manual_seed(1)
            change(net)
        compiled.check(model, expected, x)


@pytest.mark.parametrize(
    "attributes", [(nn.LeakyReLU, "negative_slope", (0.1, 0.2, 0.3)), (nn.Softplus, "beta", (1, 2, 3))]
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_numbers_of_an_activation(attributes: tuple[Any, str, tuple[float, ...]], dynamic: bool) -> None:
    kind, name, values = attributes
    model, fused = both(lambda: nn.Sequential(nn.Linear(6, 6), kind()))
    compiled, x = Compiled(fused, dynamic), torch.randn(5, 6)
    for value in values:
        for net in (model, fused):
            setattr(net[1], name, value)
        compiled.check(model, 1, x)


class Wrapped(nn.Module):
    """An activation that holds a function, and one of its class."""

    slope = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.function = F.relu
        self.own = self.halve

    def halve(self, x: Tensor) -> Tensor:
        return x * 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.function(x) + self.slope * x)


def test_functions_and_class_attributes_of_an_activation() -> None:
    model, fused = both(lambda: nn.Sequential(nn.Linear(6, 6), Wrapped()))
    compiled, x = Compiled(fused), torch.randn(5, 6)
    compiled.check(model, 1, x)
    for name, value in (("function", torch.tanh), ("slope", 0.7), ("function", F.silu)):
        for net in (model, fused):
            setattr(net[1], name, value)
        compiled.check(model, 1, x)
        torch.testing.assert_close(fused(x), model(x))


def test_a_part_of_an_activation() -> None:
    """Two classes without any state of their own."""
    model, fused = both(lambda: nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Identity())))
    compiled, x = Compiled(fused), torch.randn(5, 6)
    before = compiled.call(x)
    for net in (model, fused):
        net[1][0] = nn.Sigmoid()
    compiled.check(model, 1, x)
    torch.testing.assert_close(fused(x), model(x))
    assert not torch.equal(compiled.call(x), before)


def test_hooks_of_all_modules() -> None:
    """That are there when it is compiled; of later ones PyTorch's compiler does not hear, whatever the module."""
    model, fused = both(Net)
    x = torch.randn(5, 6)
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 2):
        # not the module itself, for what is compiled of a module is one more, and has the hooks too
        Compiled(lambda x: fused(x)).check(model, 0, x)


def test_attributes_of_the_host() -> None:
    class Flags(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.function(self.fc(x))
            return h * 2 if self.flag else h

    model, fused = both(Flags)
    compiled, x = Compiled(fused), torch.randn(5, 6)
    compiled.check(model, 1, x)
    for name, value in (("flag", True), ("function", torch.tanh)):
        before = getattr(model, name)
        for net in (model, fused):
            setattr(net, name, value)
        compiled.check(model, 0, x)
        for net in (model, fused):
            setattr(net, name, before)
        compiled.check(model, 1, x)


def test_structure_of_the_host() -> None:
    model, fused = both(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    compiled, x = Compiled(fused), torch.randn(5, 6)
    compiled.check(model, 1, x)
    for net in (model, fused):
        net.append(nn.Tanh())
    compiled.check(model, 0, x)


def test_a_part_that_is_traced_with_its_host() -> None:
    model, fused = both(Inlined)
    compiled, x = Compiled(fused), torch.randn(5, 6)
    with guarded_hooks():
        _check_part(model, fused, compiled, x)


def _check_part(model: Any, fused: Any, compiled: Compiled, x: Tensor) -> None:
    compiled.check(model, 2, x)
    handles = [net.mlp.register_forward_hook(lambda module, args, result: result * 2) for net in (model, fused)]
    compiled.check(model, 1, x)
    for handle in handles:
        handle.remove()
    compiled.check(model, 2, x)
    for net in (model, fused):
        net.mlp = nn.Linear(6, 6)
        net.mlp.weight.data.fill_(0.1), net.mlp.bias.data.fill_(0.2)
    compiled.check(model, 0, x)


class WithResidual(Net):
    def forward(self, x: Tensor, other: Any) -> Tensor:
        return F.relu(self.fc(x)) + other


@pytest.mark.parametrize("dynamic", [False, None, True], ids=["static", "by default", "dynamic"])
def test_operands_of_other_kinds_and_dtypes(dynamic: bool | None) -> None:
    model, fused = both(WithResidual)
    compiled, x = Compiled(fused, dynamic), torch.randn(4, 5, 6)
    others = (
        torch.randn(4, 5, 6),
        torch.randn(6),
        torch.randn(4, 5, 1),
        torch.tensor(0.5),
        torch.randn(4, 5, 6).bfloat16(),
        torch.randn(4, 5, 6, dtype=torch.float64),
        torch.ones(6, dtype=torch.int64),
        torch.randn(2, 4, 5, 6),
    )
    with torch._dynamo.config.patch(recompile_limit=32):
        for other in (*others, *others):
            compiled.check(model, 1, x, other)
        assert compiled.graphs == len(others)
        compiled.check(model, 0, x, 2)


def test_dtypes_and_autocast() -> None:
    class Promotes(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.softplus(self.fc(x))

    model, fused = both(Promotes)
    compiled = Compiled(fused)
    x, room = torch.randn(5, 6), {"rtol": 1.6e-2, "atol": 1.6e-2}
    compiled.check(model, 1, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled.check(model, 1, x, **room)
    compiled.check(model, 1, x)
    model.bfloat16(), fused.bfloat16()
    compiled.check(model, 1, x.bfloat16(), **room)

    def inside(net: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return net(x)

        return run

    model.float(), fused.float()
    Compiled(inside(fused)).check(inside(model), 1, x, **room)


class BySize(Net):
    """An operand that is a number, which the trace does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) * x.shape[0]


@pytest.mark.parametrize("dynamic", [False, None, True], ids=["static", "by default", "dynamic"])
def test_a_size_as_an_operand(dynamic: bool | None) -> None:
    model, fused = both(BySize)
    compiled = Compiled(fused, dynamic)
    for rows in (5, 7, 9):
        compiled.check(model, 1, torch.randn(rows, 6))


def test_a_mode_that_changes_in_the_code_that_is_compiled() -> None:
    model, fused = both(lambda: Block(0.9), training=True)

    def evaluate(net: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            net.dropout.training = False
            return net(x)

        return run

    x = torch.randn(5, 6)
    torch.testing.assert_close(Compiled(evaluate(fused)).call(x), evaluate(model)(x))


def test_models_of_one_class_do_not_share_choices() -> None:
    x = torch.randn(5, 6)
    for act in (nn.ReLU(), nn.SiLU(), nn.Sequential(nn.Tanh()), nn.Sequential(nn.Sigmoid())):
        model = nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 6))
        Compiled(gemm_ops.fuse(model).model).check(model, 1, x)
        Compiled(gemm_ops.fuse(model, patterns=[]).model).check(model, 0, x)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "functional"])
def test_copies(way: str) -> None:
    """They choose by their own modules."""
    model, fused = both(lambda: nn.Sequential(Block(), Inlined()))
    x = torch.randn(5, 6)
    fused(x)
    made = copy.deepcopy(fused) if way == "deepcopy" else pickle.loads(pickle.dumps(fused))
    for net in (made, model):
        net[0].act = nn.Tanh()
        net[0].up.weight.data.mul_(2.0)
        net.train()
        net[0].dropout.p = 0.9
    compiled = Compiled(made)
    compiled.check(model, 3, x)
    assert not torch.equal(fused(x), made.eval()(x))
    if way == "functional":
        other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        wanted = torch.func.functional_call(model.eval(), other, (x,))
        torch.testing.assert_close(torch.func.functional_call(made, other, (x,)), wanted)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Block(), Inlined()), Whole], ids=["of parts", "itself"])
def test_exported(make: Callable[[], nn.Module]) -> None:
    model, fused = both(make)
    x, rows = torch.randn(5, 6), torch.export.Dim("rows", min=2)
    calls = len(gemm_ops.fuse(model).report.fused)
    for strict, expected in ((True, calls), (False, 0)):  # without Dynamo, from tensors that are fake, nothing is fused
        program = torch.export.export(fused, (x,), dynamic_shapes=({0: rows},), strict=strict)
        assert count_products(program) == expected
        for given in (x, torch.randn(8, 6)):
            torch.testing.assert_close(program.module()(given), model(given))

"""Wrappers of one's own around a ``FusedLinear``, and what is left of an epilogue where the bias is added already."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from gemm_ops import FusedLinear
from gemm_ops.added_bias import adds_bias_first, after_bias, is_identity

pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")


class Wrapper(nn.Module):
    """A LoRA layer as people write it, of the layer's result or (``direct``) of its parameters."""

    def __init__(self, base: nn.Linear, direct: bool = False) -> None:
        super().__init__()
        self.base, self.direct = base, direct
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        if isinstance(base, FusedLinear):
            gemm_ops.epilogue_last(self)

    def forward(self, x: Tensor, **operands: Tensor) -> Tensor:
        result = F.linear(x, self.base.weight, self.base.bias) if self.direct else self.base(x, **operands)
        return result + self.up(self.down(x))

    def weight(self) -> Tensor:
        return self.base.weight + self.up.weight @ self.down.weight


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_wrapper_of_ones_own(direct: bool, bias: bool) -> None:
    wrapper, x = Wrapper(FusedLinear(6, 4, bias=bias, epilogue="gelu"), direct), torch.randn(3, 6)
    expected = F.gelu(F.linear(x, wrapper.weight(), wrapper.base.bias))
    torch.testing.assert_close(wrapper(x), expected)
    parameters = list(wrapper.parameters())
    found = torch.autograd.grad(wrapper(x).square().sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), parameters))
    torch.testing.assert_close(copy.deepcopy(wrapper)(x), expected)
    assert isinstance(wrapper, Wrapper) and type(Wrapper(nn.Linear(6, 4))) is Wrapper


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operands_go_with_the_call(dtype: torch.dtype) -> None:
    wrapper = Wrapper(FusedLinear(6, 4, epilogue=ep.builders.residual("gelu"))).to(dtype)
    x, residual = torch.randn(2, 3, 6, dtype=dtype), torch.randn(2, 3, 4, dtype=dtype)
    expected = F.gelu(F.linear(x, wrapper.weight(), wrapper.base.bias)) + residual
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(wrapper(x, residual=residual), expected, **tolerance)
    with pytest.raises(ep.EpilogueError, match="missing operand residual"):
        wrapper(x)
    with pytest.raises(ep.EpilogueError, match="unknown operand scale"):
        wrapper(x, residual=residual, scale=residual)


def test_padded_output() -> None:
    wrapper, x = Wrapper(FusedLinear(6, 5, epilogue="gelu", padded_output=True)), torch.randn(3, 6)
    found = wrapper(x)
    assert found.shape == (3, 5) and found.stride() == (8, 1)
    torch.testing.assert_close(found, F.gelu(F.linear(x, wrapper.weight(), wrapper.base.bias)))


def test_an_error_leaves_the_layer_as_it_was() -> None:
    wrapper, x = Wrapper(FusedLinear(6, 4, epilogue="gelu")), torch.randn(3, 6)
    with pytest.raises(ep.EpilogueError, match="unknown operand scale"):
        wrapper(x, scale=x)
    with pytest.raises(ep.EpilogueError, match="something other than its forward"):
        wrapper.base(x)
    torch.testing.assert_close(wrapper(x), F.gelu(F.linear(x, wrapper.weight(), wrapper.base.bias)))


def test_a_layer_may_be_taken_out() -> None:
    """While a wrapper holds it the layer is refused around it, wherever else it is and whatever was called before."""
    x, refused = torch.randn(3, 6), pytest.raises(ep.EpilogueError, match="within an adapter, a Wrapper, and was")
    wrapper = Wrapper(FusedLinear(6, 4, epilogue="gelu"))
    layer = wrapper.base
    expected = F.gelu(F.linear(x, layer.weight, layer.bias))
    home = nn.ModuleList([layer])
    for _ in range(2):
        for call in (layer, home[0]):
            with refused:
                call(x)
        wrapper(x)
    # the wrapper goes, or the attribute, or another layer takes the place
    other = copy.deepcopy(wrapper)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    del wrapper
    for call in (layer, home[0], compiled, copy.deepcopy(layer), copy.deepcopy(other.base)):
        torch.testing.assert_close(call(x), expected)
    taken, other.base = other.base, FusedLinear(6, 4, epilogue="relu")
    torch.testing.assert_close(taken(x), expected)
    with refused:
        other.base(x)
    torch.testing.assert_close(other(x), F.relu(F.linear(x, other.weight(), other.base.bias)))
    model = nn.Sequential(other)
    model[0] = other.base  # as peft unloads
    for _ in range(2):
        torch.testing.assert_close(model(x), F.relu(F.linear(x, model[0].weight, model[0].bias)))
        torch.testing.assert_close(other(x), F.relu(F.linear(x, other.weight(), other.base.bias)))
    taken = other.base
    del other.base
    torch.testing.assert_close(taken(x), F.relu(F.linear(x, taken.weight, taken.bias)))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_of_a_wrapper_hold_copies_of_the_layer(make: Any) -> None:
    x, wrapper = torch.randn(3, 6), Wrapper(FusedLinear(6, 4, epilogue="gelu"))
    made = make(wrapper)
    with pytest.raises(ep.EpilogueError, match="within an adapter"):
        made.base(x)
    torch.testing.assert_close(made(x), wrapper(x))


def test_wrappers_within_wrappers_hold_a_layer() -> None:
    x, inner = torch.randn(3, 6), Wrapper(FusedLinear(6, 4, epilogue="gelu"))
    layer = inner.base
    inner.in_features, inner.out_features = 6, 4
    outer = Wrapper(inner)  # type: ignore[arg-type]
    gemm_ops.epilogue_last(outer)
    del outer
    with pytest.raises(ep.EpilogueError, match="within an adapter"):
        layer(x)
    del inner
    torch.testing.assert_close(layer(x), F.gelu(F.linear(x, layer.weight, layer.bias)))


def test_a_module_between_wrapper_and_layer() -> None:
    """As FSDP puts one."""
    wrapper, x = Wrapper(FusedLinear(6, 4, epilogue="gelu")), torch.randn(3, 6)
    expected = wrapper(x)
    wrapper.base = nn.Sequential(wrapper.base)
    assert torch.equal(wrapper(x), expected)


def test_threads_do_not_disturb_each_other() -> None:
    wrapper, x = Wrapper(FusedLinear(6, 4, epilogue="gelu")), torch.randn(3, 6)
    expected, inside, done = wrapper(x), threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(10)

    wrapper.base.register_forward_pre_hook(wait)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(wrapper(x)))
    thread.start()
    inside.wait(10)
    assert torch.equal(wrapper(x), expected)
    done.set()
    thread.join()
    assert torch.equal(found[0], expected)


def test_checkpointing() -> None:
    wrapper, x = Wrapper(FusedLinear(6, 4, epilogue="gelu")), torch.randn(3, 6)
    parameters = list(wrapper.parameters())
    expected = torch.autograd.grad(wrapper(x).sum(), parameters)
    y = torch.utils.checkpoint.checkpoint(wrapper, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), parameters), expected)


def test_a_sharded_layer_is_refused() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapper = Wrapper(FusedLinear(6, 4, epilogue="gelu"))
        parallelize_module(wrapper, init_device_mesh("cpu", (1,)), {"base": ColwiseParallel()})
        with pytest.raises(gemm_ops.ProblemError, match="sharded over devices: merge the adapter first"):
            wrapper(torch.randn(3, 6))
    finally:
        distributed.destroy_process_group()


def test_fully_sharded() -> None:
    """FSDP2 puts a class of its own before the wrapper's, and the layer's."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapper, x = Wrapper(FusedLinear(6, 4, epilogue="gelu")), torch.randn(3, 6)
        expected, mesh = wrapper(x), init_device_mesh("cpu", (1,))
        fully_shard(wrapper.base, mesh=mesh)
        fully_shard(wrapper, mesh=mesh)
        found = wrapper(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        assert all(parameter.grad is not None for parameter in wrapper.parameters())
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("layers", [0, 2])
def test_what_epilogue_last_takes(layers: int) -> None:
    model = nn.Sequential(*(FusedLinear(4, 4) for _ in range(layers)))
    with pytest.raises(TypeError, match=f"around one FusedLinear; this Sequential has {layers} within"):
        gemm_ops.epilogue_last(model)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (FusedLinear(4, 4), "got the layer itself"),
        (Wrapper, "got the class Wrapper: call it with self in its constructor"),
        (3, "got int"),
        (None, "got NoneType"),
    ],
    ids=str,
)
def test_what_epilogue_last_does_not_take(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"takes a module around one FusedLinear, {words}"):
        gemm_ops.epilogue_last(given)
    if isinstance(given, FusedLinear):
        assert type(given) is FusedLinear and not given.within_adapter


@ep.epilogue
def both(acc, bias: ep.Row):
    return ep.gelu(acc + bias) * acc


@ep.epilogue
def twice(acc, bias: ep.Row):
    return {"D": ep.relu(bias + acc), "bias": acc + bias + bias}


@ep.epilogue
def reversed_sum(acc, scale: ep.Row, bias: ep.Row, residual: ep.Aux):
    return ep.gelu(bias + acc) * scale + residual


@pytest.mark.parametrize(
    ("epilogue", "first"),
    [
        (ep.builders.bias_activation("gelu"), True),
        (ep.builders.bias(), True),
        (ep.builders.layer_scale(), True),
        (ep.builders.gate("silu"), True),
        (reversed_sum, True),
        (ep.builders.scaled_residual(), False),
        (both, False),
        (twice, False),
    ],
    ids=str,
)
def test_after_bias(epilogue: ep.Epilogue, first: bool) -> None:
    assert adds_bias_first(epilogue) == first
    after = after_bias(epilogue)
    assert ("bias" in after.operands) != first and after.outputs == epilogue.outputs
    acc = torch.randn(5, 4)
    operands = {
        name: torch.randn(4 if kind is ep.Kind.ROW else (1 if kind is ep.Kind.SCALAR else (5, 4)))
        for name, kind in epilogue.operands.items()
    }
    given = {name: value for name, value in operands.items() if name in after.operands}
    torch.testing.assert_close(after.reference(acc + operands["bias"], **given), epilogue.reference(acc, **operands))


def test_nothing_is_left_of_a_bias() -> None:
    assert is_identity(after_bias(ep.builders.bias())) and not is_identity(ep.builders.activation("relu"))
    assert not is_identity(ep.builders.cast(torch.float32))
    assert after_bias(ep.builders.activation("relu")) is ep.builders.activation("relu")
    assert not adds_bias_first(ep.builders.activation("relu"))

"""Two processes of one machine, by gloo on the CPU: DDP, FSDP2 and tensor parallelism give what one process gives."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar
from gemm_ops import FusedLinear

WORLD = 2


def meet(rank: int, meeting: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # not what the machine's name resolves to, if it does
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)


def leave() -> None:
    """Ends the process without PyTorch's teardown, which aborts now and then, with nn.Linear for FusedLinear too."""
    dist.barrier()
    os._exit(0)


def train(rank: int, meeting: str, kind: str) -> None:
    """Three steps on half of a batch, beside the same on all of it; asserts in each process."""
    meet(rank, meeting)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(FusedLinear(6, 8, epilogue="gelu"), FusedLinear(8, 6, epilogue="relu"))
    alone, x = copy.deepcopy(model), torch.randn(8, 6)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    first = last = 0.0
    for step in range(3):
        losses = [model(x.chunk(WORLD)[rank]).square().mean(), alone(x).square().mean()]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        both = losses[0].detach().clone()
        dist.all_reduce(both)
        torch.testing.assert_close(both / WORLD, losses[1].detach(), rtol=1e-5, atol=1e-6)
        first, last = (losses[1].item() if step == 0 else first), losses[1].item()
    assert last < first, "it trains"
    leave()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(kind: str, tmp_path: Path) -> None:
    mp.spawn(train, (str(tmp_path / "meeting"), kind), nprocs=WORLD)


@ep.epilogue
def everything(acc, bias: Row, offset: Column, residual: Aux, alpha: Scalar, vector):
    return ep.gelu(acc + bias + offset) * alpha + residual * vector


class Block(nn.Module):
    """Up column-wise, down row-wise, each with every kind of operand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = FusedLinear(6, 8, epilogue=everything), FusedLinear(8, 6, epilogue=everything)

    def forward(self, x: Tensor, others: dict[str, dict[str, Tensor]]) -> Tensor:
        result = self.down(self.up(x, **others["up"]), **others["down"])
        assert isinstance(result, Tensor)
        return result


def compare_sharded(rank: int, meeting: str) -> None:
    """A block sharded over two processes beside one in one piece: outputs and all gradients."""
    meet(rank, meeting)
    torch.manual_seed(0)
    model = Block()
    alone, x = copy.deepcopy(model), torch.randn(3, 4, 6)
    mesh = init_device_mesh("cpu", (WORLD,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert isinstance(model.up.weight, DTensor) and model.up.weight.to_local().shape == (4, 6)

    def leaves() -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        torch.manual_seed(1)
        others = {}
        for name, n in (("up", 8), ("down", 6)):
            shapes = {"offset": (3, 4, 1), "alpha": (1,), "residual": (3, 4, n), "vector": (3, 4, 1)}
            others[name] = {key: torch.randn(shape).requires_grad_() for key, shape in shapes.items()}
        return x.clone().requires_grad_(), others

    one, two = leaves(), leaves()
    # PyTorch's plans give row-wise layers what column-wise ones leave: local shards
    result, expected = model(*one), alone(*two)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(one[0].grad, two[0].grad)
    for name in ("up", "down"):
        for key, value in one[1][name].items():
            torch.testing.assert_close(value.grad, two[1][name][key].grad, msg=lambda words, key=key: f"{key}: {words}")
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = parameter.grad
        assert isinstance(grad, DTensor), name
        torch.testing.assert_close(grad.full_tensor(), other.grad, msg=lambda words, name=name: f"{name}: {words}")
    leave()


def test_tensor_parallelism_gives_the_layer_in_one_piece(tmp_path: Path) -> None:
    mp.spawn(compare_sharded, (str(tmp_path / "meeting"),), nprocs=WORLD)


@ep.epilogue
def two_outputs(acc, bias: Row):
    z = acc + bias
    return {"D": ep.gelu(z), "z": ep.cast(z, torch.float32)}


def several_outputs(rank: int, meeting: str) -> None:
    """A layer of several outputs, by each plan, local and not, compiled and not, beside it in one piece."""
    meet(rank, meeting)
    torch.manual_seed(0)
    alone, x = FusedLinear(6, 8, epilogue=two_outputs), torch.randn(4, 6)
    mesh, expected = init_device_mesh("cpu", (WORLD,)), alone(x)
    gradients = torch.autograd.grad(sum(each.square().sum() for each in expected.values()), list(alone.parameters()))
    for plan in (ColwiseParallel, RowwiseParallel):
        layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
        for local in (True, False):
            model = parallelize_module(copy.deepcopy(alone), mesh, plan(**layouts, use_local_output=local))
            calls = [model, torch.compile(model, fullgraph=True, backend="aot_eager")] if local else [model]
            for call in calls:
                found = call(x)
                assert isinstance(found, dict) and list(found) == ["D", "z"]
                whole = {name: each if local else each.full_tensor() for name, each in found.items()}
                torch.testing.assert_close(dict(whole), expected)
                model.zero_grad()
                sum(each.square().sum() for each in whole.values()).backward()
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
    # what the plan leaves where it is: this device's columns
    found = parallelize_module(copy.deepcopy(alone), mesh, ColwiseParallel())(x)
    torch.testing.assert_close(found, {name: each.chunk(WORLD, -1)[rank] for name, each in expected.items()})
    leave()


def test_several_outputs_of_a_sharded_layer(tmp_path: Path) -> None:
    mp.spawn(several_outputs, (str(tmp_path / "meeting"),), nprocs=WORLD)


def compile_sharded(rank: int, meeting: str) -> None:
    """Two layers sharded over two processes, compiled without graph breaks, beside them in one piece."""
    meet(rank, meeting)
    torch.manual_seed(0)
    model = nn.Sequential(FusedLinear(6, 8, epilogue="gelu"), FusedLinear(8, 6, epilogue="silu"))
    alone, x = copy.deepcopy(model), torch.randn(4, 6)
    parallelize_module(model, init_device_mesh("cpu", (WORLD,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for each in (compiled, alone):
        each(x).square().sum().backward()
    torch.testing.assert_close(compiled(x), alone(x))
    with torch.profiler.profile() as profile:
        compiled(x)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["gemm_ops::matmul"] == 2, "a fused product for each layer"
    assert calls["gemm_ops::apply"] == 1, "what follows the all-reduce"
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)
    leave()


def test_tensor_parallelism_compiles(tmp_path: Path) -> None:
    mp.spawn(compile_sharded, (str(tmp_path / "meeting"),), nprocs=WORLD)

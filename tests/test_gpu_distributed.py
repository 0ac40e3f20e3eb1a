"""Two processes on GPUs: DDP, FSDP2 and tensor parallelism give what one process gives, with fused kernels.

By nccl on two GPUs of one host.  Where there is one, the two that train share it and talk by gloo; tensor parallelism
is then of one process, for PyTorch 2.11's DTensor dies in gloo's collectives of CUDA tensors.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_distributed import WORLD, leave
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar
from gemm_ops import FallbackWarning, FusedLinear

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
ROWS, FEATURES, HIDDEN = 256, 200, 520


def meet(rank: int, meeting: str, world: int) -> torch.device:
    faulthandler.enable()
    warnings.simplefilter("error", FallbackWarning)  # every product of 16 bits is to be fused
    several = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank if several else 0)
    torch.cuda.set_device(device)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # not what the machine's name resolves to, if it does
    options = {"backend": "nccl", "device_id": device} if several else {"backend": "gloo"}
    dist.init_process_group(init_method=f"file://{meeting}", rank=rank, world_size=world, **options)
    return device


def train(rank: int, meeting: str, kind: str, results: str) -> None:
    """Ten steps on half of a batch, beside the same on all of it; asserts in each process."""
    device = meet(rank, meeting, WORLD)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        FusedLinear(FEATURES, HIDDEN, epilogue="gelu"), FusedLinear(HIDDEN, FEATURES, epilogue="silu")
    ).to(device)
    alone, x = copy.deepcopy(model), torch.randn(ROWS, FEATURES, device=device)
    target = torch.randn(ROWS, FEATURES, device=device).sigmoid()
    within: contextlib.AbstractContextManager[object] = torch.autocast("cuda", dtype=BF16)
    if kind == "ddp":
        model = DistributedDataParallel(model, device_ids=[device.index])
    else:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cuda", (WORLD,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.AdamW(each.parameters(), 3e-3) for each in (model, alone)]
    losses: list[tuple[float, float]] = []
    for _ in range(10):
        pair = []
        for each, part in ((model, rank), (alone, None)):
            given, wanted = (x, target) if part is None else (x.chunk(WORLD)[part], target.chunk(WORLD)[part])
            with within:
                result = each(given)
            pair.append((result.float() - wanted).square().mean())
        for optimizer, loss in zip(optimizers, pair, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        both = pair[0].detach().clone()
        dist.all_reduce(both)
        losses.append(((both / WORLD).item(), pair[1].item()))
    if rank == 0:
        Path(results).write_text("\n".join(f"{two:.6f} {one:.6f}" for two, one in losses))
    assert losses[-1][1] < 0.8 * losses[0][1], "it trains"
    for two, one in losses:  # the two round their gradients to 16 bits in halves of the batch, the one over all of it
        assert abs(two - one) <= 5e-3 * one, losses
    leave()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(kind: str, tmp_path: Path) -> None:
    results = tmp_path / "losses"
    mp.spawn(train, (str(tmp_path / "meeting"), kind, str(results)), nprocs=WORLD)
    print(f"{kind}: losses of two processes and of one\n{results.read_text()}")


@ep.epilogue
def everything(acc, bias: Row, offset: Column, residual: Aux, alpha: Scalar):
    return ep.gelu(acc + bias + offset) * alpha + residual


class Block(nn.Module):
    """Up column-wise, down row-wise, each with every kind of operand."""

    def __init__(self) -> None:
        super().__init__()
        self.up = FusedLinear(FEATURES, HIDDEN, epilogue=everything)
        self.down = FusedLinear(HIDDEN, FEATURES, epilogue=everything)

    def forward(self, x: Tensor, others: dict[str, dict[str, Tensor]]) -> Tensor:
        result = self.down(self.up(x, **others["up"]), **others["down"])
        assert isinstance(result, Tensor)
        return result


def distance(found: Tensor | None, exact: Tensor | None) -> float:
    assert found is not None and exact is not None
    return float((found.double() - exact).norm() / exact.norm())


def compare_sharded(rank: int, meeting: str, results: str, world: int) -> None:
    """A block sharded over the processes, and one in one piece, beside the same in fp64: outputs and all gradients."""
    device = meet(rank, meeting, world)
    torch.manual_seed(0)
    sharded = Block().to(device, BF16)
    whole, exact = copy.deepcopy(sharded), copy.deepcopy(sharded).double()
    mesh = init_device_mesh("cuda", (world,))
    parallelize_module(sharded, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert isinstance(sharded.up.weight, DTensor) and sharded.up.weight.to_local().shape == (HIDDEN // world, FEATURES)

    def leaves(dtype: torch.dtype) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        torch.manual_seed(1)
        x = torch.randn(ROWS, FEATURES, device=device).to(BF16).to(dtype).requires_grad_()
        others = {}
        for name, n in (("up", HIDDEN), ("down", FEATURES)):
            shapes = {"offset": (ROWS, 1), "alpha": (1,), "residual": (ROWS, n)}
            others[name] = {
                key: torch.randn(shape, device=device).to(BF16).to(dtype).requires_grad_()
                for key, shape in shapes.items()
            }
        return x, others

    given = {name: leaves(dtype) for name, dtype in (("sharded", BF16), ("whole", BF16), ("exact", torch.float64))}
    found: dict[str, dict[str, Tensor]] = {}
    for name, block in (("sharded", sharded), ("whole", whole), ("exact", exact)):
        x, others = given[name]
        with warnings.catch_warnings():
            if name == "exact":
                warnings.simplefilter("ignore", FallbackWarning)  # fp64 is not fused
            result = block(x, others)
            result.square().sum().backward()
        assert x.grad is not None
        found[name] = {"output": result.detach(), "x": x.grad}
        for layer, operands in others.items():
            found[name] |= {f"{layer}.{key}": value.grad for key, value in operands.items() if value.grad is not None}
        for key, parameter in block.named_parameters():
            grad = parameter.grad
            assert grad is not None
            found[name][key] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    lines = []
    for key, truth in found["exact"].items():
        errors = {name: distance(found[name][key], truth) for name in ("sharded", "whole")}
        lines.append(f"{key:14} {errors['sharded']:.2e} {errors['whole']:.2e}")
        assert errors["sharded"] <= 1.3 * errors["whole"] + 2.0**-9, lines[-1]
    if rank == 0:
        Path(results).write_text("\n".join(lines))
    leave()


def test_tensor_parallelism_gives_the_layer_in_one_piece(tmp_path: Path) -> None:
    results = tmp_path / "errors"
    world = min(WORLD, torch.cuda.device_count())
    mp.spawn(compare_sharded, (str(tmp_path / "meeting"), str(results), world), nprocs=world)
    print(f"errors: sharded over {world}, in one piece\n{results.read_text()}")

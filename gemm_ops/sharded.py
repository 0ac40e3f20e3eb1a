"""A layer whose weight is sharded over devices (tensor parallelism), as PyTorch's ``parallelize_module`` leaves it.

    >>> parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    >>> y = model(x)                                  # model.up, model.down are FusedLinear

Contract
--------
* Column-wise (a weight (N, K) sharded along N): each device has some of the columns of the output and computes them
  with the whole epilogue, fused.  Rows and matrices among the operands are taken shard by shard, the others whole.
* Row-wise (sharded along K): each device has a part of every sum, so nothing elementwise can be done before these are
  added up over the devices.  The product alone is fused; the epilogue follows the all-reduce, as one kernel.
* Operands are DTensors of any placement, or tensors that every device has whole.  Results are DTensors, sharded along
  N, or replicated; several outputs are a dictionary of such, which a plan then treats as it does the one of a layer.
* Gradients are those of the layer in one piece, placed as what they are gradients of.
* A mesh of several dimensions, or a weight placed otherwise, is PyTorch's own business: operation by operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from epilogues import Epilogue, Kind
from epilogues.operand_shapes import bind_kind, check_names
from epilogues.tree import Operand

from .arguments import Outputs
from .functional import linear
from .standalone import apply


def linear_of_shards(
    x: Tensor, weight: DTensor, epilogue: Epilogue, operands: Mapping[str, Any], padded_output: bool
) -> Outputs:
    """:func:`gemm_ops.linear` for a weight that is a DTensor; see the module's first page."""
    placements, mesh = weight.placements, weight.device_mesh
    if len(placements) == 1 and placements[0].is_shard(0):
        local_x = _local(_placed(x, mesh, Replicate()), Partial())
        check_names(epilogue.tree, operands)
        given: dict[str, Any] = {
            operand.name: _of_columns(operands[operand.name], operand, x.shape[:-1], weight.shape[0], mesh)
            for operand in epilogue.tree.operands
        }
        found = linear(local_x, weight.to_local(), epilogue, padded_output=padded_output, **given)
        return _wrapped(found, mesh, lambda tensor: Shard(tensor.ndim - 1))
    if len(placements) == 1 and placements[0].is_shard(1):
        local_x = _placed(x, mesh, Shard(x.ndim - 1)).to_local()
        partial = linear(local_x, weight.to_local())
        assert isinstance(partial, Tensor)
        whole = DTensor.from_local(partial, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()])
        given = {name: _whole(value, mesh) for name, value in operands.items()}
        return _wrapped(apply(whole.to_local(), epilogue, **given), mesh, lambda tensor: Replicate())
    return linear(x, weight, epilogue, padded_output=padded_output, **operands)


def _placed(tensor: Tensor, mesh: Any, placement: Placement) -> DTensor:
    """A tensor, which every device has whole if it is no DTensor, in a placement."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return tensor.redistribute(mesh, [placement])


def _local(tensor: DTensor, gradient: Placement) -> Tensor:
    """This device's tensor; what gradients of it are on each device."""
    local: Tensor = tensor.to_local(grad_placements=[gradient])
    return local


def _of_columns(value: Tensor | float, operand: Operand, m_shape: Sequence[int], n: int, mesh: Any) -> Tensor | float:
    """An operand for those columns of the output that this device has."""
    if not isinstance(value, Tensor):
        return value
    kind = bind_kind(operand, tuple(value.shape), tuple(m_shape), n)
    if kind in (Kind.ROW, Kind.AUX) and value.shape[-1] == n > 1:
        return _placed(value, mesh, Shard(value.ndim - 1)).to_local()
    # every device has a part of the gradient: that of its columns
    return _local(_placed(value, mesh, Replicate()), Partial())


def _whole(value: Tensor | float, mesh: Any) -> Tensor | float:
    if not isinstance(value, Tensor):
        return value
    found: Tensor = _placed(value, mesh, Replicate()).to_local()
    return found


def _wrapped(found: Outputs, mesh: Any, placement: Any) -> Outputs:
    if isinstance(found, Tensor):
        wrapped: Tensor = DTensor.from_local(found, mesh, [placement(found)], run_check=False)
        return wrapped
    return ShardedOutputs(
        {name: DTensor.from_local(tensor, mesh, [placement(tensor)], run_check=False) for name, tensor in found.items()}
    )


class ShardedOutputs(dict[str, Tensor]):
    """Several outputs by name, with what the plans of ``parallelize_module`` ask of the one that a layer gives."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of each output, as all are placed alike."""
        first: Any = next(iter(self.values()))
        placements: tuple[Placement, ...] = first.placements
        return placements

    def redistribute(self, **how: Any) -> ShardedOutputs:
        """Each output as ``DTensor.redistribute`` places it."""
        return ShardedOutputs({name: tensor.redistribute(**how) for name, tensor in self._sharded().items()})

    def to_local(self) -> dict[str, Tensor]:
        """This device's part of each output."""
        return {name: tensor.to_local() for name, tensor in self._sharded().items()}

    def _sharded(self) -> dict[str, Any]:
        return dict(self)

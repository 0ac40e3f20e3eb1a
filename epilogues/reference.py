"""What a tree means: its outputs, computed by PyTorch operation after operation.

    >>> from epilogues.reference import evaluate
    >>> evaluate(tree, a @ b, {"bias": bias})["D"]

Contract
--------
* The accumulator and the operands are converted to the compute dtype (float32, or float64 when asked); an
  operand is used at the value its own dtype holds, a number too where the epilogue fixes the dtype.
* Operands spread over the accumulator, batch dimensions too, as :mod:`.operand_shapes` has it; none is copied for that.
* Every operation is computed in the compute dtype.  Values are rounded at each cast, and when stored.  A tree with
  eager rounding first gets eager PyTorch's casts; what the GEMM rounds to is ``out_dtype``, or the dtype of ``acc``.
* ``compute_dtype=torch.float64, keep_casts=False`` gives the mathematical value to measure errors against:
  nothing is rounded, the outputs are float64.
* Outputs have the accumulator's shape and are new tensors, never views of what was given.
* Differentiable by autograd, on any device, without waiting for the device, for empty shapes too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .dtypes import dtype_name, torch_dtype
from .errors import DtypeError, EpilogueError
from .operand_shapes import bind_kind, check_names, operand_number, spread_shape
from .operations import OPERATIONS
from .passes.compute_dtype import write_out_compute_dtype
from .tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Node, Operand, Store


def evaluate(
    tree: EpilogueTree,
    acc: Tensor,
    operands: Mapping[str, Tensor | float],
    *,
    compute_dtype: torch.dtype = torch.float32,
    keep_casts: bool = True,
    out_dtype: torch.dtype | str | None = None,
) -> dict[str, Tensor]:
    """The outputs of an epilogue, by name, each of ``acc``'s shape.

    Args:
        tree: the epilogue.
        acc: the result of the GEMM, shape (..., M, N), any floating dtype.
        operands: a tensor or number for each operand of the tree.
        compute_dtype: float32 or float64.
        keep_casts: False leaves out the casts within the tree; with float64, the rounding of outputs too.
        out_dtype: the dtype of outputs that do not name their own; None: that of ``acc``.  float64 only where
            compute_dtype is.

    Raises:
        EpilogueError: (or a subclass) if an operand is missing, unknown, or of a wrong shape, dtype, device.
    """
    if compute_dtype not in (torch.float32, torch.float64):
        raise DtypeError(f"compute_dtype: expected torch.float32 or torch.float64, got {compute_dtype}")
    if not isinstance(acc, Tensor) or acc.ndim == 0:
        raise EpilogueError(f"acc: expected a tensor of shape (..., M, N), got {_describe(acc)}")
    check_dense("acc", acc)
    if not acc.is_floating_point():
        raise DtypeError(f"acc: expected a floating dtype, got {acc.dtype}")
    check_names(tree, operands)
    computed = write_out_compute_dtype(tree)
    if tree.rounding != "once":
        computed = _as_eager(tree, acc, operands, out_dtype)
    values: dict[int, Tensor] = {}
    for node in computed.nodes:
        values[id(node)] = _compute(node, values, acc, operands, compute_dtype, keep_casts)

    exact = compute_dtype == torch.float64 and not keep_casts
    taken = [acc, *(value for value in operands.values() if isinstance(value, Tensor))]
    taken += [values[id(node)] for node in computed.nodes if isinstance(node, Operand | Accumulator)]
    outputs: dict[str, Tensor] = {}
    for store, rounded in zip(tree.outputs, computed.outputs, strict=True):
        dtype = compute_dtype if exact else _output_dtype(store, out_dtype, acc, compute_dtype)
        result = values[id(rounded.value)].to(dtype)
        if result.shape != acc.shape:
            # of operands or constants alone
            result = result.expand(acc.shape).contiguous()
        if any(result is other for other in taken):
            result = result.clone()
        taken.append(result)
        outputs[store.name] = result
    return outputs


def _as_eager(
    tree: EpilogueTree, acc: Tensor, operands: Mapping[str, Any], out_dtype: torch.dtype | str | None
) -> EpilogueTree:
    """The tree with the casts that eager PyTorch makes of these tensors."""
    facts, ranks = {}, {}
    for operand in tree.operands:
        given = operands[operand.name]
        is_tensor = isinstance(given, Tensor)
        kind = bind_kind(operand, given.shape if is_tensor else given, tuple(acc.shape[:-1]), acc.shape[-1])
        facts[operand.name] = kind, _narrow_name(given.dtype) if is_tensor else operand.dtype or "f32"
        rank = promotion_rank(given)
        if rank is not None:
            ranks[operand.name] = rank
    return tree.resolve(facts, _narrow_name(acc.dtype if out_dtype is None else out_dtype), ranks)


def promotion_rank(given: object) -> str | None:
    """How PyTorch's promotion counts an operand: "number", "0-dim", or None for a tensor with dimensions."""
    if not isinstance(given, Tensor):
        return "number"
    return "0-dim" if given.ndim == 0 else None


def _narrow_name(dtype: torch.dtype | str) -> str:
    """The short name of a dtype that values are rounded to; "f32" for those that need no rounding."""
    name = dtype if isinstance(dtype, str) else {torch.float16: "f16", torch.bfloat16: "bf16"}.get(dtype, "f32")
    return dtype_name(name)


def _compute(
    node: Node,
    values: Mapping[int, Tensor],
    acc: Tensor,
    operands: Mapping[str, Tensor | float],
    compute_dtype: torch.dtype,
    keep_casts: bool,
) -> Tensor:
    if isinstance(node, Accumulator):
        return acc.to(compute_dtype)
    if isinstance(node, Operand):
        return _load(node, operands[node.name], acc, compute_dtype)
    if isinstance(node, Constant):
        return scalar_tensor(node.value, compute_dtype, acc.device)
    if isinstance(node, Cast):
        value = values[id(node.value)]
        return value.to(torch_dtype(node.dtype)).to(compute_dtype) if keep_casts else value
    assert isinstance(node, Apply)
    return OPERATIONS[node.operation].reference(*(values[id(child)] for child in node.operands))


def _load(operand: Operand, given: Any, acc: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """An operand in the compute dtype, in a shape that broadcasts against the accumulator."""
    m_shape, n = tuple(acc.shape[:-1]), acc.shape[-1]
    if not isinstance(given, Tensor):
        number = operand_number(operand, given)
        bind_kind(operand, given, m_shape, n)
        if operand.dtype is None:
            return scalar_tensor(number, compute_dtype, acc.device)
        return round_number(number, operand.dtype, acc.device).to(compute_dtype)
    check_dense(f"operand {operand.name}", given)
    if given.device != acc.device:
        advice = "give a Python number, or move it" if given.numel() == 1 else "move it"
        raise EpilogueError(
            f"operand {operand.name} is on {given.device} and the accumulator on {acc.device}; "
            f"expected one device: {advice} to {acc.device}"
        )
    check_operand_dtype(operand, given.dtype, wide=compute_dtype == torch.float64)
    kind = bind_kind(operand, given.shape, m_shape, n)
    return given.reshape(spread_shape(kind, tuple(given.shape), m_shape, n)).to(compute_dtype)


def check_dense(what: str, tensor: Tensor) -> None:
    """Checks that a tensor's elements lie in memory one by one, as ``what`` has them.

    Raises:
        EpilogueError: for sparse, nested and quantized tensors.
    """
    if tensor.is_quantized:
        found = f"a quantized tensor ({tensor.dtype})"
    elif tensor.is_nested:
        found = "a nested tensor"
    elif tensor.layout != torch.strided:
        found = f"a tensor of layout {tensor.layout}"
    else:
        return
    raise EpilogueError(f"{what}: expected a dense tensor (layout torch.strided), got {found}")


def check_operand_dtype(operand: Operand, dtype: torch.dtype, *, wide: bool = False) -> None:
    """Checks the dtype of the tensor given for an operand; ``wide`` allows float64.

    Raises:
        DtypeError: if operands cannot have the dtype, or the epilogue fixes another.
    """
    if operand.dtype is not None:
        if dtype != torch_dtype(operand.dtype):
            raise DtypeError(
                f"operand {operand.name}: the epilogue fixes its dtype to {torch_dtype(operand.dtype)}, got {dtype}"
            )
    elif not (wide and dtype == torch.float64):
        try:
            dtype_name(dtype)
        except DtypeError as error:
            raise DtypeError(f"operand {operand.name}: {error}") from None


def round_number(number: float, dtype: str, device: torch.device) -> Tensor:
    """The number as a kernel holds it that is handed a float32: rounded to that, and to the short dtype's values."""
    return scalar_tensor(number, torch.float32, device).to(torch_dtype(dtype))


def scalar_tensor(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dimensional tensor, filled on the device, so that nothing waits for a copy."""
    if math.isfinite(number) and abs(number) > torch.finfo(dtype).max:
        number = math.copysign(math.inf, number)
    return torch.full((), number, dtype=dtype, device=device)


def _output_dtype(
    store: Store, out_dtype: torch.dtype | str | None, acc: Tensor, compute_dtype: torch.dtype
) -> torch.dtype:
    default = acc.dtype if out_dtype is None else out_dtype
    named = store.dtype is not None or isinstance(store.value, Cast)
    if not named and default == compute_dtype == torch.float64:
        return torch.float64  # a GEMM of float64 matrices, all in float64
    if not named and out_dtype is None:
        try:
            return torch_dtype(dtype_name(default))
        except DtypeError:
            raise DtypeError(
                f"output {store.name} has the accumulator's dtype, {acc.dtype}, which no output can have unless "
                "compute_dtype is float64 too; pass out_dtype="
            ) from None
    return torch_dtype(EpilogueTree.output_dtype(store, "f32" if named else dtype_name(default)))


def _describe(value: object) -> str:
    return "a tensor without dimensions" if isinstance(value, Tensor) else f"{type(value).__name__}"

"""A fused call in rewritten code: decides at every call how much of its steps one GEMM can take.

    y = fused_1(self.fc1, (self.act,), x)                       # in the code of gemm_ops.conversion.rewrite

Contract
--------
* It computes what the product and the steps do, whatever the arguments are.  As many steps as possible, up to a cut
  of the region, are the epilogue of the GEMM; the others run as they are.  None are where the product is not what it
  was (it has got hooks, was replaced, parametrised, quantised), or where tensors are not plain ones of fitting dtypes.
* What fits is asked of each call's own dtypes, shapes, autocast and modules' flags, so dropout is fused through in
  evaluation and not in training, and an operand that PyTorch would broadcast the product to is left to PyTorch.
* The result has the dtype that the steps would have given it: it is cast to it in the epilogue where that is not the
  matrices' (a residual stream in float32 under autocast).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epilogues import Aux, Column, Epilogue, EpilogueError, Kind, Row, Scalar
from epilogues.builders import cast
from epilogues.operand_shapes import fits, is_number

from ..functional import matmul
from ..product_call import HAVE_AUTOCAST
from .inspection import SIMPLE
from .products import FLOATS, has_hooks, is_still, weight_matrix
from .steps import Step, build_epilogue, operands_read, run_steps, stand_in, step_obstacle

_ANNOTATIONS: dict[Kind, Any] = {Kind.ROW: Row, Kind.COLUMN: Column, Kind.SCALAR: Scalar, Kind.AUX: Aux}
_PLAIN = (Tensor, nn.Parameter)
_SIXTEEN_OR_32 = (torch.float32, torch.float16, torch.bfloat16)

#: What every module has in its ``__dict__``, and does not compute with.
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}

#: An epilogue and how many steps it is.
Choice = tuple[Epilogue, int]


class FusedCall:
    """The fused call of one region.

    Args:
        number: tells the calls of one method apart.
        expected: the class of the product.
        steps, cuts, names: the region's.
    """

    def __init__(
        self,
        number: int,
        expected: type[nn.Module],
        steps: Sequence[Step],
        cuts: Sequence[int],
        names: Sequence[str],
    ) -> None:
        # by these names generated code calls it
        self.__name__ = self.__qualname__ = f"fused_{number}"
        self.__module__ = __name__
        self.expected = expected
        self.steps, self.cuts, self.names = tuple(steps), tuple(cuts), tuple(names)
        self.reads = {count: operands_read(self.steps[:count]) for count in self.cuts}
        self._choices: dict[Any, Choice | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        # the choices know the modules of the model that is copied
        return {**self.__dict__, "_choices": {}}

    def __call__(self, product: nn.Module, modules: tuple[nn.Module, ...], x: Any, *operands: Any) -> Any:
        key = self._key(product, modules, x, operands)
        choice = None
        if key is not None:
            if key not in self._choices:
                make: Callable[..., Choice | None] = self._choose
                if torch.compiler.is_compiling():
                    make = torch.compiler.disable(make)
                self._choices[key] = make(product, modules, x, operands, key)
            choice = self._choices[key]
        if choice is None:
            return run_steps(self.steps, [product(x)], operands, modules)[-1]
        epilogue, count = choice
        given = dict(zip(self.names[: self.reads[count]], operands, strict=False))
        if product._parameters["bias"] is not None:
            given["bias"] = product._parameters["bias"]
        result = matmul(x, weight_matrix(product), epilogue, **given)
        if count == len(self.steps):
            return result
        # nothing before a cut is read after it, so that the values before it are not missed
        return run_steps(self.steps, [None] * count + [result], operands, modules)[-1]

    def _key(
        self, product: nn.Module, modules: tuple[nn.Module, ...], x: Any, operands: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """What the choice depends on; None where nothing can be fused."""
        if not is_still(product, self.expected) or type(x) not in _PLAIN or not x.ndim:
            return None
        weight, bias = product._parameters["weight"], product._parameters["bias"]
        assert weight is not None
        device = x.device.type
        cast_to = None
        if device in HAVE_AUTOCAST and torch.is_autocast_enabled(device):
            cast_to = torch.get_autocast_dtype(device)
        mixed = x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype)
        if mixed and (cast_to is None or x.dtype not in _SIXTEEN_OR_32 or weight.dtype not in _SIXTEEN_OR_32):
            return None
        if weight.dtype not in FLOATS or x.device != weight.device or x.layout is not torch.strided or x.is_nested:
            return None
        n, k = weight.shape if issubclass(self.expected, nn.Linear) else reversed(weight.shape)
        if k != x.shape[-1]:
            return None  # the module says it in PyTorch's words
        shape = (*x.shape[:-1], n)
        facts = tuple(_facts(operand, shape, x) for operand in operands)
        states = tuple((module, *_state(module)) for module in modules)
        return (facts, states, x.dtype, weight.dtype, bias is None, cast_to, x.device)

    def _choose(
        self,
        product: nn.Module,
        modules: tuple[nn.Module, ...],
        x: Tensor,
        operands: tuple[Any, ...],
        key: tuple[Any, ...],
    ) -> Choice | None:
        """The longest cut that one GEMM can compute, None if that is none."""
        facts, _, _, _, no_bias, cast_to, _ = key
        matrix_dtype = cast_to if cast_to is not None and x.dtype in _SIXTEEN_OR_32 else x.dtype
        annotations = []
        for fact in facts:
            if fact is None:
                break
            annotations.append(_ANNOTATIONS[fact[0]])
        for count in reversed(self.cuts):
            steps = self.steps[:count]
            called = [modules[step.target] for step in steps if step.way == "module"]
            if self.reads[count] > len(annotations) or any(map(step_obstacle, called)):
                continue
            try:
                epilogue = build_epilogue(steps, self.names, annotations, modules, has_bias=not no_bias)
            except EpilogueError:
                continue
            # after that, because only then are the steps known to draw no random numbers
            dtype = self._result_dtype(steps, matrix_dtype, x.device, operands, modules)
            if dtype not in FLOATS or (dtype == torch.float64) != (matrix_dtype == torch.float64):
                continue
            return epilogue if dtype == matrix_dtype else cast(dtype, epilogue), count
        return None

    @staticmethod
    def _result_dtype(
        steps: Sequence[Step],
        dtype: torch.dtype,
        device: torch.device,
        operands: Sequence[Any],
        modules: Sequence[nn.Module],
    ) -> torch.dtype | None:
        """The dtype of what the steps give for a product of that dtype, as PyTorch promotes: by running them, once."""
        small = [
            torch.ones((1,) * operand.ndim, dtype=operand.dtype, device=operand.device)
            if isinstance(operand, Tensor)
            else operand
            for operand in operands
        ]
        stand_ins = [stand_in(module) for module in modules]
        with torch.no_grad():
            result = run_steps(steps, [torch.ones((1, 1), dtype=dtype, device=device)], small, stand_ins)[-1]
        return result.dtype if isinstance(result, Tensor) else None


def _facts(operand: Any, shape: tuple[int, ...], x: Tensor) -> tuple[Any, ...] | None:
    """An operand's kind and dtype beside a product of that shape; None where PyTorch has to take it."""
    if is_number(operand):
        return (Kind.SCALAR, type(operand))
    if type(operand) not in _PLAIN or operand.dtype not in FLOATS or operand.device != x.device:
        return None
    if (operand.dtype == torch.float64) != (x.dtype == torch.float64) or operand.layout is not torch.strided:
        return None
    kind = _kind(tuple(operand.shape), shape)
    return None if kind is None else (kind, operand.dtype, operand.ndim)


def _kind(own: tuple[int, ...], shape: tuple[int, ...]) -> Kind | None:
    """How a tensor spreads over the product where PyTorch aligns its dimensions at the right; None if it widens it."""
    m_shape, n = shape[:-1], shape[-1]
    if len(own) > len(shape):
        return None
    if all(size == 1 for size in own):
        return Kind.SCALAR
    for kind in (Kind.AUX, Kind.ROW):
        if fits(kind, own, m_shape, n):
            return kind
    # (M,), which the language takes as a column too, is a row to PyTorch
    aligned = len(own) == len(shape) and own[-1] == 1
    return Kind.COLUMN if aligned and fits(Kind.COLUMN, own, m_shape, n) else None


def _state(module: nn.Module) -> tuple[Any, ...]:
    """The plain values and functions that a step's module and its parts compute with, and whether they have hooks."""
    found: list[Any] = [has_hooks(module)]
    for key, value in module.__dict__.items():
        if key not in _INTERNAL and (type(value) in SIMPLE or callable(value)):
            found.append((key, value))
    for part in module._modules.values():
        if part is not None:
            found.append(_state(part))
    return tuple(found)

"""The backward of an elementwise call: one kernel for each output that gradients come from, and sums.

    >>> forward = storing_forward(epilogue, ("accumulator", "bias"), torch.bfloat16)
    >>> results = ...                                            # the forward over x
    >>> backward = Pass(forward, epilogue.outputs, ("accumulator", "bias"), x.dtype)
    >>> grads = backward.run({"D": grad}, x, {"bias": bias}, results, compute)

Contract
--------
* The derivative trees are the language's (:mod:`epilogues.gradients`); here they meet tensors.
* x, which takes the accumulator's place, is at hand in the backward.  So are the operands and the outputs.  What the
  backward reads of these, and what it computes again, is what moves the fewest bytes; where storing a value in the
  forward saves more than it costs, :func:`storing_forward` has it as a further output.
* The terms of a row's, a column's or a scalar's gradient are summed in fp32 (fp64 for fp64) by PyTorch.
* Gradients have the dtype of what they are gradients of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import DTYPES, dtype_name
from epilogues.gradients.backward import ACCUMULATOR, Backward, BackwardPass
from epilogues.gradients.chain_rule import free_name
from epilogues.gradients.derivative import derivative
from epilogues.tree import Accumulator, Store

#: Computes an epilogue: of x and operands by name, the outputs by name.
Compute = Callable[[Tensor, Epilogue, Mapping[str, Tensor | float]], Mapping[str, Tensor]]


def storing_forward(epilogue: Epilogue, needs: tuple[str, ...], dtype: torch.dtype) -> Epilogue:
    """The epilogue with what it should store for the backward as further outputs; mostly the epilogue itself.

    Args:
        epilogue: the forward.
        needs: what gradients will be needed of: "accumulator" for x, and operands' names.
        dtype: of x.
    """
    return _storing_forward(epilogue, needs, _short(dtype))


@functools.lru_cache(maxsize=1024)
def _storing_forward(epilogue: Epilogue, needs: tuple[str, ...], dtype: str | None) -> Epilogue:
    with_x, name = _with_x(epilogue, dtype)
    found = derivative(with_x, needs, outputs=epilogue.outputs, dtype=dtype)
    if not found.added:
        return epilogue
    tree = found.forward.tree
    outputs = tuple(store for store in tree.outputs if store.name != name)
    return Epilogue.from_tree(replace(tree, outputs=outputs), f"{epilogue.name}_forward")


@dataclass(frozen=True)
class Pass:
    """The backward of one call.

    Attributes:
        forward: what was computed, with what was stored for the backward.
        outputs: those of its outputs that have gradients.
        needs: what gradients are needed of.
        dtype: of x.
    """

    forward: Epilogue
    outputs: tuple[str, ...]
    needs: tuple[str, ...]
    dtype: torch.dtype

    def run(
        self,
        grads: Mapping[str, Tensor],
        x: Tensor,
        operands: Mapping[str, Tensor | float],
        results: Mapping[str, Tensor],
        compute: Compute,
    ) -> dict[str, Tensor]:
        """The gradients by name: "accumulator" for x, and operands'.

        Args:
            grads: of each of ``outputs``.
            x, operands: what the forward was given.
            results: what it computed, by name; those that :attr:`reads` names are enough.
            compute: computes the epilogues of the backward.
        """
        backward, name = self._backward
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        saved = {**results, name: x}
        found: dict[str, Tensor] = {}
        for one in backward.passes:
            given = one.operands(grads, saved, operands)
            start = grads[one.gradient_of]
            # an fp64 call whose output is not: the rest of the backward is fp64
            start = start.to(wide) if wide == torch.float64 else start
            values = compute(start, self._epilogue(one, operands), given)
            for gradient in one.gradients:
                raw = values[gradient.output]
                if gradient.target == ACCUMULATOR:
                    value = raw.to(x.dtype)
                else:
                    value = gradient.of(operands[gradient.target], raw, wide)
                if value is not raw and value.numel() == raw.numel():
                    value = value.clone()  # may be a view of what is another gradient, and autograd adds in place
                found[gradient.target] = value
        for target in backward.zero:
            like = x if target == ACCUMULATOR else operands[target]
            found[target] = torch.zeros_like(like) if isinstance(like, Tensor) else x.new_zeros(())
        return found

    @property
    def reads(self) -> frozenset[tuple[str, str]]:
        """What the backward reads: ("x", ""), ("operand", name) and ("output", name) of the forward."""
        backward, x = self._backward
        found = set()
        for source in (source for one in backward.passes for source in one.sources):
            if source.role == "operand":
                found.add(("operand", source.name))
            elif source.role == "saved":
                found.add(("x", "") if source.name == x else ("output", source.name))
        return frozenset(found)

    @property
    def _backward(self) -> tuple[Backward, str]:
        return _backward(self.forward, self.outputs, self.needs, _short(self.dtype))

    def _epilogue(self, one: BackwardPass, operands: Mapping[str, Tensor | float]) -> Epilogue:
        """A pass's epilogue with each output in the dtype of what it is the gradient of."""
        wanted: dict[str, set[str | None]] = {}
        for gradient in one.gradients:
            given = None if gradient.target == ACCUMULATOR else operands[gradient.target]
            dtype = given.dtype if isinstance(given, Tensor) else self.dtype
            if gradient.over == ():  # what is summed is stored as the tree says
                wanted.setdefault(gradient.output, set()).add(_short(dtype))
        dtypes = tuple((name, _widest(found)) for name, found in wanted.items())
        return _stored_as(one.epilogue, dtypes, self.dtype == torch.float64)


@functools.lru_cache(maxsize=1024)
def _backward(
    forward: Epilogue, outputs: tuple[str, ...], needs: tuple[str, ...], dtype: str | None
) -> tuple[Backward, str]:
    """The derivative, and the name of the output that x is in it."""
    with_x, name = _with_x(forward, dtype)
    return derivative(with_x, needs, outputs=outputs, dtype=dtype, store=False), name


def _with_x(epilogue: Epilogue, dtype: str | None) -> tuple[Epilogue, str]:
    """The epilogue with x as a further output, which the backward may read, and that output's name."""
    tree = epilogue.tree
    taken = {*epilogue.operands, *epilogue.outputs}
    name = free_name("x", taken)
    accumulator = next((node for node in tree.nodes if isinstance(node, Accumulator)), None) or Accumulator()
    outputs = (*tree.outputs, Store(name, accumulator, dtype or "f32"))
    return Epilogue.from_tree(replace(tree, outputs=outputs), epilogue.name), name


@functools.lru_cache(maxsize=1024)
def _stored_as(epilogue: Epilogue, dtypes: tuple[tuple[str, str | None], ...], double: bool) -> Epilogue:
    """The epilogue with dtypes for outputs that name none; in fp64, all outputs are fp64."""
    found = dict(dtypes)
    stores = tuple(
        replace(store, dtype=None if double else store.dtype or found.get(store.name))
        for store in epilogue.tree.outputs
    )
    return Epilogue.from_tree(replace(epilogue.tree, outputs=stores), epilogue.name)


def _short(dtype: torch.dtype) -> str | None:
    """The short name of a dtype of the language; None for others, which are computed in fp64 or refused."""
    return dtype_name(dtype) if dtype in DTYPES.values() else None


def _widest(dtypes: Sequence[str | None] | set[str | None]) -> str | None:
    return "f32" if len(dtypes) > 1 else next(iter(dtypes))

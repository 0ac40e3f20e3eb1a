"""The backward of an epilogue: one kernel for each output that gradients come from, and sums.

    >>> keep(ctx, epilogue, x, {"bias": bias}, results)         # in an autograd node's forward
    >>> found = gradients(ctx, kept(ctx), [grad], compute)      # in its backward: by name, "accumulator" for x

Contract
--------
* The derivative trees are the language's (:mod:`epilogues.gradients`); here they meet tensors and autograd's context.
* In an elementwise call x takes the accumulator's place and is at hand in the backward, as the operands and the outputs
  are.  The accumulator of a product is not; what the backward wants of it the forward stores as further outputs
  (:func:`storing_forward`).
* Which of these the backward reads, and what it computes again, is what moves the fewest bytes; nothing else is kept.
* The terms of a row's, a column's or a scalar's gradient are summed in fp32 (fp64 for fp64) by PyTorch.
* Gradients have the dtype of what they are gradients of.
* Outputs that no gradient comes to cost nothing, unless the backward without them would read what was not kept; then
  they count as zeros.
* What the backward computes goes through ``compute``, so that it can be recorded and differentiated in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epilogues import Epilogue, EpilogueError
from epilogues.dtypes import DTYPES, dtype_name
from epilogues.gradients.backward import ACCUMULATOR, Backward
from epilogues.gradients.chain_rule import free_name
from epilogues.gradients.derivative import derivative
from epilogues.tree import MAIN_OUTPUT, Accumulator, Operand, Store

#: Computes an epilogue: of x and operands by name, the outputs by name.
Compute = Callable[[Tensor, Epilogue, Mapping[str, Tensor | float]], Mapping[str, Tensor]]


def needs_of(x: Tensor, operands: Mapping[str, Tensor | float]) -> tuple[str, ...]:
    """What gradients will be asked for: "accumulator" for x, and operands' names."""
    found = [ACCUMULATOR] if isinstance(x, Tensor) and x.requires_grad else []
    for name, value in operands.items():
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(name)
    return tuple(found)


def product_needs(a: Tensor, b: Tensor, operands: Mapping[str, Tensor | float]) -> tuple[str, ...]:
    """What gradients of a product will be asked for: "accumulator" for the matrices, and operands' names."""
    return needs_of(a if a.requires_grad else b, operands)


@functools.lru_cache(maxsize=4096)
def storing_forward(epilogue: Epilogue, needs: tuple[str, ...], dtype: torch.dtype) -> Epilogue:
    """The epilogue of a product with what its backward reads of the accumulator as further outputs.

    Args:
        epilogue: the forward.
        needs: what gradients will be needed of: "accumulator" for the product, and operands' names.
        dtype: of the matrices.
    """
    return derivative(epilogue, needs, dtype=_short(dtype)).forward if needs else epilogue


class Look(NamedTuple):
    """What a backward knows of a tensor whose elements it does not read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Look:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of that look, or of another dtype."""
        return torch.zeros(self.shape, dtype=dtype or self.dtype, device=self.device)


def keep(
    ctx: Any,
    whole: Pass,
    x: Tensor | Look,
    operands: Mapping[str, Tensor | float],
    results: Mapping[str, Tensor],
    matrices: Mapping[str, Tensor] | None = None,
) -> None:
    """Keeps in an autograd context what the backward reads.

    Args:
        ctx: of an autograd node whose inputs and outputs the tensors are.
        whole: the backward from those outputs that gradients come from, unless the backward is differentiated in turn.
        x: what takes the accumulator's place; of a product, which is nowhere in memory, its look.
        operands: of the forward.
        results: the outputs, by name.
        matrices: what else to keep, by name.
    """
    ctx.set_materialize_grads(False)
    ctx.backward_pass = whole
    saved: dict[tuple[str, str], Tensor] = {}
    for role, name in whole.reads:
        value = x if role == "x" else (operands if role == "operand" else results)[name]
        if isinstance(value, Tensor):
            saved[role, name] = value
    if matrices:
        saved |= {("matrix", name): value for name, value in matrices.items()}
    ctx.saved_keys = tuple(saved)
    ctx.save_for_backward(*saved.values())
    # of what is not read, the look is; a tensor made to look alike would cost an allocation on every call
    ctx.x_look = x if isinstance(x, Look) else Look.of(x)
    ctx.operand_looks = {
        name: Look.of(value) if isinstance(value, Tensor) else value
        for name, value in operands.items()
        if name in whole.needs or not isinstance(value, Tensor)
    }
    ctx.output_dtypes = {name: value.dtype for name, value in results.items()}


def kept(ctx: Any) -> dict[tuple[str, str], Tensor]:
    """What :func:`keep` kept: ("x", ""), ("operand", name), ("output", name), ("matrix", name).  To be asked once."""
    return dict(zip(ctx.saved_keys, ctx.saved_tensors, strict=True))


def gradients(
    ctx: Any, saved: Mapping[tuple[str, str], Tensor], grads: Sequence[Tensor | None], compute: Compute
) -> dict[str, Tensor]:
    """The gradients by name: "accumulator" for x, and operands'; none where no gradient came.

    Args:
        ctx: as :func:`keep` left it.
        saved: what it kept.
        grads: of the outputs, in order, those included that were stored for the backward.
        compute: computes the epilogues of the backward.
    """
    whole: Pass = ctx.backward_pass
    present = {name: grad for name, grad in zip(whole.forward.outputs, grads, strict=True) if grad is not None}
    if not present:
        return {}
    chosen = whole
    if tuple(present) != whole.outputs:
        chosen = find_pass(whole.forward, tuple(present), whole.needs, whole.dtype, with_x=whole.with_x)
    if chosen is not whole and not chosen.reads <= whole.reads:
        if not set(present) <= set(whole.outputs):
            raise EpilogueError(
                f"epilogue {whole.forward.name}: its backward reads what the forward stores for it, and cannot be "
                'differentiated again; use_backend("reference") can'
            )
        chosen = whole
        for name in whole.outputs:
            if name not in present:
                present[name] = ctx.x_look.zeros(ctx.output_dtypes[name])
    return chosen.run(present, saved, ctx.x_look, ctx.operand_looks, compute)


@dataclass(frozen=True)
class Pass:
    """The backward of calls that are alike.

    Attributes:
        forward: what was computed.
        outputs: those of its outputs that have gradients.
        needs: what gradients are needed of.
        dtype: of x, or of the matrices.
        with_x: whether what takes the accumulator's place is at hand in the backward.
    """

    forward: Epilogue
    outputs: tuple[str, ...]
    needs: tuple[str, ...]
    dtype: torch.dtype
    with_x: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_epilogues", {})

    @functools.cached_property
    def reads(self) -> frozenset[tuple[str, str]]:
        """What the backward reads: ("x", ""), ("operand", name) and ("output", name) of the forward."""
        backward, x = self.backward
        found = set()
        for source in (source for one in backward.passes for source in one.sources):
            if source.role == "operand":
                found.add(("operand", source.name))
            elif source.role == "saved":
                found.add(("x", "") if x and source.name == x else ("output", source.name))
        return frozenset(found)

    def run(
        self,
        grads: Mapping[str, Tensor],
        saved: Mapping[tuple[str, str], Tensor],
        x: Look,
        operands: Mapping[str, Look | float],
        compute: Compute,
    ) -> dict[str, Tensor]:
        """The gradients by name.

        Args:
            grads: of each of ``outputs``.
            saved: the tensors among :attr:`reads`.
            x, operands: what the forward was given.
            compute: computes the epilogues of the backward.
        """
        backward, name = self.backward
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        results = {key: value for (role, key), value in saved.items() if role == "output"}
        if ("x", "") in saved:
            results[name] = saved["x", ""]
        given_to_forward: dict[str, Tensor | float] = {
            key: value for key, value in operands.items() if not isinstance(value, Look)
        }
        given_to_forward |= {key: value for (role, key), value in saved.items() if role == "operand"}
        found: dict[str, Tensor] = {}
        for place, one in enumerate(backward.passes):
            given = one.operands(grads, results, given_to_forward)
            start = grads[one.gradient_of]
            # an fp64 call whose output is not: the rest of the backward is fp64
            start = start.to(wide) if wide == torch.float64 else start
            epilogue, outputs = self.epilogue_of_pass(place, operands)
            values: dict[str | None, Tensor] = {None: start}
            if epilogue is not None:
                values.update(compute(start, epilogue, {name: given[name] for name in epilogue.operands}))
            for gradient in one.gradients:
                raw = values[outputs[gradient.target]]
                if gradient.target == ACCUMULATOR:
                    value = raw if raw.dtype == x.dtype else raw.to(x.dtype)
                else:
                    look = operands[gradient.target]
                    shape, dtype = (look.shape, look.dtype) if isinstance(look, Look) else ((), wide)
                    value = gradient.summed(raw, shape, dtype, wide)
                if value is not raw and value.numel() == raw.numel():
                    value = value.clone()  # may be a view of what is another gradient, and autograd adds in place
                found[gradient.target] = value
        reached = self.reached
        for target in backward.zero:
            like = x if target == ACCUMULATOR else operands[target]
            if target in reached and isinstance(like, Look):  # else there is no gradient, which is not one of zero
                found[target] = like.zeros()
        return found

    @functools.cached_property
    def reached(self) -> frozenset[str]:
        """What the outputs that have gradients are computed from: "accumulator", and operands' names."""
        stores = tuple(store for store in self.forward.tree.outputs if store.name in self.outputs)
        nodes = replace(self.forward.tree, outputs=stores).nodes
        names = {node.name for node in nodes if isinstance(node, Operand)}
        return frozenset(names | {ACCUMULATOR for node in nodes if isinstance(node, Accumulator)})

    @functools.cached_property
    def backward(self) -> tuple[Backward, str]:
        """The derivative, and the name of the output that x is in it."""
        tree, short = self.forward.tree, _short(self.dtype)
        if not self.with_x:
            return derivative(self.forward, self.needs, outputs=self.outputs, dtype=short, store=False), ""
        name = free_name("x", {*self.forward.operands, *self.forward.outputs})
        accumulator = next((node for node in tree.nodes if isinstance(node, Accumulator)), None) or Accumulator()
        outputs = (*tree.outputs, Store(name, accumulator, short or "f32"))
        with_x = Epilogue.from_tree(replace(tree, outputs=outputs), self.forward.name)
        return derivative(with_x, self.needs, outputs=self.outputs, dtype=short, store=False), name

    def epilogue_of_pass(
        self, place: int, operands: Mapping[str, Look | float]
    ) -> tuple[Epilogue | None, dict[str, str | None]]:
        """A pass's epilogue with each output in the dtype of what it is the gradient of, and each target's output.

        What comes in is not written out again: the output of a target whose gradient, or whose terms, are the incoming
        gradient is None, and so is the epilogue where there are no others.

        What is to be summed shares an output only if that has the dtype of what it is the gradient of: a bias in fp32
        beside an x in 16 bits gets terms of its own, in fp32.
        """
        one = self.backward[0].passes[place]
        looks = [None if gradient.target == ACCUMULATOR else operands[gradient.target] for gradient in one.gradients]
        dtypes = tuple(look.dtype if isinstance(look, Look) else self.dtype for look in looks)
        known: dict[Any, tuple[Epilogue | None, dict[str, str | None]]] = self._epilogues  # type: ignore[attr-defined]
        if (place, dtypes) not in known:
            kinds = {
                gradient.target: (gradient.output, _short(dtype), gradient.over == ())
                for gradient, dtype in zip(one.gradients, dtypes, strict=True)
            }
            known[place, dtypes] = _stored_as(one.epilogue, tuple(kinds.items()), self.dtype == torch.float64)
        return known[place, dtypes]


@functools.lru_cache(maxsize=4096)
def find_pass(
    epilogue: Epilogue, outputs: tuple[str, ...], needs: tuple[str, ...], dtype: torch.dtype, *, with_x: bool = True
) -> Pass:
    """The backward of an epilogue from some of its outputs to what needs gradients; see :class:`Pass`."""
    return Pass(epilogue, outputs, needs, dtype, with_x)


def _stored_as(
    epilogue: Epilogue, kinds: tuple[tuple[str, tuple[str, str | None, bool]], ...], double: bool
) -> tuple[Epilogue | None, dict[str, str | None]]:
    """An epilogue of a backward with dtypes for its outputs; see :meth:`Pass.epilogue_of_pass`.

    Args:
        kinds: of each target the output, the dtype, and whether the output is the gradient as it is.
        double: whether all outputs are fp64.
    """
    stores: list[Store] = []
    outputs: dict[str, str | None] = {}
    for store in epilogue.tree.outputs:
        found = [(target, dtype, final) for target, (output, dtype, final) in kinds if output == store.name]
        if isinstance(store.value, Accumulator):
            outputs |= {target: None for target, _, _ in found}
            continue
        wanted = {dtype for _, dtype, final in found if final}
        chosen = store.dtype or ("f32" if len(wanted) > 1 else next(iter(wanted), "f32"))
        stores.append(replace(store, dtype=None if double else chosen))
        outputs |= {target: store.name for target, _, _ in found}
        apart = [target for target, dtype, final in found if not final and chosen not in ("f32", dtype)]
        if apart and not double:
            name = free_name("terms", {*epilogue.operands, *epilogue.outputs, *(other.name for other in stores)})
            stores.append(Store(name, store.value, "f32"))
            outputs |= dict.fromkeys(apart, name)
    if not stores:
        return None, outputs
    first = stores[0].name  # an epilogue's first output is called D
    stores[0] = replace(stores[0], name=MAIN_OUTPUT)
    outputs = {target: MAIN_OUTPUT if name == first else name for target, name in outputs.items()}
    return Epilogue.from_tree(replace(epilogue.tree, outputs=tuple(stores)), epilogue.name), outputs


def _short(dtype: torch.dtype) -> str | None:
    """The short name of a dtype of the language; None for others, which are computed in fp64 or refused."""
    return dtype_name(dtype) if dtype in DTYPES.values() else None

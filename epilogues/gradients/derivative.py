"""From a forward epilogue to its backward: the chain rule over the tree, by the rules of the operation table.

    >>> backward = derivative(builders.bias_activation("relu"))
    >>> print(backward.passes[0].epilogue.tree)
    %0 = operand saved_D (aux, 0)  : any
    %1 = constant 0.0              : f32
    %2 = le(%0, %1)                : bool
    %3 = accumulator               : f32
    %4 = where(%2, %1, %3)         : f32
    store D = %4                   : default
    >>> print(*backward.reduce_outside)
    bias: output D, summed over M

Contract
--------
* The gradient of an operation's input is the gradient of its output times the table's derivative.  Where that is a
  selection, such as 0 where x <= 0 and else 1, the gradient itself is selected, as PyTorch's autograd does: a
  gradient that is infinite or NaN does not get past a zero.  A derivative of 1 or -1 multiplies nothing.
* The gradient of a cast is cast to the same dtype, as autograd rounds it, but for values that have fewer elements
  than the accumulator (a cast of a row, say): autograd rounds their gradient after the sum, and here it is left
  unrounded, in float32.
* Gradients with respect to rows, columns and scalars are terms, one for each element of the accumulator, stored in
  float32 and summed outside.  What autograd computes on such an operand alone, after the sum, is computed on the terms.
  An aux that is given for fewer batches than there are is summed outside too; here it counts as having as many
  elements as the accumulator, so that its terms are cast and stored as its gradient is.
* A gradient is computed in the compute dtype and not rounded before it is stored, whatever the rounding of the
  forward.  Eager rounding makes casts of a resolved tree; there gradients are rounded after every operation, as eager
  autograd does, and where the tree is not resolved they are not.
* Values of the forward are read or computed again as :mod:`.saved_values` chooses.  Read values are rounded as they
  were stored, so that a condition may come out otherwise than in the forward: as in PyTorch, which keeps rounded
  tensors too.  ``save_dtype="float32"`` keeps what it stores exact.

The objects that are returned are those of :mod:`epilogues.gradients.backward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..declare import Epilogue
from ..dtypes import dtype_name
from ..errors import EpilogueError
from ..source import short
from ..tree import MAIN_OUTPUT, Accumulator, Apply, Cast, EpilogueTree, Kind, Node, Operand, Store
from .backward import ACCUMULATOR, SUMMED_OVER, Backward, BackwardPass, Gradient, Source
from .chain_rule import Differentiated, differentiate, free_name
from .saved_values import ASSUMED_DTYPE, Plan, Sizes, choose


def derivative(
    epilogue: Epilogue | EpilogueTree,
    needs: Iterable[str] | None = None,
    *,
    outputs: Iterable[str] | None = None,
    dtype: torch.dtype | str | None = None,
    save_dtype: torch.dtype | str | None = None,
    store: bool = True,
    m: int = 4096,
    n: int = 4096,
) -> Backward:
    """The backward of an epilogue: ``derivative(bias_gelu).passes[0].epilogue``.

    Args:
        epilogue: the forward, or its tree.
        needs: what gradients are needed of: "accumulator" and names of operands; None: all.
        outputs: the outputs that gradients come from; None: all.  An output kept only for the backward is none.
        dtype: the dtype of the GEMM's matrices, which outputs and operands have that name no other.  None: not
            known; bytes are counted for 16 bits.
        save_dtype: the dtype in which values are stored for the backward; None: that of a cast, else ``dtype``.
        store: whether the forward may store values for the backward only.  If not, what the backward needs must follow
            from the operands and the outputs.
        m: rows of the accumulator, to count bytes for.
        n: columns of the accumulator, to count bytes for.

    Raises:
        EpilogueError: if a name is not one of the epilogue, an extent is not positive, or the backward needs the
            accumulator and nothing may be stored.
        DtypeError: if a dtype is not one of the language.
    """
    forward = epilogue if isinstance(epilogue, Epilogue) else _checked(epilogue)
    targets = _targets(forward.tree, needs)
    from_outputs = _chosen("outputs", outputs, forward.outputs, forward.outputs)
    for name, extent in (("m", m), ("n", n)):
        if not isinstance(extent, int) or isinstance(extent, bool) or extent < 1:
            raise EpilogueError(f"{name}: expected a positive int, got {short(extent)}")
    gemm_dtype = None if dtype is None else dtype_name(dtype)
    sizes = Sizes(m, n, gemm_dtype or ASSUMED_DTYPE, None if save_dtype is None else dtype_name(save_dtype))

    differentiated = differentiate(forward, targets, from_outputs)
    plan = choose(differentiated.forward, differentiated.needed(), sizes, store=store)
    if plan.added and not store:
        raise EpilogueError(
            "the backward needs values that follow neither from operands nor from outputs, and none may be stored"
        )
    return _Assembly(forward, differentiated, plan, sizes, gemm_dtype).backward(targets)


def _checked(tree: EpilogueTree) -> Epilogue:
    if not isinstance(tree, EpilogueTree):
        raise EpilogueError(f"derivative: expected an Epilogue or an EpilogueTree, got {type(tree).__name__}")
    return Epilogue.from_tree(tree)


def _targets(tree: EpilogueTree, needs: Iterable[str] | None) -> tuple[str, ...]:
    operands = [operand.name for operand in tree.operands]
    if ACCUMULATOR in operands:
        raise EpilogueError(f"an operand is named {ACCUMULATOR!r}, as the accumulator is here; rename it")
    known = (ACCUMULATOR, *operands)
    return _chosen("needs", needs, known, known)


def _chosen(what: str, given: Iterable[str] | None, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """The names that were given, in the order of those known."""
    if given is None:
        return tuple(default)
    if isinstance(given, str):
        raise EpilogueError(f"{what}: expected several names, such as ({given!r},), got the text {given!r}")
    if not isinstance(given, Iterable):
        raise EpilogueError(f"{what}: expected several names, got {type(given).__name__} {short(given)}")
    names = list(given)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        got = ", ".join(map(repr, unknown)) or "no name"
        raise EpilogueError(f"{what}: expected names out of {', '.join(known)}; got {got}")
    return tuple(name for name in known if name in names)


class _Assembly:
    """Makes the forward and the passes of what was differentiated and chosen."""

    def __init__(
        self, epilogue: Epilogue, differentiated: Differentiated, plan: Plan, sizes: Sizes, gemm_dtype: str | None
    ) -> None:
        self.epilogue = epilogue
        self.found = differentiated
        self.plan = plan
        self.gemm_dtype = gemm_dtype
        forward = differentiated.forward
        taken = {operand.name for operand in (*forward.operands, *differentiated.incoming.values())}
        taken |= {store.name for store in forward.outputs}
        # what the forward stores for the backward goes by one name there and here
        self.added = tuple(Store(free_name(_name_of(node), taken), node, sizes.save_as(node)) for node in plan.added)
        self.sources = {op.name: Source(op.name, "operand", op.name) for op in forward.operands}
        self.changed: dict[int, Node] = {}
        names = {op.name for op in (*forward.operands, *differentiated.incoming.values())}
        names |= {store.name for store in self.added}
        position = len(forward.operands)
        for store in (*(stored for _, stored in plan.stored), *self.added):
            if store in self.added:
                name = store.name
            elif store.name == MAIN_OUTPUT:
                name = free_name(f"saved_{MAIN_OUTPUT}", names)  # D is the name of an output of the pass
            else:
                name = free_name(store.name, names)
            self.sources[name] = Source(name, "saved", store.name)
            self.changed[id(store.value)] = Operand(name, Kind.AUX, position, location=store.value.location)
            position += 1
        for output, operand in differentiated.incoming.items():
            self.sources[operand.name] = Source(operand.name, "gradient", output)
            self.changed[id(operand)] = replace(operand, position=position)
            position += 1

    def backward(self, targets: Sequence[str]) -> Backward:
        by_output: dict[str, list[str]] = {}
        for target in targets:
            if target in self.found.gradients:
                by_output.setdefault(self.found.gradient_of(target), []).append(target)
        # in the order of the outputs
        passes = tuple(self._pass(name, by_output[name]) for name in self.found.incoming if name in by_output)
        read = [store.name for _, store in self.plan.stored] + [store.name for store in self.added]
        return Backward(
            forward=self._forward(),
            passes=passes,
            zero=tuple(target for target in targets if target not in self.found.gradients),
            saved=tuple(read),
            added=tuple(store.name for store in self.added),
            recomputed=self.plan.recomputed,
            bytes_written=self.plan.bytes_written,
            bytes_read=self.plan.bytes_read,
        )

    def _forward(self) -> Epilogue:
        if not self.added:
            return self.epilogue
        tree = self.found.forward
        return Epilogue.from_tree(replace(tree, outputs=(*tree.outputs, *self.added)), f"{self.epilogue.name}_forward")

    def _pass(self, output: str, targets: Sequence[str]) -> BackwardPass:
        """The pass from the gradient of one output to the gradients of the targets."""
        stores, gradients = self._stores(targets)
        accumulator = Accumulator(location=self.found.incoming[output].location)
        changed = {**self.changed, id(self.found.incoming[output]): accumulator}
        tree = EpilogueTree(stores).map_nodes(changed).without_intermediates()
        numbered: dict[int, Node] = {id(op): replace(op, position=i) for i, op in enumerate(tree.operands)}
        tree = tree.map_nodes(numbered)
        # an output is stored in the dtype of a cast at its root; these are stored in that of the matrices
        stores = tuple(
            replace(store, value=Apply("identity", (store.value,), location=store.value.location))
            if store.dtype is None and isinstance(store.value, Cast)
            else store
            for store in tree.outputs
        )
        tree = replace(tree, outputs=stores)
        name = f"{self.epilogue.name}_backward"
        main = self.epilogue.outputs[0]
        return BackwardPass(
            gradient_of=output,
            epilogue=Epilogue.from_tree(tree, name if output == main else f"{name}_{output}"),
            sources=tuple(self.sources[operand.name] for operand in tree.operands),
            gradients=gradients,
        )

    def _stores(self, targets: Sequence[str]) -> tuple[tuple[Store, ...], tuple[Gradient, ...]]:
        """The outputs of a pass and which targets they are for: each value stored once, gradients before terms."""
        operands = {operand.name: operand for operand in self.found.forward.operands}
        over = {t: () if t == ACCUMULATOR else SUMMED_OVER[operands[t].kind] for t in targets}
        stores: list[Store] = []
        found: dict[str, Gradient] = {}
        for target in sorted(targets, key=lambda t: over[t] != ()):
            node, final = self.found.gradients[target], over[target] == ()
            dtype = operands[target].dtype if final and target != ACCUMULATOR else None if final else "f32"
            same = [s for s in stores if s.value is node and (not final or self._stored_as(s, dtype))]
            if not same:
                name = f"grad_{target}" if stores else MAIN_OUTPUT
                stores.append(Store(name, node, dtype))
            found[target] = Gradient(target, same[0].name if same else stores[-1].name, over[target])
        return tuple(stores), tuple(found[target] for target in targets)

    def _stored_as(self, store: Store, dtype: str | None) -> bool:
        """Whether an output is stored in the dtype that an operand's gradient should have."""
        return dtype == store.dtype or (store.dtype is None and dtype == self.gemm_dtype)


def _name_of(node: Node) -> str:
    if isinstance(node, Accumulator):
        return "saved_acc"
    return f"saved_{node.operation}" if isinstance(node, Apply) else "saved_cast"

"""What a recorded call is, said so that it can be repeated without Python: see ``cpp/recording.h``.

    >>> described = describe_recording(node, 2, epilogue, finish)
    >>> module.add_recording((a, b), epilogue, values, *described)

Contract: the steps are those of :meth:`gemm_ops.gradients.Pass.run` and of :mod:`gemm_ops.product_gradients` for the
shapes and dtypes of one call, with every sum and cast spelt out.  A backward that is not exactly as foreseen (some
gradient is missing, or it is differentiated in turn) goes to :class:`Again`, which does what the node of the first call
would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype
from epilogues.gradients.backward import ACCUMULATOR

from ..gradients import Look, Pass

#: From an autograd context and the gradients of the outputs to those of the leading tensors and the tensors among the
#: operands.
Finish = Callable[[Any, "tuple[Tensor | None, ...]"], "tuple[Tensor | None, ...]"]

# where a step takes an operand from
_GRADIENT, _SAVED, _NUMBER = 0, 1, 2
_CONTEXT = ("backward_pass", "saved_keys", "x_look", "operand_looks", "output_dtypes", "tensor_names")
_CONTEXT_OF_PRODUCT = ("shapes", "turned")


class Described(NamedTuple):
    """A recorded call, as ``add_recording`` takes it.

    Attributes:
        forward: what is computed, with what is stored for the backward.
        visible: how many of its outputs are the caller's.
        saved: of each tensor that is kept, whether it is an output, and which output or input.
        steps: which outputs' gradients are expected, the passes, and how gradients are made of their outputs.
        matrices: of a product, where the matrices are kept, their shapes, and whether b is a linear layer's weight.
        owner: what does the backwards that are not as expected.
    """

    forward: Epilogue
    visible: int
    saved: tuple[tuple[int, int], ...]
    steps: tuple[Any, ...]
    matrices: tuple[Any, ...] | None
    owner: Again


class Again:
    """What is needed to do in Python what the node of a call alike would have done."""

    def __init__(self, node: Any, names: Mapping[int, str], finish: Finish, keeps: tuple[object, ...]) -> None:
        known = (*_CONTEXT, *(_CONTEXT_OF_PRODUCT if hasattr(node, "shapes") else ()))
        self._context = {name: getattr(node, name) for name in known}
        self._names = names
        self._finish = finish
        self._keeps = keeps  # whose identities are in keys

    def backward(
        self, grads: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors among the inputs.

        Args:
            grads: of the outputs.
            saved: what was kept, in order.
            numbers: the values of the inputs that are numbers, by place.
        """
        context = SimpleNamespace(**self._context, saved_tensors=saved)
        looks = dict(context.operand_looks)
        for place, name in self._names.items():
            if name in looks and not isinstance(looks[name], Look):  # a number is of this call
                looks[name] = numbers[place]
        context.operand_looks = looks
        return self._finish(context, grads)


def describe_recording(node: Any, leading: int, epilogue: Epilogue, finish: Finish) -> Described | None:
    """A recorded call; None where the forward takes the operands in another order than the epilogue.

    Args:
        node: what autograd recorded it with.
        leading: how many tensors come before the operands.
        finish: what the node's backward does.
    """
    whole: Pass = node.backward_pass
    forward = whole.forward
    if tuple(forward.operands) != tuple(epilogue.operands):
        return None
    inputs = {name: leading + place for place, name in enumerate(epilogue.operands)}
    kept = {key: place for place, key in enumerate(node.saved_keys)}
    saved = tuple(_saved(key, inputs, forward) for key in node.saved_keys)
    matrices = None
    if leading == 2:
        places = tuple(kept.get(("matrix", name), -1) for name in ("a", "b"))
        matrices = (*places, *map(tuple, node.shapes), bool(node.turned))
    owner = Again(node, {place: name for name, place in inputs.items()}, finish, (epilogue, forward))
    return Described(forward, len(epilogue.outputs), saved, _steps(node, inputs, kept), matrices, owner)


def _saved(key: tuple[str, str], inputs: Mapping[str, int], forward: Epilogue) -> tuple[int, int]:
    role, name = key
    if role == "output":
        return 1, forward.outputs.index(name)
    if role == "operand":
        return 0, inputs[name]
    return 0, 1 if name == "b" else 0  # x, or a matrix


def _steps(node: Any, inputs: Mapping[str, int], kept: Mapping[tuple[str, str], int]) -> tuple[Any, ...]:
    whole: Pass = node.backward_pass
    outputs = whole.forward.outputs
    expected = tuple(int(name in whole.outputs) for name in outputs)
    backward, name_of_x = whole.backward
    passes: list[tuple[Any, ...]] = []
    targets: list[tuple[Any, ...]] = []
    for place, one in enumerate(backward.passes):
        epilogue, stored = whole.epilogue_of_pass(place, node.operand_looks)
        found = {source.operand: source for source in one.sources}
        names = () if epilogue is None else tuple(epilogue.operands)
        sources = tuple(_source(found[name], name_of_x, node, inputs, kept) for name in names)
        passes.append((epilogue, outputs.index(one.gradient_of), sources))
        for gradient in one.gradients:
            name = stored[gradient.target]
            output = -1 if epilogue is None or name is None else epilogue.outputs.index(name)
            shape = tuple(node.x_look.shape)
            if gradient.target == ACCUMULATOR:
                targets.append((0, place, output, (), None, shape, node.x_look.dtype))
                continue
            look = node.operand_looks[gradient.target]
            dims = gradient.dims(look.shape, shape)
            terms = "" if epilogue is None or output < 0 else str(epilogue.tree.outputs[output].dtype or "")
            dtype = torch_dtype(terms) if terms else node.output_dtypes[one.gradient_of]
            # as epilogues.gradients.backward.Gradient.summed
            same = dtype == look.dtype and dtype.itemsize == 2
            summed = torch.float32 if dims and not same else None
            targets.append((inputs[gradient.target], place, output, dims, summed, tuple(look.shape), look.dtype))
    for target in backward.zero:
        like: Any = node.x_look if target == ACCUMULATOR else node.operand_looks[target]
        if target in whole.reached and isinstance(like, Look):
            place = 0 if target == ACCUMULATOR else inputs[target]
            targets.append((place, -1, 0, (), None, tuple(like.shape), like.dtype))
    return expected, tuple(passes), tuple(targets)


def _source(
    source: Any, name_of_x: str, node: Any, inputs: Mapping[str, int], kept: Mapping[tuple[str, str], int]
) -> tuple[int, int]:
    if source.role == "gradient":
        return _GRADIENT, node.backward_pass.forward.outputs.index(source.name)
    if source.role == "operand":
        place = kept.get(("operand", source.name))
        return (_NUMBER, inputs[source.name]) if place is None else (_SAVED, place)
    is_x = name_of_x and source.name == name_of_x
    return _SAVED, kept[("x", "") if is_x else ("output", source.name)]

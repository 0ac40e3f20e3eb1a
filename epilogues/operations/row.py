"""What a row of the operation table says.

>>> from epilogues import functions
>>> from epilogues.operations import OPERATIONS
>>> x = torch.tensor([0.5])
>>> OPERATIONS["tanh"].derivatives[0](functions, (x,), torch.tanh(x))
tensor([0.7864])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

#: ``(f, inputs, output) -> value``; see :class:`Operation`.
Derivative = Callable[[Any, tuple[Any, ...], Any], Any]


@dataclass(frozen=True)
class Cost:
    """What an operation costs on a GPU; see :mod:`.costs`.

    Attributes:
        exact, fast: instructions of the two device functions; one is the time of an fp32 addition.
        registers: values alive within the function, beyond its inputs and its result.
        special_exact, special_fast: calls of the special function unit in the two device functions.
    """

    exact: int
    fast: int
    registers: int
    special_exact: int = 0
    special_fast: int = 0


@dataclass(frozen=True)
class Operation:
    """One elementwise operation.

    Attributes:
        name: the name in trees, JSON and error messages.
        arity: the number of inputs.
        reference: the PyTorch computation, ``arity`` tensors to one; conditions are tensors of dtype bool.
        functor: the device function, in namespace ``ep`` of ``functors.cuh``.
        note: what is worth knowing of its numbers.
        result: what it gives: a value of the compute dtype, or a condition, which is true or false.
        conditions: the positions of the inputs that are conditions; all others are values.
        eager: where eager PyTorch has no kernel of its own but composes it: ``(f, *inputs) -> value``, in terms of
            other rows by name (``f.mul(x, y)``); each of these is rounded.
        keeps_numbers: how eager PyTorch's kernel takes a Python number next to tensors of 16 bits: true, as it is;
            false, rounded to their dtype.  Measured on an H200 with PyTorch 2.11.
        cost: instructions and registers on a GPU.
        dtypes: short names of the dtypes of tensors that PyTorch computes it in: where eager rounding has something to
            agree with.  An epilogue computes every operation in its compute dtype, on operands of any dtype.
        derivatives: by input, the derivative of the output with respect to it: a function
            ``(f, inputs, output) -> value`` that writes it with ``f`` (the module :mod:`epilogues.functions`)
            and operators, alike for values of an epilogue and for tensors of the compute dtype; it may give a
            number.  It has the values that PyTorch's autograd has for a gradient of one, at kinks, bounds,
            infinities and NaN too.  None where there is none to write; :meth:`no_derivative` says why.
    """

    name: str
    arity: int
    reference: Callable[..., Tensor]
    functor: str
    note: str = ""
    derivatives: tuple[Derivative | None, ...] = ()
    result: Literal["value", "condition"] = "value"
    conditions: tuple[int, ...] = ()
    eager: Callable[..., Any] | None = None
    keeps_numbers: bool = False
    cost: Cost = Cost(1, 1, 0)
    dtypes: tuple[str, ...] = ("f16", "bf16", "f32")

    def no_derivative(self, position: int) -> str:
        """Why there is no derivative with respect to an input; empty if there is one."""
        if self.derivatives[position] is not None:
            return ""
        if self.result == "condition":
            return "the result is a condition"
        return "the input is a condition" if position in self.conditions else "zero everywhere"


def row(
    name: str,
    reference: Callable[..., Tensor],
    *rules: Callable[..., Any] | None,
    note: str = "",
    result: Literal["value", "condition"] = "value",
    conditions: tuple[int, ...] = (),
    eager: Callable[..., Any] | None = None,
    keeps_numbers: bool = False,
) -> Operation:
    """A row, written short: one rule ``(f, *inputs, output) -> value``, or None, for each input."""
    derivatives = tuple(None if rule is None else _derivative(rule) for rule in rules)
    return Operation(name, len(rules), reference, name, note, derivatives, result, conditions, eager, keeps_numbers)


def _derivative(rule: Callable[..., Any]) -> Derivative:
    return lambda f, inputs, output: rule(f, *inputs, output)

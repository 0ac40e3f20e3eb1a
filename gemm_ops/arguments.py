"""What people may give as an epilogue, its operands and ``out``, and what they get.

    >>> as_epilogue("gelu", has_bias=True)
    <Epilogue bias_gelu ...>

An epilogue is given as an :class:`epilogues.Epilogue`, as the name of an activation ("gelu", "relu", ...), which
stands for ``builders.bias_activation`` if a ``bias`` is given and ``builders.activation`` if not, or as None: no
activation.  A result is one tensor, or a dictionary by output name if the epilogue has several outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epilogues import Epilogue, EpilogueError, builders
from epilogues.tree import MAIN_OUTPUT

EpilogueLike = Epilogue | str | None
Outputs = Tensor | dict[str, Tensor]


def as_epilogue(epilogue: EpilogueLike, has_bias: bool) -> Epilogue:
    """The epilogue that a call means; see the module's first page.

    Raises:
        EpilogueError: an activation of that name is not known.
        TypeError: for anything that is no epilogue.
    """
    if isinstance(epilogue, Epilogue):
        return epilogue
    if epilogue is None or isinstance(epilogue, str):
        return builders.bias_activation(epilogue) if has_bias else builders.activation(epilogue)
    hint = ""
    if isinstance(epilogue, torch.nn.Module):
        hint = "; make one of it, epilogues.epilogue(module), or name the activation"
    elif callable(epilogue):
        hint = "; decorate the function with @epilogues.epilogue"
    raise TypeError(f"epilogue should be an Epilogue, a name or None, got {type(epilogue).__name__}{hint}")


def epilogue_of_call(epilogue: EpilogueLike, operands: Mapping[str, Tensor | float]) -> Epilogue:
    """The epilogue that a call with these operands means.

    Raises:
        EpilogueError: an activation of that name is not known, or an operand is given that none by name has.
        TypeError: for anything that is no epilogue.
    """
    chosen = as_epilogue(epilogue, operands.get("bias") is not None)
    if not isinstance(epilogue, Epilogue):
        check_named_operands(epilogue, operands)
    return chosen


def check_named_operands(name: str | None, operands: Mapping[str, Tensor | float]) -> None:
    """Refuses operands that an epilogue given by its name, or as None, cannot have.

    Raises:
        EpilogueError: naming them.
    """
    unknown = ", ".join(key for key in operands if key != "bias")
    if unknown:
        given = "no epilogue" if name is None else f"the epilogue {name!r}"
        raise EpilogueError(
            f"unknown operand {unknown}; {given} takes bias alone: for others declare an epilogue, with "
            "@epilogues.epilogue or a builder"
        )


def without_absent_bias(epilogue: Epilogue, operands: Mapping[str, Tensor | float]) -> Mapping[str, Tensor | float]:
    """The operands without ``bias=None``, which is F.linear's way to say that there is no bias."""
    if operands.get("bias", 0) is None and "bias" not in epilogue.operands:
        return {name: value for name, value in operands.items() if name != "bias"}
    return operands


def outputs_by_name(out: Tensor | Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """What was given as ``out``, by name; empty for None."""
    if out is None:
        return {}
    return {MAIN_OUTPUT: out} if isinstance(out, Tensor) else out


def results_of(outputs: dict[str, Tensor]) -> Outputs:
    """The one output, or all by name."""
    if len(outputs) == 1:
        (result,) = outputs.values()
        return result
    return outputs

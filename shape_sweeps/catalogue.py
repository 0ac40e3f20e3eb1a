"""The epilogues a sweep can name: the suite's, and a user's own as ``module:attribute``.

>>> from shape_sweeps.catalogue import load_epilogue
>>> load_epilogue("bias_gelu").outputs
('D',)
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable

import epilogues as ep
from epilogues.errors import did_you_mean

from .errors import InputError, one_line
from .importing import import_attribute
from .shapes import split_list

#: name -> formula of the epilogues by which the kernels are judged.  [n] is a row vector of length N, [m] a
#: column vector of length M, [m, n] a matrix; alpha is a number.
FORMULAS: dict[str, str] = {
    "identity": "D = acc",
    "bias_gelu": "D = gelu_tanh(acc + bias[n])",
    "bias_gelu_erf": "D = gelu(acc + bias[n])",
    "bias_silu": "D = silu(acc + bias[n])",
    "train_gelu": "preact = acc + bias[n]; D = gelu_tanh(preact); both stored",
    "residual": "D = (acc * scale[n] + bias[n]) * alpha + residual[m, n]",
    "gate": "D = silu(acc + bias[n]) * gate[m, n]",
    "dequant": "D = silu(acc * row_scale[m] * col_scale[n] + bias[n])",
}


def parse_epilogues(values: Iterable[str], where: str = "--epilogues") -> dict[str, ep.Epilogue]:
    """Epilogues by the name they were given, from comma-separated lists; "all" is the whole suite.

    Raises:
        InputError: for a name that gives no epilogue that a sweep can run.
    """
    names: dict[str, None] = {}
    for item in split_list(values, where):
        names.update(dict.fromkeys(FORMULAS if item == "all" else (item,)))
    return {name: load_epilogue(name, where, also=("all",)) for name in names}


def load_epilogue(name: str, where: str = "--epilogues", *, also: tuple[str, ...] = ()) -> ep.Epilogue:
    """One epilogue by the suite's name or as ``module:attribute``; the current folder is searched first.

    Args:
        name: the epilogue's.
        where: what an error begins with.
        also: names that the caller takes besides, for the error that lists them.

    Raises:
        InputError: if there is no such name, module or attribute, if importing it raises, if it is no
            epilogue, or if an operand does not say how it spreads over the output.
    """
    if name in FORMULAS:
        return ep.builders.SUITE[name]()
    if ":" not in name:
        expected = ", ".join((*FORMULAS, *also))
        meant = did_you_mean(name, (*FORMULAS, *also))
        raise InputError(f"{where}: unknown epilogue {name!r}: expected {expected}, or module:attribute{meant}")
    found = import_attribute(name, where)
    if not isinstance(found, ep.Epilogue):
        raise InputError(f"{where}: {name} is {_what(found, name)}")
    try:
        kinds, _ = found.operands, found.tree
    except ep.EpilogueError as error:
        raise InputError(f"{where}: {name} is refused: {one_line(error)}") from error
    for operand, kind in kinds.items():
        if kind is ep.Kind.AUTO:
            # Its kind is told from the operand's shape at a call, and here nobody has made it yet.
            raise InputError(
                f"{where}: operand {operand!r} of {name} has no kind: annotate it as epilogues.Row, Column,"
                " Scalar or Aux, as there is no tensor to tell it from"
            )
    return found


def _what(found: object, name: str) -> str:
    """What is there instead of an epilogue, and what to do about it."""
    if isinstance(found, types.ModuleType):
        return f"a module, not an epilogue: name an attribute of it, as in {found.__name__}:my_epilogue"
    if not callable(found):
        return f"of type {type(found).__name__}, not an epilogue"
    what = "a class" if isinstance(found, type) else "a function" if inspect.isroutine(found) else "a callable"
    annotations = getattr(found, "__annotations__", None)
    if isinstance(annotations, dict) and "Epilogue" in str(annotations.get("return")):
        return (
            f"{what} that makes an epilogue, not an epilogue: call it in a module of yours, as in"
            f" mine = {name.rpartition(':')[2]}(...), and name that"
        )
    return (
        f"{what}, not an epilogue: decorate it with @epilogues.epilogue; if it makes one, call it in the module,"
        " and name the result"
    )

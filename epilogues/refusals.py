"""What an epilogue cannot do, by the name of the torch function, and what to do instead.

    >>> @ep.epilogue
    ... def normalised(acc):
    ...     return acc / acc.sum(dim=-1, keepdim=True)
    Traceback (most recent call last):
    epilogues.errors.ReductionError: sum communicates between elements (reduction): cannot be fused ...
      at model.py:3: return acc / acc.sum(dim=-1, keepdim=True)
      why: each element of its result depends on many elements of its input ...
      instead: return the elements from the epilogue and call torch.sum on the GEMM's result

Contract
--------
* Element (i, j) of an output may depend on accumulator element (i, j) and on the operands' entries for it.
  A kernel computes each tile of the output on its own and writes it once, so anything that needs other
  elements would need a second pass: :class:`~epilogues.errors.ReductionError`, whatever the communication.
* Everything else that is not in the operation table raises
  :class:`~epilogues.errors.UnsupportedOperationError` with the nearest operations that are.
* Writing in place is refused too, whatever the spelling: values never change, they only get new names.
* Reasons and ways out are in the tables of :mod:`epilogues.refusal_reasons`.
"""

from __future__ import annotations

import difflib
import re
import sys
from typing import NoReturn

import torch

from .errors import ReductionError, UnsupportedOperationError
from .refusal_reasons import COMMUNICATING_BY_NAME as _BY_NAME
from .refusal_reasons import COMMUNICATING_BY_PATTERN as _BY_PATTERN
from .refusal_reasons import COMMUNICATION_HINTS as _COMMUNICATION_HINTS
from .refusal_reasons import EXPLAINED_BY_NAME as _EXPLAINED_BY_NAME
from .refusal_reasons import LOSS, MODULES, Communication
from .source import explain, running_text, torch_module, user_location

#: Python's special methods, under the names the tables use.
_DUNDER = re.compile(r"__(?:r(?=matmul__|pow__|floordiv__|mod__|divmod__|and__|or__|xor__|lshift__|rshift__))?(\w+?)__")
_SPOKEN = {"getitem": "indexing with []", "delitem": "del x[]"}
_SPOKEN |= {"setattr": "assigning an attribute", "delattr": "deleting an attribute"}
_OPERATORS = {"matmul": "@", "pow": "**", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "gt": ">"}
_OPERATORS |= {"lshift": "<<", "rshift": ">>"}
_OPERATORS |= {"ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^", "invert": "~"}
#: Augmented assignments, which assign in place: name -> operator.
_AUGMENTED = {"iadd": "+", "isub": "-", "imul": "*", "itruediv": "/", "ipow": "**", "ifloordiv": "//"}
_AUGMENTED |= {"imod": "%", "iand": "&", "ior": "|", "ixor": "^", "ilshift": "<<", "irshift": ">>"}
_CONVERSIONS = {
    "bool",
    "int",
    "float",
    "complex",
    "index",
    "len",
    "iter",
    "next",
    "call",
    "format",
    "contains",
    "array",
}


def _candidates(name: str) -> tuple[str, ...]:
    """The names to look a function up by: ``linalg_norm`` is ``norm``, ``dropout_`` is ``dropout``."""
    library = r"^(special_|linalg_|native_|cudnn_|miopen_|mkldnn_|quantized_|unsafe_|_+)"
    return (name, re.sub(library, "", name), name.rstrip("_"), re.sub(r"_copy$", "", name))


def communication(name: str) -> tuple[str, Communication] | None:
    """How the function of that name lets elements depend on each other, and its name in the tables.

    None if it does not let them, or is not known.
    """
    for candidate in _candidates(name):
        if candidate in _BY_NAME:
            return candidate, _BY_NAME[candidate]
    return next(((name, kind) for pattern, kind in _BY_PATTERN if pattern.match(_candidates(name)[1])), None)


def refuse(spelled: str) -> NoReturn:
    """Raises the error that using the function, method or operator of that name deserves.

    Raises:
        ReductionError: if it communicates between elements.
        UnsupportedOperationError: otherwise.
    """
    location = user_location()
    dunder = _DUNDER.fullmatch(spelled)
    name = dunder.group(1) if dunder else spelled
    if dunder:
        _refuse_assignment(name)
        name = name.replace("imatmul", "matmul")
    found = communication(name) or communication(MODULES.get(torch_module() or "", ""))
    if found is not None and found[0] not in _candidates(name):
        name, dunder = found[0], None
    shown = _shown(name, bool(dunder))
    if found is not None:
        listed, kind = found
        raise ReductionError(
            explain(
                f"{shown} communicates between elements ({kind.name}): cannot be fused into a single-pass epilogue",
                location,
                why=kind.why,
                instead=_COMMUNICATION_HINTS.get(listed, kind.instead).format(op=_shown(name, False)),
            )
        )
    for candidate in _candidates(name):
        if candidate in _EXPLAINED_BY_NAME:
            why, instead = _EXPLAINED_BY_NAME[candidate]
            if name == "float":
                instead = _torch_spelling() or instead
            raise UnsupportedOperationError(
                explain(
                    f"{shown} cannot be used in an epilogue", location, why=why, instead=instead.replace("{op}", name)
                )
            )
    if name.endswith("_"):
        plain = name.rstrip("_")
        there = plain in _supported()
        refuse_in_place(shown, f"use the result: x = x.{plain}(...)" if there else "give the new value a name: x = ...")
    close = difflib.get_close_matches(_candidates(name)[1], _supported(), n=3, cutoff=0.7)
    raise UnsupportedOperationError(
        explain(
            f"{shown} is not an operation of the epilogue language"
            + (f"; did you mean {' or '.join(close)}?" if close else ""),
            location,
            instead="compute it from the operations that there are (epilogues.functions.__all__ lists them), or call "
            "it on the GEMM's result",
        )
    )


def refuse_reduction(name: str, reduction: object) -> NoReturn:
    """Raises the error that a loss deserves which is elementwise, but for its reduction.

    Raises:
        ReductionError: always.
    """
    raise ReductionError(
        explain(
            f"{name} with reduction={reduction!r} communicates between elements ({LOSS.name}): cannot be fused into a "
            "single-pass epilogue",
            user_location(),
            why="it sums over all elements, and other tiles compute those",
            instead='write reduction="none" for the loss of each element, and reduce it outside: torch.mean or '
            "torch.sum of the GEMM's result",
        )
    )


def refuse_elementwise_loss(name: str, why: str, instead: str) -> NoReturn:
    """Raises the error that a loss deserves which is elementwise, and which the language does not compute.

    Raises:
        UnsupportedOperationError: always.
    """
    message = f'{name} cannot be used in an epilogue, with reduction="none" neither'
    raise UnsupportedOperationError(explain(message, user_location(), why=why, instead=instead))


def _supported() -> list[str]:
    """What a user may write: names that are offered when one is close to them."""
    from .functions import __all__ as ours
    from .torch_signatures import CALLS

    return [*ours, *(name for name in CALLS if name not in ours)]


def _torch_spelling() -> str:
    """What to write for the function of Python's module math that the user's code calls now."""
    called = re.findall(r"\bmath\.(\w+)\(", running_text())
    # a call's own source starts with its name; of a whole line it may be any
    called = called[:1] if sys.version_info >= (3, 11) else list(dict.fromkeys(called))
    spelled = [(name, {"fabs": "abs"}.get(name, name)) for name in called]
    known = [f"torch.{ours}(...) for math.{name}(...)" for name, ours in spelled if ours in _supported()]
    return f"write {' or '.join(known)}" if known else ""


def refuse_in_place(shown: str, instead: str) -> NoReturn:
    """Raises the error that writing in place deserves, however it was asked for.

    Raises:
        UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(
        explain(
            f"{shown} writes in place, and the values of an epilogue never change",
            user_location(),
            why="a value is no memory: on tensors every other name for it would change too, here none could",
            instead=instead,
        )
    )


def _refuse_assignment(name: str) -> None:
    """Refuses the special methods that assign to a value: x += y and the like, x[...] = y."""
    if name == "setitem":
        refuse_in_place("assigning with [] = (setitem)", "compute all elements alike, or assign in the GEMM's result")
    operator = _AUGMENTED.get(name)
    if operator is None:
        return
    instead = _EXPLAINED_BY_NAME[name[1:]][1] if operator in ("<<", ">>") else f"write x = x {operator} y"
    refuse_in_place(f"{operator}=", instead)


def _shown(name: str, dunder: bool) -> str:
    """The operation as the user wrote it: ``sum``, ``matmul (@)``, ``float()``, ``indexing with []``."""
    library = re.match(r"(special|linalg|fft)_(\w+)", name)
    if library and hasattr(getattr(torch, library[1]), library[2]):
        return f"torch.{library[1]}.{library[2]}"
    if name in _SPOKEN:
        return f"{_SPOKEN[name]} ({name})"
    if dunder and name in _OPERATORS:
        return f"{name} ({_OPERATORS[name]})"
    if dunder and name in _CONVERSIONS:
        return f"{name}()" if name != "bool" else "a branch on a value (bool())"
    return name

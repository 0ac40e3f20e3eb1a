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
* The tables are below.  To explain a further function, add its name to a line.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import NoReturn

from .errors import ReductionError, UnsupportedOperationError
from .source import explain, torch_module, user_location
from .tree import SourceLocation


@dataclass(frozen=True)
class Communication:
    """A way in which elements would depend on each other: its name, the reason, and the way out."""

    name: str
    why: str
    instead: str


_REDUCTION = Communication(
    "reduction",
    "each element of its result depends on many elements of its input, and other tiles compute those",
    "return the elements from the epilogue and call {op} on the GEMM's result; if the reduced values are "
    "known before the GEMM, give them as a Row, Column or Scalar operand",
)
_NORMALISATION = Communication(
    "normalisation",
    "each element is scaled by statistics over many elements, which are complete only after all tiles are",
    "return the unnormalised values and call {op} on the GEMM's result",
)
_SCAN = Communication(
    "scan",
    "each element depends on all the elements before it",
    "call {op} on the GEMM's result",
)
_ORDERING = Communication(
    "ordering",
    "where an element goes depends on all the others",
    "call {op} on the GEMM's result",
)
_CONTRACTION = Communication(
    "contraction",
    "it sums products over many elements, which is another GEMM, convolution or attention",
    "run it as an operation of its own, with an epilogue of its own: epilogue after the first GEMM, then {op}",
)
_INDEXING = Communication(
    "indexing",
    "it reads or writes elements at other positions than the one being computed",
    "index before or after the GEMM; an operand indexed beforehand can be given as Row, Column or Aux",
)
_SHIFT = Communication(
    "shift",
    "it moves elements to other positions",
    "call {op} on the GEMM's result, or on the operand before giving it",
)
_SHAPE = Communication(
    "change of shape",
    "it moves elements to other positions or changes the shape, which the GEMM fixes",
    "call {op} on the GEMM's result, or on the operand before giving it; operands are spread over the "
    "accumulator by their kind (Row, Column, Scalar, Aux), without unsqueeze or expand",
)
_LOSS = Communication(
    "loss",
    "it reduces over many elements",
    "return the predictions from the epilogue and call {op} on the GEMM's result",
)

_COMMUNICATING: dict[Communication, str] = {
    _REDUCTION: "sum nansum mean nanmean amax amin aminmax max min argmax argmin prod std var std_mean "
    "var_mean norm vector_norm matrix_norm frobenius_norm nuclear_norm dist cdist pdist logsumexp all any "
    "median nanmedian mode quantile nanquantile count_nonzero histc histogram bincount trace "
    "cosine_similarity pairwise_distance equal allclose corrcoef cov nonzero",
    _NORMALISATION: "softmax log_softmax softmin gumbel_softmax layer_norm native_layer_norm rms_norm "
    "group_norm batch_norm instance_norm local_response_norm normalize renorm",
    _SCAN: "cumsum cumprod cummax cummin logcumsumexp diff gradient cumulative_trapezoid trapezoid",
    _ORDERING: "sort argsort msort topk kthvalue unique unique_consecutive searchsorted bucketize",
    _CONTRACTION: "matmul mm bmm addmm addbmm baddbmm linear bilinear einsum dot vdot inner outer ger "
    "tensordot mv addmv addr kron multi_dot chain_matmul scaled_dot_product_attention "
    "multi_head_attention_forward attention flex_attention",
    _INDEXING: "getitem delitem gather scatter scatter_add scatter_reduce index_select index_add "
    "index_copy index_fill index_put take take_along_dim embedding embedding_bag masked_select "
    "masked_scatter select narrow select_scatter slice_scatter one_hot grid_sample",
    _SHIFT: "roll flip fliplr flipud rot90 channel_shuffle",
    _SHAPE: "reshape view view_as reshape_as permute transpose t T mT H mH adjoint movedim moveaxis "
    "swapaxes swapdims flatten unflatten ravel unsqueeze squeeze expand expand_as broadcast_to "
    "broadcast_tensors repeat repeat_interleave tile cat concat concatenate stack hstack vstack dstack "
    "column_stack chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind unfold fold "
    "pixel_shuffle pixel_unshuffle pad interpolate upsample tril triu diag diagonal diag_embed as_strided "
    "meshgrid glu block_diag resize",
    _LOSS: "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div ctc_loss triplet_margin_loss",
}
_BY_NAME = {name: kind for kind, names in _COMMUNICATING.items() for name in names.split()}
_BY_PATTERN: tuple[tuple[re.Pattern[str], Communication], ...] = (
    (re.compile(r"conv(_|\d|$|olution|_transpose)|linalg_|fft_|stft$|istft$"), _CONTRACTION),
    (re.compile(r"(adaptive_|fractional_|lp_|max_|avg_)\w*(pool|unpool)\d?d?"), _REDUCTION),
    (re.compile(r"\w+_loss$"), _LOSS),
)
#: torch.nn.modules file -> what its modules compute, for those that ask for the shape before they call it.
_MODULES = {
    "batchnorm": "batch_norm",
    "instancenorm": "instance_norm",
    "pooling": "max_pool2d",
    "rnn": "linear",
}
#: Ways out that are better than the general one.
_COMMUNICATION_HINTS = {
    "softmax": "return the logits and call torch.softmax on the GEMM's result",
    "glu": "split the weight instead: one GEMM gives the gate, and the other's epilogue multiplies by it as "
    "an Aux operand, as in epilogues.builders.gate",
    "max": "for the larger of two values write ep.maximum(x, y); the maximum over a dimension is taken of "
    "the GEMM's result",
    "min": "for the smaller of two values write ep.minimum(x, y); the minimum over a dimension is taken of "
    "the GEMM's result",
    "getitem": "index the GEMM's result, or the operand before giving it; an operand is spread over the "
    "accumulator by its kind (Row, Column, Scalar, Aux), without [None] or [:, None]",
    "sum": "return the elements from the epilogue and call torch.sum on the GEMM's result; to divide by a "
    "row sum that is known before the GEMM, give it as a Column operand",
}

_CONTROL = "a value is symbolic while the epilogue is traced: it stands for every element at once"
_NO_TENSOR = "an epilogue is traced once, for any M and N: while it is, there is no tensor"
_RANDOM = "an epilogue is a function of the accumulator and its operands; random numbers are neither"
_BITS = "there are only floating point values and conditions in an epilogue, and on values it has no meaning"
_USE_CONDITIONS = "combine conditions, such as (x > 0) & (x < 1); to scale by a power of two, multiply"
_NO_BRANCH = (
    "write the choice elementwise: torch.where(condition, a, b), torch.maximum(x, y), &, | and ~ for and, or and "
    "not, (x > 0) & (x < 1) for 0 < x < 1; or decide outside of the epilogue"
)
_NO_SHAPE = "leave shapes to the operand kinds: Row, Column, Scalar, Aux"

#: names -> (why not, what instead), for what is elementwise or no operation on elements at all.
_EXPLAINED: dict[str, tuple[str, str]] = {
    "isclose": ("its tolerances make it more than one comparison", "write (x - y).abs() <= atol"),
    "bool": (f"{_CONTROL}, so there is no one truth value to branch on", _NO_BRANCH),
    "int float complex index item tolist numpy array": (
        f"{_CONTROL}, so it is no Python number (math.* functions ask for one), and no value has an integer dtype",
        "use ep.* or torch.* functions in place of math.* or numpy functions; to round, torch.trunc(x)",
    ),
    "format": (f"{_CONTROL}, so it is no number to format", "print it without a format: {value}"),
    "call": (f"{_CONTROL}, and no function", "to multiply, write x * (...)"),
    "setattr delattr": (f"{_CONTROL}, and has no attributes to change", "keep what you compute in variables"),
    "len iter next contains": (f"{_CONTROL}, so it cannot be iterated or unpacked", _NO_SHAPE),
    "shape size ndim dim numel nelement stride is_contiguous storage_offset element_size": (
        f"{_NO_TENSOR}, and no shape to ask for",
        _NO_SHAPE,
    ),
    "device is_cuda layout requires_grad grad data cpu cuda data_ptr requires_grad_ get_device is_meta": (
        _NO_TENSOR,
        "place operands on the GEMM's device before the call",
    ),
    "detach": (
        "an epilogue is differentiated as what it computes, so that nothing can be held back from the gradient",
        "leave it out if the gradient may go through, else compute that part outside and pass it as an operand",
    ),
    "clone contiguous": ("values have no storage of their own", "leave it out"),
    "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rand rand_like randn "
    "randn_like randint randint_like bernoulli normal uniform multinomial poisson rrelu exponential "
    "native_dropout": (
        _RANDOM,
        "draw the numbers beforehand and give them as an Aux operand (for dropout, the mask times 1/(1 - p)); "
        "in evaluation dropout is the identity: module.eval(), training=False",
    ),
    "double long int8 half_to_float bfloat": (
        "values are computed in float32 and cast to float32, float16 or bfloat16 only",
        "leave the cast out, or write x.to(torch.float32)",
    ),
    "and or xor invert lshift rshift bitwise_left_shift bitwise_right_shift": (_BITS, _USE_CONDITIONS),
    "prelu": (
        "its slope is a tensor that is no operand",
        "make it one: add a parameter slope: Row (Scalar if it is a single number), and write torch.prelu(x, slope)",
    ),
    "divmod": ("it gives two values", "write x // y and x % y"),
    "floor ceil trunc": (f"{_CONTROL}, so it is no Python integer", "write torch.{op}(x)"),
    "type_as zeros_like ones_like full_like empty_like new_zeros new_ones new_full": (
        _NO_TENSOR,
        "write a Python number: it is spread over all elements; for a cast, x.to(torch.bfloat16)",
    ),
}
_EXPLAINED_BY_NAME = {name: reason for names, reason in _EXPLAINED.items() for name in names.split()}

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
    return (name, re.sub(r"^(special_|linalg_|native_|_+)", "", name), name.rstrip("_"))


def communication(name: str) -> tuple[str, Communication] | None:
    """How the function of that name lets elements depend on each other, and its name in the tables.

    None if it does not let them, or is not known.
    """
    for candidate in _candidates(name):
        if candidate in _BY_NAME:
            return candidate, _BY_NAME[candidate]
    return next(((name, kind) for pattern, kind in _BY_PATTERN if pattern.match(name)), None)


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
    found = communication(name) or communication(_MODULES.get(torch_module() or "", ""))
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
                instead=_COMMUNICATION_HINTS.get(listed, kind.instead).format(op=name),
            )
        )
    for candidate in _candidates(name):
        if candidate in _EXPLAINED_BY_NAME:
            why, instead = _EXPLAINED_BY_NAME[candidate]
            if name == "float":
                instead = _torch_spelling(location) or instead
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


def _supported() -> list[str]:
    """What a user may write: names that are offered when one is close to them."""
    from .functions import __all__ as ours
    from .torch_signatures import CALLS

    return [*ours, *(name for name in CALLS if name not in ours)]


def _torch_spelling(location: SourceLocation | None) -> str:
    """What to write for the function of Python's module math that the user's line calls."""
    called = re.search(r"\bmath\.(\w+)\(", location.text) if location else None
    name = called[1] if called else ""
    name = {"fabs": "abs"}.get(name, name)
    return f"write torch.{name}(...) for math.{called[1]}(...)" if called and name in _supported() else ""


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
    if name in _SPOKEN:
        return f"{_SPOKEN[name]} ({name})"
    if dunder and name in _OPERATORS:
        return f"{name} ({_OPERATORS[name]})"
    if dunder and name in _CONVERSIONS:
        return f"{name}()" if name != "bool" else "a branch on a value (bool())"
    return name

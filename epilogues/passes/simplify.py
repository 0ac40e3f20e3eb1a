"""A tree with less to compute and the same results, bit for bit.

    >>> @epilogue
    ... def wordy(acc, bias: Row):
    ...     z = -(-(acc * 1.0)) + bias
    ...     return torch.where(~(z > 0), z / 4, z.to(torch.float32))
    >>> print(simplify(wordy.tree))
    %0 = accumulator            : f32
    %1 = operand bias (row, 0)  : any
    %2 = add(%0, %1)            : f32
    %3 = constant 0.0           : f32
    %4 = gt(%2, %3)             : bool
    %5 = constant 0.25          : f32
    %6 = mul(%2, %5)            : f32
    %7 = where(%4, %2, %6)      : f32
    store D = %7                : default

Contract
--------
* No output changes by a bit in :func:`epilogues.reference.evaluate` with its defaults (float32, casts kept), for any
  accumulator and operands, infinities, NaN, -0.0 and denormals among them.  Two things are no bits that count: the
  payload and the sign of a NaN, which IEEE leaves to the machine (where a tree has ``copysign``, which can tell, the
  rules that may change that sign are left out); and the last bit that PyTorch's own CPU kernels of functions such as
  ``exp`` or ``sigmoid`` round otherwise where an element lies at the end of a row or in a strided tensor.
* The same is meant in float32: constants are folded in it.  Measure errors in float64 against the tree as it was.
* Operands stay, all of them, and so do the outputs, with their names and dtypes.  Every output reads what it read.
* Never more operations and casts than before.  Simplifying again changes nothing.
* A node that takes another's place has its source location; equal nodes become the first of them.
* Of a tree whose rounding is not "once", or whose compute dtype is not float32, only equal nodes are shared: an
  operation left out is a rounding left out.  Marks of intermediate steps, which only eager rounding reads, are dropped
  of other trees.

What is not done, as it would change results: reassociation and distribution (they round elsewhere), ``x * 0`` and
``x - x`` (NaN and infinity), ``x + 0.0`` (-0.0 becomes 0.0), ``0.0 - x`` (not -x for 0.0), ``not (x > y)`` as ``x <=
y`` (NaN), multiplying by the reciprocal of other numbers than powers of two, ``pow(x, 2)`` as ``x * x`` (PyTorch's
differs in the last bit), ``maximum`` with swapped inputs (of 0.0 and -0.0 either may come back), and ``exp`` and the
like of constants (:mod:`epilogues.passes.constant_folding`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..dtypes import torch_dtype
from ..tree import Apply, Cast, Constant, EpilogueTree, Node, Operand
from ..validation import validate
from .constant_folding import choose_by_known_condition, fold_conditions, fold_constants, logic_with_constant
from .patterns import below, beside, is_apply, is_constant, number_of
from .rewriting import Rule, rewrite

#: Operations that give the same bits with their first two inputs swapped.  Not minimum and maximum: of 0.0 and -0.0
#: PyTorch gives the first or the second.
COMMUTATIVE = frozenset(("add", "mul", "fma", "eq", "ne", "logical_and", "logical_or", "logical_xor"))

#: Operations whose result has the bits of one of these inputs, but for its sign, or is 0 or 1, or a whole number not
#: beyond that input: what a dtype holds they leave in it.
_KEEPS_DTYPE = {
    **dict.fromkeys(("identity", "neg", "abs", "relu", "hardshrink", "copysign"), (0,)),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), (0,)),
    **dict.fromkeys(("minimum", "maximum", "fmin", "fmax"), (0, 1)),
    "threshold": (0, 2),
    "where": (1, 2),
    "clamp": (0, 1, 2),
    "sign": (),
}
#: How many operations deep a rule looks for the cast that a value comes from.
_DEPTH = 4

_ROUNDING = ("floor", "ceil", "trunc", "round")
_LEAST_NORMAL = torch.finfo(torch.float32).tiny


def simplify(tree: EpilogueTree) -> EpilogueTree:
    """The tree after all rules; see the module's contract.

    Returns:
        The tree itself where nothing is to do.

    Raises:
        EpilogueError: if the tree breaks a rule of :mod:`epilogues.validation`.
    """
    validate(tree)
    if tree.rounding != "once" or tree.compute_dtype != "f32":
        return rewrite(tree, ())
    tree = tree.without_intermediates()
    sees_sign = _sees_the_sign_of_nan(tree)
    rules = [rule for rule in RULES if not (sees_sign and rule in MAY_CHANGE_THE_SIGN_OF_NAN)]
    simple = rewrite(tree, rules, commutative=() if sees_sign else COMMUTATIVE)
    # what could tell signs of NaN may be gone now
    return simplify(simple) if sees_sign and not _sees_the_sign_of_nan(simple) else simple


def _sees_the_sign_of_nan(tree: EpilogueTree) -> bool:
    return any(is_apply(node, "copysign") for node in tree.nodes)


# selection and logic


def choose_between_equals(node: Node) -> Node | None:
    """``where(c, a, a)``, ``maximum(a, a)``, ``c and c`` -> ``a``: either way the same bits, NaN too."""
    if is_apply(node, "where"):
        return node.inputs[1] if node.inputs[1] is node.inputs[2] else None
    if is_apply(node, "minimum", "maximum", "fmin", "fmax", "logical_and", "logical_or"):
        return node.inputs[0] if node.inputs[0] is node.inputs[1] else None
    return None


def choose_by_negation(node: Node) -> Node | None:
    """``where(not c, a, b)`` -> ``where(c, b, a)``: the same choice."""
    if is_apply(node, "where") and is_apply(node.inputs[0], "logical_not"):
        _, yes, no = node.inputs
        return Apply("where", (node.inputs[0].inputs[0], no, yes))
    return None


def negated_equality(node: Node) -> Node | None:
    """``not (a == b)`` -> ``a != b``, and the reverse: exact, of NaN too, which ``>`` and ``<=`` are not."""
    if is_apply(node, "logical_not") and is_apply(node.inputs[0], "eq", "ne"):
        return Apply("ne" if is_apply(node.inputs[0], "eq") else "eq", node.inputs[0].inputs)
    return None


# signs


def double_negation(node: Node) -> Node | None:
    """``-(-x)`` and ``not not c`` -> ``x``, ``c``: flipping the sign's bit twice leaves it."""
    return below(node, "neg", "neg") or below(node, "logical_not", "logical_not")


def sign_of_no_effect(node: Node) -> Node | None:
    """``abs(-x)`` -> ``abs(x)``; ``square(-x)``, ``square(abs(x))`` -> ``square(x)``: the sign's bit does not count."""
    inner = below(node, "abs", "neg") or below(node, "square", "neg") or below(node, "square", "abs")
    return replace(node, operands=(inner,)) if isinstance(node, Apply) and inner is not None else None


def minus_one(node: Node) -> Node | None:
    """``x * -1`` and ``x / -1`` -> ``-x``: exact, zeros and infinities too.  The sign of NaN differs."""
    if is_apply(node, "mul", "div"):
        other = beside(node, -1.0, ordered=is_apply(node, "div"))
        return None if other is None else Apply("neg", (other,))
    return None


def sum_with_negation(node: Node) -> Node | None:
    """``x + (-y)`` -> ``x - y``, ``x - (-y)`` -> ``x + y``: what subtraction is.  The sign of NaN differs."""
    if not is_apply(node, "add", "sub"):
        return None
    x, y = node.inputs
    if is_apply(y, "neg"):
        return Apply("sub" if is_apply(node, "add") else "add", (x, y.inputs[0]))
    if is_apply(node, "add") and is_apply(x, "neg"):
        return Apply("sub", (y, x.inputs[0]))
    return None


# neutral elements


def identity(node: Node) -> Node | None:
    """``identity(x)`` -> ``x``."""
    return node.inputs[0] if is_apply(node, "identity") else None


def times_one(node: Node) -> Node | None:
    """``x * 1``, ``1 * x``, ``x / 1`` -> ``x``: the result is representable, so that nothing is rounded."""
    return beside(node, 1.0, ordered=is_apply(node, "div")) if is_apply(node, "mul", "div") else None


def plus_negative_zero(node: Node) -> Node | None:
    """``x + (-0.0)``, ``x - 0.0`` -> ``x``: exact, and -0.0 + -0.0 is -0.0; ``x + 0.0`` makes 0.0 of -0.0."""
    if is_apply(node, "add"):
        return beside(node, -0.0)
    return beside(node, 0.0, ordered=True) if is_apply(node, "sub") else None


def plus_zero(node: Node) -> Node | None:
    """``x + 0.0``, ``x - (-0.0)`` -> ``x``, where x is a value that is never -0.0, such as ``abs(y)`` or ``y + 1``.

    A sum is -0.0 only if both its terms are, where it is rounded to nearest; squares and sizes have no sign.  Not
    after ``relu``, ``sqrt`` or ``floor``: those of -0.0 are -0.0.
    """
    if not is_apply(node, "add", "sub"):
        return None
    x = beside(node, 0.0) if is_apply(node, "add") else beside(node, -0.0, ordered=True)
    return x if x is not None and _is_never_negative_zero(x) else None


def fma_of_neutral(node: Node) -> Node | None:
    """``fma(a, 1, c)`` -> ``a + c``; ``fma(a, b, -0.0)`` -> ``a * b``: rounded once, both.  The sign of NaN differs."""
    if not is_apply(node, "fma"):
        return None
    a, b, c = node.inputs
    if is_constant(c, -0.0):
        return Apply("mul", (a, b))
    for factor, one in ((a, b), (b, a)):
        if is_constant(one, 1.0):
            return Apply("add", (factor, c))
    return None


def unbounded(node: Node) -> Node | None:
    """``maximum(x, -inf)``, ``minimum(x, inf)``, ``clamp(x, -inf, inf)`` -> ``x``: NaN stays NaN in these.

    Not ``fmax`` and ``fmin``, which give the bound for NaN.
    """
    if is_apply(node, "maximum", "minimum"):
        return beside(node, -math.inf if is_apply(node, "maximum") else math.inf)
    if is_apply(node, "clamp") and is_constant(node.inputs[1], -math.inf) and is_constant(node.inputs[2], math.inf):
        return node.inputs[0]
    return None


def division_by_power_of_two(node: Node) -> Node | None:
    """``x / 2**k`` -> ``x * 2**-k``: the same real number, rounded once, denormals too; where ``2**-k`` is normal."""
    divisor = number_of(node.inputs[1]) if is_apply(node, "div") else None
    if divisor is None or not math.isfinite(divisor) or abs(math.frexp(divisor)[0]) != 0.5:
        return None
    factor = 1.0 / divisor
    if not _LEAST_NORMAL <= abs(factor) <= torch.finfo(torch.float32).max:
        return None
    return Apply("mul", (node.inputs[0], Constant(factor)))


# what is done twice


def done_twice(node: Node) -> Node | None:
    """``f(f(x))`` -> ``f(x)`` for abs, relu and sign: what they give they leave alone, -0.0 and NaN too."""
    return node.inputs[0] if any(below(node, name, name) is not None for name in ("abs", "relu", "sign")) else None


def whole_number_rounded(node: Node) -> Node | None:
    """``floor(round(x))`` and the like -> ``round(x)``: whole numbers, infinities, -0.0 and NaN stay what they are."""
    return node.inputs[0] if is_apply(node, *_ROUNDING) and is_apply(node.inputs[0], *_ROUNDING) else None


def bounded_twice(node: Node) -> Node | None:
    """``maximum(maximum(x, c), c)`` -> ``maximum(x, c)``, and so minimum, fmin, fmax and clamp, for constants.

    Not for a bound of 0.0 in the first four: of 0.0 and -0.0, PyTorch gives the one or the other by where the
    element lies.
    """
    if is_apply(node, "clamp") and is_apply(node.inputs[0], "clamp"):
        bounds = zip(node.inputs[1:], node.inputs[0].inputs[1:], strict=True)
        same = all(a is b and isinstance(a, Constant) for a, b in bounds)
        return node.inputs[0] if same else None
    if isinstance(node, Apply) and is_apply(node, "minimum", "maximum", "fmin", "fmax"):
        for inner, bound in (node.inputs, node.inputs[::-1]):
            if number_of(bound) not in (None, 0.0) and is_apply(inner, node.operation) and bound in inner.inputs:
                return inner
    return None


# casts


def cast_to_float32(node: Node) -> Node | None:
    """``cast(x, f32)`` -> ``x``: values are float32 anyway.  Outputs stay casts, see :mod:`.rewriting`."""
    return node.value if isinstance(node, Cast) and node.dtype == "f32" else None


def cast_of_what_fits(node: Node) -> Node | None:
    """``cast(x, d)`` -> ``x``, where x is held by d already: rounding changes nothing.  The sign of NaN differs.

    That is an operand of that dtype, a cast to it, and what ``relu``, ``neg``, ``where``, ``clamp`` and the like make
    of values that d holds, whole numbers too: below a whole number that a dtype holds it holds all that rounding gives.
    """
    return node.value if isinstance(node, Cast) and _fits(node.value, node.dtype, _DEPTH) else None


#: In the order in which they are tried.
RULES: tuple[Rule, ...] = (
    fold_constants,
    fold_conditions,
    choose_by_known_condition,
    logic_with_constant,
    choose_between_equals,
    choose_by_negation,
    negated_equality,
    double_negation,
    sign_of_no_effect,
    minus_one,
    sum_with_negation,
    identity,
    times_one,
    plus_negative_zero,
    plus_zero,
    fma_of_neutral,
    unbounded,
    division_by_power_of_two,
    done_twice,
    whole_number_rounded,
    bounded_twice,
    cast_to_float32,
    cast_of_what_fits,
)

#: Rules that are left out where a tree has an operation that can tell.  Commutative sharing is, too.  On a CPU the sum
#: and the product of two NaN have the first one's sign; maximum, minimum and casts give NaN a sign of their own.
MAY_CHANGE_THE_SIGN_OF_NAN: frozenset[Rule] = frozenset(
    {
        choose_between_equals,
        sign_of_no_effect,
        minus_one,
        sum_with_negation,
        fma_of_neutral,
        unbounded,
        bounded_twice,
        cast_of_what_fits,
    }
)


def _is_never_negative_zero(node: Node) -> bool:
    if is_apply(node, "abs", "square"):
        return True
    if is_apply(node, "add"):
        return any(isinstance(term, Constant) and not is_constant(term, -0.0) for term in node.inputs)
    return is_apply(node, "sub") and isinstance(node.inputs[1], Constant) and not is_constant(node.inputs[1], 0.0)


def _fits(node: Node, dtype: str, depth: int) -> bool:
    """Whether a value is known to be one that the dtype holds."""
    if isinstance(node, Cast | Operand):
        return node.dtype == dtype
    number = number_of(node)
    if number is not None:
        return math.isnan(number) or number == float(torch.tensor(number).to(torch_dtype(dtype)))
    if not isinstance(node, Apply) or depth == 0:
        return False
    positions = _KEEPS_DTYPE.get(node.operation)
    return positions is not None and all(_fits(node.operands[i], dtype, depth - 1) for i in positions)

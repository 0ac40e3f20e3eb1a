"""Random trees, valid and not, and tensors for them: strategies for hypothesis.

>>> @given(trees(), st.integers(0, 2**32))
... def test(tree, seed):
...     acc, operands = inputs_for(tree, seed)
...     evaluate(tree, acc, operands)

Trees have operations of the whole table or of a part of it, operands of all kinds and dtypes, casts, several outputs,
shared nodes, equal nodes that are not shared, and constants at the edges of float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from epilogues.dtypes import DTYPES, torch_dtype
from epilogues.operations import OPERATIONS
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store


def some(examples: int) -> settings:
    """So many examples, the same ones every time; or MORE_EXAMPLES times as many, others each time."""
    more = int(os.environ.get("MORE_EXAMPLES", "0"))
    return settings(
        max_examples=examples * max(more, 1),
        derandomize=not more,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# what hypothesis shows of a failing tree: its lines, not nodes within nodes
EpilogueTree._repr_pretty_ = lambda self, printer, cycle: printer.text(f"\n{self}\n")  # type: ignore[attr-defined]

#: Values at which arithmetic differs from what one expects.
EDGES = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -4.0, math.inf, -math.inf, math.nan, 3.4028234663852886e38, 65504.0, 1e-40]
EDGES += [1.401298464324817e-45, -1.401298464324817e-45, 1.1754943508222875e-38, 1e300, 0.1, -3.0, 20.0, 1 + 2**-9]

#: Operations that rules of simplification look at.
SIMPLIFIED = [
    name
    for line in (
        "identity neg abs relu sign add sub mul div fma square sqrt reciprocal minimum maximum fmin fmax clamp where",
        "floor ceil trunc round threshold hardshrink gt le eq ne isnan logical_and logical_or logical_xor logical_not",
    )
    for name in line.split()
]


def _do(name: str, *inputs: Node | float) -> Node:
    return Apply(name, tuple(node if isinstance(node, Node) else Constant(node) for node in inputs))


#: What could be said with less, and what looks as if it could: of a value, a condition and another value.
WORDY: dict[str, Callable[[Node, Node, Node], Node]] = {
    "times one": lambda x, c, t: _do("mul", 1.0, x),
    "over one": lambda x, c, t: _do("div", x, 1.0),
    "one over": lambda x, c, t: _do("div", 1.0, x),
    "times minus one": lambda x, c, t: _do("mul", x, -1.0),
    "over minus one": lambda x, c, t: _do("div", x, -1.0),
    "times zero": lambda x, c, t: _do("mul", x, 0.0),
    "plus zero": lambda x, c, t: _do("add", x, 0.0),
    "plus minus zero": lambda x, c, t: _do("add", x, -0.0),
    "minus zero": lambda x, c, t: _do("sub", x, 0.0),
    "zero minus": lambda x, c, t: _do("sub", 0.0, x),
    "minus itself": lambda x, c, t: _do("sub", x, x),
    "size plus zero": lambda x, c, t: _do("add", _do("abs", x), 0.0),
    "relu plus zero": lambda x, c, t: _do("add", _do("relu", x), 0.0),
    "shifted plus zero": lambda x, c, t: _do("sub", _do("add", x, 1.0), -0.0),
    "there and back": lambda x, c, t: _do("sub", _do("add", x, t), t),
    "twice and half": lambda x, c, t: _do("mul", _do("mul", x, 2.0), 0.5),
    "over four": lambda x, c, t: _do("div", x, 4.0),
    "over a little": lambda x, c, t: _do("div", x, -(2.0**-126)),
    "over a lot": lambda x, c, t: _do("div", x, 2.0**127),
    "over three": lambda x, c, t: _do("div", x, 3.0),
    "double negation": lambda x, c, t: _do("neg", _do("neg", x)),
    "negated difference": lambda x, c, t: _do("neg", _do("sub", x, t)),
    "plus negation": lambda x, c, t: _do("add", _do("neg", x), t),
    "minus negation": lambda x, c, t: _do("sub", x, _do("neg", t)),
    "size of size": lambda x, c, t: _do("abs", _do("abs", _do("neg", x))),
    "relu of relu": lambda x, c, t: _do("relu", _do("relu", x)),
    "sign of sign": lambda x, c, t: _do("sign", _do("sign", x)),
    "floor of round": lambda x, c, t: _do("floor", _do("round", x)),
    "square of negation": lambda x, c, t: _do("square", _do("neg", x)),
    "square of size": lambda x, c, t: _do("square", _do("abs", x)),
    "root of square": lambda x, c, t: _do("sqrt", _do("square", x)),
    "reciprocal twice": lambda x, c, t: _do("reciprocal", _do("reciprocal", x)),
    "power of one": lambda x, c, t: _do("pow", x, 1.0),
    "power of two": lambda x, c, t: _do("pow", x, 2.0),
    "fma by one": lambda x, c, t: _do("fma", 1.0, x, t),
    "fma without sum": lambda x, c, t: _do("fma", x, t, -0.0),
    "fma with zero": lambda x, c, t: _do("fma", x, t, 0.0),
    "fma by zero": lambda x, c, t: _do("fma", x, 0.0, t),
    "same maximum": lambda x, c, t: _do("maximum", x, x),
    "maximum twice": lambda x, c, t: _do("maximum", 0.5, _do("maximum", x, 0.5)),
    "minimum with zero twice": lambda x, c, t: _do("minimum", 0.0, _do("minimum", x, 0.0)),
    "swapped maximum": lambda x, c, t: _do("sub", _do("maximum", x, t), _do("maximum", t, x)),
    "swapped sum": lambda x, c, t: _do("div", _do("add", x, t), _do("add", t, x)),
    "swapped product": lambda x, c, t: _do("fmax", _do("mul", x, t), _do("mul", t, x)),
    "no minimum": lambda x, c, t: _do("minimum", x, float("inf")),
    "no fmax": lambda x, c, t: _do("fmax", x, float("-inf")),
    "no clamp": lambda x, c, t: _do("clamp", x, float("-inf"), float("inf")),
    "clamp twice": lambda x, c, t: _do("clamp", _do("clamp", x, -0.0, 6.0), -0.0, 6.0),
    "clamp crossing": lambda x, c, t: _do("clamp", _do("clamp", x, 2.0, 0.0), 2.0, 0.0),
    "same arms": lambda x, c, t: _do("where", c, x, x),
    "where not": lambda x, c, t: _do("where", _do("logical_not", c), x, t),
    "where not greater": lambda x, c, t: _do("where", _do("logical_not", _do("gt", x, t)), x, t),
    "where not equal": lambda x, c, t: _do("where", _do("logical_not", _do("eq", x, t)), x, t),
    "where true": lambda x, c, t: _do("where", _do("lt", 1.0, 2.0), x, t),
    "where false": lambda x, c, t: _do("where", _do("isnan", 1.0), t, x),
    "not not": lambda x, c, t: _do("where", _do("logical_not", _do("logical_not", c)), x, t),
    "and true": lambda x, c, t: _do("where", _do("logical_and", c, _do("ne", 1.0, 0.0)), x, t),
    "and false": lambda x, c, t: _do("where", _do("logical_and", c, _do("ne", 0.0, 0.0)), x, t),
    "xor true": lambda x, c, t: _do("where", _do("logical_xor", _do("ne", 1.0, 0.0), c), x, t),
    "or itself": lambda x, c, t: _do("where", _do("logical_or", c, c), x, t),
    "equal to itself": lambda x, c, t: _do("where", _do("eq", x, x), x, t),
    "constants": lambda x, c, t: _do("mul", x, _do("fma", _do("sqrt", 2.0), 0.1, _do("neg", 3.0))),
    "functions of constants": lambda x, c, t: _do("mul", x, _do("exp", 0.1)),
    "bounds of constants": lambda x, c, t: _do("div", x, _do("maximum", 0.0, -0.0)),
    "cast of constant": lambda x, c, t: _do("add", x, Cast(Constant(0.1), "bf16")),
    "cast twice": lambda x, c, t: Cast(Cast(x, "bf16"), "bf16"),
    "cast to another": lambda x, c, t: Cast(Cast(x, "bf16"), "f16"),
    "cast wider": lambda x, c, t: Cast(Cast(x, "f16"), "f32"),
    "cast of chosen": lambda x, c, t: Cast(_do("where", c, _do("relu", Cast(x, "f16")), _do("sign", t)), "f16"),
    "cast of bounded": lambda x, c, t: Cast(_do("clamp", _do("ceil", Cast(x, "bf16")), -1.5, 0.5), "bf16"),
    "cast of bounded by others": lambda x, c, t: Cast(_do("clamp", Cast(x, "bf16"), -0.1, 0.1), "bf16"),
    "cast of sum": lambda x, c, t: Cast(_do("add", Cast(x, "bf16"), Cast(t, "bf16")), "bf16"),
}

_NAMES = ("bias", "scale", "residual", "t", "größe")
_CONSTANTS = st.one_of(st.sampled_from(EDGES), st.floats(), st.floats(width=16))


@st.composite
def trees(
    draw: Callable[..., Any],
    operations: Sequence[str] = tuple(OPERATIONS),
    max_steps: int = 24,
    rounding: str = "once",
    wordy: bool = False,
) -> EpilogueTree:
    """Valid trees; most operations take what was made last, so that rules find something to do."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(Kind), st.sampled_from([None, *DTYPES])), max_size=4))
    constants: list[Node] = [Constant(value) for value in draw(st.lists(_CONSTANTS, min_size=1, max_size=4))]
    values = [*constants, *(Operand(_NAMES[i], kind, i, dtype) for i, (kind, dtype) in enumerate(kinds))]
    values.append(Accumulator())
    conditions: list[Node] = [Apply("gt", (values[-1], constants[0]))]
    pick = st.integers(0, 60)
    step = st.tuples(
        st.sampled_from([*operations, *DTYPES, *(WORDY if wordy else ())]), pick, pick, pick, st.booleans()
    )
    for name, *picks, mark in draw(st.lists(step, min_size=max_steps // 3, max_size=max_steps)):
        if name in DTYPES:
            values.append(Cast(_picked(values, picks[0]), name))
            continue
        if name in WORDY:
            values.append(
                WORDY[name](_picked(values, picks[0]), _picked(conditions, picks[1]), _picked(values, picks[2]))
            )
            continue
        row = OPERATIONS[name]
        inputs = [
            _picked(conditions if i in row.conditions else constants if picks[i] % 3 > 1 else values, picks[i])
            for i in range(row.arity)
        ]
        made = Apply(name, tuple(inputs), mark and picks[0] % 8 == 0)
        (conditions if row.result == "condition" else values).append(made)
    reading = [node for node in values if any(isinstance(below, Accumulator) for below in _below(node))]
    stored = draw(st.lists(st.tuples(pick, st.sampled_from([None, None, *DTYPES])), min_size=1, max_size=3))
    stores = [
        Store("D" if i == 0 else f"out{i}", _picked(reading, picked), dtype) for i, (picked, dtype) in enumerate(stored)
    ]
    return numbered(EpilogueTree(tuple(stores), rounding))


def _picked(nodes: Sequence[Node], pick: int) -> Node:
    """One of the nodes: the last for every other pick, the one before for a quarter of them, and so on."""
    back = 0
    while pick % 2 and back < len(nodes) - 1:
        pick, back = pick // 2, back + 1
    return nodes[-1 - back if pick != 30 else 0]


def _below(node: Node) -> tuple[Node, ...]:
    return EpilogueTree((Store("D", node),)).nodes


def numbered(tree: EpilogueTree) -> EpilogueTree:
    """The tree with the operands that are left in it numbered without gaps."""
    return tree.map_nodes({id(op): replace(op, position=i) for i, op in enumerate(tree.operands)})


@st.composite
def chains(draw: Callable[..., Any], least: int = 2000, most: int = 4000) -> EpilogueTree:
    """Valid trees that are deeper than Python recurses."""
    pattern = draw(st.lists(st.sampled_from(SIMPLIFIED), min_size=1, max_size=4))
    constant = Constant(draw(_CONSTANTS))
    value: Node = Accumulator()
    for i in range(draw(st.integers(least, most))):
        row = OPERATIONS[pattern[i % len(pattern)]]
        condition = Apply("lt", (value, constant))
        inputs = [condition if k in row.conditions else constant if k else value for k in range(row.arity)]
        if row.arity == 3 and row.conditions:
            inputs[1] = value
        value = Apply(row.name, tuple(inputs))
        if row.result == "condition":
            value = Apply("where", (value, inputs[0] if not row.conditions else constant, Accumulator()))
    if not any(isinstance(node, Accumulator) for node in _below(value)):
        value = Apply("add", (value, Accumulator()))
    return EpilogueTree((Store("D", value),))


# tensors


def tensor_of_edges(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A dense tensor of random values, about a third of them from :data:`EDGES`."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = torch.randn(*shape, generator=generator) * 3
    edges = torch.tensor(EDGES, dtype=torch.float64).float()
    chosen = edges[torch.randint(len(edges), tuple(shape), generator=generator)]
    return torch.where(torch.rand(*shape, generator=generator) < 0.35, chosen, ordinary).to(dtype)


def inputs_for(
    tree: EpilogueTree, seed: int, shape: tuple[int, int] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
    """An accumulator, M not N, and an operand for each of the tree's."""
    m, n = shape or [(3, 5), (1, 37), (5, 16), (2, 1)][seed % 4]
    shapes = {Kind.ROW: (n,), Kind.COLUMN: (m,), Kind.SCALAR: (1,), Kind.AUX: (m, n), Kind.AUTO: (m, n)}
    operands: dict[str, torch.Tensor | float] = {}
    for op in tree.operands:
        dtype = torch_dtype(op.dtype) if op.dtype else [*DTYPES.values()][seed % 3]
        given = tensor_of_edges(shapes[op.kind], seed + op.position + 1, dtype)
        as_number = op.kind in (Kind.SCALAR, Kind.AUTO) and seed % 2
        operands[op.name] = float(given.flatten()[0]) if as_number else given
    return tensor_of_edges((m, n), seed), operands


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, 0.0 and -0.0 apart; any NaN is any other."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    nan = torch.isnan(one) & torch.isnan(other)
    return bool(((one.contiguous().view(width) == other.contiguous().view(width)) | nan).all())


# invalid trees


def _change_store(tree: EpilogueTree, **changes: Any) -> EpilogueTree:
    first, *others = tree.outputs
    return replace(tree, outputs=(replace(first, **changes), *others))


def _also(tree: EpilogueTree, node: Node, name: str = "extra") -> EpilogueTree:
    """The tree with a further output: something that is wrong on its own, computed from the accumulator too."""
    return replace(tree, outputs=(*tree.outputs, Store(name, node)))


def _added(tree: EpilogueTree, *operands: Operand) -> EpilogueTree:
    value = tree.outputs[0].value
    for operand in operands:
        value = Apply("add", (value, operand))
    return _change_store(tree, value=value)


def _last(tree: EpilogueTree) -> Node:
    return tree.outputs[0].value


def _condition(tree: EpilogueTree) -> Node:
    return Apply("le", (_last(tree), Constant(1.0)))


#: What makes an invalid tree of a valid one.
MISTAKES: dict[str, Callable[[EpilogueTree], EpilogueTree]] = {
    "no outputs": lambda tree: replace(tree, outputs=()),
    "main output misnamed": lambda tree: _change_store(tree, name="main"),
    "output without identifier": lambda tree: _also(tree, _last(tree), "no name"),
    "output names alike": lambda tree: _also(tree, _last(tree), "D"),
    "output named by a number": lambda tree: _also(tree, _last(tree), 3),  # type: ignore[arg-type]
    "output without accumulator": lambda tree: _also(tree, Apply("exp", (Constant(1.0),))),
    "output of operands only": lambda tree: _also(tree, Operand("q", Kind.ROW, len(tree.operands))),
    "output of unknown dtype": lambda tree: _change_store(tree, dtype="f64"),
    "unknown operation": lambda tree: _change_store(tree, value=Apply("softmax", (_last(tree),))),
    "no operation": lambda tree: _change_store(tree, value=Apply([], (_last(tree),))),  # type: ignore[arg-type]
    "too many inputs": lambda tree: _change_store(tree, value=Apply("relu", (_last(tree), _last(tree)))),
    "too few inputs": lambda tree: _change_store(tree, value=Apply("fma", (_last(tree), _last(tree)))),
    "no inputs": lambda tree: _also(tree, Apply("add", (_last(tree), Apply("exp", ())))),
    "condition as value": lambda tree: _change_store(tree, value=Apply("mul", (_last(tree), _condition(tree)))),
    "condition stored": lambda tree: _change_store(tree, value=_condition(tree)),
    "condition cast": lambda tree: _change_store(tree, value=Cast(_condition(tree), "f16")),
    "value as condition": lambda tree: _change_store(tree, value=Apply("where", (_last(tree),) * 3)),
    "value negated as condition": lambda tree: _also(
        tree, Apply("where", (Apply("logical_not", (_last(tree),)), _last(tree), _last(tree)))
    ),
    "cast to unknown dtype": lambda tree: _change_store(tree, value=Cast(_last(tree), "int8")),
    "cast to no dtype": lambda tree: _change_store(tree, value=Cast(_last(tree), None)),  # type: ignore[arg-type]
    "operand of unknown dtype": lambda tree: _added(tree, Operand("q", Kind.ROW, len(tree.operands), "float16")),
    "operand of unknown kind": lambda tree: _added(
        tree,
        Operand("q", "row", len(tree.operands)),  # type: ignore[arg-type]
    ),
    "gap in positions": lambda tree: _added(tree, Operand("q", Kind.ROW, len(tree.operands) + 1)),
    "negative position": lambda tree: _added(tree, Operand("q", Kind.ROW, -1)),
    "position that is no number": lambda tree: _added(
        tree,
        Operand("q", Kind.ROW, "0"),  # type: ignore[arg-type]
    ),
    "positions alike": lambda tree: _added(tree, Operand("q", Kind.ROW, 0), Operand("r", Kind.ROW, 0)),
    "operand names alike": lambda tree: _added(
        tree, *(Operand("q", Kind.ROW, len(tree.operands) + i) for i in range(2))
    ),
    "operand without identifier": lambda tree: _added(tree, Operand("a-b", Kind.ROW, len(tree.operands))),
    "reserved operand name": lambda tree: _added(tree, Operand("weight", Kind.ROW, len(tree.operands))),
    "constant that is no number": lambda tree: _change_store(
        tree,
        value=Apply("add", (_last(tree), Constant("1"))),  # type: ignore[arg-type]
    ),
    "constant that is too large": lambda tree: _change_store(
        tree, value=Apply("add", (_last(tree), Constant(10**400)))
    ),
    "unknown rounding": lambda tree: replace(tree, rounding="twice"),
    "unknown compute dtype": lambda tree: replace(tree, compute_dtype="f64"),
}

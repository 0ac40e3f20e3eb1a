"""Simplification: each rule where it applies, and where it must not."""

from __future__ import annotations

import math
import time

import pytest
import torch
from random_trees import EDGES, inputs_for, same_bits

import epilogues as ep
from epilogues import Aux, EpilogueError, Kind, Row, builders, epilogue
from epilogues.operations import OPERATIONS
from epilogues.passes.constant_folding import FOLDED
from epilogues.passes.patterns import number_of
from epilogues.passes.rewriting import rewrite
from epilogues.passes.simplify import MAY_CHANGE_THE_SIGN_OF_NAN, RULES, simplify
from epilogues.reference import evaluate
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Node, Operand, Store

INF, NAN = math.inf, math.nan
#: Every pair of values at which arithmetic differs from what one expects.
VALUES = torch.tensor([*EDGES, 2.5, -2.5, 7.0, 1e-30, 3e38], dtype=torch.float64).float()
X = Accumulator()
T = Operand("t", Kind.AUX, 0)
C = Apply("gt", (X, Constant(0.25)))


def do(name: str, *inputs: Node | float) -> Node:
    return Apply(name, tuple(node if isinstance(node, Node) else Constant(node) for node in inputs))


TRUE, FALSE = do("ne", 1.0, 0.0), do("ne", 0.0, 0.0)


def tree_of(value: Node, **others: Node) -> EpilogueTree:
    """The value stored as float32, so that all bits are seen."""
    outputs = {"D": value} | others
    return EpilogueTree(tuple(Store(name, node, "f32") for name, node in outputs.items()))


def values_of(tree: EpilogueTree) -> dict[str, torch.Tensor]:
    """The outputs at every pair of edge values."""
    size = len(VALUES)
    acc = VALUES[:, None].expand(size, size).repeat(1, 2).contiguous()
    t = VALUES[None, :].expand(size, size).repeat(1, 2).contiguous()
    return evaluate(tree, acc, {op.name: t for op in tree.operands})


#: A rule, what it is given, and what it makes of it.
APPLIED: list[tuple[str, Node, Node]] = [
    ("fold_constants", do("mul", X, do("add", 0.1, 0.2)), do("mul", X, float(torch.tensor(0.1) + torch.tensor(0.2)))),
    ("fold_constants", do("mul", X, do("fma", do("neg", 3.0), 2.0, do("sqrt", 16.0))), do("mul", X, -2.0)),
    ("fold_constants", do("add", X, do("div", 1.0, 0.0)), do("add", X, INF)),
    ("fold_constants", do("add", X, do("div", 1e-40, 2.0)), do("add", X, float(torch.tensor(1e-40) / 2))),
    ("fold_constants", do("add", X, do("clamp", 7.0, -1.0, 6.0)), do("add", X, 6.0)),
    ("fold_constants", do("add", X, Cast(Constant(0.1), "bf16")), do("add", X, float(torch.tensor(0.1).bfloat16()))),
    ("fold_constants", do("add", X, Cast(Constant(1e6), "f16")), do("add", X, INF)),
    (
        "fold_conditions",
        do("where", do("logical_and", do("lt", NAN, 1.0), C), X, T),
        do("where", do("logical_and", FALSE, C), X, T),
    ),
    ("choose_by_known_condition", do("where", do("isinf", -INF), do("add", X, T), do("sub", X, T)), do("add", X, T)),
    ("choose_by_known_condition", do("where", do("eq", NAN, NAN), do("add", X, T), do("sub", X, T)), do("sub", X, T)),
    ("choose_by_known_condition", do("where", do("logical_xor", TRUE, do("gt", 1.0, 2.0)), X, 2.0), X),
    ("logic_with_constant", do("where", do("logical_and", C, TRUE), X, T), do("where", C, X, T)),
    ("logic_with_constant", do("where", do("logical_or", FALSE, C), X, T), do("where", C, X, T)),
    ("logic_with_constant", do("where", do("logical_xor", C, FALSE), X, T), do("where", C, X, T)),
    ("logic_with_constant", do("where", do("logical_xor", TRUE, C), X, T), do("where", C, T, X)),
    ("choose_between_equals", do("where", C, do("add", X, T), do("add", X, T)), do("add", X, T)),
    ("choose_between_equals", do("maximum", do("add", X, T), do("add", T, X)), do("add", X, T)),
    ("choose_between_equals", do("where", do("logical_or", C, do("gt", X, 0.25)), X, T), do("where", C, X, T)),
    ("choose_by_negation", do("where", do("logical_not", C), X, T), do("where", C, T, X)),
    (
        "negated_equality",
        do("where", do("logical_and", C, do("logical_not", do("eq", X, T))), X, T),
        do("where", do("logical_and", C, do("ne", X, T)), X, T),
    ),
    ("double_negation", do("neg", do("neg", do("add", X, T))), do("add", X, T)),
    (
        "double_negation",
        do("where", do("logical_and", C, do("logical_not", do("logical_not", C))), X, T),
        do("where", C, X, T),
    ),
    ("sign_of_no_effect", do("abs", do("neg", X)), do("abs", X)),
    ("sign_of_no_effect", do("square", do("abs", X)), do("square", X)),
    ("minus_one", do("mul", -1.0, X), do("neg", X)),
    ("minus_one", do("div", X, -1.0), do("neg", X)),
    ("sum_with_negation", do("add", do("neg", X), T), do("sub", T, X)),
    ("sum_with_negation", do("sub", X, do("neg", T)), do("add", X, T)),
    ("identity", do("add", do("identity", X), T), do("add", X, T)),
    ("times_one", do("mul", 1.0, do("mul", X, 1.0)), X),
    ("times_one", do("div", X, 1.0 + 1e-12), X),
    ("plus_negative_zero", do("add", X, -0.0), X),
    ("plus_negative_zero", do("sub", X, 0.0), X),
    ("plus_zero", do("add", do("abs", X), 0.0), do("abs", X)),
    ("plus_zero", do("sub", do("add", X, 1.0), -0.0), do("add", X, 1.0)),
    ("plus_zero", do("add", 0.0, do("add", X, 0.0)), do("add", X, 0.0)),
    ("fma_of_neutral", do("fma", 1.0, X, T), do("add", X, T)),
    ("fma_of_neutral", do("fma", X, T, -0.0), do("mul", X, T)),
    ("unbounded", do("minimum", INF, X), X),
    ("unbounded", do("clamp", X, -INF, INF), X),
    ("division_by_power_of_two", do("div", X, -4.0), do("mul", X, -0.25)),
    ("division_by_power_of_two", do("div", X, 2.0**126), do("mul", X, 2.0**-126)),
    ("done_twice", do("relu", do("relu", X)), do("relu", X)),
    ("done_twice", do("abs", do("abs", X)), do("abs", X)),
    ("done_twice", do("sign", do("sign", X)), do("sign", X)),
    ("whole_number_rounded", do("floor", do("round", do("ceil", X))), do("ceil", X)),
    ("bounded_twice", do("maximum", 0.5, do("maximum", X, 0.5)), do("maximum", X, 0.5)),
    ("bounded_twice", do("clamp", do("clamp", X, 0.0, 6.0), 0.0, 6.0), do("clamp", X, 0.0, 6.0)),
    ("cast_to_float32", do("add", Cast(X, "f32"), T), do("add", X, T)),
    ("cast_of_what_fits", do("add", Cast(Cast(X, "f16"), "f16"), T), do("add", Cast(X, "f16"), T)),
    (
        "cast_of_what_fits",
        do("add", Cast(do("relu", do("neg", Cast(X, "bf16"))), "bf16"), T),
        do("add", do("relu", do("neg", Cast(X, "bf16"))), T),
    ),
    (
        "cast_of_what_fits",
        do("add", Cast(do("ceil", Cast(X, "bf16")), "bf16"), T),
        do("add", do("ceil", Cast(X, "bf16")), T),
    ),
    (
        "cast_of_what_fits",
        do("add", Cast(do("clamp", Cast(X, "f16"), -1.5, 0.5), "f16"), T),
        do("add", do("clamp", Cast(X, "f16"), -1.5, 0.5), T),
    ),
]


@pytest.mark.parametrize(("rule", "before", "after"), APPLIED, ids=[f"{a[0]}-{i}" for i, a in enumerate(APPLIED)])
def test_rules(rule, before, after):
    tree, simple, wanted = tree_of(before), simplify(tree_of(before)), rewrite(tree_of(after), ())
    assert simple == wanted, f"{simple}\nexpected\n{wanted}"
    expected, found = values_of(tree), values_of(simple)
    assert same_bits(found["D"], expected["D"])
    # the rule named, and not another one, is what does it
    without = [known for known in RULES if known.__name__ != rule]
    assert len(without) == len(RULES) - 1
    commutative = ("add", "mul", "eq")
    assert rewrite(tree, without, commutative=commutative) != simple


def test_every_rule_has_a_case():
    assert {rule for rule, _, _ in APPLIED} == {rule.__name__ for rule in RULES}
    assert len(RULES) == len(set(RULES)) and set(RULES) > MAY_CHANGE_THE_SIGN_OF_NAN
    assert all(rule.__doc__ for rule in RULES)


#: What looks as if it could be left out; each differs for some input, or may.
KEPT: dict[str, Node] = {
    "x * 0 is NaN for infinity, and -0.0": do("mul", X, 0.0),
    "x - x is NaN for infinity": do("sub", X, X),
    "x / x is NaN for 0": do("div", X, X),
    "x + 0.0 of -0.0 is 0.0": do("add", X, 0.0),
    "x - -0.0 of -0.0 is 0.0": do("sub", X, -0.0),
    "0.0 - x of 0.0 is 0.0, and -x is -0.0": do("sub", 0.0, X),
    "relu(x) may be -0.0": do("add", do("relu", X), 0.0),
    "sqrt(x) may be -0.0": do("add", do("sqrt", X), 0.0),
    "x + -0.0 + 0.0 may be -0.0 before": do("add", do("mul", X, 2.0), 0.0),
    "-(x - t) of equal ones is -0.0": do("neg", do("sub", X, T)),
    "x + t - t rounds": do("sub", do("add", X, T), T),
    "x * 3 / 3 rounds": do("div", do("mul", X, 3.0), 3.0),
    "x * 2 * 0.5 overflows": do("mul", do("mul", X, 2.0), 0.5),
    "(x * 3) * 5 rounds twice": do("mul", do("mul", X, 3.0), 5.0),
    "x * 3 + x * 5 rounds thrice": do("add", do("mul", X, 3.0), do("mul", X, 5.0)),
    "x / 3 is not x * (1 / 3)": do("div", X, 3.0),
    "1 / 2**127 is a denormal": do("div", X, 2.0**127),
    "2**-149 has no reciprocal": do("div", X, 2.0**-149),
    "x / 0 is infinite": do("div", X, 0.0),
    "x / inf": do("div", X, INF),
    "1 / x is no x": do("div", 1.0, X),
    "-1 / x": do("div", -1.0, X),
    "0 - x once more": do("sub", -0.0, X),
    "pow(x, 2) is not x * x in PyTorch": do("pow", X, 2.0),
    "pow(x, 1) is a library function's": do("pow", X, 1.0),
    "sqrt(x * x) overflows": do("sqrt", do("square", X)),
    "reciprocal twice overflows": do("reciprocal", do("reciprocal", X)),
    "exp(log(x)) is NaN for -1": do("exp", do("log", X)),
    "fma(x, t, 0.0) of -0.0 is 0.0": do("fma", X, T, 0.0),
    "fma(x, 0, t) is NaN for infinity": do("fma", X, 0.0, T),
    "x * t + 1 rounds twice, fma once": do("add", do("mul", X, T), 1.0),
    "fma rounds once, x * t + 1 twice": do("fma", X, T, 1.0),
    "fmax(x, -inf) of NaN is -inf": do("fmax", X, -INF),
    "fmin(x, inf) of NaN is inf": do("fmin", X, INF),
    "maximum(x, inf) of NaN is NaN": do("maximum", X, INF),
    "clamp(x, -inf, 1)": do("clamp", X, -INF, 1.0),
    "other bounds": do("clamp", do("clamp", X, -2.0, 2.0), -1.0, 1.0),
    "minimum of maximum": do("minimum", do("maximum", X, 0.5), 0.5),
    "maximum with 0.0 twice: 0.0 or -0.0 by the place": do("maximum", do("maximum", X, 0.0), 0.0),
    "not (x > t) is true for NaN, x <= t is not": do(
        "where", do("logical_and", C, do("logical_not", do("gt", X, T))), X, T
    ),
    "x == x is false for NaN": do("where", do("eq", X, X), X, 1.0),
    "x >= x is false for NaN": do("where", do("ge", X, X), X, 1.0),
    "where(x == 0, 0, x) of -0.0 is 0.0": do("where", do("eq", X, 0.0), 0.0, X),
    "abs(relu(x)) of -0.0 is 0.0": do("abs", do("relu", X)),
    "exp of a constant": do("mul", X, do("exp", 1.5)),
    "tanh of a constant": do("mul", X, do("tanh", 1.5)),
    "NaN of constants": do("copysign", X, do("neg", NAN)),
    "0 / 0 of constants": do("mul", X, do("div", 0.0, 0.0)),
    "maximum(0.0, -0.0) is either": do("div", X, do("maximum", 0.0, -0.0)),
    "copysign of NaN": do("mul", X, do("copysign", 1.0, NAN)),
    "a cast rounds": do("add", Cast(X, "bf16"), T),
    "a cast of another cast rounds": do("add", Cast(Cast(X, "f16"), "bf16"), T),
    "a cast of a sum rounds": do("add", Cast(do("add", Cast(X, "bf16"), Cast(T, "bf16")), "bf16"), T),
    "a cast of a bound that does not fit rounds": do("add", Cast(do("clamp", Cast(X, "bf16"), -0.1, 0.1), "bf16"), T),
    "a cast of the other arm rounds": do("add", Cast(do("where", C, Cast(X, "f16"), T), "f16"), T),
}


@pytest.mark.parametrize("why", KEPT)
def test_what_must_stay(why):
    tree = tree_of(KEPT[why])
    assert simplify(tree) == rewrite(tree, ())


#: Wrong rules of the list above, as what they would make; ``values_of`` tells each from what is right.
TEMPTING: list[tuple[Node, Node]] = [
    (do("mul", X, 0.0), do("add", do("mul", X, 0.0), 0.0)),
    (do("add", X, 0.0), X),
    (do("sub", 0.0, X), do("neg", X)),
    (do("add", do("relu", X), 0.0), do("relu", X)),
    (do("add", do("sqrt", X), 0.0), do("sqrt", X)),
    (do("neg", do("sub", X, T)), do("sub", T, X)),
    (do("sub", do("add", X, T), T), do("identity", X)),
    (do("mul", do("mul", X, 2.0), 0.5), X),
    (do("div", X, 3.0), do("mul", X, 1 / 3)),
    (do("sqrt", do("square", X)), do("abs", X)),
    (do("reciprocal", do("reciprocal", X)), X),
    (do("fma", X, T, 0.0), do("mul", X, T)),
    (do("fma", X, 0.0, T), T),
    (do("fmax", X, -INF), X),
    (do("where", do("logical_not", do("gt", X, T)), X, T), do("where", do("le", X, T), X, T)),
    (do("abs", do("relu", X)), do("relu", X)),
    (do("add", Cast(Cast(X, "f16"), "bf16"), T), do("add", Cast(X, "bf16"), T)),
]


@pytest.mark.parametrize(("right", "wrong"), TEMPTING, ids=[str(i) for i in range(len(TEMPTING))])
def test_the_values_tell_wrong_rules_from_right(right, wrong):
    # both have to read the same, for the comparison's sake
    right, wrong = (tree_of(value, extra=do("add", X, T)) for value in (right, wrong))
    assert not same_bits(values_of(right)["D"], values_of(wrong)["D"])


def test_pytorchs_maximum_of_zeros_depends_on_the_place():
    # why maximum is not commutative here, and a bound of 0.0 not dropped: 16 elements are computed at once, one is left
    zeros, other = torch.zeros(17), -torch.zeros(17)
    one, swapped = torch.maximum(zeros, other), torch.maximum(other, zeros)
    assert not same_bits(one, swapped) or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    tree = tree_of(do("sub", do("maximum", X, T), do("maximum", T, X)))
    assert simplify(tree) is tree


def test_the_example():
    @epilogue
    def wordy(acc, bias: Row):
        z = -(-(acc * 1.0)) + bias  # noqa: B002
        return torch.where(~(z > 0), z / 4, z.to(torch.float32))

    @epilogue
    def plain(acc, bias: Row):
        z = acc + bias
        return torch.where(z > 0, z, z * 0.25)

    simple = simplify(wordy.tree)
    assert simple == plain.tree
    # every node has the line that it, or what it takes the place of, was written in
    assert {node.location.line for node in simple.nodes} == {node.location.line for node in wordy.tree.nodes}
    divided = next(node for node in simple.nodes if isinstance(node, Apply) and node.operation == "mul")
    assert "z / 4" in divided.location.text and "z / 4" in divided.operands[1].location.text


def test_a_tree_without_anything_to_do_is_returned():
    for make in builders.SUITE.values():
        assert simplify(make().tree) is make().tree


def test_equal_nodes_are_shared():
    inner = [do("add", X, T), do("add", T, Accumulator()), do("add", X, T)]
    tree = tree_of(do("mul", inner[0], inner[1]), e=do("tanh", inner[2]))
    simple = simplify(tree)
    assert len(tree.nodes) == 8 and len(simple.nodes) == 5
    product = simple.outputs[0].value
    assert product.inputs[0] is product.inputs[1] is simple.outputs[1].value.inputs[0]
    assert same_bits(values_of(tree)["D"], values_of(simple)["D"])


@pytest.mark.parametrize("name", ["sub", "div", "pow", "minimum", "maximum", "atan2", "copysign", "gt"])
def test_swapped_inputs_are_shared_only_where_they_give_the_same(name):
    one, other = do(name, X, T), do(name, T, X)
    if OPERATIONS[name].result == "condition":
        one, other = do("where", one, 1.0, 0.0), do("where", other, 1.0, 0.0)
    tree = tree_of(do("hypot", one, other))
    assert len(simplify(tree).nodes) == len(tree.nodes) - (2 if "where" in str(tree) else 0)


# operands and outputs


def test_every_operand_stays():
    @epilogue
    def f(acc, a1: Row, a2: Aux, a3: Row):
        chosen = ep.where(ep.lt(1.0 + 0 * a1, 2.0) | True, acc, a2)  # a2 would drop out
        return chosen + ep.where(a3 > 0, acc, acc)  # a3 would

    simple = simplify(f.tree)
    assert [op.name for op in simple.operands] == ["a1", "a2", "a3"]
    assert simple.operands == f.tree.operands


def test_a_shape_that_a_value_takes_from_a_condition_stays():
    row = Operand("row", Kind.ROW, 0)
    spread = do("where", do("gt", T1 := Operand("column", Kind.COLUMN, 1), 0.0), row, row)
    tree = tree_of(do("add", X, spread))
    assert simplify(tree).operands == tree.operands
    twice = tree_of(do("add", do("add", X, T1), spread))  # the operand is read elsewhere too, and still the shape stays
    assert any(isinstance(node, Apply) and node.operation == "where" for node in simplify(twice).nodes)


def test_every_output_keeps_reading_the_accumulator():
    tree = tree_of(do("where", C, 1.0, 1.0))
    assert simplify(tree) == rewrite(tree, ())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Cast(do("relu", X), "f32"), "f32"),
        (Cast(Cast(X, "bf16"), "bf16"), "bf16"),
        (Cast(do("relu", Cast(X, "f16")), "f16"), "f16"),
        (do("mul", Cast(X, "bf16"), 1.0), "default"),
        (do("neg", do("neg", Cast(X, "f32"))), "default"),
        (do("identity", Cast(X, "bf16")), "default"),
        (Cast(Cast(X, "f16"), "f32"), "f32"),
    ],
)
def test_outputs_keep_their_dtypes(value, expected):
    tree = EpilogueTree((Store("D", value), Store("e", do("tanh", value)), Store("f", value, "bf16")))
    simple = simplify(tree)
    dtypes = [simple.output_dtype(store, "default") for store in simple.outputs]
    assert dtypes == [expected, "default", "bf16"]
    assert simplify(simple) == simple
    acc = torch.randn(3, 4)
    for default in (torch.float32, torch.float16):
        found = evaluate(simple, acc, {}, out_dtype=default)
        for name, wanted in evaluate(tree, acc, {}, out_dtype=default).items():
            assert same_bits(found[name], wanted)


def test_operands_of_known_dtype_need_no_cast():
    known = Operand("t", Kind.AUX, 0, "bf16")
    assert simplify(tree_of(do("add", X, Cast(known, "bf16")))) == tree_of(do("add", X, known))
    narrower = tree_of(do("add", X, Cast(known, "f16")))
    assert simplify(narrower) is narrower
    unknown = tree_of(do("add", X, Cast(T, "bf16")))
    assert simplify(unknown) is unknown


# constants


@pytest.mark.parametrize("name", sorted(FOLDED))
def test_folding_gives_what_the_reference_computes(name):
    row = OPERATIONS[name]
    for first in EDGES:
        for second in EDGES[::3] if row.arity > 1 else [1.0]:
            values = [first, second, -1.5][: row.arity]
            inputs = [do("gt", v, 0.25) if i in row.conditions else Constant(v) for i, v in enumerate(values)]
            node = Apply(name, tuple(inputs))
            value = do("where", node, 3.0, X) if row.result == "condition" else do("mul", node, do("abs", X))
            tree = tree_of(do("add", value, X))
            assert same_bits(values_of(simplify(tree))["D"], values_of(tree)["D"]), (name, values)


def test_constants_are_folded_in_float32():
    simple = simplify(tree_of(do("mul", X, do("mul", 0.1, 3.0))))
    (constant,) = (node for node in simple.nodes if isinstance(node, Constant))
    assert constant.value == float(torch.tensor(0.1) * torch.tensor(3.0)) != 0.1 * 3.0


def test_numbers_are_those_of_float32():
    assert number_of(Constant(1e300)) == INF and number_of(Constant(1 + 1e-12)) == 1.0
    assert math.copysign(1.0, number_of(Constant(-1e-60))) == -1.0
    assert number_of(X) is None


# NaN and its sign


def test_where_the_sign_of_nan_is_seen_rules_that_change_it_are_left_out():
    seen = do("copysign", 1.0, do("mul", X, -1.0))
    tree = tree_of(do("add", seen, X))
    assert simplify(tree) is tree
    assert simplify(tree_of(do("add", do("copysign", 1.0, do("mul", X, 1.0)), X))) == tree_of(
        do("add", do("copysign", 1.0, X), X)
    )


def test_when_the_sign_is_seen_no_more_the_rules_apply():
    tree = tree_of(do("mul", do("mul", X, -1.0), do("copysign", 2.0, -3.0)))
    assert simplify(tree) == tree_of(do("mul", do("neg", X), -2.0))


# trees that are large, and others


def test_long_chains_take_linear_time():
    def chain(length: int) -> EpilogueTree:
        value: Node = X
        for i in range(length):
            value = do("add", do("mul", do("neg", do("neg", value)), 1.0), float(i))
        return tree_of(value)

    def seconds(tree: EpilogueTree) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            simple = simplify(tree)
            times.append(time.perf_counter() - start)
        assert sum(isinstance(node, Apply) for node in simple.nodes) == sum(1 for n in tree.nodes if n.inputs) // 4
        return min(times)

    short, long = chain(500), chain(4000)
    assert seconds(long) < 30 * seconds(short)  # quadratic would be 64


def test_graphs_with_much_sharing():
    value: Node = X
    for _ in range(200):
        value = do("mul", do("add", value, value), 0.5)
    tree = tree_of(value)
    assert len(simplify(tree).nodes) == len(tree.nodes) - 199  # one constant for all


def test_trees_that_break_a_rule_are_refused():
    with pytest.raises(EpilogueError, match="operation 'sum'"):
        simplify(tree_of(do("sum", X)))


def test_rules_that_go_around_in_circles_are_found():
    def swap(node: Node) -> Node | None:
        return Apply("add", node.operands[::-1]) if isinstance(node, Apply) and node.operation == "add" else None

    def grow(node: Node) -> Node | None:
        return Apply("neg", (Apply("neg", (node.inputs[0],)),)) if node.inputs and not node.inputs[0].inputs else None

    def count(node: Node) -> Node | None:
        return Constant(node.value + 1) if isinstance(node, Constant) else None

    for value, rule in ((do("add", X, 1.0), count), (do("add", X, T), swap), (do("relu", X), grow)):
        with pytest.raises(AssertionError, match="without end"):
            rewrite(tree_of(value), [rule])


@pytest.mark.parametrize("make", [builders.SUITE[name] for name in builders.SUITE], ids=list(builders.SUITE))
def test_ready_made_epilogues_compute_the_same(make):
    tree = make().tree
    acc, operands = inputs_for(tree, 4)
    for name, wanted in evaluate(tree, acc, operands).items():
        assert same_bits(evaluate(simplify(tree), acc, operands)[name], wanted)

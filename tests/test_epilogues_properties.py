"""What holds of every tree, tried on random ones: valid and invalid.

``MORE_EXAMPLES=50 pytest tests/test_epilogues_properties.py`` looks further than the examples of every day.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_trees import MISTAKES, SIMPLIFIED, chains, inputs_for, same_bits, some, trees
from torch.nn import functional as F

from epilogues import Epilogue, EpilogueError, EpilogueTree, epilogue
from epilogues.dtypes import torch_dtype
from epilogues.passes.rewriting import rewrite
from epilogues.passes.simplify import simplify
from epilogues.reference import evaluate
from epilogues.tree import ROUNDINGS, Accumulator, Apply, Cast, Constant, Kind, Node, Operand
from epilogues.validation import validate

SEEDS = st.integers(0, 10**6)


# valid trees


@some(100)
@given(trees())
def test_valid_trees_are_valid_and_shown(tree):
    validate(tree)
    lines = str(tree).splitlines()
    assert len(lines) == len(tree.nodes) + len(tree.outputs)
    assert Epilogue.from_tree(tree).tree is tree


@some(100)
@given(st.sampled_from(ROUNDINGS).flatmap(lambda rounding: trees(rounding=rounding)))
def test_trees_survive_json_and_pickling(tree):
    again = EpilogueTree.from_json(tree.to_json())
    assert again == tree and hash(again) == hash(tree) and again.to_json() == tree.to_json()
    assert [(op.name, op.kind, op.dtype) for op in again.operands] == [
        (op.name, op.kind, op.dtype) for op in tree.operands
    ]
    assert [(store.name, store.dtype) for store in again.outputs] == [
        (store.name, store.dtype) for store in tree.outputs
    ]
    unpickled = pickle.loads(pickle.dumps(tree))
    assert unpickled == tree and hash(unpickled) == hash(tree)
    assert copy.deepcopy(tree) == tree
    made = Epilogue.from_tree(tree, "random")
    assert pickle.loads(pickle.dumps(made)) == made


def reference_of(name: str) -> Callable[..., torch.Tensor]:
    """PyTorch's function of an operation, as one would write it without the table."""
    written = {
        "identity": lambda x: x,
        "fma": lambda a, b, c: a * b + c,
        "clamp": lambda x, low, high: torch.clamp(x, low, high),
        "leaky_relu": lambda x, slope: torch.where(x > 0, x, x * slope),
        "threshold": lambda x, threshold, value: torch.where(x <= threshold, value, x),
        "logsigmoid": F.logsigmoid,
        "entr": torch.special.entr,
        "gelu_erf": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "softplus": lambda x, beta, limit: torch.where(x * beta > limit, x, torch.log1p(torch.exp(x * beta)) / beta),
        "elu": lambda x, alpha: torch.where(x < 0, torch.expm1(x) * alpha, x),
        "celu": lambda x, alpha: torch.where(x < 0, torch.expm1(x * (1 / alpha)) * alpha, x),
        "hardshrink": lambda x, limit: torch.where((x >= -limit) & (x <= limit), 0.0, x),
        "softshrink": lambda x, limit: torch.where(
            x > limit, x - limit, torch.where(x < -limit, x + limit, torch.where(torch.isnan(x), x, 0.0))
        ),
    }
    return written.get(name) or getattr(torch, name, None) or getattr(F, name)


def interpreted(
    tree: EpilogueTree, acc: torch.Tensor, operands: dict[str, torch.Tensor | float]
) -> dict[str, torch.Tensor]:
    """The outputs in float64, without casts: a walk through the tree."""
    m, n = acc.shape
    shapes = {Kind.ROW: (1, n), Kind.COLUMN: (m, 1), Kind.SCALAR: (1, 1), Kind.AUX: (m, n), Kind.AUTO: (m, n)}
    done: dict[int, torch.Tensor] = {}

    def value(node: Node) -> torch.Tensor:
        if id(node) not in done:
            done[id(node)] = compute(node)
        return done[id(node)]

    def compute(node: Node) -> torch.Tensor:
        if isinstance(node, Accumulator):
            return acc.double()
        if isinstance(node, Constant):
            return torch.tensor(node.value, dtype=torch.float64)
        if isinstance(node, Cast):
            return value(node.value)
        if isinstance(node, Apply):
            return reference_of(node.operation)(*map(value, node.operands))
        assert isinstance(node, Operand)
        given = operands[node.name]
        if isinstance(given, torch.Tensor):
            return given.double().reshape(shapes[node.kind])
        number = torch.tensor(given, dtype=torch.float64)
        return number if node.dtype is None else number.float().to(torch_dtype(node.dtype)).double()

    return {store.name: value(store.value).expand(m, n) for store in tree.outputs}


@some(200)
@given(trees(), SEEDS)
def test_the_reference_is_what_pytorch_computes_in_fp64(tree, seed):
    acc, operands = inputs_for(tree, seed)
    found = evaluate(tree, acc, operands, compute_dtype=torch.float64, keep_casts=False)
    expected = interpreted(tree, acc, operands)
    assert found.keys() == expected.keys()
    for name, output in found.items():
        assert same_bits(output, expected[name]), f"{name} of\n{tree}"


def costs(tree: EpilogueTree) -> int:
    return sum(isinstance(node, Apply | Cast) for node in tree.nodes)


def check_simplified(tree: EpilogueTree, seed: int) -> None:
    simple = simplify(tree)
    validate(simple)
    assert simplify(simple) == simple
    assert costs(simple) <= costs(tree)
    described = [[(op.name, op.kind, op.dtype, op.position) for op in of.operands] for of in (tree, simple)]
    assert described[0] == described[1]
    assert [store.name for store in simple.outputs] == [store.name for store in tree.outputs]
    for default in ("f16", "bf16"):
        dtypes = [[of.output_dtype(store, default) for store in of.outputs] for of in (tree, simple)]
        assert dtypes[0] == dtypes[1]
    acc, operands = inputs_for(tree, seed)
    expected, found = evaluate(tree, acc, operands), evaluate(simple, acc, operands)
    for name, output in found.items():
        assert same_bits(output, expected[name]), f"{name} of\n{tree}\nas\n{simple}"


@some(150)
@given(trees(), SEEDS)
def test_simplifying_changes_no_bit(tree, seed):
    check_simplified(tree, seed)


@some(400)
@given(trees(operations=SIMPLIFIED, wordy=True), SEEDS)
def test_simplifying_changes_no_bit_where_rules_apply(tree, seed):
    check_simplified(tree, seed)


@some(150)
@given(trees(operations=["copysign", "neg", "mul", "add", "maximum", "square", "fma"], wordy=True), SEEDS)
def test_simplifying_changes_no_bit_where_signs_of_nan_are_seen(tree, seed):
    # every output tells the sign of what was stored, of NaN too
    seen = [Apply("copysign", (Constant(2.0), store.value)) for store in tree.outputs]
    stores = (replace(store, value=value, dtype="f32") for store, value in zip(tree.outputs, seen, strict=True))
    check_simplified(replace(tree, outputs=tuple(stores)), seed)


@some(8)
@given(chains(), SEEDS)
def test_long_chains(tree, seed):
    check_simplified(tree, seed)
    assert EpilogueTree.from_json(tree.to_json()) == tree
    assert len(str(tree).splitlines()) == len(tree.nodes) + 1


@some(40)
@given(st.sampled_from(ROUNDINGS[1:]).flatmap(lambda rounding: trees(rounding=rounding)))
def test_other_roundings_keep_every_operation(tree):
    simple = simplify(tree)
    assert simple.rounding == tree.rounding
    assert simple == rewrite(tree, ())


def inside_another(tree: EpilogueTree) -> EpilogueTree:
    """The tree of an epilogue that returns what another one gives."""
    names = [op.name for op in tree.operands]
    space: dict[str, Any] = {"inner": Epilogue.from_tree(tree, "inner")}
    given = "".join(f", {name}={name}" for name in names)
    exec(f"def outer({', '.join(['acc', *names])}): return inner(acc{given})", space)
    return epilogue(space["outer"], rounding=tree.rounding).tree


@some(100)
@given(st.sampled_from(ROUNDINGS).flatmap(lambda rounding: trees(rounding=rounding)))
def test_an_epilogue_inside_another_is_the_same_tree(tree):
    # what another epilogue gives is a value: the dtype that it would be stored in stays behind
    tree = replace(tree, outputs=tuple(replace(store, dtype=None) for store in tree.outputs))
    again = inside_another(tree)
    assert again == rewrite(tree, ())  # tracing makes equal nodes once
    assert [store.name for store in again.outputs] == [store.name for store in tree.outputs]
    assert [op.name for op in again.operands] == [op.name for op in tree.operands]


# invalid trees


@pytest.mark.parametrize("mistake", MISTAKES)
@some(8)
@given(tree=trees(max_steps=6))
def test_invalid_trees_are_refused(mistake, tree):
    wrong = MISTAKES[mistake](tree)
    for use in (validate, Epilogue.from_tree, simplify):
        with pytest.raises(EpilogueError):
            use(wrong)
    if not any(isinstance(node, Constant) and not isinstance(node.value, float) for node in wrong.nodes):
        try:
            text = wrong.to_json()
        except (TypeError, AttributeError):
            return  # it has something that is no part of any tree's JSON
        with pytest.raises(EpilogueError):
            EpilogueTree.from_json(text)


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 40),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["relu", "f16"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=4,
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Everything that can be replaced in JSON data, as the container and the key."""
    found = []
    stack = [data]
    while stack:
        inside = stack.pop()
        keys = list(inside) if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
        found += [(inside, key) for key in keys]
        stack += [inside[key] for key in keys]
    return found


@some(200)
@given(trees(max_steps=6), st.integers(0, 10**6), anything, st.booleans())
def test_broken_json_is_refused_or_a_valid_tree(tree, where, new, remove):
    data = json.loads(tree.to_json())
    container, key = (found := places(data))[where % len(found)]
    if remove:
        del container[key]
    else:
        container[key] = new
    try:
        again = EpilogueTree.from_json(json.dumps(data))
    except EpilogueError:
        return
    validate(again)
    assert EpilogueTree.from_json(again.to_json()) == again


@some(100)
@given(trees(max_steps=4), st.integers(0, 10**6), st.integers(0, 200))
def test_cut_text_is_refused(tree, start, length):
    text = tree.to_json()
    start %= len(text)
    assume(length < len(text) - start)
    with pytest.raises(EpilogueError):
        EpilogueTree.from_json(text[: start + length][:-1])

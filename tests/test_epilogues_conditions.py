"""Conditions in trees: what gives them, what takes them, what they are where a value is wanted."""

import pickle

import pytest
import torch

import epilogues as ep
from epilogues import Aux, DtypeError, EpilogueTree, Row, UnsupportedOperationError, epilogue
from epilogues.tree import Accumulator, Apply, Cast, Constant, Store
from epilogues.validation import validate

ACC, ZERO = Accumulator(), Constant(0.0)
POSITIVE = Apply("gt", (ACC, ZERO))


def operations(made):
    return [node.operation for node in made.tree if isinstance(node, Apply)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.where(x > 0, x, 0.1 * x), ["gt", "mul", "where"]),
        (lambda x: (x > 0) * x, ["gt", "where", "mul"]),
        (lambda x: torch.where((x > 0) & ~(x >= 2), x, 0), ["gt", "ge", "logical_not", "logical_and", "where"]),
        (lambda x: torch.where(x.logical_not(), 1.0, x), ["ne", "logical_not", "where"]),
        (lambda x: x.masked_fill(x != x, 0), ["ne", "where"]),
        (lambda x: torch.where((x > 0) == (x < 1), x, 0), ["gt", "where", "lt", "where", "eq", "where"]),
        (lambda x: (x > 0).float(), ["gt", "where"]),
    ],
)
def test_trees(function, expected):
    assert operations(epilogue(function)) == expected


def test_promotion_is_a_select_of_one_and_zero():
    tree = epilogue(lambda acc: (acc > 0).to(torch.bfloat16)).tree
    (store,) = tree.outputs
    assert isinstance(store.value, Cast) and store.value.dtype == "bf16"
    select = store.value.value
    assert select.operation == "where" and [node.value for node in select.operands[1:]] == [1.0, 0.0]


@epilogue
def masked(acc, bias: Row, mask: Aux):
    keep = (mask > 0.5) & (acc != 0)
    return {"D": torch.where(keep, acc + bias, -1.0), "mask": keep.half()}


def test_round_trips():
    again = EpilogueTree.from_json(masked.tree.to_json())
    assert again == masked.tree
    assert pickle.loads(pickle.dumps(masked)) == masked
    acc, bias, mask = torch.randn(3, 4), torch.randn(4), torch.rand(3, 4)
    acc[0, 0] = 0.0
    keep = (mask > 0.5) & (acc != 0)
    for made in (masked, ep.Epilogue.from_tree(again)):
        outputs = made.reference(acc, bias=bias, mask=mask)
        assert torch.equal(outputs["D"], torch.where(keep, acc + bias, -1.0))
        assert torch.equal(outputs["mask"], keep.half())


def test_text_and_dtype():
    assert ": bool" in str(masked.tree) and "logical_and(" in str(masked.tree)
    seen = []
    epilogue(lambda acc: seen.append((acc > 0).dtype) or acc)
    assert seen == [torch.bool]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (POSITIVE, r"output D is a condition \(gt\); expected a value"),
        (Cast(POSITIVE, "f16"), r"a cast of a condition \(gt\)"),
        (Apply("add", (ACC, POSITIVE)), r"input 1 of operation add is a condition \(gt\); expected a value"),
        (Apply("where", (ACC, ACC, ZERO)), "input 0 of operation where is a value; expected a condition"),
        (Apply("where", (POSITIVE, POSITIVE, ZERO)), "input 1 of operation where is a condition"),
        (Apply("exp", (Apply("logical_not", (ACC,)),)), "input 0 of operation logical_not is a value"),
        (Apply("eq", (POSITIVE, POSITIVE)), "input 0 of operation eq is a condition"),
    ],
)
def test_rules(value, message):
    tree = EpilogueTree((Store("D", value),))
    for check in (validate, lambda tree: EpilogueTree.from_json(tree.to_json()), ep.Epilogue.from_tree):
        with pytest.raises(DtypeError, match=message) as caught:
            check(tree)
        assert "\n  instead: " in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda acc: acc > 0, r"output D is a condition \(gt\)(?s:.)*torch\.where\(condition, 1\.0, 0\.0\)"),
        (lambda acc: {"D": acc, "mask": acc > 0}, "output mask is a condition"),
        (lambda acc: torch.where(acc, acc, 0), r"expected a condition, such as x > 0(?s:.)*compare it"),
        (lambda acc: acc.masked_fill(acc, 0), "expected a condition"),
        (lambda acc: (acc > 0) - (acc > 1), "sub of nothing but conditions"),
        (lambda acc: -(acc > 0) * acc, "neg of nothing but conditions"),
        (lambda acc: (acc > 0).int() * acc, "int"),
    ],
)
def test_refusals_while_tracing(function, message):
    with pytest.raises(ep.EpilogueError, match=message) as caught:
        epilogue(function, name="refused")
    assert f"{__file__}:{function.__code__.co_firstlineno}: " in str(caught.value)


def test_branches_are_refused_with_a_way_out():
    def f(acc):
        if acc > 0:
            return acc
        return -acc

    with pytest.raises(UnsupportedOperationError, match=r"if acc > 0:(?s:.)*torch\.where\(condition, a, b\)"):
        epilogue(f)


def test_symbols_are_hashed_by_identity():
    def f(acc, bias: Row):
        z = acc + bias
        names = {acc: "acc", bias: "bias", z: "z"}
        assert [names[value] for value in (z, acc, bias)] == ["z", "acc", "bias"]
        assert acc is acc and acc in [acc, bias]  # the same object is found before anything is compared
        return torch.where(acc == bias, z, acc)

    assert operations(epilogue(f)) == ["eq", "add", "where"]


def test_conditions_are_values_to_other_epilogues():
    inner = epilogue(lambda acc, gate: acc * gate, name="inner")
    outer = epilogue(lambda acc: inner(acc, acc > 0))
    rebuilt = epilogue(lambda acc: ep.Epilogue.from_tree(inner.tree)(acc, gate=acc > 0))
    x = torch.randn(3, 4)
    assert torch.equal(outer.reference(x), x * (x > 0)) and outer.tree == rebuilt.tree


def test_functions_on_tensors():
    x = torch.tensor([-1.0, 2.0], dtype=torch.float16)
    mask = ep.gt(x, 0)
    assert mask.dtype == torch.bool
    assert ep.where(mask, x, 0.0).dtype == torch.float32
    assert torch.equal(ep.mul(mask, x), torch.tensor([0.0, 2.0]))
    assert torch.equal(ep.add(mask, mask), mask) and torch.equal(ep.where(mask, mask, ~mask), mask | ~mask & ~mask)
    assert ep.add(mask, 1.0).tolist() == [1.0, 2.0]
    with pytest.raises(DtypeError, match=r"where: expected a condition, .* got a tensor of dtype torch\.float16"):
        ep.where(x, x, x)
    with pytest.raises(UnsupportedOperationError, match=r"add of a tensor of dtype torch\.int64"):
        ep.add(torch.tensor([1]), 1.0)

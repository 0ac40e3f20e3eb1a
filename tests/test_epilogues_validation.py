"""Every rule of validation broken by a tree that breaks no other, and the list of all that is refused."""

from __future__ import annotations

import pytest

from epilogues import EpilogueError, EpilogueTree, Kind
from epilogues.error_catalogue import Refused, catalogue, describe
from epilogues.errors import DtypeError, ReductionError, UnsupportedOperationError
from epilogues.refusals import refuse
from epilogues.tree import Accumulator, Apply, Cast, Constant, Operand, SourceLocation, Store
from epilogues.validation import RULES, describe_rules, validate

HERE = SourceLocation("model.py", 7, "return relu(acc)")
ACC = Accumulator(location=HERE)
BIAS = Operand("bias", Kind.ROW, 0)
POSITIVE = Apply("gt", (ACC, Constant(0.0)), location=HERE)


def stored(*values, dtype=None):
    return EpilogueTree(tuple(Store("DEFG"[i], value, dtype) for i, value in enumerate(values)))


def added(*operands):
    return stored(*(Apply("add", (ACC, operand)) for operand in operands))


#: Rule -> a tree that breaks it and no other, the one whose message is the rule's example.
BROKEN = {
    "there_is_an_output": EpilogueTree(()),
    "main_output_comes_first": EpilogueTree((Store("E", ACC), Store("D", ACC))),
    "outputs_have_names": EpilogueTree((Store("D", ACC), Store("no name", ACC))),
    "output_names_differ": EpilogueTree((Store("D", ACC), Store("E", ACC), Store("E", ACC))),
    "operations_are_known": stored(Apply("relu7", (ACC,))),
    "operations_have_their_inputs": stored(Apply("add", (ACC, ACC, ACC))),
    "conditions_are_not_cast": stored(Cast(POSITIVE, "f16")),
    "values_are_not_conditions": stored(Apply("where", (ACC, ACC, ACC))),
    "conditions_are_not_values": stored(Apply("relu", (POSITIVE,))),
    "conditions_are_not_stored": stored(POSITIVE),
    "dtypes_are_known": stored(Cast(ACC, "f64")),
    "constants_are_numbers": stored(Apply("add", (ACC, Constant("pi")))),
    "kinds_are_known": added(Operand("bias", "row", 0)),
    "operands_are_numbered": added(Operand("bias", Kind.ROW, 1)),
    "operands_have_names": added(Operand("a b", Kind.ROW, 0)),
    "operand_names_differ": added(BIAS, Operand("bias", Kind.AUX, 1)),
    "operand_names_are_free": added(Operand("weight", Kind.ROW, 0)),
    "outputs_depend_on_the_accumulator": stored(Constant(1.0)),
    "rounding_is_known": EpilogueTree((Store("D", ACC),), "twice"),
    "compute_dtype_goes_with_rounding": EpilogueTree((Store("D", ACC),), "eager", "bf16"),
}


def test_every_rule_has_a_tree_that_breaks_it():
    assert [rule.name for rule in RULES] == list(BROKEN)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules(rule):
    tree = BROKEN[rule.name]
    with pytest.raises(EpilogueError) as caught:
        validate(tree)
    assert type(caught.value) is rule.error
    message, *lines = str(caught.value).splitlines()
    assert message == rule.example
    assert lines[-1] == f"  instead: {rule.instead}"
    # it is this rule and no other: those before it find nothing, nor do those after it that do not rely on it
    at = RULES.index(rule)
    independent = [other for other in RULES[at + 1 :] if tree.outputs and other.name in INDEPENDENT]
    assert [other.name for other in (*RULES[:at], *independent) if list(other.findings(tree))] == []


#: Rules that look at a tree whatever else is wrong with it.
INDEPENDENT = {
    "output_names_differ",
    "dtypes_are_known",
    "constants_are_numbers",
    "kinds_are_known",
    "operands_are_numbered",
    "operands_have_names",
    "operand_names_differ",
    "operand_names_are_free",
    "outputs_depend_on_the_accumulator",
    "rounding_is_known",
    "compute_dtype_goes_with_rounding",
}


def test_messages_have_the_users_line():
    with pytest.raises(DtypeError) as caught:
        validate(BROKEN["conditions_are_not_stored"])
    assert str(caught.value).splitlines()[1] == "  at model.py:7: return relu(acc)"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (stored(ACC, dtype="f8"), "output D has dtype 'f8'"),
        (stored(ACC, dtype=["f16"]), r"output D has dtype \['f16'\]"),
        (added(Operand("bias", Kind.ROW, 0, "float32")), "operand bias has dtype 'float32'"),
        (added(BIAS, Operand("scale", Kind.ROW, 0)), r"positions \[0, 0\]; expected each of 0 to 1 once"),
        (added(BIAS, Operand("scale", Kind.ROW, "1")), r"positions \[0, '1'\]"),
        (added(Operand("bias", Kind.ROW, None)), r"positions \[None\]"),
        (added(Operand(3, Kind.ROW, 0)), "an operand is named 3"),
        (EpilogueTree((Store("D", ACC), Store(None, ACC))), "an output is named None"),
        (stored(Apply(["relu"], (ACC,))), r"operation \['relu'\] is not in"),
        (stored(Apply("relu", ())), "relu has 0 inputs; expected 1"),
        (stored(Apply("add", (ACC, Constant(10**400)))), "a constant is 1000"),
        (stored(Apply("add", (ACC, Constant(True)))), "a constant is True; expected a number"),
        (stored(Apply("logical_not", (ACC,))), "input 0 of operation logical_not is a value"),
        (stored(Apply("where", (POSITIVE, POSITIVE, ACC))), r"input 1 of operation where is a condition \(gt\)"),
        (stored(ACC, BIAS), "output E does not depend on the accumulator"),
    ],
)
def test_other_ways_to_break_a_rule(tree, message):
    with pytest.raises(EpilogueError, match=message):
        validate(tree)


def test_the_list_as_text():
    text = describe_rules()
    for rule in RULES:
        assert f"{rule.name}: {rule.holds}\n  {rule.error.__name__}: {rule.example}\n  instead: {rule.instead}" in text
        assert rule.holds and rule.instead


# everything that is refused

LISTED = catalogue()


def names(error: type[EpilogueError]) -> set[str]:
    return {entry.what for entry in LISTED if entry.error is error}


def test_the_catalogue_has_all_tables():
    assert {"sum", "softmax", "matmul", "roll", "reshape", "cumsum", "sort"} <= names(ReductionError)
    assert {"dropout", "bool", "__iadd__", "__setitem__", "double", "divmod"} <= names(UnsupportedOperationError)
    assert {rule.name for rule in RULES} <= {entry.what for entry in LISTED if entry.when == "validated"}
    assert all(entry.why and entry.instead for entry in LISTED)
    assert all(bool(entry.group) == (entry.error is ReductionError) for entry in LISTED)


def is_pattern(entry: Refused) -> bool:
    return not entry.what.isidentifier()


@pytest.mark.parametrize(
    "entry", [entry for entry in LISTED if entry.when == "traced" and not is_pattern(entry)], ids=lambda e: e.what
)
def test_refusals_say_what_the_catalogue_says(entry):
    with pytest.raises(EpilogueError) as caught:
        refuse(entry.what)
    assert type(caught.value) is entry.error
    lines = str(caught.value).splitlines()
    assert f"  why: {entry.why}" in lines and f"  instead: {entry.instead}" in lines


def test_patterns_of_names():
    patterns = {entry.what: entry for entry in LISTED if is_pattern(entry)}
    assert len(patterns) >= 3
    with pytest.raises(ReductionError, match="conv7d communicates") as caught:
        refuse("conv7d")
    assert any(entry.why in str(caught.value) for entry in patterns.values())


def test_the_catalogue_as_text():
    text = describe()
    for entry in LISTED:
        assert entry.what in text and entry.why in text and entry.error.__name__ in text
    assert "call it on the GEMM's result" in text  # one entry for many functions
    assert any(line.startswith("  instead") and "torch.softmax" in line for line in text.splitlines())
    assert "{op}" not in text

"""Trees as data: identity, JSON, text, rules, pickling."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

import epilogues as ep
from epilogues import Aux, Column, EpilogueError, EpilogueTree, Kind, Row, builders, epilogue
from epilogues.errors import DtypeError, UnsupportedOperationError
from epilogues.tree import Accumulator, Apply, Cast, Constant, Operand, Store
from epilogues.validation import validate


@epilogue
def rich(acc, bias: Row, scale: Column[torch.float32], gate: Aux, other):
    z = (acc + bias) * scale
    extremes = ep.maximum(z, -float("inf")) + ep.minimum(z, -0.0) * float("nan")
    return {"D": ep.gelu(z).half() * gate, "preact": z.to(torch.bfloat16), "rest": extremes + other / 3}


def test_names_are_no_part_of_a_trees_identity():
    @epilogue
    def one(acc, bias: Row, other: Aux):
        return {"D": acc + bias, "e": acc * other}

    @epilogue
    def two(x0, c: Row, t: Aux):
        return {"D": x0 + c, "f": x0 * t}

    assert one.tree == two.tree and hash(one.tree) == hash(two.tree)
    assert one != two  # they are called differently


@pytest.mark.parametrize(
    "other",
    [
        lambda acc, bias, t: (acc + bias) * 3 + t,  # constant
        lambda acc, bias, t: (acc - bias) * 2 + t,  # operation
        lambda acc, bias, t: (bias + acc) * 2 + t,  # order
        lambda acc, bias, t: ((acc + bias) * 2 + t).half(),  # cast
        lambda acc, bias, t: (acc + t) * 2 + bias,  # which operand
        lambda acc, bias, t: {"D": (acc + bias) * 2 + t, "E": acc},  # outputs
    ],
)
def test_structure_is(other):
    tree = epilogue(lambda acc, bias, t: (acc + bias) * 2 + t).tree
    assert tree == epilogue(lambda acc, bias, t: (acc + bias) * 2 + t).tree
    assert tree != epilogue(other).tree


def test_operand_kinds_and_dtypes_are():
    def with_kind(kind):
        def f(acc, t):
            return acc + t

        f.__annotations__["t"] = kind
        return epilogue(f).tree

    kinds = [ep.Row, ep.Column, ep.Scalar, ep.Aux, ep.Row[torch.float32], ep.Row[torch.float16]]
    assert len({with_kind(kind) for kind in kinds}) == len(kinds)
    assert with_kind(ep.Row) == with_kind(ep.Row)


def test_signed_zeros_are_different_constants():
    tree = epilogue(lambda acc: acc * 0.0).tree
    assert tree != epilogue(lambda acc: acc * -0.0).tree
    assert epilogue(lambda acc: acc * float("nan")).tree == epilogue(lambda acc: acc * -float("nan")).tree


ALL = [rich.tree, builders.cast("f16", builders.train()).tree]
ALL += [make().tree for make in builders.SUITE.values()]


@pytest.mark.parametrize("tree", ALL, ids=repr)
def test_json_round_trip(tree):
    again = EpilogueTree.from_json(tree.to_json())
    assert again == tree and hash(again) == hash(tree)
    assert again.to_json() == tree.to_json()
    assert [op.name for op in again.operands] == [op.name for op in tree.operands]
    assert [op.dtype for op in again.operands] == [op.dtype for op in tree.operands]
    assert [store.name for store in again.outputs] == [store.name for store in tree.outputs]


def test_json_keeps_resolved_trees():
    tree = rich.tree.resolve({name: (Kind.ROW, "bf16") for name in rich.operands}, "f16")
    assert EpilogueTree.from_json(tree.to_json()) == tree != rich.tree


def change(**replacements):
    """The JSON of a small tree with parts replaced: ``node3={...}``, or a whole field."""
    data = json.loads(builders.bias_activation("leaky_relu").tree.to_json())
    for key, value in replacements.items():
        if key.startswith("node") and key != "nodes":
            data["nodes"][int(key[4:])].update(value)
        elif key == "output":
            data["outputs"][0].update(value)
        else:
            data[key] = value
    return json.dumps(data)


def test_the_small_tree_is_what_the_cases_below_think():
    data = json.loads(change())
    tags = [node.get("operation", node["node"]) for node in data["nodes"]]
    assert tags == ["accumulator", "operand", "add", "constant", "leaky_relu"]
    EpilogueTree.from_json(change())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", EpilogueError, "not JSON"),
        ("[" * 100_000, EpilogueError, "not JSON"),
        ("[]", EpilogueError, "expected a JSON object"),
        (change(version=2), EpilogueError, "expected a tree of version 1, got 2"),
        (change(nodes=None), EpilogueError, "expected nodes to be of type list, got None"),
        (change(nodes=[3]), EpilogueError, "node 0: expected a JSON object, got 3"),
        (change(nodes=[]), EpilogueError, "output 0: expected the index of an earlier node"),
        (change(node0={"node": "acc"}), EpilogueError, "node 0: expected accumulator, operand"),
        (change(node1={"kind": "diagonal"}), EpilogueError, "node 1: expected a kind among row, column"),
        (change(node1={"position": "0"}), EpilogueError, "node 1: expected position to be of type int"),
        (change(node1={"position": True}), EpilogueError, "node 1: expected position to be of type int"),
        (change(node1={"position": 1}), EpilogueError, r"positions \[1\]; expected each of 0 to 0 once"),
        (change(node1={"name": "a b"}), EpilogueError, "operand is named 'a b'"),
        (
            change(node1={"name": "weight"}),
            EpilogueError,
            "named 'weight', which is reserved; rename it, for example to 'scale'",
        ),
        (change(node1={"dtype": "f64"}), DtypeError, "operand bias has dtype 'f64'"),
        (change(node3={"value": "0.0.1"}), EpilogueError, "node 3: expected a number as float.hex writes it"),
        (change(node3={"value": 0.5}), EpilogueError, "node 3: expected value to be of type str, got 0.5"),
        (change(node4={"operation": "gelu"}), UnsupportedOperationError, "operation 'gelu' is not in"),
        (change(node4={"inputs": [2]}), EpilogueError, "leaky_relu has 1 inputs; expected 2"),
        (change(node4={"inputs": [2, 4]}), EpilogueError, "node 4: .*earlier node, 0 to 3, got 4"),
        (change(node2={"inputs": [0, 3]}), EpilogueError, "node 2: .*earlier node, 0 to 1, got 3"),
        (change(node4={"inputs": [-1, 3]}), EpilogueError, "earlier node, 0 to 3, got -1"),
        (change(node4={"node": "cast", "dtype": "f8"}), EpilogueError, "a cast has 1 input, got 2"),
        (change(node4={"node": "cast", "dtype": "f8", "inputs": [2]}), DtypeError, "cast has dtype 'f8'"),
        (change(outputs=[]), EpilogueError, "a tree without outputs"),
        (change(output={"name": "E"}), EpilogueError, "first output is called 'E'; expected 'D'"),
        (change(output={"name": 1}), EpilogueError, "output 0: expected name to be of type str"),
        (change(output={"value": 9}), EpilogueError, "output 0: expected the index"),
        (change(output={"dtype": "f8"}), DtypeError, "output D has dtype 'f8'"),
        (change(output={"value": 1}), EpilogueError, "output D does not depend on the accumulator"),
    ],
)
def test_malformed_json(text, error, message):
    with pytest.raises(EpilogueError, match=message) as caught:
        EpilogueTree.from_json(text)
    assert type(caught.value) is error


ACC, BIAS = Accumulator(), Operand("bias", Kind.ROW, 0)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((Store("D", ACC), Store("E", ACC), Store("E", ACC)), "2 outputs are named 'E'"),
        ((Store("D", ACC), Store("no name", ACC)), "an output is named 'no name'"),
        ((Store("D", Apply("add", (ACC, BIAS, BIAS))),), "add has 3 inputs; expected 2"),
        ((Store("D", Apply("sum", (ACC,))),), "operation 'sum' is not in the operation table"),
        ((Store("D", Cast(ACC, "int8")),), "cast has dtype 'int8'"),
        (
            (
                Store("D", Apply("add", (ACC, BIAS))),
                Store("E", Apply("mul", (ACC, Operand("t", Kind.AUX, 0)))),
            ),
            r"positions \[0, 0\]; expected each of 0 to 1 once",
        ),
        (
            (
                Store("D", Apply("add", (ACC, BIAS))),
                Store("E", Apply("mul", (ACC, Operand("bias", Kind.AUX, 1)))),
            ),
            "2 operands are named 'bias'",
        ),
        ((Store("D", Apply("add", (Constant(1.0), BIAS))),), "output D does not depend on the accumulator"),
    ],
)
def test_rules(outputs, message):
    with pytest.raises(EpilogueError, match=message):
        validate(EpilogueTree(outputs))


def test_text():
    lines = str(rich.tree).splitlines()
    assert lines[0].split() == ["%0", "=", "accumulator", ":", "f32", "#", lines[0].split("# ")[1]]
    assert __file__ in lines[0]
    text = "\n".join(line.split("#")[0].rstrip() for line in lines)
    for expected in (
        r"%1 = operand bias (row, 0)",
        r"operand scale (column, 1)",
        r"%2 = add(%0, %1)",
        r"gelu_erf(%4)",
        r"cast(%5, f16)",
        r"constant -inf",
        r"constant -0.0",
        r"constant nan",
        r"store D = %8",
    ):
        assert expected in text
    dtypes = {line.split(" : ")[0].strip(): line.split(" : ")[1] for line in text.splitlines()}
    assert dtypes["%1 = operand bias (row, 0)"] == "any"
    assert dtypes["%3 = operand scale (column, 1)"] == "f32"
    assert dtypes["%6 = cast(%5, f16)"] == "f16"
    assert dtypes["store D = %8"] == "default"
    assert [dtype for store, dtype in dtypes.items() if store.startswith("store preact")] == ["bf16"]


def test_text_of_a_tree_without_locations():
    assert "#" not in str(EpilogueTree.from_json(rich.tree.to_json()))


def same_values(one, two):
    acc, given = torch.randn(4, 6), {}
    for name, kind in rich.operands.items():
        shape = {Kind.ROW: (6,), Kind.COLUMN: (4,), Kind.AUX: (4, 6), Kind.AUTO: ()}[kind]
        given[name] = torch.randn(shape)
    left, right = one.reference(acc, **given), two.reference(acc, **given)
    return all(torch.equal(left[k].nan_to_num(), right[k].nan_to_num()) for k in left | right)


def test_pickled_epilogues():
    again = pickle.loads(pickle.dumps(rich))
    assert again == rich and hash(again) == hash(rich)
    assert (again.name, repr(again), again.outputs) == ("rich", repr(rich), rich.outputs)
    assert same_values(again, rich)
    for make in builders.SUITE.values():
        assert pickle.loads(pickle.dumps(make())) == make()


def test_copied_epilogues():
    assert copy.deepcopy(rich) == copy.copy(rich) == rich
    assert copy.deepcopy({"act": rich})["act"] == rich


def test_pickled_trees_hash_alike_in_another_process():
    hash(rich.tree)  # cached now, and must not be pickled: hashes of strings are salted
    code = (
        "import pickle, sys; tree = pickle.load(sys.stdin.buffer); "
        "fresh = type(tree).from_json(tree.to_json()); "
        "sys.exit(not (tree == fresh and hash(tree) == hash(fresh)))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    root = os.path.dirname(os.path.dirname(ep.__file__))
    child = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(rich.tree),
        env=environment,
        cwd=root,
        capture_output=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()
    assert copy.deepcopy(rich.tree) == rich.tree


def test_long_chains_are_pickled_and_copied():
    @epilogue
    def chain(acc, bias: Row):
        for i in range(5000):
            acc = acc * bias + i
        return acc

    again = pickle.loads(pickle.dumps(chain.tree))
    assert again == chain.tree and hash(again) == hash(chain.tree)
    assert [operand.name for operand in again.operands] == ["bias"]
    assert copy.deepcopy(chain.tree) == copy.copy(chain.tree) == chain.tree
    assert copy.deepcopy(chain.tree.outputs[0]).value is chain.tree.outputs[0].value
    assert pickle.loads(pickle.dumps(chain)) == chain


def test_trees_that_break_a_rule_are_pickled_too():
    tree = EpilogueTree((Store("D", Apply("sum", (ACC, BIAS)), "f64"),))
    assert pickle.loads(pickle.dumps(tree)) == tree


def test_trees_hold_short_dtype_names():
    with pytest.raises(DtypeError, match="cast has dtype 'float16'; expected one of f32, f16, bf16"):
        validate(EpilogueTree((Store("D", Cast(ACC, "float16")),)))
    resolved = builders.bias().tree.resolve({"bias": (Kind.ROW, "float16")}, "f16")
    assert resolved.operands[0].dtype == "f16"

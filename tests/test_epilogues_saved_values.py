"""What a backward reads, and the bytes it moves, counted by hand."""

import itertools

import pytest
import torch

import epilogues as ep
from epilogues import Aux, Column, Row, Scalar, builders, epilogue
from epilogues.gradients.saved_values import minimum_cut
from epilogues.tree import Accumulator, Apply, Constant, EpilogueTree, Kind, Operand, Store

M, N = 64, 32
MATRIX = M * N * 2  # bytes of a matrix of 16 bits
SIZES = {"m": M, "n": N, "dtype": torch.bfloat16}


def plan(case, **arguments):
    backward = case.backward(**{**SIZES, **arguments})
    return backward.saved, backward.added, backward.bytes_written, backward.bytes_read, backward.recomputed


def test_relu_reads_the_output_that_is_there():
    assert plan(builders.bias_activation("relu")) == (("D",), (), 0, MATRIX, 0)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "exp"])
def test_activations_with_a_derivative_by_their_output(name):
    assert plan(builders.bias_activation(name)) == (("D",), (), 0, MATRIX, 0)


def test_gelu_stores_what_goes_into_it():
    # acc would do as well, but then bias had to be read again
    assert plan(builders.bias_activation("gelu")) == (("saved_add",), ("saved_add",), MATRIX, MATRIX, 0)


def test_gelu_reads_the_preactivation_that_is_stored_anyway():
    assert plan(builders.train("gelu"), outputs=("D",)) == (("preact",), (), 0, MATRIX, 0)


def test_a_gate_is_read_and_the_activation_computed_again():
    # silu(z) for the gradient of the gate, silu'(z) and the gate for that of z
    assert plan(builders.gate("silu")) == (("saved_add",), ("saved_add",), MATRIX, 2 * MATRIX, 1)
    assert plan(builders.gate("silu"), needs=("gate",)) == (("saved_silu",), ("saved_silu",), MATRIX, MATRIX, 0)


def test_scaled_residual():
    # the gradient of scale needs acc, that of alpha acc * scale + bias, computed again
    read = MATRIX + 2 * 2 * N + 2
    assert plan(builders.scaled_residual()) == (("saved_acc",), ("saved_acc",), MATRIX, read, 2)
    # without those nothing but scale and alpha
    needs = ("accumulator", "bias", "residual")
    assert plan(builders.scaled_residual(), needs=needs) == ((), (), 0, 2 * N + 2, 0)


def test_the_dtype_in_which_values_are_stored_counts():
    case = builders.bias_activation("gelu")
    assert plan(case, save_dtype=torch.float32) == (("saved_add",), ("saved_add",), 2 * MATRIX, 2 * MATRIX, 0)
    assert plan(case, dtype=torch.float32)[2:4] == (2 * MATRIX, 2 * MATRIX)
    (*_, added) = case.backward(save_dtype=torch.float32).forward.tree.outputs
    assert (added.name, added.dtype) == ("saved_add", "f32")
    (*_, added) = case.backward().forward.tree.outputs
    assert added.dtype is None


def test_what_a_cast_has_rounded_is_stored_as_it_is():
    @epilogue
    def narrowed(acc):
        return ep.gelu(ep.cast(acc * 3, "f16") * 1.5)

    backward = narrowed.backward(dtype="f32", save_dtype="f32", m=M, n=N)
    # 3 and 1.5 are constants, so the product after the cast would do too, in 32 bits
    assert (backward.added, backward.bytes_written, backward.recomputed) == (("saved_cast",), MATRIX, 1)


def test_of_equally_cheap_values_the_one_that_leaves_least_to_compute():
    @epilogue
    def chain(acc):
        return ep.gelu(ep.square(acc * 2) * 3)

    # of acc, its double and so on: the derivatives of square and gelu need the double
    assert plan(chain) == (("saved_mul",), ("saved_mul",), MATRIX, MATRIX, 2)


def test_a_matrix_that_is_an_operand_is_read_rather_than_stored():
    @epilogue
    def two(acc, left: Aux, right: Aux):
        return ep.gelu(left * right) * acc

    # gelu'(left * right) * acc for left and right, gelu(left * right) for acc
    saved, added, written, read, _ = plan(two)
    assert (saved, added) == (("saved_acc",), ("saved_acc",))
    assert (written, read) == (MATRIX, 3 * MATRIX)
    assert plan(two, needs=("accumulator",)) == ((), (), 0, 2 * MATRIX, 2)


def test_storing_one_value_beats_reading_many():
    @epilogue
    def many(acc, p: Aux, q: Aux, r: Aux):
        return ep.gelu(acc + p + q + r)

    assert plan(many) == (("saved_add",), ("saved_add",), MATRIX, MATRIX, 0)


def test_an_output_is_read_rather_than_stored_again():
    acc = Accumulator()
    activation = Apply("gelu_erf", (Apply("add", (acc, Operand("p", Kind.AUX, 0))),))
    wide = ep.Epilogue.from_tree(EpilogueTree((Store("D", activation), Store("copy", acc, "f32"))))
    # acc + p stored: two accesses of 16 bits; acc read from the copy in 32 bits, and p: three
    assert plan(wide, outputs=("D",))[:2] == (("saved_add",), ("saved_add",))
    assert plan(wide, outputs=("D",), save_dtype="f32")[1:4] == ((), 0, 3 * MATRIX)


def test_extents_decide():
    @epilogue
    def outer(acc, p: Row, q: Column, r: Scalar):
        return acc * ep.exp(p * q * r)

    assert plan(outer, needs=("accumulator",)) == ((), (), 0, 2 * N + 2 * M + 2, 3)


def test_vectors_of_a_single_row():
    @epilogue
    def case(acc, p: Row):
        return ep.gelu(acc * p)

    assert plan(case, m=1, needs=("accumulator",))[3] == 2 * N + 2 * N  # p, and the product


def test_a_condition_is_not_stored():
    @epilogue
    def selected(acc, p: Row):
        return torch.where(acc * 2 > p, acc, p)

    saved, added, *_ = plan(selected)
    assert saved == added == ("saved_mul",)


# the cut


def brute_force(needed, costs):
    """The least that any set of nodes costs from which all needed ones can be computed."""
    nodes = {}
    stack = list(needed)
    while stack:
        node = stack.pop()
        nodes[id(node)] = node
        stack.extend(node.inputs)

    def computable(node, chosen):
        if id(node) in chosen or isinstance(node, Constant):
            return True
        return bool(node.inputs) and all(computable(child, chosen) for child in node.inputs)

    priced = [key for key in nodes if key in costs]
    subsets = itertools.chain.from_iterable(itertools.combinations(priced, k) for k in range(len(priced) + 1))
    fits = [chosen for chosen in map(set, subsets) if all(computable(node, chosen) for node in needed)]
    return min(sum(costs[key] for key in chosen) for chosen in fits)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_cheapest(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (), generator=generator))

    nodes = [Accumulator(), Operand("p", Kind.AUX, 0), Operand("q", Kind.ROW, 1), Constant(2.0)]
    for _ in range(7):
        nodes.append(Apply("add", (nodes[draw(len(nodes))], nodes[draw(len(nodes))])))
    costs = {id(node): 1 + draw(9) for node in nodes if not isinstance(node, Constant)}
    for node in nodes[4:]:
        if draw(4) == 0:
            del costs[id(node)]
    needed = [nodes[4 + draw(7)] for _ in range(3)]
    cut = minimum_cut(needed, costs)
    assert sum(costs[id(node)] for node in cut) == brute_force(needed, costs)
    assert len({id(node) for node in cut}) == len(cut)


def test_nothing_is_needed():
    assert minimum_cut([], {}) == ()
    assert minimum_cut([Apply("neg", (Constant(1.0),))], {}) == ()

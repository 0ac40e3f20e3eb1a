"""What a backward is besides its values: what is reduced outside, outputs, names, messages."""

import pickle

import pytest
import torch
from gemm_support import every_kind, resolved
from gradient_support import (  # noqa: F401
    AUTO,
    CASES,
    EXACT,
    INF,
    NAN,
    M,
    N,
    by_autograd,
    by_backward,
    grads_of,
    kinks,
    masked,
    of_operands,
    operands_of,
    seeded,
    several,
    shared,
    side_output,
    unannotated,
)

import epilogues as ep
from epilogues import Aux, Column, EpilogueError, Row, builders, epilogue
from epilogues.gradients.derivative import derivative
from epilogues.tree import Accumulator, Apply, Constant, EpilogueTree, Kind, Store
from epilogues.validation import validate
from gemm_ops.lowering.visitor import lower

# reductions


def test_what_is_reduced_outside():
    backward = every_kind.backward()
    found = {gradient.target: gradient.over for gradient in backward.reduce_outside}
    assert found == {"scale": ("M",), "offset": ("N",), "alpha": ("M", "N")}
    (one,) = backward.passes
    stores = {store.name: store for store in one.epilogue.tree.outputs}
    for gradient in one.gradients:
        expected = "f32" if gradient.over else None
        assert stores[gradient.output].dtype == expected
    assert [gradient.target for gradient in one.gradients] == ["accumulator", "scale", "offset", "alpha", "residual"]


def test_the_bias_gradient_is_the_sum_of_the_accumulators():
    backward = builders.bias_activation("gelu").backward()
    (one,) = backward.passes
    assert one.epilogue.outputs == ("D",)
    assert [(g.target, g.output, g.over) for g in one.gradients] == [("accumulator", "D", ()), ("bias", "D", ("M",))]
    assert str(backward.reduce_outside[0]) == "bias: output D, summed over M"


def test_a_gradient_is_stored_once():
    @epilogue
    def sums(acc, p: Row, q: Row, column: Column, r: Aux, s: Aux):
        return acc + p + q + column + r + s

    (one,) = sums.backward().passes
    assert one.epilogue.outputs == ("D",)
    assert {g.output for g in one.gradients} == {"D"}
    # an operand that is fixed to another dtype has an output of that dtype

    @epilogue
    def fixed(acc, r: Aux[torch.float32], s: Aux[torch.float32]):
        return acc + r + s

    (one,) = fixed.backward().passes
    assert [(s.name, s.dtype) for s in one.epilogue.tree.outputs] == [("D", None), ("grad_r", "f32")]
    (one,) = fixed.backward(dtype=torch.float32).passes
    assert one.epilogue.outputs == ("D",)


def test_terms_are_summed_in_float32():
    acc, grad = torch.zeros(5000, 2), torch.ones(5000, 2, dtype=torch.bfloat16)
    for dtype, expected in ((torch.float32, 5000.0), (torch.bfloat16, 4992.0)):  # rounded once, to a multiple of 32
        found = builders.bias().backward().gradients(grad, acc, {"bias": torch.zeros(2, dtype=dtype)})
        assert found["bias"].dtype == dtype
        assert found["bias"].tolist() == [expected, expected]


def test_operands_without_annotation_are_summed_by_their_shape():
    backward = unannotated.backward()
    assert all(gradient.over is None for gradient in backward.reduce_outside)
    assert {gradient.target for gradient in backward.reduce_outside} == set(AUTO)


def test_a_python_number_has_a_gradient_too():
    acc, grad = torch.randn(M, N), torch.randn(M, N)
    operands = {**operands_of(builders.scaled_residual().tree, dtype=torch.float32), "alpha": 0.5}
    found = by_backward(builders.scaled_residual().backward(), acc, operands, {"D": grad})
    z = acc * operands["scale"] + operands["bias"]
    torch.testing.assert_close(found["alpha"], (grad * z).sum())
    assert found["alpha"].shape == ()


@pytest.mark.parametrize("column", [(M,), (M, 1)])
def test_gradients_have_the_operands_shapes(column):
    tree = builders.dequantize("silu").tree
    acc, grad = torch.randn(M, N), torch.randn(M, N)
    operands = {"row_scale": torch.randn(column), "col_scale": torch.randn(1, N), "bias": torch.randn(N)}
    actual = by_backward(derivative(tree), acc, operands, {"D": grad})
    expected = by_autograd(tree, acc, operands, {"D": grad})
    for key, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[key])


# zeros, several outputs, names


def test_gradients_that_are_zero():
    backward = masked.backward()
    assert backward.zero == ("mask",)
    acc, operands = torch.randn(M, N), operands_of(masked.tree, dtype=torch.float32)
    found = by_backward(backward, acc, operands, {"D": torch.randn(M, N)})
    assert torch.equal(found["mask"], torch.zeros(M, N))

    flat = epilogue(lambda acc, bias: ep.sign(acc) + ep.floor(bias) * ep.round(acc), name="flat").backward()
    assert flat.zero == ("accumulator", "bias")
    assert flat.passes == flat.reduce_outside == ()
    assert flat.forward.outputs == ("D",)
    found = flat.gradients(torch.ones(M, N), torch.ones(M, N), {"bias": 2.0})
    assert torch.equal(found["accumulator"], torch.zeros(M, N))
    assert found["bias"] == 0


def test_outputs_that_d_has_nothing_to_do_with_have_a_pass_of_their_own():
    backward = side_output.backward()
    assert [one.gradient_of for one in backward.passes] == ["D", "side"]
    first, second = backward.passes
    assert [g.target for g in first.gradients] == ["accumulator", "bias"]
    assert [(g.target, g.output, g.over) for g in second.gradients] == [
        ("extra", "D", ()),
        ("factor", "grad_factor", ("M", "N")),
    ]
    assert ("grad_side", "gradient", "side") in [(s.operand, s.role, s.name) for s in first.sources]
    # of D alone, the others are zero
    only = side_output.backward(outputs=("D",))
    assert only.zero == ("extra", "factor")
    assert [one.gradient_of for one in only.passes] == ["D"]


def test_only_what_is_needed():
    backward = side_output.backward(needs=("bias",))
    (one,) = backward.passes
    assert [(g.target, g.output, g.over) for g in one.gradients] == [("bias", "D", ("M",))]
    assert backward.saved == ("D",)
    assert side_output.backward(needs=["factor"]).passes[0].gradient_of == "side"
    acc, operands = torch.randn(M, N), operands_of(side_output.tree, dtype=torch.float32)
    grads = grads_of(side_output.tree, acc.shape, torch.float32)
    found = by_backward(backward, acc, operands, grads)
    assert list(found) == ["bias"]
    torch.testing.assert_close(found["bias"], by_autograd(side_output.tree, acc, operands, grads)["bias"])


def test_names_do_not_collide():
    @epilogue
    def awkward(acc, saved_acc: Row, grad_D: Aux, grad_preact: Row, saved_D: Aux):
        z = acc + saved_acc
        return {"D": ep.exp(acc) - saved_D, "preact": ep.silu(z) * grad_preact, "grad_D": ep.exp(acc) + grad_D}

    acc, operands = torch.randn(M, N, dtype=torch.float64), operands_of(awkward.tree)
    grads = grads_of(awkward.tree, acc.shape)
    backward = awkward.backward()
    names = [source.operand for one in backward.passes for source in one.sources]
    assert {"saved_acc", "grad_preact_2", "grad_grad_D", "saved_acc_2"} <= set(names)
    assert backward.added == ("saved_acc_2",)

    @epilogue
    def reads_d(acc, saved_D: Aux):
        return {"D": ep.exp(acc), "scaled": ep.exp(acc) * saved_D}

    assert [s.operand for s in reads_d.backward().passes[0].sources] == ["saved_D", "saved_D_2", "grad_scaled"]
    acc, operands = torch.randn(M, N, dtype=torch.float64), operands_of(awkward.tree)
    actual = by_backward(backward, acc, operands, grads, **EXACT)
    expected = by_autograd(awkward.tree, acc, operands, grads, **EXACT)
    for key, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[key])


# the trees


@pytest.mark.parametrize("name", CASES)
def test_backward_trees_are_valid_and_can_be_lowered(name):
    case = CASES[name]
    if any(kind is Kind.AUTO for kind in case.operands.values()):
        tree = case.tree.resolve({key: (kind, "bf16") for key, kind in AUTO.items()}, "bf16")
    else:
        tree = case.tree
    backward = derivative(tree)
    assert backward.trees
    for made in (backward.forward, *(one.epilogue for one in backward.passes)):
        validate(made.tree)
        assert EpilogueTree.from_json(made.tree.to_json()) == made.tree
        for family in ("sm90", "sm80"):
            assert lower(resolved(made), family).root


def test_the_forward_keeps_its_outputs():
    backward = builders.bias_activation("gelu").backward()
    acc, bias = torch.randn(M, N), torch.randn(N)
    outputs = backward.forward.reference(acc, bias=bias)
    assert torch.equal(outputs["D"], builders.bias_activation("gelu").reference(acc, bias=bias))
    assert torch.equal(outputs["saved_add"], acc + bias)
    relu = builders.bias_activation("relu")
    assert relu.backward().forward is relu


def test_a_hand_made_tree_with_equal_nodes():
    """Nodes that are equal and not one object, of which a traced tree has none."""
    relu = [Apply("relu", (Apply("add", (Accumulator(), Constant(1.0))),)) for _ in range(2)]
    tree = EpilogueTree((Store("D", Apply("mul", tuple(relu))),))
    acc, grad = torch.randn(M, N), torch.randn(M, N)
    found = by_backward(derivative(tree), acc, {}, {"D": grad})
    torch.testing.assert_close(found["accumulator"], grad * 2 * torch.relu(acc + 1))


def test_the_users_lines_are_kept():
    nodes = builders.SUITE["gate"]().backward().trees[0].nodes
    assert any(node.location is not None for node in nodes if isinstance(node, Apply))
    tree = shared.backward().trees[0]
    lines = {node.location.text for node in tree.nodes if isinstance(node, Apply) and node.location}
    assert "y = ep.silu(z)" in lines


def test_results_can_be_pickled_compared_and_printed():
    backward = side_output.backward()
    assert pickle.loads(pickle.dumps(backward)) == backward
    assert str(builders.bias_activation("gelu").backward()) == (
        "forward: D, saved_add (stored for the backward)\n"
        "backward from the gradient of D, reading saved_add:\n"
        "  accumulator: output D\n"
        "  bias: output D, summed over M"
    )
    assert str(masked.backward(needs=("mask",))) == "forward: D\nzero: mask"


def test_passes_can_be_called_with_their_operands():
    backward = several.backward()
    acc, operands = torch.randn(M, N), operands_of(several.tree, dtype=torch.float32)
    grads = grads_of(several.tree, acc.shape, torch.float32)
    outputs = backward.forward.reference(acc, **operands)
    expected = backward.gradients(grads, outputs, operands)
    first, second = backward.passes
    assert second.gradient_of == "mixed"
    for one, target in ((first, "accumulator"), (second, "other")):
        results = one.epilogue(grads[one.gradient_of], **one.operands(grads, outputs, operands))
        results = {"D": results} if isinstance(results, torch.Tensor) else results
        assert torch.equal(results["D"], expected[target])


def test_gradients_work_without_grad_mode():
    with torch.no_grad():
        found = (
            builders.bias_activation("relu")
            .backward()
            .gradients(torch.ones(M, N), torch.ones(M, N), {"bias": torch.zeros(N)})
        )
    assert torch.equal(found["bias"], torch.full((N,), float(M)))


# what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"needs": ("gate",)}, r"needs: expected names out of accumulator, bias; got 'gate'"),
        ({"needs": "bias"}, r"needs: expected several names, such as \('bias',\), got the text 'bias'"),
        ({"needs": ()}, r"needs: expected names out of accumulator, bias; got no name"),
        ({"outputs": ("preact",)}, r"outputs: expected names out of D; got 'preact'"),
        ({"m": 0}, r"m: expected a positive int, got 0"),
        ({"n": 2.5}, r"n: expected a positive int, got 2.5"),
        ({"dtype": torch.int8}, r"dtype torch.int8 has no place"),
        ({"save_dtype": torch.float64}, r"dtype torch.float64 has no place"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(EpilogueError, match=message):
        builders.bias_activation("gelu").backward(**arguments)


def test_other_refusals():
    with pytest.raises(EpilogueError, match="expected an Epilogue or an EpilogueTree, got function"):
        derivative(lambda acc: acc)
    with pytest.raises(EpilogueError, match="an operand is named 'accumulator'"):
        epilogue(lambda acc, accumulator: acc + accumulator).backward()
    backward = builders.bias_activation("gelu").backward()
    bias, grad = {"bias": torch.zeros(N)}, torch.zeros(M, N)
    with pytest.raises(EpilogueError, match="missing output of the forward saved_add, which the backward needs; got D"):
        backward.gradients(grad, grad, bias)
    with pytest.raises(EpilogueError, match="missing gradient of output D, which the backward needs; got nothing"):
        backward.gradients({}, {"saved_add": grad}, bias)
    with pytest.raises(EpilogueError, match="missing operand bias"):
        backward.gradients(grad, {"saved_add": grad}, {})


def test_gradients_that_are_refused():
    backward = builders.bias_activation("gelu").backward()
    acc, operands = torch.randn(M, N), {"bias": torch.zeros(N)}
    saved = backward.forward.reference(acc, **operands)
    grad = torch.ones(M, N)
    with pytest.raises(EpilogueError, match="needs: expected several names, got int 3"):
        builders.bias_activation("gelu").backward(needs=3)
    with pytest.raises(EpilogueError, match=r"grads: expected a dict .* got NoneType None"):
        backward.gradients(None, saved, operands)
    with pytest.raises(EpilogueError, match=r"saved: expected a dict .* got NoneType None"):
        backward.gradients(grad, None, operands)
    with pytest.raises(EpilogueError, match="missing operand bias, which the backward needs; got nothing"):
        backward.gradients(grad, saved, None)
    with pytest.raises(EpilogueError, match="operands: expected a dict from names to tensors, got Tensor"):
        backward.gradients(grad, saved, operands["bias"])
    with pytest.raises(EpilogueError, match="grads: unknown output E; expected names out of D"):
        backward.gradients({"D": grad, "E": grad}, saved, operands)
    with pytest.raises(EpilogueError, match="operands: unknown operand gate; expected names out of bias"):
        backward.gradients(grad, saved, {**operands, "gate": grad})
    with pytest.raises(EpilogueError, match=r"gradient of output D: expected a tensor of shape .*, got 'ones'"):
        backward.gradients({"D": "ones"}, saved, operands)


def test_operands_of_a_pass_are_told_in_the_users_words():
    @epilogue
    def made(acc):
        return {"D": ep.tanh(acc), "pre": acc * 2}

    backward = made.backward()
    assert {source.operand for source in backward.passes[0].sources} == {"saved_D", "grad_pre"}
    acc, grad = torch.randn(M, N), torch.ones(M, N)
    saved = backward.forward.reference(acc)
    with pytest.raises(EpilogueError, match=r"^gradient of output pre: expected shape \(6, 5\), .* got \(5,\)"):
        backward.gradients({"D": grad, "pre": grad[0]}, saved)
    with pytest.raises(EpilogueError, match=r"^output D of the forward: expected shape \(6, 5\), .* got \(5,\)"):
        backward.gradients({"D": grad, "pre": grad}, {**saved, "D": saved["D"][0]})
    with pytest.raises(EpilogueError, match=r"^gradient of output pre: dtype torch.float64"):
        backward.gradients({"D": grad, "pre": grad.double()}, saved)
    with pytest.raises(EpilogueError, match=r"^output D of the forward: dtype torch.int64"):
        backward.gradients({"D": grad, "pre": grad}, {**saved, "D": saved["D"].long()})


def test_no_gradient_counts_as_zeros():
    backward = several.backward()
    acc, operands = torch.randn(M, N), operands_of(several.tree, dtype=torch.float32)
    grads = grads_of(several.tree, acc.shape, torch.float32)
    outputs = backward.forward.reference(acc, **operands)
    for names in (("D",), ("preact", "mixed"), ("D", "preact", "mixed")):
        given = {name: None if name in names else grad for name, grad in grads.items()}
        zeros = {name: torch.zeros_like(grads[name]) if name in names else grads[name] for name in grads}
        actual, expected = (backward.gradients(g, outputs, operands) for g in (given, zeros))
        assert all(torch.equal(actual[key], expected[key]) for key in expected)

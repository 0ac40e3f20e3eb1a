"""Derivatives of epilogues against PyTorch's autograd of their reference, and against finite differences."""

import math
import pickle

import pytest
import test_operations as table
import torch
from gemm_support import every_kind, resolved
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, Column, EpilogueError, Row, Scalar, builders, epilogue
from epilogues.functions.apply import one_function
from epilogues.gradients.derivative import derivative
from epilogues.operations import OPERATIONS
from epilogues.reference import evaluate
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store
from epilogues.validation import validate
from gemm_ops.lowering.visitor import lower

INF, NAN = math.inf, math.nan
M, N = 6, 5
EXACT = {"compute_dtype": torch.float64, "keep_casts": False}


@epilogue
def shared(acc, scale: Row, residual: Aux):
    z = acc * scale
    y = ep.silu(z)
    return y * z + ep.tanh(y) * residual + z / (1 + ep.abs(residual))


@epilogue
def several(acc, bias: Row, column: Column, other: Aux):
    z = acc + bias
    return {"D": ep.gelu(z) * column, "preact": z, "mixed": ep.sigmoid(z * other)}


@epilogue
def side_output(acc, bias: Row, extra: Aux, factor: Scalar):
    """``extra`` and ``factor`` feed the second output only."""
    return {"D": ep.relu(acc + bias), "side": ep.tanh(acc * factor) + extra}


@epilogue
def kinks(acc, low: Row, high: Column, slope: Scalar, other: Aux):
    z = ep.clamp(acc, low, 3.0) + ep.relu(acc) + ep.abs(other)
    y = ep.maximum(z, other) + ep.minimum(acc, high)
    return torch.where(y > low, y, slope * y) + ep.leaky_relu(acc, slope)


@epilogue
def unannotated(acc, scale, bias, alpha, residual):
    return (acc * scale + bias) * alpha + residual * acc


@epilogue
def masked(acc, mask: Aux, bias: Row):
    return torch.where(mask > 0, acc + bias, 0.0) + ep.sign(acc) * ep.floor(bias)


@epilogue
def of_operands(acc, p: Row, q: Row, column: Column):
    """What operands alone are computed with, before they meet the accumulator."""
    return acc * ep.exp(p * q) + ep.square(column) * p


CASES = {name: make() for name, make in builders.SUITE.items()}
CASES |= {f.name: f for f in (shared, several, side_output, kinks, unannotated, masked, of_operands, every_kind)}
CASES |= {name: builders.bias_activation(name) for name in builders.ACTIVATIONS}

#: Of AUTO operands, what the tests give.
AUTO = {"scale": Kind.ROW, "bias": Kind.COLUMN, "alpha": Kind.SCALAR, "residual": Kind.AUX}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def operands_of(tree, m_shape=(M,), n=N, dtype=torch.float64):
    shapes = {Kind.ROW: (n,), Kind.COLUMN: m_shape, Kind.SCALAR: (1,), Kind.AUX: (*m_shape, n)}
    kinds = {op.name: AUTO[op.name] if op.kind is Kind.AUTO else op.kind for op in tree.operands}
    return {name: torch.randn(shapes[kind], dtype=torch.float64).to(dtype) for name, kind in kinds.items()}


def grads_of(tree, shape, dtype=torch.float64):
    return {store.name: torch.randn(shape, dtype=torch.float64).to(dtype) for store in tree.outputs}


def by_autograd(tree, acc, operands, grads, **how):
    """Gradients by name as PyTorch has them, of the reference; zeros where there are none."""
    leaves = {"accumulator": acc, **operands}
    leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    given = {name: leaf for name, leaf in leaves.items() if name != "accumulator"}
    outputs = evaluate(tree, leaves["accumulator"], given, **how)
    used = [name for name in grads if outputs[name].requires_grad]
    found = torch.autograd.grad(
        [outputs[name] for name in used],
        list(leaves.values()),
        [grads[name] for name in used],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True))


def by_backward(backward, acc, operands, grads, **how):
    outputs = evaluate(backward.forward.tree, acc, operands, **how)
    return backward.gradients(grads, outputs, operands, **how)


@pytest.mark.parametrize("m_shape", [(M,), (2, 3), (1,), (0,)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_in_float64(name, m_shape):
    tree = CASES[name].tree
    acc, operands = torch.randn(*m_shape, N, dtype=torch.float64), operands_of(tree, m_shape)
    grads = grads_of(tree, acc.shape)
    actual = by_backward(CASES[name].backward(), acc, operands, grads, **EXACT)
    expected = by_autograd(tree, acc, operands, grads, **EXACT)
    assert actual.keys() == expected.keys()
    for key, gradient in actual.items():
        assert gradient.shape == expected[key].shape
        assert gradient.dtype == torch.float64
        rtol = 1e-6 if name == "hardsigmoid" else 1e-12  # PyTorch's 1/6 is that of float32
        torch.testing.assert_close(gradient, expected[key], rtol=rtol, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_float32(name):
    tree = CASES[name].tree
    acc = torch.randn(M, N)
    operands, grads = operands_of(tree, dtype=torch.float32), grads_of(tree, acc.shape, torch.float32)
    actual = by_backward(CASES[name].backward(), acc, operands, grads)
    expected = by_autograd(tree, acc, operands, grads)
    for key, gradient in actual.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-5, equal_nan=True)


#: Rounding moves values across the kinks of these.
KINKS = ("kinks", "masked", "hardshrink", "softshrink", "leaky_relu", "relu6", "hardtanh")


@pytest.mark.parametrize("name", [name for name in CASES if name not in KINKS])
def test_gradients_in_bfloat16_are_near_those_of_float64(name):
    """Saved values, incoming gradients and stored gradients all rounded to bfloat16."""
    tree = CASES[name].tree
    acc = torch.randn(M, N)
    operands, grads = operands_of(tree, dtype=torch.bfloat16), grads_of(tree, acc.shape, torch.bfloat16)
    backward = CASES[name].backward()
    outputs = evaluate(backward.forward.tree, acc, operands, out_dtype=torch.bfloat16)
    assert all(outputs[key].dtype == torch.bfloat16 for key in backward.added)
    actual = backward.gradients(grads, outputs, operands)
    wide = {key: value.double() for key, value in operands.items()}
    expected = by_autograd(tree, acc.double(), wide, {k: g.double() for k, g in grads.items()}, **EXACT)
    for key, gradient in actual.items():
        assert gradient.dtype == torch.bfloat16
        scale = expected[key].nan_to_num().abs().max().item() + 1e-3
        torch.testing.assert_close(gradient.double(), expected[key], rtol=0.05, atol=0.05 * scale, equal_nan=True)


@pytest.mark.parametrize("name", ["shared", "several", "of_operands", "bias_gelu", "gate", "dequant", "residual"])
def test_gradients_are_those_of_finite_differences(name):
    tree = CASES[name].tree
    acc, operands = torch.randn(M, N, dtype=torch.float64), operands_of(tree)
    grads = grads_of(tree, acc.shape)
    found = by_backward(CASES[name].backward(), acc, operands, grads, **EXACT)

    def weighted(values):
        given = {key: value for key, value in values.items() if key != "accumulator"}
        outputs = evaluate(tree, values["accumulator"], given, **EXACT)
        return sum((outputs[key] * grads[key]).sum() for key in grads)

    point, step = {"accumulator": acc, **operands}, 1e-6
    for key, gradient in found.items():
        direction = torch.randn_like(point[key])
        above = weighted({**point, key: point[key] + step * direction})
        below = weighted({**point, key: point[key] - step * direction})
        torch.testing.assert_close((gradient * direction).sum(), (above - below) / (2 * step), rtol=1e-6, atol=1e-7)


# every row of the table


def row_tree(row):
    """D = row(acc, v0, v1); where the first input is a condition, that of the accumulator."""
    leaves: list[Node] = [Accumulator(), *(Operand(f"v{i}", Kind.AUX, i) for i in range(row.arity - 1))]
    leaves = [Apply("gt", (x, Constant(0.0))) if i in row.conditions else x for i, x in enumerate(leaves)]
    node: Node = Apply(row.name, tuple(leaves))
    if row.result == "condition":
        node = Apply("where", (node, Constant(1.5), Constant(-0.5)))
    return EpilogueTree((Store("D", node),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_row(name, dtype):
    tree = row_tree(OPERATIONS[name])
    low, high = table.DOMAIN.get(name, (-3, 3))
    acc, *rest = (torch.rand(40, 3, dtype=torch.float64) * (min(high, 3) - low) + low for _ in range(3))
    operands = {op.name: value.to(dtype) for op, value in zip(tree.operands, rest, strict=False)}
    how = EXACT if dtype == torch.float64 else {}
    acc, grads = acc.to(dtype), grads_of(tree, acc.shape, dtype)
    actual = by_backward(derivative(tree), acc, operands, grads, **how)
    expected = by_autograd(tree, acc, operands, grads, **how)
    for key, gradient in actual.items():
        keep = torch.isfinite(expected[key])  # the reference of softplus and the like leaks NaN
        assert keep.any()
        rtol = 1e-6 if dtype == torch.float64 else 1e-3
        torch.testing.assert_close(gradient[keep], expected[key][keep], rtol=rtol, atol=1e-2 * rtol)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_rows_without_derivative_are_zero(name):
    row = OPERATIONS[name]
    backward = derivative(row_tree(row))
    if row.result == "condition" or row.conditions:
        assert "accumulator" in backward.zero
        return
    targets = ["accumulator", "v0", "v1"][: row.arity]
    zero = [target for target, rule in zip(targets, row.derivatives, strict=True) if rule is None]
    assert list(backward.zero) == zero
    found = {gradient.target for one in backward.passes for gradient in one.gradients}
    assert found == set(targets) - set(zero)


#: PyTorch composes these of several functions, whose gradients are infinity - infinity where the incoming one is.
COMPOSED = ("quick_gelu", "softsign", "tanhshrink")


#: With respect to a parameter of F.softplus and the like PyTorch has no gradient; the reference's is finite at best.
EDGES = [
    (name, position, incoming)
    for name, position in table.DIFFERENTIABLE
    for incoming in (1.0, -2.5, 0.0, INF, -INF, NAN)
    if not (name in COMPOSED and math.isinf(incoming))
    if not ((name, position) in table.LEAKS and not math.isfinite(incoming))
]


@pytest.mark.parametrize(("name", "position", "incoming"), EDGES)
def test_every_row_on_edge_values_and_with_gradients_that_are_not_finite(name, position, incoming):
    row = OPERATIONS[name]
    inputs = table.inputs_of(row, table.POINTS)
    tree = row_tree(row)
    target = "accumulator" if position == 0 else f"v{position - 1}"
    # a condition is that of the accumulator, so that goes in as a value
    values = [x.double()[None] for x in inputs]
    operands = {f"v{i}": value for i, value in enumerate(values[1:])}
    grad = torch.full_like(values[0], incoming)
    backward = derivative(tree, needs=(target,))
    actual = by_backward(backward, values[0], operands, {"D": grad}, **EXACT)[target][0]

    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    if name in table.PARAMETERS and position == 0:
        parts = [table.EXPECTED[name](x.repeat(8), *rest)[0] for x, *rest in zip(*leaves, strict=True)]
        output = torch.stack(parts)
    else:
        output = row.reference(*leaves) if name in table.PARAMETERS else table.EXPECTED[name](*leaves)
    (expected,) = torch.autograd.grad(output, leaves[position], grad[0])

    keep = torch.ones_like(expected, dtype=torch.bool)
    if (name, position) in table.LEAKS:
        keep = torch.stack([torch.isfinite(x) for x in inputs]).all(0) & torch.isfinite(expected)
    if name in table.UNSETTLED_AT_NAN:
        keep &= ~torch.isnan(inputs[0])
    if name == "remainder":  # PyTorch's vectorised fmod gives up where the quotient overflows
        keep &= torch.isfinite(inputs[0] / inputs[1]) | (inputs[1] == 0)
    if (name, position, incoming) == ("xlogy", 1, 0.0):  # 0 * (x / y), or (0 * x) / y, where x / y overflows
        keep &= torch.isfinite(inputs[0] / inputs[1])
    torch.testing.assert_close(actual[keep], expected[keep], rtol=1e-6, atol=1e-10, equal_nan=True)


def test_a_selection_by_the_user_multiplies():
    """Only the derivative's own selections take the gradient in: autograd multiplies by the user's."""

    @epilogue
    def selected(acc, other: Aux):
        return acc * torch.where(other > 0, 2.0, 0.0)

    acc = torch.randn(M, N, dtype=torch.float64)
    operands, grads = operands_of(selected.tree), {"D": torch.full((M, N), INF, dtype=torch.float64)}
    actual = by_backward(selected.backward(), acc, operands, grads, **EXACT)
    assert torch.isnan(actual["accumulator"]).any()
    assert torch.isinf(actual["accumulator"]).any()
    expected = by_autograd(selected.tree, acc, operands, grads, **EXACT)
    torch.testing.assert_close(actual["accumulator"], expected["accumulator"], equal_nan=True)


@pytest.mark.parametrize("incoming", [INF, -INF, NAN])
def test_masks_hold_back_gradients_that_are_not_finite(incoming):
    @epilogue
    def kept(acc, mask: Aux):
        z = torch.where(mask > 0, acc, 0.0)
        return ep.relu(z) + ep.clamp(acc, -1.0, 1.0) + ep.maximum(acc, mask)

    acc = torch.tensor([[0.5, -0.5, 2.0, -2.0, 0.0, -0.0, NAN, INF, 1.0]], dtype=torch.float64)
    acc = acc.repeat(2, 1)
    mask = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, acc.shape[1]).contiguous()
    grads = {"D": torch.full_like(acc, incoming)}
    actual = by_backward(kept.backward(), acc, {"mask": mask}, grads, **EXACT)
    expected = by_autograd(kept.tree, acc, {"mask": mask}, grads, **EXACT)
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], equal_nan=True)


# casts


@epilogue
def casts(acc, bias: Row, residual: Aux):
    z = (acc + bias).to(torch.bfloat16)
    return ep.relu(z.float() * 1.7).half() + residual.to(torch.bfloat16)


@epilogue
def cast_at_the_root(acc, residual: Aux):
    return {"D": ep.cast(acc, "bf16") + residual, "narrow": (acc * residual).half()}


@pytest.mark.parametrize("case", [casts, cast_at_the_root], ids=lambda case: case.name)
def test_gradients_of_casts_are_rounded_as_by_autograd(case):
    acc = torch.randn(M, N)
    operands = operands_of(case.tree, dtype=torch.float32)
    dtypes = {store.name: torch.float16 if store.name == "narrow" else torch.float32 for store in case.tree.outputs}
    grads = {name: torch.randn(M, N).to(dtype) for name, dtype in dtypes.items()}
    backward = case.backward(save_dtype="f32")
    actual = by_backward(backward, acc, operands, grads)
    expected = by_autograd(case.tree, acc, operands, grads)
    for key in ("accumulator", "residual"):
        assert torch.equal(actual[key], expected[key])
        assert actual[key].dtype == torch.float32
    unrounded = by_autograd(case.tree, acc, operands, grads, keep_casts=False)
    assert not torch.equal(unrounded["accumulator"], expected["accumulator"])


def test_a_cast_of_the_gradient_does_not_choose_the_outputs_dtype():
    tree = cast_at_the_root.backward(needs=("accumulator",), outputs=("D",)).trees[0]
    assert [EpilogueTree.output_dtype(store, "default") for store in tree.outputs] == ["default"]
    assert any(isinstance(node, Cast) and node.dtype == "bf16" for node in tree.nodes)


def test_gradients_of_casts_of_rows_are_rounded_after_the_sum_or_not_at_all():
    @epilogue
    def narrow_bias(acc, bias: Row):
        return acc + bias.to(torch.bfloat16)

    acc, grad, bias = torch.randn(400, N), torch.randn(400, N), torch.randn(N)
    backward = narrow_bias.backward()
    assert not any(isinstance(node, Cast) for node in backward.trees[0].nodes)
    actual = by_backward(backward, acc, {"bias": bias}, {"D": grad})["bias"]
    torch.testing.assert_close(actual, grad.sum(0))
    rounded = by_autograd(narrow_bias.tree, acc, {"bias": bias}, {"D": grad})["bias"]
    assert torch.equal(actual.bfloat16().float(), rounded)


def test_a_gradient_is_not_rounded_twice():
    narrow = builders.bias_activation("silu").with_compute_dtype(torch.bfloat16)
    backward = narrow.backward()
    tree = backward.trees[0]
    assert not any(isinstance(node, Cast) and isinstance(node.value, Cast) for node in tree.nodes)
    assert [store.name for store in tree.outputs] == ["D"]  # that of the bias is the same
    acc = torch.randn(M, N).bfloat16()
    operands, grads = operands_of(narrow.tree, dtype=torch.bfloat16), grads_of(narrow.tree, acc.shape, torch.bfloat16)
    actual = by_backward(backward, acc, operands, grads)
    expected = by_autograd(narrow.tree, acc, operands, grads)
    torch.testing.assert_close(actual["accumulator"], expected["accumulator"], rtol=0, atol=0)


def test_eager_rounding_of_a_resolved_tree_rounds_gradients_after_every_operation():
    unresolved = builders.gate("silu").with_rounding("eager")
    tree = resolved(unresolved)
    acc = torch.randn(M, N).bfloat16()
    operands = operands_of(tree, dtype=torch.bfloat16)
    grads = grads_of(tree, acc.shape, torch.bfloat16)
    backward = derivative(tree, needs=("accumulator", "gate"))
    outputs = evaluate(backward.forward.tree, acc, operands)
    plain = evaluate(unresolved.tree, acc, operands)
    assert torch.equal(outputs["D"], plain["D"])
    actual = backward.gradients(grads, outputs, operands)
    expected = by_autograd(unresolved.tree, acc, operands, grads)
    for key, gradient in actual.items():
        assert torch.equal(gradient, expected[key])
    assert all(one.epilogue.tree.rounding == "once" for one in backward.passes)


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


# infinities


EDGES = torch.tensor([[INF, -INF, 0.0, -0.0, 2.0, -3.0, 0.3, -0.3, NAN, 1e-12, 1e12]])
#: text -> a function of PyTorch, several operations here
ONE_FUNCTION = {
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none", delta=2.5),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "smooth_l1_loss, beta": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "x ** -2": lambda x, y: (x - y) ** -2,
    "x ** -1": lambda x, y: (x - y) ** -1,
    "x ** -3": lambda x, y: (x - y) ** -3,
    "x ** 2": lambda x, y: (x - y) ** 2,
    "x ** 3": lambda x, y: (x - y) ** 3,
}


@pytest.mark.parametrize("text", ONE_FUNCTION)
def test_one_function_at_the_edges(text):
    function = ONE_FUNCTION[text]

    @epilogue
    def made(acc, target: Aux):
        return function(acc, target)

    backward, target = made.backward(), torch.zeros_like(EDGES)
    for weight in (1.0, -0.5):
        grads = {"D": torch.full_like(EDGES, weight)}
        found = by_backward(backward, EDGES, {"target": target}, grads)
        leaves = [EDGES.clone().requires_grad_(), target.clone().requires_grad_()]
        expected = torch.autograd.grad(function(*leaves), leaves, grads["D"])
        for name, gradient in zip(("accumulator", "target"), expected, strict=True):
            torch.testing.assert_close(found[name], gradient, equal_nan=True)


def test_zeros_of_the_operation_and_zeros_of_the_rule():
    """A zero arm of the derivative selects, though the operation has a zero too; a slope of zero multiplies."""
    acc, grad = torch.tensor([[-2.0, 3.0, 9.0]]), torch.full((1, 3), INF)
    cases = (
        lambda x: torch.clamp(x, 0, 6),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: torch.where(x < 0, 0.0, x),
        lambda x: torch.nn.functional.threshold(x, 0, 0),
        lambda x: torch.nn.functional.leaky_relu(x, 0.0),
        lambda x: x * 0.0,
    )
    for function in cases:
        made = epilogue(function)
        leaf = acc.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(leaf), leaf, grad)
        found = by_backward(made.backward(), acc, {}, {"D": grad})["accumulator"]
        torch.testing.assert_close(found, expected, equal_nan=True)


def _selected(x):
    root = ep.sqrt(x)
    return ep.where(ep.gt(x, 1.0), root * root * x, ep.where(ep.gt(x, 0.5), root, 0.0))


def test_zeros_stay_zero_within_one_function_only():
    acc, grad = torch.tensor([[0.0, 0.75, 4.0]]), torch.ones(1, 3)
    users = epilogue(lambda acc: _selected(acc))
    found = by_backward(users.backward(), acc, {}, {"D": grad})["accumulator"]
    assert found.isnan().tolist() == [[True, False, False]]
    torch.testing.assert_close(found, by_autograd(users.tree, acc, {}, {"D": grad})["accumulator"], equal_nan=True)
    one = epilogue(lambda acc: one_function(_selected)(acc))
    found = by_backward(one.backward(), acc, {}, {"D": grad})["accumulator"]
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5 / 0.75**0.5, 8.0]]))
    # what the user selects outside is a gradient like any other to the function
    outside = epilogue(lambda acc: ep.where(acc > 0.5, one_function(lambda x: ep.sqrt(x) + 1)(acc), 0.0))
    found = by_backward(outside.backward(), acc, {}, {"D": grad})["accumulator"]
    assert found.isnan().tolist() == [[True, False, False]]


# random trees

SMOOTH = ("add", "sub", "mul", "tanh", "sigmoid", "silu", "gelu_tanh", "sin", "softplus", "atan", "neg", "fma", "where")


def random_tree(seed):
    """Smooth operations on operands of every kind, values used again and again, up to three outputs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(among):
        return among[int(torch.randint(len(among), (), generator=generator))]

    acc = Accumulator()
    kinds = (Kind.ROW, Kind.COLUMN, Kind.SCALAR, Kind.AUX)
    leaves: list[Node] = [Operand(f"p{i}", draw(kinds), i) for i in range(4)]
    values = [acc, *leaves, Constant(0.5)]
    whole: list[Node] = [acc]
    for _ in range(12):
        row = OPERATIONS[draw(SMOOTH)]
        inputs = [draw(values) for _ in range(row.arity)]
        if row.conditions:
            inputs[0] = Apply("gt", (draw(whole), draw(leaves)))
        if row.name == "softplus":
            inputs[1:] = [Constant(1.0), Constant(20.0)]
        values.append(Apply(row.name, tuple(inputs)))
        if any(child in whole for child in inputs) or row.conditions:
            whole.append(values[-1])
    outputs = [Store(name, draw(whole[-4:])) for name in ("D", "first", "second")[: draw((1, 2, 3))]]
    tree = EpilogueTree(tuple(outputs))
    return tree.map_nodes({id(op): Operand(op.name, op.kind, i) for i, op in enumerate(tree.operands)})


@pytest.mark.parametrize("seed", range(80))
def test_random_trees(seed):
    tree = random_tree(seed)
    torch.manual_seed(seed)
    acc, operands = torch.randn(M, N, dtype=torch.float64), operands_of(tree)
    grads = grads_of(tree, acc.shape)
    expected = by_autograd(tree, acc, operands, grads, **EXACT)
    for needs in (None, ("accumulator",), [op.name for op in tree.operands][:1] or None):
        backward = derivative(tree, needs)
        actual = by_backward(backward, acc, operands, grads, **EXACT)
        assert set(actual) == set(expected if needs is None else needs)
        for key, gradient in actual.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bound", (INF, -INF, 0.5))
@pytest.mark.parametrize("side", ("min", "max"))
def test_clamp_by_one_bound(side: str, bound: float) -> None:
    """The bound that is left out is no bound, also where the other is infinite."""

    def clamped(acc, limit: Row):
        return torch.clamp(acc, **{side: limit})

    acc, limit = torch.tensor([[0.0, 1.0, -1.0, INF, -INF]]), torch.full((5,), bound)
    found = ep.epilogue(clamped).backward()
    output = found.forward.reference(acc, limit=limit)
    gradients = found.gradients(torch.ones_like(acc), output, {"limit": limit})
    leaves = acc.clone().requires_grad_(), limit.clone().requires_grad_()
    expected = torch.autograd.grad(torch.clamp(leaves[0], **{side: leaves[1]}).sum(), leaves)
    for mine, theirs in zip(gradients.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)

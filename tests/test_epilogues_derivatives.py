"""Derivatives of epilogues against PyTorch's autograd of their reference, and against finite differences."""

import math

import pytest
import test_operations as table
import torch
from gemm_support import resolved
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
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, Row, builders, epilogue
from epilogues.functions.apply import one_function
from epilogues.gradients.derivative import derivative
from epilogues.operations import OPERATIONS
from epilogues.reference import evaluate
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand, Store


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

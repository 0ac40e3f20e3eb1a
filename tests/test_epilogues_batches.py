"""Operands that broadcast over batch dimensions: values against PyTorch's broadcasting, gradients against autograd."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import epilogues as ep
from epilogues import Aux, BroadcastError, Column, Row, Scalar, builders, epilogue
from epilogues.gradients.backward import Gradient

EXACT = {"compute_dtype": torch.float64, "keep_casts": False}
#: (*batch, M), N
ACCUMULATORS = [
    ((4,), 5),
    ((2, 4), 5),
    ((2, 3, 4), 5),
    ((3, 3, 3), 3),
    ((2, 1), 5),
    ((1, 4), 5),
    ((3,), 3),
    ((1, 4), 4),
    ((2, 4), 4),
    ((2, 4), 1),
    ((1, 1), 1),
    ((0, 4), 5),
    ((2, 0), 5),
    ((2, 4), 0),
    ((0, 0, 0), 0),
]


@epilogue
def annotated(acc, row: Row, column: Column, alpha: Scalar, aux: Aux):
    return ep.tanh(acc * row + column) * alpha + aux * acc


@epilogue
def unannotated(acc, row, column, alpha, aux):
    return ep.tanh(acc * row + column) * alpha + aux * acc


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def batches(batch):
    """Every shape that broadcasts against the batch, with the first dimensions left out or not."""
    for first in range(len(batch) + 1):
        yield from sorted(set(itertools.product(*((1, size) for size in batch[first:]))))


def shapes(m_shape, n):
    """Kind -> every shape that it accepts."""
    *batch, m = m_shape
    over = list(batches(batch))
    return {
        "row": [(n,), *((*b, 1, n) for b in over)],
        "column": [m_shape, *((*b, m, 1) for b in over)],
        "alpha": [(), (1,), (1, 1)],
        "aux": [(*b, m, n) for b in over],
    }


def cases(m_shape, n):
    """Every shape of a kind, with shapes of the others that change along."""
    found = shapes(m_shape, n)
    for i in range(max(map(len, found.values()))):
        yield {name: own[i % len(own)] for name, own in found.items()}
    for name, own in found.items():
        for shape in own:
            yield {**{key: other[-1] for key, other in found.items()}, name: shape}


def is_ambiguous(given, m_shape, n):
    """Whether a shape is that of a column, and its last size N."""
    return m_shape in given.values() and m_shape[-1] == n > 1


def by_hand(acc, row, column, alpha, aux):
    column = column[..., None] if column.shape == acc.shape[:-1] else column
    return torch.tanh(acc * row + column) * alpha.reshape(()) + aux * acc


@pytest.mark.parametrize(("m_shape", "n"), ACCUMULATORS, ids=str)
def test_values(m_shape, n):
    acc = random(*m_shape, n)
    for given in cases(m_shape, n):
        operands = {name: random(*shape) for name, shape in given.items()}
        expected = by_hand(acc, **operands)
        assert expected.shape == acc.shape
        assert torch.equal(annotated.reference(acc, **operands, **EXACT), expected), given


@pytest.mark.parametrize(("m_shape", "n"), ACCUMULATORS, ids=str)
def test_values_without_annotations(m_shape, n):
    """Where the shape alone says it, it says the same as the annotation; else it is refused."""
    acc = random(*m_shape, n)
    for given in cases(m_shape, n):
        operands = {name: random(*shape) for name, shape in given.items()}
        if is_ambiguous(given, m_shape, n):
            with pytest.raises(BroadcastError, match="ambiguous"):
                unannotated.reference(acc, **operands, **EXACT)
        else:
            assert torch.equal(unannotated.reference(acc, **operands, **EXACT), by_hand(acc, **operands)), given


@pytest.mark.parametrize("f", [annotated, unannotated], ids=["annotated", "unannotated"])
@pytest.mark.parametrize(("m_shape", "n"), ACCUMULATORS, ids=str)
def test_gradients(m_shape, n, f):
    backward = f.backward()
    acc, grad = random(*m_shape, n), random(*m_shape, n)
    for given in cases(m_shape, n):
        if f is unannotated and is_ambiguous(given, m_shape, n):
            continue
        operands = {name: random(*shape) for name, shape in given.items()}
        outputs = backward.forward.reference(acc, **operands, **EXACT)
        found = backward.gradients({"D": grad}, outputs, operands, **EXACT)
        leaves = {"accumulator": acc, **operands}
        leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        value = by_hand(leaves["accumulator"], **{name: leaves[name] for name in operands})
        expected = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()), grad), strict=True))
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert gradient.shape == leaves[name].shape
            torch.testing.assert_close(gradient, expected[name])


def test_gradients_of_the_reference_itself():
    acc = random(2, 3, 4).requires_grad_()
    operands = [random(2, 1, 4), random(3, 1), random(1), random(3, 4)]

    def value(acc, *given):
        return annotated.reference(acc, **dict(zip(("row", "column", "alpha", "aux"), given, strict=True)), **EXACT)

    assert torch.autograd.gradcheck(value, [acc, *(operand.requires_grad_() for operand in operands)])


def test_sums_left_outside():
    """A user who runs the passes sums what ``dims`` says."""
    m_shape, n = (2, 3, 4), 5
    acc, grad = random(*m_shape, n), random(*m_shape, n)
    backward = annotated.backward()
    (one,) = backward.passes
    for given in cases(m_shape, n):
        operands = {name: random(*shape) for name, shape in given.items()}
        outputs = backward.forward.reference(acc, **operands, **EXACT)
        saved = outputs if isinstance(outputs, dict) else {"D": outputs}
        inner = one.operands({"D": grad}, saved, operands)
        terms = one.epilogue.reference(grad, **inner, **EXACT)
        expected = backward.gradients({"D": grad}, outputs, operands, **EXACT)
        for gradient in one.gradients:
            shape = operands[gradient.target].shape if gradient.target in operands else acc.shape
            value, dims = terms[gradient.output], gradient.dims(shape, acc.shape)
            summed = (value.sum(dims) if dims else value).reshape(shape)
            torch.testing.assert_close(summed, expected[gradient.target])


def test_dims():
    accumulator = (2, 3, 4, 5)
    row, column, aux = Gradient("t", "D", ("M",)), Gradient("t", "D", ("N",)), Gradient("t", "D", ())
    assert row.dims((5,), accumulator) == (0, 1, 2)
    assert row.dims((3, 1, 5), accumulator) == (0, 2)
    assert row.dims((2, 1, 1, 5), accumulator) == (1, 2)
    assert column.dims((2, 3, 4), accumulator) == (3,)
    assert column.dims((4, 1), accumulator) == (0, 1, 3)
    assert aux.dims(torch.Size((4, 5)), torch.Size(accumulator)) == (0, 1)
    assert aux.dims(accumulator, accumulator) == ()
    assert Gradient("t", "D", ("M", "N")).dims((), accumulator) == (0, 1, 2, 3)
    assert Gradient("accumulator", "D", ()).dims(accumulator, accumulator) == ()
    unannotated = Gradient("t", "D", None)
    assert unannotated.dims((5,), accumulator) == (0, 1, 2)
    assert unannotated.dims((4, 5), accumulator) == (0, 1)
    with pytest.raises(BroadcastError, match=r"operand t \(Row\): expected shape \(5,\)"):
        row.dims((4,), accumulator)


def test_an_aux_of_one_batch_is_summed_in_float32():
    batch = 5000
    acc, grad = torch.zeros(batch, 1, 2), torch.ones(batch, 1, 2, dtype=torch.bfloat16)
    f = builders.residual()
    for dtype, expected in ((torch.float32, 5000.0), (torch.bfloat16, 4992.0)):  # rounded once, to a multiple of 32
        given = {"bias": torch.zeros(2), "residual": torch.zeros(1, 2, dtype=dtype)}
        found = f.backward().gradients(grad, acc, given)
        assert found["residual"].dtype == dtype and found["residual"].tolist() == [[expected, expected]]


def test_a_number_per_batch():
    acc, s = random(2, 3, 4), random(2, 1, 1)
    f = epilogue(lambda acc, s: acc * s, name="f")
    with pytest.raises(BroadcastError, match=r"s\.expand\(2, 3, 1\)"):
        f.reference(acc, s=s, **EXACT)
    assert torch.equal(f.reference(acc, s=s.expand(2, 3, 1), **EXACT), acc * s)


@pytest.mark.parametrize("name", builders.SUITE)
def test_the_suite_of_matrices_in_a_batch(name):
    """A batch is what its matrices are one by one, shared operands given once."""
    f = builders.SUITE[name]()
    own = {ep.Kind.ROW: (2, 1, 5), ep.Kind.COLUMN: (2, 3, 1), ep.Kind.SCALAR: (), ep.Kind.AUX: (2, 3, 5)}
    shared = {ep.Kind.ROW: (5,), ep.Kind.COLUMN: (3, 1), ep.Kind.SCALAR: (), ep.Kind.AUX: (3, 5)}
    acc = torch.randn(2, 3, 5)
    for chosen in (own, shared):
        operands = {op.name: torch.randn(chosen[op.kind]) for op in f.tree.operands}
        outputs = f.reference(acc, **operands)
        for i in range(2):
            single = {key: v[i] if chosen is own and v.ndim else v for key, v in operands.items()}
            expected = f.reference(acc[i], **single)
            if isinstance(expected, dict):
                assert all(torch.equal(outputs[key][i], value) for key, value in expected.items())
            else:
                assert torch.equal(outputs[i], expected)


def test_broadcast_operands_round_as_eager_pytorch_does():
    f = epilogue(lambda acc, row, aux: F.gelu(acc + row) * aux, name="f").with_rounding("eager")
    acc, row, aux = (torch.randn(s).bfloat16() for s in ((2, 3, 5), (2, 1, 5), (3, 5)))
    assert torch.equal(f.reference(acc, row=row, aux=aux), F.gelu(acc + row) * aux)

"""Losses without a reduction, and composed functions of torch.special, against PyTorch: values and gradients."""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from epilogues import Aux, Row, epilogue, functions
from epilogues.torch_losses import LOSSES

SIGNS = torch.tensor([1.0, -1.0]).repeat(20)[None]
X = torch.cat([torch.linspace(-4, 4, 36), torch.tensor([0.0, 1.0, -1.0, 200.0])])[None]
Y = torch.cat([torch.linspace(3, -3, 36), torch.tensor([0.0, 0.0, 0.0, 1.0])])[None]
UNIT = torch.linspace(0, 1, 40)[None]

#: text -> a loss of acc and target, and the target
CASES = {
    "mse_loss": (lambda x, y: F.mse_loss(x, y, reduction="none"), Y),
    "mse_loss, weighted": (lambda x, y: F.mse_loss(x, y, reduction="none", weight=y), Y),
    "mse_loss, module": (lambda x, y: nn.MSELoss(reduction="none")(x, y), Y),
    "mse_loss, reduce=False": (lambda x, y: F.mse_loss(x, y, reduce=False), Y),
    "l1_loss": (lambda x, y: F.l1_loss(x, y, reduction="none"), Y),
    "l1_loss, weighted": (lambda x, y: F.l1_loss(x, y, reduction="none", weight=y), Y),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), Y),
    "smooth_l1_loss, beta": (lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5), Y),
    "smooth_l1_loss, beta=0": (lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0), Y),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, reduction="none"), Y),
    "huber_loss, delta": (lambda x, y: F.huber_loss(x, y, "none", 2.5), Y),
    "huber_loss, module": (lambda x, y: nn.HuberLoss("none", delta=0.5)(x, y), Y),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        UNIT,
    ),
    "binary_cross_entropy_with_logits, weights": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, y, reduction="none", pos_weight=3 * y),
        UNIT,
    ),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="none"), UNIT),
    "kl_div, log_target": (lambda x, y: F.kl_div(x, y, reduction="none", log_target=True), Y),
    "poisson_nll_loss": (lambda x, y: F.poisson_nll_loss(x, y, reduction="none"), UNIT),
    "poisson_nll_loss, full": (lambda x, y: F.poisson_nll_loss(x, y, full=True, reduction="none"), 5 * UNIT),
    "poisson_nll_loss, not of logarithms": (
        lambda x, y: F.poisson_nll_loss(x * x, y, log_input=False, eps=0.1, reduction="none"),
        UNIT,
    ),
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y, reduction="none"), SIGNS),
    "margin_ranking_loss": (lambda x, y: F.margin_ranking_loss(x, x * 0.5, y, 0.1, reduction="none"), SIGNS),
    "hinge_embedding_loss": (lambda x, y: F.hinge_embedding_loss(x, y, 0.7, reduction="none"), SIGNS),
}


def test_every_loss_is_tried():
    refused = {"binary_cross_entropy", "gaussian_nll_loss"}  # see test_epilogues_refusals.py
    assert {text.split(",")[0] for text in CASES} == set(LOSSES) - refused


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.parametrize("text", CASES)
def test_losses(text):
    loss, target = CASES[text]
    function = getattr(F, text.split(",")[0])
    if text.endswith("weighted") and "weight" not in inspect.signature(function).parameters:
        pytest.skip("this PyTorch's loss has no weight")

    @epilogue
    def traced(acc, target: Aux):
        return loss(acc, target)

    torch.testing.assert_close(traced.reference(X, target=target), loss(X, target), rtol=1e-6, atol=1e-6)
    ours, theirs = X.double().requires_grad_(), X.double().requires_grad_()
    output = traced.reference(ours, target=target.double(), compute_dtype=torch.float64, keep_casts=False)
    expected = loss(theirs, target.double())
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, X.numel(), dtype=torch.float64)[None]
    (ours,) = torch.autograd.grad(output, ours, weights)
    (theirs,) = torch.autograd.grad(expected, theirs, weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_target_may_be_a_row():
    @epilogue
    def traced(acc, target: Row):
        return F.mse_loss(acc, target, reduction="none")

    assert torch.equal(traced.reference(X, target=Y[0]), (X - Y).square())


# torch.special

INF, NAN = math.inf, math.nan
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 1e-6, -1e-6, 1e-30, 2.0, -5.0, 12.0, INF, -INF, NAN])
PAIRS = torch.cartesian_prod(EDGES, EDGES)
COMPOSED = {
    "sinc": torch.sinc,
    "special.sinc": torch.special.sinc,
    "method": lambda x: x.sinc(),
    "entr": torch.special.entr,
    "ndtr": torch.special.ndtr,
    "angle": torch.angle,
}
REAL = [torch.conj, torch.conj_physical, torch.resolve_conj, torch.resolve_neg, lambda x: x.conj()]


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_functions(name):
    function = COMPOSED[name]
    made = epilogue(lambda acc: function(acc))
    x = torch.cat([EDGES, torch.linspace(-6, 6, 121)])[None]
    torch.testing.assert_close(made.reference(x), function(x), rtol=2e-6, atol=2e-7, equal_nan=True)
    inside = torch.linspace(0.01, 3, 50, dtype=torch.float64)[None]
    values = [leaf.clone().requires_grad_() for leaf in (inside, inside)]
    output = made.reference(values[0], compute_dtype=torch.float64, keep_casts=False)
    gradients = torch.autograd.grad(output.sum() + function(values[1]).sum(), values)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_xlog1py():
    @epilogue
    def traced(acc, y: Aux):
        return torch.special.xlog1py(acc, y)

    x, y = PAIRS.T.contiguous()[:, None]
    expected = torch.special.xlog1py(x, y)
    torch.testing.assert_close(traced.reference(x, y=y), expected, rtol=1e-6, atol=0, equal_nan=True)
    finite = (y > -1) & y.isfinite() & x.isfinite()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (ours,) = torch.autograd.grad(traced.reference(ours, y=y).sum(), ours)
    (theirs,) = torch.autograd.grad(torch.special.xlog1py(theirs, y).sum(), theirs)
    torch.testing.assert_close(ours[finite], theirs[finite])  # where x is 0 too


@pytest.mark.parametrize("function", REAL)
def test_values_are_real(function):
    assert torch.equal(epilogue(lambda acc: function(acc) * 2).reference(X), X * 2)


def test_questions_about_dtypes():
    def f(acc):
        assert torch.is_floating_point(acc) and acc.is_floating_point() and not acc.is_complex()
        assert not torch.is_floating_point(acc > 0)
        return acc if not torch.is_complex(acc) else -acc

    assert torch.equal(epilogue(f).reference(X), X)


def test_functions_of_tensors_and_numbers():
    assert torch.equal(functions.sinc(EDGES[:5]), torch.sinc(EDGES[:5]))
    assert functions.entr(0.0) == 0 and functions.ndtr(0.0) == 0.5 and functions.angle(-2.0) == math.pi
    assert functions.xlog1py(0.0, -1.0) == 0 and functions.sinc(0.0) == 1

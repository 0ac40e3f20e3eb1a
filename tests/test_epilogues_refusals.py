"""What is refused inside an epilogue: the error's class, and that it names operation, line and way out."""

import math
import operator
import re
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epilogues as ep
from epilogues import EpilogueError, ReductionError, UnsupportedOperationError, epilogue, functions
from epilogues.errors import DtypeError
from epilogues.outputs import Outputs
from epilogues.refusal_reasons import COMMUNICATING_BY_NAME, EXPLAINED_BY_NAME
from epilogues.refusals import communication
from epilogues.source import explain
from epilogues.torch_calls import CALLS
from epilogues.torch_losses import LOSSES
from epilogues.tree import SourceLocation

W = torch.ones(4, 4)
INDEX = torch.zeros(4, 4, dtype=torch.long)

#: (name in the message, function)
COMMUNICATING = [
    ("sum", lambda x: x / x.sum(dim=-1, keepdim=True)),
    ("sum", lambda x: torch.sum(x)),
    ("sum", lambda x: np.sum(x)),
    ("mean", lambda x: x.mean(-1)),
    ("amax", lambda x: torch.amax(x, dim=1)),
    ("amin", lambda x: x.amin(1)),
    ("max", lambda x: torch.max(x)),
    ("max", lambda x: torch.max(x, 1)),
    ("max", lambda x: x.max(dim=1)),
    ("min", lambda x: x.min()),
    ("argmax", lambda x: x.argmax(-1)),
    ("argmin", lambda x: torch.argmin(x)),
    ("prod", lambda x: x.prod()),
    ("std", lambda x: torch.std(x)),
    ("var", lambda x: x.var(0)),
    ("norm", lambda x: torch.norm(x)),
    ("norm", lambda x: x.norm()),
    ("torch.linalg.norm", lambda x: torch.linalg.norm(x)),
    ("torch.linalg.vector_norm", lambda x: torch.linalg.vector_norm(x)),
    ("logsumexp", lambda x: torch.logsumexp(x, 1)),
    ("all", lambda x: x.all()),
    ("any", lambda x: torch.any(x)),
    ("median", lambda x: x.median()),
    ("trace", lambda x: x.trace()),
    ("cosine_similarity", lambda x: F.cosine_similarity(x, x)),
    ("softmax", lambda x: F.softmax(x, -1)),
    ("softmax", lambda x: torch.softmax(x, -1)),
    ("softmax", lambda x: x.softmax(-1)),
    ("softmax", lambda x: nn.Softmax(-1)(x)),
    ("log_softmax", lambda x: F.log_softmax(x, -1)),
    ("layer_norm", lambda x: F.layer_norm(x, (4,))),
    ("layer_norm", lambda x: nn.LayerNorm(4)(x)),
    ("rms_norm", lambda x: F.rms_norm(x, (4,))),
    ("group_norm", lambda x: F.group_norm(x, 2)),
    ("batch_norm", lambda x: F.batch_norm(x, W, W)),
    ("batch_norm", lambda x: nn.BatchNorm1d(4)(x)),
    ("instance_norm", lambda x: F.instance_norm(x)),
    ("normalize", lambda x: F.normalize(x)),
    ("cumsum", lambda x: x.cumsum(0)),
    ("cumprod", lambda x: torch.cumprod(x, 0)),
    ("sort", lambda x: torch.sort(x)),
    ("argsort", lambda x: x.argsort()),
    ("topk", lambda x: torch.topk(x, 2)),
    ("matmul", lambda x: x @ x),
    ("matmul", lambda x: W @ x),
    ("matmul", lambda x: x @ W),
    ("matmul", lambda x: torch.matmul(x, W)),
    ("mm", lambda x: torch.mm(x, W)),
    ("bmm", lambda x: torch.bmm(x, W)),
    ("addmm", lambda x: torch.addmm(x, W, W)),
    ("linear", lambda x: F.linear(x, W)),
    ("linear", lambda x: nn.Linear(4, 4)(x)),
    ("einsum", lambda x: torch.einsum("ij->i", x)),
    ("dot", lambda x: x.dot(x)),
    ("conv2d", lambda x: F.conv2d(x, W)),
    ("conv2d", lambda x: nn.Conv2d(4, 4, 1)(x)),
    ("scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x, x, x)),
    ("torch.fft.fft", lambda x: torch.fft.fft(x)),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2)),
    ("avg_pool2d", lambda x: nn.AvgPool2d(2)(x)),
    ("gather", lambda x: x.gather(0, INDEX)),
    ("scatter", lambda x: torch.scatter(x, 0, INDEX, 1.0)),
    ("index_select", lambda x: torch.index_select(x, 0, INDEX[0])),
    ("take", lambda x: x.take(INDEX)),
    ("embedding", lambda x: F.embedding(x, W)),
    ("getitem", lambda x: x[0]),
    ("getitem", lambda x: x[:, None]),
    ("getitem", lambda x: x[x]),
    ("roll", lambda x: torch.roll(x, 1)),
    ("flip", lambda x: x.flip(0)),
    ("reshape", lambda x: x.reshape(-1)),
    ("view", lambda x: x.view(2, -1)),
    ("permute", lambda x: x.permute(1, 0)),
    ("transpose", lambda x: x.transpose(0, 1)),
    ("T", lambda x: x.T),
    ("mT", lambda x: x.mT),
    ("t", lambda x: x.t()),
    ("flatten", lambda x: torch.flatten(x)),
    ("flatten", lambda x: nn.Flatten()(x)),
    ("unsqueeze", lambda x: x.unsqueeze(0)),
    ("squeeze", lambda x: x.squeeze()),
    ("expand", lambda x: x.expand(4, 4)),
    ("repeat", lambda x: x.repeat(2, 1)),
    ("cat", lambda x: torch.cat([x, x])),
    ("stack", lambda x: torch.stack([x, x])),
    ("chunk", lambda x: x.chunk(2)),
    ("split", lambda x: torch.split(x, 2)),
    ("glu", lambda x: F.glu(x)),
    ("pad", lambda x: F.pad(x, (1, 1))),
    ("tril", lambda x: torch.tril(x)),
    ("unfold", lambda x: F.unfold(x, 2)),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2)),
    ("cross_entropy", lambda x: F.cross_entropy(x, W)),
    ("mse_loss", lambda x: nn.MSELoss()(x, W)),
    ("soft_margin_loss", lambda x: F.soft_margin_loss(x, W)),
    ("nll_loss", lambda x: F.nll_loss(x, INDEX[0], reduction="none")),
    ("multi_margin_loss", lambda x: F.multi_margin_loss(x, INDEX[0], reduction="none")),
    ("torch.linalg.det", lambda x: torch.linalg.det(x)),
    ("inverse", lambda x: x.inverse()),
    ("cross", lambda x: torch.cross(x, x)),
    ("gru_cell", lambda x: torch.gru_cell(x, x, W, W)),
    ("cudnn_convolution", lambda x: torch.cudnn_convolution(x, W, (1,), (1,), (1,), 1, False, False, False)),
    ("transpose_copy", lambda x: torch.transpose_copy(x, 0, 1)),
    ("unsafe_chunk", lambda x: torch.unsafe_chunk(x, 2)),
    ("atleast_2d", lambda x: torch.atleast_2d(x)),
    ("argwhere", lambda x: torch.argwhere(x)),
    ("trapz", lambda x: torch.trapz(x)),
]

UNSUPPORTED = [
    ("a branch on a value", lambda x: max(x, 0)),
    ("a branch on a value", lambda x: x if x > 0 else -x),
    ("a branch on a value", lambda x: x * (0 < x < 1)),
    ("a branch on a value", lambda x: x * (not x)),
    ("a branch on a value", lambda x: x if x == 0 else 1 / x),
    ("a branch on a value", lambda x: x * (x in [x + 1])),
    ("a tensor of shape (4, 4)", lambda x: torch.where(W > 0, x, x)),
    ("a tensor of shape (4, 4)", lambda x: x.masked_fill(W > 0, 0)),
    ("divmod", lambda x: divmod(x, 2)),
    ("trunc", lambda x: math.trunc(x)),
    ("lshift (<<)", lambda x: x << 1),
    ("or (|)", lambda x: x | (x > 0)),
    ("prelu", lambda x: nn.PReLU()(x)),
    ("isclose", lambda x: torch.isclose(x, x + 1)),
    ("lgamma", lambda x: torch.lgamma(x)),
    ("torch.special.i0", lambda x: torch.special.i0(x)),
    ("i0", lambda x: x.i0()),
    ("torch.special.gammaln", lambda x: torch.special.gammaln(x)),
    ("erfinv", lambda x: torch.erfinv(x)),
    ("digamma", lambda x: x.digamma()),
    ("torch.special.erfcx", lambda x: torch.special.erfcx(x)),
    ("torch.special.log_ndtr", lambda x: torch.special.log_ndtr(x)),
    ("nextafter", lambda x: torch.nextafter(x, x + 1)),
    ("gcd", lambda x: torch.gcd(x, x)),
    ("frexp", lambda x: torch.frexp(x)),
    ("isin", lambda x: torch.isin(x, W)),
    ("polar", lambda x: torch.polar(x, x)),
    ("imag", lambda x: x.imag),
    ("real", lambda x: x.real),
    ("quantize_per_tensor", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    ("fake_quantize_per_tensor_affine", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)),
    ("register_hook", lambda x: x.register_hook(print)),
    ("short", lambda x: x.short()),
    ("is_nonzero", lambda x: x if torch.is_nonzero(x) else -x),
    ("div: expected rounding_mode", lambda x: torch.div(x, 2, rounding_mode="up")),
    ("a branch on a value", lambda x: x if x else -x),
    ("a branch on a value", lambda x: x and 1),
    ("float()", lambda x: math.exp(x)),
    ("float()", lambda x: float(x)),
    ("int()", lambda x: int(x)),
    ("index()", lambda x: range(x)),
    ("len()", lambda x: len(x)),
    ("iter()", lambda x: [*x]),
    ("array()", lambda x: np.asarray(x)),
    ("item", lambda x: x.item()),
    ("shape", lambda x: x.shape),
    ("size", lambda x: x.size(0)),
    ("ndim", lambda x: x.ndim),
    ("numel", lambda x: torch.numel(x)),
    ("device", lambda x: x.device),
    ("cuda", lambda x: x.cuda()),
    ("to", lambda x: x.to("cpu")),
    ("dropout", lambda x: F.dropout(x)),
    ("dropout", lambda x: nn.Dropout(0.1)(x)),
    ("rand_like", lambda x: torch.rand_like(x)),
    ("bernoulli", lambda x: torch.bernoulli(x)),
    ("dropout", lambda x: F.dropout(x, 0.1, True)),
    ("dropout", lambda x: torch.dropout(x, 0.1, train=True)),
    ("dropout", lambda x: nn.Dropout2d()(x)),
    ("dropout", lambda x: nn.AlphaDropout()(x)),
    ("rrelu", lambda x: nn.RReLU()(x)),
    ("format()", lambda x: f"{x:.3f}"),
    ("format()", lambda x: "{:8}".format(x)),  # noqa: UP032
    ("float()", lambda x: "%f" % x),  # noqa: UP031
    ("call()", lambda x: x()),
    ("call()", lambda x: x(2)),
    ("next()", lambda x: next(x)),
    ("assigning an attribute", lambda x: setattr(x, "node", 1)),
    ("assigning an attribute", lambda x: setattr(x, "requires_grad", True)),
    ("deleting an attribute", lambda x: delattr(x, "node")),
    ("vmap", lambda x: torch.vmap(lambda y: y * 2)(x)),
    ("invert (~)", lambda x: ~x),
    ("and (&)", lambda x: x & x),
    ("double", lambda x: x.double()),
    ("detach", lambda x: x.detach()),
    ("no_such_method", lambda x: x.no_such_method()),
    ("a tensor of shape (4, 4)", lambda x: x + W),
    ("a tensor of shape (4, 4)", lambda x: W * x),
    ("a tensor of shape (4, 4)", lambda x: ep.maximum(x, W)),
    ("ndarray", lambda x: np.ones(3) * x),
    ("bool True", lambda x: x * True),
    ("str 'two'", lambda x: x * "two"),
    ("complex 2j", lambda x: x * 2j),
    ("leaky_relu", lambda x: x.leaky_relu(0.1, slope=2)),
]


#: (how it was written, what to write instead, function)
IN_PLACE = [
    ("relu with inplace=True", "leave inplace out", lambda x: F.relu(x, inplace=True)),
    ("relu with inplace=True", "z = F.relu(z)", lambda x: F.relu(x, True)),
    ("relu with inplace=True", "leave inplace out, of a module too", lambda x: nn.ReLU(inplace=True)(x)),
    ("silu with inplace=True", "z = F.silu(z)", lambda x: nn.SiLU(inplace=True)(x)),
    ("leaky_relu with inplace=True", "leave", lambda x: nn.Sequential(nn.LeakyReLU(0.1, inplace=True))(x)),
    ("dropout with inplace=True", "leave", lambda x: nn.Dropout(inplace=True).eval()(x)),
    ("rrelu with inplace=True", "leave", lambda x: F.rrelu(x, inplace=True)),
    ("+=", "x = x + y", lambda x: operator.iadd(x, 1)),
    ("-=", "x = x - y", lambda x: operator.isub(x, 1)),
    ("*=", "x = x * y", lambda x: operator.imul(x, 2)),
    ("/=", "x = x / y", lambda x: operator.itruediv(x, x)),
    ("**=", "x = x ** y", lambda x: operator.ipow(x, 2)),
    ("//=", "x = x // y", lambda x: operator.ifloordiv(x, 2)),
    ("%=", "x = x % y", lambda x: operator.imod(x, 2)),
    ("&=", "x = x & y", lambda x: operator.iand(x, x)),
    ("|=", "x = x | y", lambda x: operator.ior(x, x)),
    ("^=", "x = x ^ y", lambda x: operator.ixor(x, x)),
    ("<<=", "multiply", lambda x: operator.ilshift(x, 1)),
    (">>=", "multiply", lambda x: operator.irshift(x, 1)),
    ("add_", "x = x.add(...)", lambda x: x.add_(1)),
    ("add_", "x = x.add(...)", lambda x: operator.iadd(W, x)),
    ("relu_", "x = x.relu(...)", lambda x: F.relu_(x)),
    ("clamp_", "x = x.clamp(...)", lambda x: torch.clamp_(x, 0)),
    ("copy_", "a name: x = ...", lambda x: x.copy_(x)),
    ("zero_", "a name: x = ...", lambda x: nn.init.zeros_(x)),
    ("add with out=", "make it an output", lambda x: torch.add(x, 1, out=W)),
    ("exp with out=", "make it an output", lambda x: np.exp(x, out=np.ones(3))),
    ("add with out=", "make it an output", lambda x: operator.iadd(np.ones(3), x)),
    ("assigning with [] =", "compute all elements alike", lambda x: operator.setitem(x, 0, 1)),
    ("assigning with [] =", "compute all elements alike", lambda x: operator.setitem(x, ..., x)),
    ("assigning with [] =", "compute all elements alike", lambda x: operator.setitem(W, 0, x)),
]


def refused(function, error):
    with pytest.raises(EpilogueError) as caught:
        epilogue(function, name="refused")
    assert type(caught.value) is error
    message = str(caught.value)
    location = re.search(rf"  at {re.escape(__file__)}:(\d+): (.*)", message)
    assert location, message
    assert int(location[1]) == function.__code__.co_firstlineno
    assert "lambda x:" in location[2]
    return message


@pytest.mark.parametrize(("name", "function"), COMMUNICATING)
def test_communication(name, function):
    message = refused(function, ReductionError)
    assert re.match(rf"(\w+ )*.*\b{name}\b.* communicates between elements \(", message)
    assert "\n  why: " in message
    assert "\n  instead: " in message
    assert "{" not in message.split("\n  why: ")[1]


@pytest.mark.parametrize(("name", "function"), UNSUPPORTED)
def test_unsupported(name, function):
    assert name in refused(function, UnsupportedOperationError).split("\n")[0]


@pytest.mark.parametrize(("written", "instead", "function"), IN_PLACE)
def test_writing_in_place(written, instead, function):
    message = refused(function, UnsupportedOperationError)
    assert message.startswith(f"{written} ") and " writes in place, " in message.split("\n")[0]
    assert instead in message.split("\n  instead: ")[1]


def test_augmented_assignment_does_not_rebind():
    def f(acc):
        y = acc
        y *= 2
        return y + acc  # on tensors 4 * acc

    with pytest.raises(UnsupportedOperationError, match=r"^\*= writes in place(?s:.)*refusals\.py:\d+: y \*= 2\n"):
        epilogue(f)


def test_augmented_matmul_is_a_contraction():
    assert refused(lambda x: operator.imatmul(x, W), ReductionError).startswith("matmul (@) ")


def test_numbers_may_be_rebound():
    def f(acc):
        factor = 2.0
        factor *= 3
        total = 0
        total += acc * factor  # a number has no memory that others know of either
        return total

    assert f(torch.ones(())) == epilogue(f).reference(torch.ones(1, 1))


def test_recursion():
    def f(acc):
        return f(acc) + 1

    with pytest.raises(
        EpilogueError, match=r"epilogue f: the function recurses(?s:.)*refusals\.py:\d+: return f\(acc\)"
    ):
        epilogue(f)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_functions():
    scripted = torch.jit.script(F.relu)
    message = refused(lambda x: scripted(x), UnsupportedOperationError)
    assert message.startswith("epilogue refused: RuntimeError: relu() Expected a value of type 'Tensor'")


@pytest.mark.parametrize("error", [KeyError("k"), TypeError("the user's own"), RuntimeError()])
def test_errors_of_the_user_pass_through(error):
    def f(acc):
        raise error

    with pytest.raises(type(error)) as caught:
        epilogue(f)
    assert caught.value is error


def test_pytorchs_own_errors_pass_through():
    with pytest.raises(TypeError, match="must be Tensor, not float"):  # as on tensors
        epilogue(lambda acc: torch.maximum(acc, 0.0))


def test_long_lines_are_shortened():
    message = explain("wrong", SourceLocation("model.py", 3, "x + " * 100))
    assert message.split(": ", 1)[1] == ("x + " * 30)[:117] + "..."


def test_long_values_are_shortened():
    message = refused(lambda x: x * [*range(1000)], UnsupportedOperationError)
    assert len(message.split("\n")[0]) < 200 and "list [0, 1," in message


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", [lambda x: np.asarray(x), lambda x: np.where(x, 1, 2), lambda x: np.array(x)])
def test_numpy_is_refused_without_a_warning(function):
    assert "array()" in refused(function, UnsupportedOperationError)


def test_dtypes():
    message = refused(lambda x: x.to(torch.float64), DtypeError)
    assert "torch.float64" in message


@pytest.mark.parametrize(
    ("function", "offered"),
    [
        (lambda x: x.no_such_method(), "language"),
        (lambda x: x.soft_plus(), "; did you mean softplus?"),
        (lambda x: x.hard_sigmoid(), "; did you mean hardsigmoid or sigmoid?"),
    ],
)
def test_close_names_are_offered(function, offered):
    assert refused(function, UnsupportedOperationError).split("\n")[0].endswith(offered)


def test_the_line_is_that_of_the_innermost_user_function():
    def helper(x):
        return x.sum()

    with pytest.raises(ReductionError, match=r"at .*test_epilogues_refusals\.py:\d+: return x\.sum\(\)"):
        epilogue(lambda acc: helper(acc))


def test_what_is_refused_is_not_also_supported():
    both = {name for name in CALLS if communication(name)} - set(LOSSES)
    assert both == {"max", "min"}  # of two values, or over a dimension; losses with a reduction, or without


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.lgamma(x),
        lambda x: torch.special.bessel_j0(x),
        lambda x: torch.special.shifted_chebyshev_polynomial_v(x, 3),
        lambda x: torch.special.zeta(x, 2.0),
        lambda x: x.erfinv(),
        lambda x: x.lgamma_(),
    ],
)
def test_no_device_function(function):
    message = refused(function, UnsupportedOperationError)
    assert "why: there is no device function for it in the operation table" in message
    assert "instead: call torch's function on the GEMM's result" in message


def test_no_name_is_in_two_tables():
    assert not set(COMMUNICATING_BY_NAME) & set(EXPLAINED_BY_NAME)
    for name in EXPLAINED_BY_NAME:
        # what dropout and prelu do, or what Python asks of numbers, depends on the arguments
        assert name not in CALLS or name in DEPENDS.split(), name


DEPENDS = """
    bool float floor ceil trunc and or xor invert prelu rrelu dropout alpha_dropout feature_alpha_dropout dropout1d
    dropout2d dropout3d
"""


# losses, which reduce unless told otherwise


@pytest.mark.parametrize("given", [{}, {"reduction": "mean"}, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_a_reduction(name, given):
    loss, others = getattr(F, name), 2 if name in ("gaussian_nll_loss", "margin_ranking_loss") else 1
    message = refused(lambda x: loss(x, *[x] * others, **given), ReductionError)
    reduction = given.get("reduction", "mean")
    assert message.startswith(f"{name} with reduction={reduction!r} communicates between elements (loss)")
    assert 'instead: write reduction="none" for the loss of each element' in message


def test_losses_by_their_older_arguments():
    assert "reduction='sum'" in refused(lambda x: F.mse_loss(x, x, size_average=False), ReductionError)
    assert "reduction='mean'" in refused(lambda x: F.mse_loss(x, x, reduce=True, reduction="none"), ReductionError)


@pytest.mark.parametrize(
    ("function", "why", "instead"),
    [
        (
            lambda x: F.binary_cross_entropy(x, x, reduction="none"),
            "every input is between 0 and 1",
            "F.binary_cross_entropy_with_logits",
        ),
        (
            lambda x: F.gaussian_nll_loss(x, x, x, reduction="none"),
            "no variance is negative",
            "0.5 * (torch.log(var) + (input - target) ** 2 / var)",
        ),
    ],
)
def test_losses_that_are_more_than_their_formula(function, why, instead):
    message = refused(function, UnsupportedOperationError)
    assert why in message.split("\n  why: ")[1]
    assert instead in message.split("\n  instead: ")[1]


def test_numbers_of_losses():
    assert "for beta, got -1" in refused(lambda x: F.smooth_l1_loss(x, x, reduction="none", beta=-1), EpilogueError)
    assert "for delta, got 0" in refused(lambda x: F.huber_loss(x, x, reduction="none", delta=0), EpilogueError)


# several outputs where one value is wanted


@epilogue
def saving(acc):
    return {"D": acc * 2, "preact": acc}


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, x: outputs + 1,
        lambda outputs, x: 2 * outputs,
        lambda outputs, x: x + outputs,
        lambda outputs, x: outputs - x,
        lambda outputs, x: -outputs,
        lambda outputs, x: abs(outputs),
        lambda outputs, x: outputs > 0,
        lambda outputs, x: x * (outputs == 0),
        lambda outputs, x: x * (outputs != 0),
        lambda outputs, x: torch.relu(outputs),
        lambda outputs, x: F.gelu(outputs),
        lambda outputs, x: torch.where(x > 0, outputs, x),
        lambda outputs, x: torch.maximum(outputs, x),
        lambda outputs, x: outputs.to(torch.bfloat16),
        lambda outputs, x: outputs.relu(),
        lambda outputs, x: float(outputs),
    ],
)
def test_several_outputs_are_no_value(function):
    def f(acc):
        return function(Outputs(saving(acc), "saving"), acc)

    with pytest.raises(EpilogueError) as caught:
        epilogue(f)
    message = str(caught.value)
    assert message.startswith("epilogue saving has 2 outputs, D, preact, and was used as one value\n  at ")
    assert 'instead: take the output that is meant: saving(...)["D"]' in message


def test_several_outputs_are_a_dict():
    def f(acc):
        outputs = Outputs(saving(acc), "saving")
        assert outputs == dict(outputs) and outputs != {} and "preact" in outputs and not hasattr(outputs, "_private")
        return {**outputs, "sum": outputs["D"] + outputs["preact"]} | {"D": outputs["D"]}

    made = epilogue(f)
    assert made.outputs == ("D", "preact", "sum")
    assert made.reference(torch.ones(1, 1))["sum"].item() == 3
    assert epilogue(lambda acc: Outputs(saving(acc), "saving")).tree == saving.tree


def test_operand_is_refused_too():
    with pytest.raises(ReductionError, match="sum"):

        @epilogue
        def f(acc, scale: ep.Row):
            return acc * scale.sum()


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (lambda x: math.exp(x), "write torch.exp(...) for math.exp(...)"),
        (lambda x: 2 * math.fabs(x), "write torch.abs(...) for math.fabs(...)"),
        (lambda x: math.pow(x, 2), "write torch.pow(...) for math.pow(...)"),
        (lambda x: math.floor(x), "write torch.floor(x)"),
        (lambda x: math.ceil(x), "write torch.ceil(x)"),
        (lambda x: math.gamma(x), "use ep.* or torch.* functions in place of math.* or numpy functions"),
        (lambda x: x if x > 0 else 0, "write the choice elementwise: torch.where(condition, a, b)"),
        (lambda x: nn.PReLU()(x), "add a parameter slope: Row"),
        (lambda x: x & 1, "combine conditions, such as (x > 0) & (x < 1)"),
    ],
)
def test_the_way_out(function, instead):
    assert instead in refused(function, UnsupportedOperationError).split("\n  instead: ")[1]


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, x: outputs + 1,
        lambda outputs, x: torch.where(x > 0, outputs, x),
        lambda outputs, x: ep.relu(outputs),
        lambda outputs, x: ep.add(x, outputs),
        lambda outputs, x: ep.cast(outputs, "f16"),
        lambda outputs, x: saving(outputs),
        lambda outputs, x: {"D": outputs},
    ],
)
def test_what_a_call_with_several_outputs_gives_is_no_value(function):
    with pytest.raises(EpilogueError, match="epilogue saving has 2 outputs, D, preact, and was used as one value"):
        epilogue(lambda acc: function(saving(acc), acc))


# what is said of what is nearly right


def test_casts_to_few_bits_name_quantize():
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        message = refused(lambda x: x.to(dtype), DtypeError)  # noqa: B023
        assert str(dtype) in message and "instead: epilogues.builders.quantize gives" in message
    assert "epilogues.builders.quantize" in refused(lambda x: x.char(), UnsupportedOperationError)
    assert "\n  instead: " not in refused(lambda x: x.to(torch.float64), DtypeError)


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (lambda x: torch.full_like(x, 0.5), "instead: write the number itself, x + 0.5"),
        (lambda x: x.type_as(x), "instead: name it: x.to(torch.bfloat16)"),
        (lambda x: x.to(x), "instead: name it: x.to(torch.bfloat16)"),
        (lambda x: torch.zeros_like(x, dtype=torch.float16), "instead: write the number, 0.0"),
        (lambda x: torch.ones_like(x > 0), "instead: write the number, 1.0"),
        (lambda x: x.new_zeros(3), "instead: write 0.0 or 1.0"),
    ],
)
def test_tensors_like_a_value(function, instead):
    assert instead in refused(function, UnsupportedOperationError)


def test_the_function_of_math_that_is_called_is_named():
    message = refused(lambda x: math.sqrt(2.0) * math.exp(x), UnsupportedOperationError)
    hint = message.split("instead: ")[1]
    assert "torch.exp(...) for math.exp(...)" in hint
    if sys.version_info >= (3, 11):
        assert hint == "write torch.exp(...) for math.exp(...)"
    assert "torch.abs(...) for math.fabs(...)" in refused(lambda x: math.fabs(x), UnsupportedOperationError)


def test_a_reduction_that_does_not_exist():
    with pytest.raises(EpilogueError, match="mse_loss: expected reduction=\"none\", got reduction='foo'") as caught:
        epilogue(lambda acc: F.mse_loss(acc, acc, reduction="foo"))
    assert not isinstance(caught.value, ReductionError)


class Scaled:
    def method(self, acc):
        return acc * 2


def test_a_method_of_no_object():
    with pytest.raises(EpilogueError, match=r"Scaled\.method is a method of no object(?s:.)*epilogue\(made\.method\)"):
        epilogue(Scaled.method)
    assert torch.equal(epilogue(Scaled().method).reference(torch.ones(2, 2)), torch.full((2, 2), 2.0))


#: message -> what PyTorch refuses too, of a tensor
PARAMETERS = {
    "hardtanh: expected a number, no larger than max_val, -1.0, for min_val, got 1.0": lambda x: F.hardtanh(
        x, 1.0, -1.0
    ),
    "softshrink: expected a number, 0 or larger, for lambd, got -0.7": lambda x: F.softshrink(x, -0.7),
    "softshrink: expected a number, 0 or larger, for lambd, got nan": lambda x: F.softshrink(x, math.nan),
    "celu: expected a number, other than 0, for alpha, got 0.0": lambda x: F.celu(x, 0.0),
    "dropout: expected a number, from 0 to 1, for p, got 1.5": lambda x: F.dropout(x, 1.5, training=False),
    "dropout: expected a number, from 0 to 1, for p, got -1": lambda x: F.alpha_dropout(x, -1),
    "rrelu: expected a number, no larger than upper, 0.2, for lower, got 0.5": lambda x: F.rrelu(x, 0.5, 0.2),
    "rrelu: expected a number, finite, for lower and upper, got inf": lambda x: F.rrelu(x, 0.5, math.inf),
}


@pytest.mark.parametrize("message", PARAMETERS)
def test_parameters_that_pytorch_refuses(message):
    function = PARAMETERS[message]
    with pytest.raises((RuntimeError, ValueError)):
        function(torch.ones(3))
    assert refused(function, EpilogueError).startswith(message)


def test_operands_as_parameters_are_not_checked():
    epilogue(lambda acc, low, high: functions.hardtanh(acc, low, high))
    epilogue(lambda acc, alpha: functions.celu(functions.softshrink(acc, alpha), alpha))
    assert functions.hardtanh(3.0, 1.0, 1.0) == 1.0

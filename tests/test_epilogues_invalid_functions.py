"""Functions that no epilogue can be made of: each raises an EpilogueError and nothing else, wherever the mistake is.

``MORE_EXAMPLES=50 pytest tests/test_epilogues_invalid_functions.py`` tries more calls of torch functions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import some
from torch.nn import functional as F

import epilogues as ep
from epilogues import EpilogueError, epilogue
from epilogues.validation import validate


def _no_grad(z: Any, t: Any) -> Any:
    with torch.no_grad():
        return z * 2


def _branch(z: Any, t: Any) -> Any:
    return z if z > 0 else t


def _loop(z: Any, t: Any) -> Any:
    while z < 3:
        z = z + 1
    return z


def _assign(z: Any, t: Any) -> Any:
    z[0] = 1.0
    return z


def _augment(z: Any, t: Any) -> Any:
    z += t
    return z


def _attribute(z: Any, t: Any) -> Any:
    z.scale = 2.0
    return z


def _recurse(z: Any, t: Any) -> Any:
    return _recurse(z + 1, t)


#: What a function may not do with a value.
REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda z, t: z / z.sum(dim=-1, keepdim=True),
    "mean": lambda z, t: z - torch.mean(z),
    "max": lambda z, t: z - z.max(dim=1).values,
    "amax": lambda z, t: torch.amax(z, -1),
    "softmax": lambda z, t: torch.softmax(z, dim=-1),
    "log_softmax": lambda z, t: F.log_softmax(z, -1),
    "layer_norm": lambda z, t: F.layer_norm(z, (8,)),
    "norm": lambda z, t: torch.linalg.norm(z),
    "var": lambda z, t: z.var(),
    "any": lambda z, t: (z > 0).any(),
    "cumsum": lambda z, t: torch.cumsum(z, 0),
    "sort": lambda z, t: z.sort().values,
    "argmax": lambda z, t: z.argmax(),
    "topk": lambda z, t: torch.topk(z, 2),
    "matmul": lambda z, t: z @ t,
    "mm": lambda z, t: torch.mm(z, t),
    "linear": lambda z, t: F.linear(z, t),
    "module": lambda z, t: torch.nn.Linear(4, 4)(z),
    "conv": lambda z, t: F.conv1d(z, t),
    "index": lambda z, t: z[0],
    "slice": lambda z, t: z[:, ::2],
    "gather": lambda z, t: torch.gather(z, 1, t),
    "embedding": lambda z, t: F.embedding(z, t),
    "roll": lambda z, t: torch.roll(z, 1, 0),
    "flip": lambda z, t: z.flip(0),
    "transpose": lambda z, t: z.t(),
    "T": lambda z, t: z.T,
    "reshape": lambda z, t: z.reshape(-1),
    "view": lambda z, t: z.view(2, -1),
    "permute": lambda z, t: z.permute(1, 0),
    "unsqueeze": lambda z, t: z * t.unsqueeze(0),
    "cat": lambda z, t: torch.cat([z, t]),
    "stack": lambda z, t: torch.stack((z, t)),
    "chunk": lambda z, t: z.chunk(2)[0],
    "glu": lambda z, t: F.glu(z),
    "loss": lambda z, t: F.mse_loss(z, t),
    "cross entropy": lambda z, t: F.cross_entropy(z, t),
    "add in place": lambda z, t: z.add_(t),
    "relu in place": lambda z, t: torch.relu_(z),
    "inplace=True": lambda z, t: F.relu(z, inplace=True),
    "copy_": lambda z, t: z.copy_(t),
    "zero_": lambda z, t: z.zero_(),
    "out=": lambda z, t: torch.add(z, t, out=z),
    "augmented": _augment,
    "item assignment": _assign,
    "attribute": _attribute,
    "branch": _branch,
    "while": _loop,
    "and": lambda z, t: z and t,
    "not": lambda z, t: not z,
    "chained comparison": lambda z, t: torch.where(0 < z < 1, z, t),
    "Python's max": lambda z, t: max(z, t),
    "iteration": lambda z, t: sum(x for x in z),
    "unpacking": lambda z, t: torch.add(*z),
    "in": lambda z, t: z * (1 if t in z else 2),
    "len": lambda z, t: z * len(t),
    "float": lambda z, t: z * float(t),
    "int": lambda z, t: z * int(t),
    "item": lambda z, t: z * t.item(),
    "tolist": lambda z, t: z.tolist(),
    "math": lambda z, t: math.exp(z),
    "numpy": lambda z, t: np.asarray(z),
    "numpy sort": lambda z, t: np.sort(z),
    "range": lambda z, t: next(z for _ in range(z)),
    "format": lambda z, t: z * len(f"{t:.3f}"),
    "random": lambda z, t: z + torch.rand_like(z),
    "bernoulli": lambda z, t: torch.bernoulli(z),
    "dropout": lambda z, t: F.dropout(z, 0.5),
    "dropout module": lambda z, t: torch.nn.Dropout(0.5)(z),
    "shape": lambda z, t: z / z.shape[-1],
    "size": lambda z, t: z / z.size(0),
    "dim": lambda z, t: z if t.dim() else t,
    "device": lambda z, t: z.to(t.device),
    "cuda": lambda z, t: z.cuda(),
    "float64": lambda z, t: z.double(),
    "to float64": lambda z, t: z.to(torch.float64),
    "int8": lambda z, t: z.to(torch.int8),
    "long": lambda z, t: z.long(),
    "complex": lambda z, t: torch.complex(z, t),
    "shift": lambda z, t: z << 1,
    "bits": lambda z, t: z & 3,
    "condition as value": lambda z, t: torch.where(z, z, t),
    "value of conditions": lambda z, t: torch.where((z > 0) - (t > 0), z, t),
    "detach": lambda z, t: z.detach(),
    "no_grad": _no_grad,
    "grad": lambda z, t: z.grad,
    "backward": lambda z, t: z.backward(),
    "a tensor": lambda z, t: z + torch.ones(8),
    "a parameter": lambda z, t: torch.nn.BatchNorm1d(4)(z),
    "a string": lambda z, t: z + "1",
    "a list": lambda z, t: z * [1, 2],
    "None": lambda z, t: z + None,
    "a complex number": lambda z, t: z * 2j,
    "a large integer": lambda z, t: z + 10**400,
    "no such method": lambda z, t: z.frobnicate(),
    "recursion": _recurse,
    "vmap": lambda z, t: torch.vmap(torch.sin)(z),
    "unknown activation": lambda z, t: ep.gelu(z, approximate="cubic"),
    "returns nothing": lambda z, t: None,
    "returns a number": lambda z, t: 2.0,
    "returns a condition": lambda z, t: z > t,
    "returns an operand": lambda z, t: t,
    "returns a tuple": lambda z, t: (z, t),
    "returns an empty dict": lambda z, t: {},
    "returns no main output": lambda z, t: {"E": z + t},
    "returns a number in a dict": lambda z, t: {"D": z + t, "E": 1},
    "returns a name that is none": lambda z, t: {"D": z + t, "1": z},
    "returns an output of operands": lambda z, t: {"D": z, "E": t},
}

#: What surrounds it: before and after it.
BEFORE: list[Callable[[Any], Any]] = [
    lambda x: x,
    lambda x: x * 0.5,
    lambda x: F.gelu(x),
    lambda x: x.to(torch.bfloat16),
    lambda x: torch.where(x > 0, x, -x),
    lambda x: 1.0 - x.exp(),
]


@pytest.mark.parametrize("name", REFUSED)
@some(4)
@given(st.lists(st.sampled_from(BEFORE), max_size=3), st.booleans())
def test_invalid_functions_are_refused(name, before, condition):
    def function(acc, t):
        z = acc
        for change in before:
            z = change(z)
        return REFUSED[name](z, t)

    with pytest.raises(EpilogueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epilogue(function)


UNSAFE = ("set_", "save", "load")
OVERRIDABLE = [
    (f"{getattr(space, '__name__', space)}.{function.__name__}", function)
    for space, functions in torch.overrides.get_overridable_functions().items()
    for function in functions
    if callable(function) and hasattr(function, "__name__") and not function.__name__.startswith(UNSAFE)
]
ARGUMENTS = st.lists(st.sampled_from(["z", "z", "t", 2.0, 1, -1, 0.5, True, None, "mean", torch.float16]), max_size=3)


@some(600)
@given(st.sampled_from(OVERRIDABLE), ARGUMENTS)
def test_every_function_of_torch_is_traced_or_refused(named, arguments):
    _, called = named

    def function(acc, t):
        values = {"z": acc * 0.5, "t": t}
        first = values["z"]
        return called(first, *(values.get(a, a) if isinstance(a, str) else a for a in arguments)) + t

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = epilogue(function).tree
        except EpilogueError:
            return
        except (TypeError, ValueError) as error:
            # PyTorch's own complaint about the arguments, which it makes before it asks what they are
            assert "argument" in str(error) or "equation" in str(error)
            assert "Symbol" not in str(error)
            return
    validate(tree)

"""A fused call in rewritten code: decides at every call how much of its steps one GEMM can take.

    y = fused_1(x)                                              # in the code of gemm_ops.conversion.rewrite

Contract
--------
* It computes what the product and the steps do, whatever the arguments are.  As many steps as possible, up to a cut
  of the region, are the epilogue of the GEMM; the others run as they are.  None are where the product is not what it
  was (it has got hooks, was replaced, parametrised, quantised), or where tensors are not plain ones of fitting dtypes.
* What fits is asked of each call's own dtypes, shapes, autocast and modules' flags, so dropout is fused through in
  evaluation and not in training, and an operand that PyTorch would broadcast the product to is left to PyTorch.
* PyTorch's compiler traces a call: what a choice depends on is read where the compiler guards on it, and the choice is
  made by a function that it runs with constants and does not trace.  When what was read changes, it compiles anew.
* The result has the dtype that the steps would have given it: it is cast to it in the epilogue where that is not the
  matrices' (a residual stream in float32 under autocast).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epilogues import Aux, Column, Epilogue, EpilogueError, Kind, Row, Scalar
from epilogues.builders import cast
from epilogues.operand_shapes import fits, is_number
from epilogues.tree import MAIN_OUTPUT

from .. import native
from ..autocast import autocast_dtype, with_autocast
from ..functional import matmul, multiply_described
from ..transforms import are_transforms_active
from .functions import ClassFunctions, NotTraceableError
from .inspection import read_code, read_methods
from .products import FLOATS, has_hooks, has_own_hooks, is_still, submodule, weight_matrix
from .steps import Step, build_epilogue, operands_read, run_steps, stand_in, step_obstacle
from .values import SIMPLE

_ANNOTATIONS: dict[Kind, Any] = {Kind.ROW: Row, Kind.COLUMN: Column, Kind.SCALAR: Scalar, Kind.AUX: Aux}
_PLAIN = (Tensor, nn.Parameter)
_SIXTEEN_OR_32 = (torch.float32, torch.float16, torch.bfloat16)

#: What every module has in its ``__dict__``, and does not compute with.
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}

#: An epilogue and how many steps it is.
Choice = tuple[Epilogue, int]

#: What a choice depends on but the steps' modules: see FusedCall._facts.
Facts = tuple[Any, ...]

#: An epilogue in constants.
Described = tuple[str, tuple[str, ...], tuple[str, ...]]

#: What a choice depends on of a step's module: its class, whether it has hooks, the plain values that it and its code
#: have by name, its functions by name, and the same of its parts.
Values = tuple[type, bool, tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]

#: Shapes that a call keeps the facts of.
_MOST_KNOWN = 256

#: The same as far as it is constants to PyTorch's compiler.
Constants = tuple[bool, tuple[tuple[str, Any], ...], tuple[str, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True)
class _Seen:
    """What a step's module was like at an earlier call, to be compared fast: values are the same objects, as a rule."""

    module: nn.Module
    size: int
    own: tuple[tuple[str, Any], ...]
    parts: dict[str, nn.Module | None]
    inner: tuple[_Seen, ...]
    functions: ClassFunctions | None

    @classmethod
    def of(cls, module: nn.Module) -> _Seen:
        held = module.__dict__
        own = tuple((name, value) for name, value in held.items() if name not in _INTERNAL)
        inner = tuple(cls.of(part) for part in module._modules.values() if part is not None)
        return cls(module, len(held), own, dict(module._modules), inner, _class_functions(module))

    def holds(self, module: nn.Module) -> bool:
        """Whether it is the same module still, with the same values and without hooks."""
        held = module.__dict__
        if module is not self.module or len(held) != self.size or has_own_hooks(module):
            return False
        for name, value in self.own:
            if held.get(name, held) is not value:
                return False
        if self.functions is not None and not self.functions.are_of(type(module)):
            return False
        if not self.parts:
            return not held["_modules"]
        return held["_modules"] == self.parts and all(each.holds(each.module) for each in self.inner)


@dataclass(frozen=True)
class _Latest:
    """The latest choice of a call, and what it was made of."""

    facts: Facts
    seen: tuple[_Seen, ...]
    choice: Choice | None


class FusedCall:
    """The fused call of one region.

    Args:
        number: tells the calls of one method apart.
        host: the module whose code calls it.
        product: the path of the product in the host.
        modules: the paths of the modules that the steps call.
        steps, cuts, names: the region's.
    """

    def __init__(
        self,
        number: int,
        host: nn.Module,
        product: str,
        modules: Sequence[str],
        steps: Sequence[Step],
        cuts: Sequence[int],
        names: Sequence[str],
    ) -> None:
        # by these names generated code calls it
        self.__name__ = self.__qualname__ = f"fused_{number}"
        self.__module__ = __name__
        self.host = host
        self.expected = type(host.get_submodule(product))
        self.is_linear = issubclass(self.expected, nn.Linear)
        self.product = tuple(product.split("."))
        self.modules = tuple(tuple(path.split(".")) for path in modules)
        self.steps, self.cuts, self.names = tuple(steps), tuple(cuts), tuple(names)
        self.reads = {count: operands_read(self.steps[:count]) for count in self.cuts}
        self.given = {count: self.names[:read] for count, read in self.reads.items()}
        self._choices: dict[Any, Choice | None] = {}
        self._latest: _Latest | None = None
        self._known: dict[bytes, Facts | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        # the choices know the modules of the model that is copied
        return {**self.__dict__, "_choices": {}, "_latest": None, "_known": {}}

    def __call__(self, x: Any, *operands: Any) -> Any:
        product = submodule(self.host, self.product)
        in_graph = torch.compiler.is_dynamo_compiling()
        facts = self._facts(product, x, operands) if in_graph else self._known_facts(product, x, operands)
        if facts is None:
            return run_steps(self.steps, [product(x)], operands, self._called())[-1]
        if in_graph:
            return self._call_in_graph(facts, product, x, operands)
        choice = self._choice(facts)
        if choice is None:
            return run_steps(self.steps, [product(x)], operands, self._called())[-1]
        epilogue, count = choice
        given = self._given(count, product, operands)
        result = native.product(x, product._parameters["weight"], self.is_linear, epilogue, False, given)
        if result is None:
            result = matmul(x, weight_matrix(product), epilogue, **given)
        return self._finish(count, result, operands)

    def _known_facts(self, product: nn.Module, x: Any, operands: tuple[Any, ...]) -> Facts | None:
        """The facts of a call, by those of an earlier one with tensors of the same dtypes and shapes."""
        if not is_still(product, self.expected):
            return None
        held = product._parameters
        key: bytes | None = native.signature(x, held["weight"], held["bias"], *operands)
        if key is None:
            return self._facts(product, x, operands)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._facts(product, x, operands)
        return self._known[key]

    def _call_in_graph(self, facts: Facts, product: nn.Module, x: Tensor, operands: tuple[Any, ...]) -> Any:
        """The same for PyTorch's compiler, which traces this, guards on what it reads, and takes a choice as it is."""
        product.forward  # noqa: B018 - that it is the class's is guarded on where it is read, not where it is looked for
        still = [_is_still(submodule(self.host, path), self._constants(i)) for i, path in enumerate(self.modules)]
        count, described = self._decide(facts, all(still))
        if described is None or are_transforms_active():
            return run_steps(self.steps, [product(x)], operands, self._called())[-1]
        given = self._given(count, product, operands)
        result = multiply_described(x, weight_matrix(product), described, given)[MAIN_OUTPUT]
        return self._finish(count, result, operands)

    def _given(self, count: int, product: nn.Module, operands: tuple[Any, ...]) -> dict[str, Any]:
        """What an epilogue of so many steps is given."""
        given = dict(zip(self.given[count], operands, strict=False))
        bias = product._parameters["bias"]
        if bias is not None:
            given["bias"] = bias
        return given

    def _finish(self, count: int, result: Any, operands: tuple[Any, ...]) -> Any:
        """The steps after the first ``count``."""
        if count == len(self.steps):
            return result
        # nothing before a cut is read after it, so that the values before it are not missed
        return run_steps(self.steps, [None] * count + [result], operands, self._called())[-1]

    def _called(self) -> list[nn.Module]:
        return [submodule(self.host, path) for path in self.modules]

    def _facts(self, product: nn.Module, x: Any, operands: tuple[Any, ...]) -> Facts | None:
        """What the choice depends on, but for the steps' modules; None where nothing can be fused.

        Only constants: the compiler, which traces this, knows them and guards on them.
        """
        if not is_still(product, self.expected) or type(x) not in _PLAIN or not x.ndim:
            return None
        weight, bias = product._parameters["weight"], product._parameters["bias"]
        assert weight is not None
        dtype, weight_dtype, device = x.dtype, weight.dtype, x.device
        cast_to = autocast_dtype(device.type)
        if (dtype != weight_dtype or (bias is not None and bias.dtype != weight_dtype)) and (
            cast_to is None or dtype not in _SIXTEEN_OR_32 or weight_dtype not in _SIXTEEN_OR_32
        ):
            return None
        if weight_dtype not in FLOATS or device != weight.device or x.layout is not torch.strided or x.is_nested:
            return None
        n, k = weight.shape if self.is_linear else reversed(weight.shape)
        shape = x.shape
        if k != shape[-1]:
            return None  # the module says it in PyTorch's words
        if bias is not None and bias.shape != (n,):
            return None  # it is spread over the result, or PyTorch says that it cannot be
        spread: tuple[Any, ...] = ()
        if operands:
            result = (*shape[:-1], n)
            spread = tuple([_facts(operand, result, x) for operand in operands])
        return (spread, dtype, weight_dtype, bias is None, cast_to, device)

    def _choice(self, facts: Facts) -> Choice | None:
        """The choice for these facts and the modules as they are."""
        latest = self._latest
        modules = self._called()
        if latest is not None and latest.facts == facts:
            for module, seen in zip(modules, latest.seen, strict=True):
                if not seen.holds(module):
                    break
            else:
                return latest.choice
        key = (facts, tuple([(module, _values(module)) for module in modules]))
        if key not in self._choices:
            self._choices[key] = self._choose(facts, modules)
        choice = self._choices[key]
        self._latest = _Latest(facts, tuple(map(_Seen.of, modules)), choice)
        return choice

    def _constants(self, number: int) -> Constants:
        return _in_constants(_values(self._called()[number]))

    def _decide(self, facts: Facts, still: bool) -> tuple[int, Described | None]:
        """The choice in constants: how many steps, and the epilogue described; None where nothing is fused.

        Args:
            still: whether the modules are what they are, and not what the code that is compiled made of them before.
        """
        choice = self._choice(facts) if still else None
        if choice is None:
            return 0, None
        epilogue, count = choice
        return count, (epilogue.text, tuple(epilogue.operands), epilogue.outputs)

    # The compiler runs these two as it traces, with constants, and takes what they return as constants: that is what
    # torch.compiler.assume_constant_result says of a function.  It is said by hand, as that imports the compiler.
    _constants._dynamo_marked_constant = _decide._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _choose(self, facts: Facts, modules: Sequence[nn.Module]) -> Choice | None:
        """The longest cut that one GEMM can compute, None if that is none."""
        spread, dtype, _, no_bias, cast_to, device = facts
        matrix_dtype = cast_to if cast_to is not None and dtype in _SIXTEEN_OR_32 else dtype
        fitting = list(itertools.takewhile(lambda fact: fact is not None, spread))
        annotations = [_ANNOTATIONS[fact[0]] for fact in fitting]
        for count in reversed(self.cuts):
            steps = self.steps[:count]
            called = [modules[step.target] for step in steps if step.way == "module"]
            if self.reads[count] > len(fitting) or any(map(step_obstacle, called)):
                continue
            try:
                epilogue = build_epilogue(steps, self.names, annotations, modules, has_bias=not no_bias)
            except EpilogueError:
                continue
            # after that, because only then are the steps known to draw no random numbers
            with with_autocast(device.type, cast_to):
                found = _result_dtype(steps, matrix_dtype, device, fitting, modules)
            if found not in FLOATS or (found == torch.float64) != (matrix_dtype == torch.float64):
                continue
            return epilogue if found == matrix_dtype else cast(found, epilogue), count
        return None


def _result_dtype(
    steps: Sequence[Step],
    dtype: torch.dtype,
    device: torch.device,
    spread: Sequence[tuple[Any, ...]],
    modules: Sequence[nn.Module],
) -> torch.dtype | None:
    """The dtype of what the steps give for a product of that dtype, as PyTorch promotes: by running them, once."""
    small = [_small(device, *fact) for fact in spread]
    stand_ins = [stand_in(module) for module in modules]
    with torch.no_grad():
        # of as many dimensions as an operand may have, so that steps in place find it no smaller
        shape = (1,) * max(2, *[operand.ndim for operand in small if isinstance(operand, Tensor)], 0)
        result = run_steps(steps, [torch.ones(shape, dtype=dtype, device=device)], small, stand_ins)[-1]
    return result.dtype if isinstance(result, Tensor) else None


def _small(device: torch.device, kind: Kind, dtype: Any, ndim: int | None = None) -> Any:
    """An operand of those facts: a tensor, or a number, whose type stands for its dtype."""
    return dtype(1) if ndim is None else torch.ones((1,) * ndim, dtype=dtype, device=device)


def _facts(operand: Any, shape: tuple[int, ...], x: Tensor) -> tuple[Any, ...] | None:
    """An operand's kind and dtype beside a product of that shape; None where PyTorch has to take it."""
    if type(operand) not in _PLAIN:
        return (Kind.SCALAR, type(operand)) if is_number(operand) else None
    dtype = operand.dtype
    if dtype not in FLOATS or operand.device != x.device or operand.layout is not torch.strided:
        return None
    if (dtype == torch.float64) != (x.dtype == torch.float64):
        return None
    kind = _kind(operand.shape, shape)
    return None if kind is None else (kind, dtype, operand.ndim)


def _kind(own: tuple[int, ...], shape: tuple[int, ...]) -> Kind | None:
    """How a tensor spreads over the product where PyTorch aligns its dimensions at the right; None if it widens it."""
    m_shape, n = shape[:-1], shape[-1]
    if n != 1:  # what nearly every operand is, told at once
        if own == shape:
            return Kind.AUX
        if own == (n,):
            return Kind.ROW
    if len(own) > len(shape):
        return None
    own = tuple(own)
    if all([size == 1 for size in own]):
        return Kind.SCALAR
    for kind in (Kind.AUX, Kind.ROW):
        if fits(kind, own, m_shape, n):
            return kind
    # (M,), which the language takes as a column too, is a row to PyTorch
    aligned = len(own) == len(shape) and own[-1] == 1
    return Kind.COLUMN if aligned and fits(Kind.COLUMN, own, m_shape, n) else None


def _values(module: nn.Module) -> Values:
    """What a choice depends on of a step's module."""
    held = module.__dict__
    own = {name: value for name, value in held.items() if name not in _INTERNAL}
    plain = {name: value for name, value in own.items() if type(value) in SIMPLE}
    functions = {name: value for name, value in own.items() if name not in plain and callable(value)}
    with contextlib.suppress(NotTraceableError):
        for name in sorted(read_code(module, "forward").attributes - _INTERNAL - set(held)):
            if type(value := getattr(type(module), name, module)) in SIMPLE:
                plain[name] = value
    if (of_class := _class_functions(module)) is not None:
        functions |= of_class.by_name
    parts = tuple((name, _values(part)) for name, part in module._modules.items() if part is not None)
    return type(module), has_hooks(module), tuple(plain.items()), tuple(functions.items()), parts


def _class_functions(module: nn.Module) -> ClassFunctions | None:
    """What a step runs of its module's class; None of PyTorch's, which nobody is taken to patch."""
    if type(module).__module__.startswith("torch.nn."):
        return None
    with contextlib.suppress(NotTraceableError):
        return ClassFunctions(type(module), {"forward", *read_methods(module, read_code(module, "forward"))})
    return None  # which is no step


def _in_constants(values: Values) -> Constants:
    _, hooks, plain, functions, parts = values
    named = tuple(name for name, _ in functions)
    return hooks, plain, named, tuple((name, _in_constants(part)) for name, part in parts)


def _is_still(module: nn.Module, constants: Constants) -> bool:
    """Whether a step's module has these values; for PyTorch's compiler, which guards on whatever this reads."""
    hooks, plain, functions, parts = constants
    module.forward  # noqa: B018 - see FusedCall._call_in_graph
    still = has_hooks(module) == hooks
    for name, value in plain:
        still = still and getattr(module, name) == value
    for name in functions:  # which they are is guarded on; some have no value to compare
        still = still and getattr(module, name) is not None
    inner: dict[str, Any] = module._modules
    return still and all([_is_still(inner[name], part) for name, part in parts])

"""What follows a product, as data: steps that run on tensors and on the values of an epilogue alike.

    >>> steps = (Step("function", F.gelu, (Value(0),)), Step("function", operator.add, (Value(1), Given(0))))
    >>> run_steps(steps, [product], [residual], [])[-1]                  # unfused: gelu(product) + residual
    >>> build_epilogue(steps, ["residual"], [Aux], [], has_bias=True)    # the same, traced
    <Epilogue ...>

Contract
--------
* ``Value(0)`` is the product, its bias added; ``Value(i)`` the result of step i.  ``Given(j)`` is operand j: a value
  that the steps read and do not compute.  Operands are numbered as the steps first read them.
* There is no list of activations: a step is elementwise if running it on the symbols of an epilogue makes one.
* Steps are plain data of functions, names and numbers, so that they can be pickled and copied with a model.  The
  modules that they call are not in them; they are looked up in the model when it runs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from epilogues import Epilogue, EpilogueError, Row
from epilogues.builders import bias_activation, identity

from .functions import NotTraceableError
from .inspection import read_code
from .products import has_hooks, is_called_plainly
from .undisturbed import check_iterators, no_random_numbers
from .values import is_mutable

#: An operand's annotation: Row, Column, Scalar, Aux, or inspect.Parameter.empty where its shape is not known yet.
Annotation = Any

#: What nn.Module itself has, which it changes by its own methods.
_INTERNAL = frozenset(nn.Module().__dict__)


@dataclass(frozen=True)
class Value:
    """The product (0), or the result of a step, by number."""

    index: int


@dataclass(frozen=True)
class Given:
    """An operand, by number."""

    index: int


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        way: "function", "method" or "module".
        target: the function; the method's name; the module's number.
        args, kwargs: with :class:`Value` and :class:`Given` in the places of tensors.
        label: what reports call it.
        pattern: the pattern that it belongs to, see :mod:`gemm_ops.conversion.patterns`.
        in_place: whether the code writes the result over the first argument.  Nobody else reads that, so the step is
            computed out of place, with the shape and the dtype of what it would overwrite.
    """

    way: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    pattern: str = "activation"
    in_place: bool = False


def references(step: Step) -> list[Value | Given]:
    """The values and operands that a step reads, in order."""
    found: list[Value | Given] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Value | Given):
            found.append(leaf)
        return leaf

    _map(step.args, collect)
    _map(step.kwargs, collect)
    return found


def operands_read(steps: Sequence[Step]) -> int:
    """How many operands the steps read: the first ones, as they are numbered in order."""
    return max((ref.index + 1 for step in steps for ref in references(step) if isinstance(ref, Given)), default=0)


def run_steps(
    steps: Sequence[Step], values: list[Any], operands: Sequence[Any], modules: Sequence[Callable[..., Any]]
) -> list[Any]:
    """Runs the steps that have no value yet; gives ``values`` with theirs appended."""

    def look_up(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return values[leaf.index]
        return operands[leaf.index] if isinstance(leaf, Given) else leaf

    for step in steps[len(values) - 1 :]:
        args, kwargs = _map(step.args, look_up), _map(step.kwargs, look_up)
        if step.way == "module":
            values.append(modules[step.target](*args, **kwargs))
        elif step.way == "method":
            values.append(getattr(args[0], step.target)(*args[1:], **kwargs))
        else:
            values.append(step.target(*args, **kwargs))
        if step.in_place and isinstance(args[0], Tensor):
            values[-1] = _written_over(args[0], values[-1])
    return values


def _written_over(written: Tensor, result: Tensor) -> Tensor:
    """What writing a result over a tensor makes of it."""
    if result.shape != written.shape:
        raise RuntimeError(f"a result of shape {tuple(result.shape)} does not fit over one of {tuple(written.shape)}")
    return result.to(written.dtype)


def build_epilogue(
    steps: Sequence[Step],
    names: Sequence[str],
    annotations: Sequence[Annotation],
    modules: Sequence[nn.Module],
    *,
    has_bias: bool,
) -> Epilogue:
    """The epilogue that the steps are, of a product's accumulator and its bias.

    Args:
        names, annotations: of the operands; those that the steps read are used.
        modules: what "module" steps call; stand-ins of them are run, see :func:`stand_in`.

    Raises:
        EpilogueError: if the steps are not elementwise, in the language's words.
    """
    if not steps:
        return bias_activation(None) if has_bias else identity()
    read = operands_read(steps)
    stand_ins = [stand_in(module) for module in modules]

    def run(acc: Any, *values: Any) -> Any:
        operands = values[1:] if has_bias else values
        start = acc + values[0] if has_bias else acc
        return run_steps(steps, [start], operands, stand_ins)[-1]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("acc", kind)]
    parameters += [inspect.Parameter("bias", kind, annotation=Row)] if has_bias else []
    parameters += [
        inspect.Parameter(name, kind, annotation=annotation)
        for name, annotation in zip(names[:read], annotations[:read], strict=True)
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    try:
        with no_random_numbers() as draws:
            epilogue = Epilogue(run, "_".join(["bias"] * has_bias + [_word(step.label) for step in steps]))
    except EpilogueError:
        raise
    except Exception as error:  # a step is anybody's code, and what it raises at a symbol anything
        raise EpilogueError(f"{type(error).__name__}: {error}") from error
    if draws():
        raise EpilogueError("which draws random numbers")
    return epilogue


def stand_in(module: nn.Module, *, training: bool | None = None) -> nn.Module:
    """A copy of a step's module to run on symbols: in training or evaluation, and not in place.

    A step's module has no parameters, so the copy is small.  In place makes no difference to the result: the value it
    would overwrite is the product's or a step's, and nothing else reads that.
    """
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if getattr(part, "inplace", False) is True:
            vars(part)["inplace"] = False
    return copied if training is None else copied.train(training)


def step_obstacle(module: nn.Module) -> str | None:
    """Why a module cannot be a step, whatever it computes; None if it can."""
    name = type(module).__name__
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return f"a {name}, which has parameters or buffers"
    for part in module.modules():
        if has_hooks(part) or "forward" in part.__dict__:
            return f"a {name}, which has hooks, or a forward set on it"
        if not is_called_plainly(part):
            return f"a {name}, which has a __call__ of its own"
        try:
            reading = read_code(part, "forward")
            check_iterators([part], reading.functions)
        except NotTraceableError as error:
            return f"a {name}: {error}"
        for each in sorted(reading.attributes - _INTERNAL):
            if is_mutable(getattr(part, each, None)):
                return f"a {name}, which reads self.{each}, whose values may change"
    return None


def _word(label: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in label)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nest of tuples, lists, dictionaries and slices with its leaves changed."""
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_map(value.start, change), _map(value.stop, change), _map(value.step, change))
    return change(value)

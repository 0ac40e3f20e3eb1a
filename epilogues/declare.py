"""Declaring an epilogue: the decorator, and the object it makes.

    >>> @epilogue
    ... def bias_gelu(acc, bias: Row):
    ...     return ep.gelu(acc + bias)
    >>> bias_gelu.reference(a @ b, bias=bias)          # unfused, in PyTorch
    >>> @epilogue
    ... def bias_gelu_residual(acc, bias: Row, residual: Aux):
    ...     return bias_gelu(acc, bias) + residual      # epilogues compose

Contract
--------
* The function is traced when it is decorated, so mistakes are reported there.  An ``nn.Module`` is a function
  too, by the signature of its ``forward``; it is traced as it then is, in training or in evaluation.
* An :class:`Epilogue` never changes.  Two are equal if their trees are, and their operands and outputs have
  the same names: then they can be called alike.  Caches of kernels go by ``.tree``, where names don't count.
* An epilogue's declarations hold in another one too: operands handed on as they are have its kinds and dtypes.
* Pickling keeps the tree and the name, not the function; the copy computes the same and composes too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import Tensor

from .errors import EpilogueError
from .operand_shapes import check_names, is_number, operand_number
from .reference import evaluate, round_number
from .source import explain, plain_function, short, user_location
from .symbol import Symbol
from .tracing import Trace, replay, trace, trace_of
from .tree import MAIN_OUTPUT, EpilogueTree, Kind, Operand
from .validation import validate


class Epilogue:
    """What happens to the accumulator of a GEMM before it is stored.  Made by :func:`epilogue`."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        chosen = name or str(getattr(function, "__name__", type(function).__name__))
        is_module = isinstance(function, torch.nn.Module)
        self._set(trace(function, chosen), chosen)
        self.__qualname__ = chosen
        # the attributes of a function, not the state of an object that can be called
        updated = ("__dict__",) if inspect.isfunction(function) else ()
        functools.update_wrapper(self, plain_function(function) if is_module else function, updated=updated)
        self.__name__ = chosen

    @classmethod
    def from_tree(cls, tree: EpilogueTree, name: str = "epilogue") -> Epilogue:
        """The epilogue that a tree describes.

        Raises:
            EpilogueError: if the tree breaks a rule of :mod:`epilogues.validation`.
        """
        validate(tree)
        made = cls.__new__(cls)
        made._set(tree, name)
        made.__name__ = made.__qualname__ = name
        return made

    def _set(self, tree: EpilogueTree, name: str) -> None:
        self._tree = tree
        self._name = name

    @property
    def tree(self) -> EpilogueTree:
        """What is computed."""
        return self._tree

    @property
    def name(self) -> str:
        """What error messages and reports call it."""
        return self._name

    @functools.cached_property
    def operands(self) -> Mapping[str, Kind]:
        """The operands' names, in order, and how each spreads over the accumulator."""
        return MappingProxyType({operand.name: operand.kind for operand in self.tree.operands})

    @functools.cached_property
    def outputs(self) -> tuple[str, ...]:
        """The outputs' names, "D" first."""
        return tuple(store.name for store in self.tree.outputs)

    def __call__(self, acc: Any, /, *args: Any, **operands: Any) -> Any:
        """Inside another epilogue: this one, of its values.  On tensors: :meth:`reference`.

        Operands may be given by position here, in the order of the function's parameters.
        """
        named = self._by_name(args, operands)
        recorder = trace_of((acc, *named.values()))
        if recorder is None:
            return self.reference(acc, **named)
        try:
            check_names(self.tree, named)
        except EpilogueError as error:
            raise EpilogueError(explain(f"epilogue {self.name}: {error}", user_location())) from None
        start = recorder.value(acc)
        return self._compose(start, {op.name: self._given(recorder, op, named[op.name]) for op in self.tree.operands})

    def _given(self, recorder: Trace, operand: Operand, value: Any) -> Symbol:
        """What another epilogue gives for an operand, held to the operand's declaration."""
        if is_number(value) and operand.dtype is not None:
            value = round_number(operand_number(operand, value), operand.dtype, torch.device("cpu")).item()
        symbol = recorder.value(value)
        recorder.hand_on(symbol, operand, self.name)
        return symbol

    def _compose(self, acc: Symbol, values: dict[str, Symbol]) -> Any:
        # the tree and not the function: what that closes over, or the object it is a method of, may have changed
        outputs = replay(self.tree, acc, values)
        return outputs if len(outputs) > 1 else outputs[MAIN_OUTPUT]

    def _by_name(self, args: tuple[Any, ...], operands: dict[str, Any]) -> dict[str, Any]:
        names = list(self.operands)
        if len(args) > len(names):
            raise EpilogueError(
                explain(
                    f"epilogue {self.name}: expected the accumulator and {len(names)} operands "
                    f"({', '.join(names) or 'none'}), got {len(args)} operands",
                    user_location(),
                )
            )
        positional = dict(zip(names, args, strict=False))
        twice = sorted(positional.keys() & operands.keys())
        if twice:
            raise EpilogueError(
                explain(f"epilogue {self.name}: operand {', '.join(twice)} given twice", user_location())
            )
        return {**positional, **operands}

    def reference(
        self,
        acc: Tensor,
        /,
        *,
        compute_dtype: torch.dtype = torch.float32,
        keep_casts: bool = True,
        out_dtype: torch.dtype | str | None = None,
        **operands: Tensor | float,
    ) -> Any:
        """What the epilogue computes, unfused, in PyTorch; see :func:`epilogues.reference.evaluate`.

        Returns:
            The output tensor, or, of an epilogue with several outputs, a dict of them by name.
        """
        outputs = evaluate(
            self.tree,
            acc,
            operands,
            compute_dtype=compute_dtype,
            keep_casts=keep_casts,
            out_dtype=out_dtype,
        )
        return outputs if len(outputs) > 1 else outputs[MAIN_OUTPUT]

    def _identity(self) -> tuple[object, ...]:
        return (self.tree, tuple(self.operands), self.outputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Epilogue) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        parameters = ["acc", *(f"{name}: {kind.value}" for name, kind in self.operands.items())]
        return f"<epilogue {self.name}({', '.join(parameters)}) -> {', '.join(self.outputs)}>"

    def __copy__(self) -> Epilogue:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Epilogue:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.tree.to_json(), self.name, self.__doc__))


def _rebuild(text: str, name: str, doc: str | None) -> Epilogue:
    made = Epilogue.from_tree(EpilogueTree.from_json(text), name)
    made.__doc__ = doc
    return made


@overload
def epilogue(function: Callable[..., Any], /, *, name: str | None = None) -> Epilogue: ...


@overload
def epilogue(*, name: str | None = None) -> Callable[[Callable[..., Any]], Epilogue]: ...


def epilogue(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None
) -> Epilogue | Callable[[Callable[..., Any]], Epilogue]:
    """Makes an epilogue of a function of the accumulator; see the module's example.

    Args:
        function: first parameter the accumulator, the others operands annotated Row, Column, Scalar or Aux.
            Or a module with such a ``forward``.
        name: what to call it; the function's name if not given.

    Raises:
        EpilogueError: if the function cannot be fused, naming the line that is the reason.
    """
    if function is None:
        return functools.partial(epilogue, name=name)
    if not callable(function):
        hint = "" if not isinstance(function, str) else f"; did you mean epilogues.builders.activation({function!r})?"
        raise EpilogueError(f"epilogue: expected a function, got {type(function).__name__} {short(function)}{hint}")
    if inspect.isclass(function):
        hint = (
            f"; make an instance: epilogue({function.__name__}(...))" if issubclass(function, torch.nn.Module) else ""
        )
        raise EpilogueError(f"epilogue: expected a function, got the class {function.__name__}{hint}")
    if isinstance(function, Epilogue):
        return function if name is None else Epilogue.from_tree(function.tree, name)
    return Epilogue(function, name)

"""A value of an epilogue while its function is traced: what operators, methods and torch functions do with it.

    >>> epilogue(lambda acc: print(acc > 0, acc.exp()) or acc)
    Symbol(gt(...)) Symbol(exp(...))

Contract
--------
* Operators, methods, functions of torch and numpy's elementwise functions go by name to :mod:`epilogues.torch_calls`,
  which makes nodes or refuses.
* Comparisons give conditions, ``==`` and ``!=`` too; a symbol is hashed by identity, and ``is`` compares symbols.
* Python never learns what a value is: ``bool``, ``float``, ``len`` and the like are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from .dtypes import torch_dtype
from .errors import UnsupportedOperationError
from .operations import is_condition
from .refusals import refuse
from .source import explain, user_location
from .tree import Apply, Cast, Constant, Node, Operand

if TYPE_CHECKING:
    from .tracing import Trace

#: What numpy calls otherwise than torch.
_NUMPY_NAMES = {"equal": "eq", "power": "pow", "rint": "round", "fabs": "abs", "float_power": "pow"}


def _call(name: str, *args: Any, **keywords: Any) -> Any:
    from .torch_calls import call

    return call(name, args, keywords)


class Symbol:
    """One value of an epilogue while its function is traced.  Computes like a tensor, elementwise only."""

    __slots__ = ("node", "recorder")

    node: Node
    recorder: Trace

    def __init__(self, node: Node, recorder: Trace) -> None:
        object.__setattr__(self, "node", node)
        object.__setattr__(self, "recorder", recorder)

    def __repr__(self) -> str:
        node = self.node
        if isinstance(node, Operand):
            return f"Symbol({node.name})"
        if isinstance(node, Constant):
            return f"Symbol({node.value})"
        if isinstance(node, Apply):
            return f"Symbol({node.operation}(...))"
        return f"Symbol({type(node).__name__.lower()})"

    # operators, by the names of the functions that PyTorch has for them
    def __add__(self, other: Any) -> Symbol:
        return _call("__add__", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return _call("__add__", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return _call("__sub__", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return _call("__sub__", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return _call("__mul__", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return _call("__mul__", other, self)

    def __truediv__(self, other: Any) -> Symbol:
        return _call("__truediv__", self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        # as torch.Tensor has it
        return _call("__mul__", _call("reciprocal", self), other)

    def __floordiv__(self, other: Any) -> Symbol:
        return _call("__floordiv__", self, other)

    def __rfloordiv__(self, other: Any) -> Symbol:
        return _call("__floordiv__", other, self)

    def __mod__(self, other: Any) -> Symbol:
        return _call("__mod__", self, other)

    def __rmod__(self, other: Any) -> Symbol:
        return _call("__mod__", other, self)

    def __pow__(self, other: Any) -> Symbol:
        return _call("__pow__", self, other)

    def __rpow__(self, other: Any) -> Symbol:
        return _call("__pow__", other, self)

    def __and__(self, other: Any) -> Symbol:
        return _call("__and__", self, other)

    def __rand__(self, other: Any) -> Symbol:
        return _call("__and__", other, self)

    def __or__(self, other: Any) -> Symbol:
        return _call("__or__", self, other)

    def __ror__(self, other: Any) -> Symbol:
        return _call("__or__", other, self)

    def __xor__(self, other: Any) -> Symbol:
        return _call("__xor__", self, other)

    def __rxor__(self, other: Any) -> Symbol:
        return _call("__xor__", other, self)

    def __neg__(self) -> Symbol:
        return _call("__neg__", self)

    def __pos__(self) -> Symbol:
        return _call("__pos__", self)

    def __invert__(self) -> Symbol:
        return _call("__invert__", self)

    def __abs__(self) -> Symbol:
        return _call("__abs__", self)

    def __round__(self, ndigits: int = 0) -> Symbol:
        return _call("__round__", self, decimals=0 if ndigits is None else ndigits)

    def __lt__(self, other: Any) -> Symbol:
        return _call("__lt__", self, other)

    def __le__(self, other: Any) -> Symbol:
        return _call("__le__", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return _call("__gt__", self, other)

    def __ge__(self, other: Any) -> Symbol:
        return _call("__ge__", self, other)

    def __eq__(self, other: Any) -> Symbol:  # type: ignore[override]
        return _call("__eq__", self, other)

    def __ne__(self, other: Any) -> Symbol:  # type: ignore[override]
        return _call("__ne__", self, other)

    # the dtype, which is known without any tensor
    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a condition (bool), of a cast, or of an operand whose dtype is fixed; others have none.

        Not float32, in which they are computed: ``z.to(z.dtype)`` at the end of a function would make every output
        float32, and ``torch.finfo(z.dtype).max`` overflow where the output has 16 bits.
        """
        node = self.node
        if is_condition(node):
            return torch.bool
        if isinstance(node, Cast):
            return torch_dtype(node.dtype)
        if isinstance(node, Operand):
            if node.dtype is None:
                raise UnsupportedOperationError(
                    explain(
                        f"the dtype of operand {node.name} is not known while the epilogue is traced",
                        user_location(),
                        instead=f"fix it in the annotation, such as {node.name}: Row[torch.float32]",
                    )
                )
            return torch_dtype(node.dtype)
        raise UnsupportedOperationError(
            explain(
                "the dtype of a computed value",
                user_location(),
                why="values are computed in float32 and rounded where they are stored, in the dtype of the matrices",
                instead="leave out a cast back to it, or name a dtype: x.to(torch.bfloat16)",
            )
        )

    # methods of a tensor, and functions of torch: by name
    def __getattr__(self, name: str) -> Any:
        from .torch_calls import method

        return method(self, name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _call(getattr(func, "__name__", str(func)), *args, **dict(kwargs or {}))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """The elementwise functions and operators of numpy, by name, such as ``np.float32(2) * x``."""
        name = _NUMPY_NAMES.get(ufunc.__name__, ufunc.__name__)
        given = [x if isinstance(x, Symbol) or np.ndim(x) else np.asarray(x).item() for x in inputs]
        return _call(name if method == "__call__" else f"{name}.{method}", *given, **kwargs)

    def __format__(self, spec: str) -> str:
        if spec:
            refuse("__format__")
        return repr(self)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse("__setattr__")

    def __delattr__(self, name: str) -> None:
        refuse("__delattr__")

    # identity, so that symbols may be keys although == makes a node
    __hash__ = object.__hash__


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: Symbol, *args: Any, **keywords: Any) -> NoReturn:
        refuse(name)

    method.__name__ = name
    return method


# What Python may ask of a value and an epilogue has no answer to; the reasons are in the table of refusals.
_REFUSED = (
    "bool int float complex index len iter next contains array call",
    "iadd isub imul itruediv ipow ifloordiv imod imatmul iand ior ixor ilshift irshift",
    "getitem setitem delitem matmul rmatmul divmod rdivmod lshift rlshift rshift rrshift trunc floor ceil",
)
for _line in _REFUSED:
    for _name in _line.split():
        setattr(Symbol, f"__{_name}__", _refused(f"__{_name}__"))

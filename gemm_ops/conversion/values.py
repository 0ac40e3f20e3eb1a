"""Values that a trace depended on: kept as they were, and compared before every call with what is there.

    >>> expected = kept(module.options)                  # {"scale": [2.0]}
    >>> is_same(module.options, expected)
    True

Plain values are compared by type and value, containers item by item; functions and modules in them by identity.
A tensor within one is none that a trace can stand for.
"""

from __future__ import annotations

import collections
import enum
import functools
import random
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Values that are compared before a trace stands for a method; others, such as a configuration, should not change.
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)

#: Others that never change, and are equal where they are the same.
_VALUES = (*SIMPLE, range, torch.memory_format)

_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
#: What PyTorch's compiler asks for by its parts, not by ``is``.
BY_PARTS = (dict, list, tuple, frozenset, functools.partial, MethodType)
_IDENTIFIED = (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type, enum.Enum)

#: How many values a container may have, with those within it, to be compared at every call.
_MOST_VALUES = 64

_DEPTH = 8


class Presence(enum.Enum):
    """What is known of an attribute whose value a trace did not depend on, only on whether there is one."""

    ABSENT = "absent"
    PRESENT = "present"


class Itself(NamedTuple):
    """An object of which only is known which one it is, such as a configuration."""

    value: Any


class UnkeptError(Exception):
    """A value that cannot be compared later; says what it is."""


def kept(value: Any) -> Any:
    """What a value is to be compared with later, whatever is done to it; :class:`Presence` where it is not compared.

    Raises:
        UnkeptError: if it may change in a way that would not be seen.
    """
    if isinstance(value, functools.partial):
        return _copied(value)
    if type(value) in _VALUES or isinstance(value, _IDENTIFIED):
        return value
    if isinstance(value, _CONTAINERS):
        if _count(value, 0) > _MOST_VALUES:
            raise UnkeptError(f"a {type(value).__name__} of more values than are compared at every call")
        return _copied(value)
    if type(value).__module__ == "numpy":  # numbers too, which PyTorch's compiler takes for tensors
        raise UnkeptError(f"a numpy {type(value).__name__}, which is not compared at every call")
    if isinstance(value, bytearray | memoryview):
        raise UnkeptError(f"a {type(value).__name__}, which may change")
    return Presence.PRESENT if isinstance(value, nn.Module | Tensor) else Itself(value)


def is_same(value: Any, expected: Any) -> bool:
    """Whether a value is what another was when it was kept.

    PyTorch's compiler traces this, so it has no loop that ends early.
    """
    if expected is Presence.PRESENT:
        return value is not None and value is not Presence.ABSENT
    if isinstance(expected, Itself):
        # of which PyTorch's compiler would not take every kind
        return torch.compiler.is_dynamo_compiling() or value is expected.value
    if isinstance(expected, dict):
        if not isinstance(value, dict) or list(value) != list(expected):
            return False
        return all([is_same(value[key], item) for key, item in expected.items()])
    if isinstance(expected, list | tuple):
        kinds = (list, collections.deque) if isinstance(expected, list) else (tuple,)  # what is kept as one
        if not isinstance(value, kinds) or len(value) != len(expected):
            return False
        return all([is_same(item, other) for item, other in zip(value, expected, strict=True)])
    if isinstance(expected, frozenset):
        return isinstance(value, set | frozenset) and len(value) == len(expected) and not (expected - value)
    if isinstance(expected, functools.partial):
        if not isinstance(value, functools.partial) or value.func is not expected.func:
            return False
        return is_same(value.args, expected.args) and is_same(value.keywords, expected.keywords)
    if isinstance(expected, MethodType):
        if not isinstance(value, MethodType):
            return False
        return value.__func__ is expected.__func__ and value.__self__ is expected.__self__
    if value is expected:
        return True
    return type(value) is type(expected) and type(expected) in _VALUES and bool(value == expected)


def is_stream(value: Any) -> bool:
    """Whether asking it gives something else every time, and nothing could take that back."""
    return hasattr(type(value), "__next__") or _is_generator(value)


def in_words(stream: Any) -> str:
    return "a generator of random numbers" if _is_generator(stream) else "an iterator"


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random | torch.Generator) or type(value).__module__.startswith("numpy.random")


def is_mutable(value: Any) -> bool:
    """Whether it is, or has, a container or an array: what a cheap comparison of a module's values leaves out."""
    return isinstance(value, (*_CONTAINERS, bytearray, memoryview)) or (
        type(value).__module__ == "numpy" and hasattr(value, "__setitem__")
    )


def _count(value: Any, depth: int) -> int:
    """How many values there are in a container, up to more than too many."""
    if not isinstance(value, _CONTAINERS):
        return 1
    if depth == _DEPTH or len(value) > _MOST_VALUES:  # a list that is in itself has no end
        return _MOST_VALUES + 1
    return sum(_count(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value))


def _copied(value: Any) -> Any:
    """The containers as plain ones, what is in them as it is."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | collections.deque):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        return tuple([_copied(item) for item in value])
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, functools.partial):
        return functools.partial(value.func, *_copied(value.args), **_copied(value.keywords))
    if isinstance(value, Tensor):
        raise UnkeptError("which has tensors, whose values are not compared")
    if type(value) in _VALUES or isinstance(value, (*_IDENTIFIED, nn.Module)):
        return value
    return kept(value)

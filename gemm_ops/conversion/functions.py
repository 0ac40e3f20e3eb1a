"""The functions that a method runs: itself, what it wraps, and the methods and helpers that it calls; their source.

    >>> [each.function.__name__ for each in functions_of(block, method_of(block, "forward"))]
    ['forward', '_ff_block']

Functions of other packages than the method's, PyTorch's first of all, are taken to be what tensors go through.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn


class NotTraceableError(Exception):
    """A method that is not traced; says why."""


class Reached(NamedTuple):
    """A function that a method runs, and the names that the module has in it."""

    function: FunctionType
    selves: frozenset[str]


def method_of(module: nn.Module, name: str) -> FunctionType:
    """The function that a class has for a method.

    Raises:
        NotTraceableError: if it is no plain function.
    """
    function = inspect.getattr_static(type(module), name, None)
    if not isinstance(function, FunctionType):
        raise NotTraceableError(f"{type(module).__name__}.{name} is no plain function")
    return function


def functions_of(module: nn.Module, first: FunctionType) -> Iterator[Reached]:
    """The function, what it wraps, and the module's methods and the helpers beside them that it calls."""
    waiting, seen = [(first, True)], set()
    while waiting:
        function, is_method = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        selves = {"self", *function.__code__.co_varnames[: int(is_method and function.__code__.co_argcount > 0)]}
        yield Reached(function, frozenset(selves))
        cells = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        waiting += [(value, is_method and is_wrapped(function)) for value in cells if isinstance(value, FunctionType)]
        home = _package(function)
        names = {name for code in codes_of(function.__code__) for name in code.co_names}
        spaces = [value for name in sorted(names) if isinstance(value := function.__globals__.get(name), ModuleType)]
        held = [value for name in sorted(names) if _is_object(value := module.__dict__.get(name))]
        for name in sorted(names):  # so that of several reasons the same is given each time
            found = _on_class(type(module), name)
            others = [function.__globals__.get(name), module.__dict__.get(name)]
            others += [vars(space).get(name) for space in spaces if _package_name(space.__name__) == home]
            others += [place for value in held for place, _ in _on_class(type(value), name)]
            found += [(place, False) for place in others if isinstance(place, FunctionType)]
            for place, of_class in found:
                if getattr(nn.Module, name, None) is not place and home != "torch" and _package(place) == home:
                    waiting.append((place, of_class))
        waiting += [(place, False) for value in held for place, _ in _on_class(type(value), "__call__")]


def is_wrapped(function: FunctionType) -> bool:
    """Whether it stands around another function, as functools.wraps says."""
    return hasattr(function, "__wrapped__")


def _package_name(name: Any) -> str:
    return str(name).partition(".")[0]


def _package(function: FunctionType) -> str:
    return _package_name(function.__module__)


def _is_object(value: Any) -> bool:
    """Whether it is an object of a Python class that is no module: one whose methods may be anything."""
    return value is not None and not isinstance(value, nn.Module | type | FunctionType | ModuleType)


def _on_class(kind: type, name: str) -> list[tuple[FunctionType, bool]]:
    """The functions that a class and its bases have by a name, which may call each other by ``super()``.

    That of a property too; and whether each is given the object first.
    """
    found = []
    for base in kind.__mro__:
        place, is_given = vars(base).get(name) if base not in (nn.Module, object) else None, True
        if isinstance(place, property):
            place = place.fget
        elif isinstance(place, staticmethod | classmethod):
            place, is_given = place.__func__, isinstance(place, classmethod)
        elif isinstance(place, functools.cached_property):
            place = place.func
        if isinstance(place, FunctionType):
            found.append((place, is_given))
    return found


class ClassFunctions:
    """The functions that a class and its bases had by some names, to be compared with those that they have.

    A copy compares with the same ones; what is loaded from a pickle with those of the time of loading.
    """

    def __init__(self, kind: type, names: Iterable[str]) -> None:
        self.kind, self.names = kind, tuple(sorted(names))
        self._first = tuple((name, _unbound(kind, name)) for name in self.names)
        self._places = tuple(
            (base, name, place, _code(place))
            for name in self.names
            for base in kind.__mro__
            if (place := vars(base).get(name)) is not None and base is not nn.Module
        )

    def __deepcopy__(self, memo: object) -> ClassFunctions:
        return self

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return ClassFunctions, (self.kind, self.names)

    @property
    def by_name(self) -> dict[str, tuple[Any, ...]]:
        """The functions and their code, of which no two that differ are equal."""
        return {name: tuple(place[2:] for place in self._places if place[1] == name) for name in self.names}

    def are_of(self, kind: type) -> bool:
        """Whether a class, as a rule the same, has them, and with the same code."""
        for name, function in self._first:
            if _unbound(kind, name) is not function:
                return False
        for base, name, place, code in self._places:  # which may be called by super()
            if base.__dict__.get(name) is not place or _code(place) is not code:
                return False
        return True


def _unbound(kind: type, name: str) -> Any:
    found = getattr(kind, name, None)
    return getattr(found, "__func__", found)  # of a class method, which is bound anew each time


def _code(place: Any) -> Any:
    """The code of a function, which tools that reload modules replace."""
    place = place.fget if isinstance(place, property) else getattr(place, "__func__", place)
    return getattr(place, "__code__", None)


@functools.lru_cache(maxsize=1024)
def source_tree(function: FunctionType) -> ast.AST | None:
    """A function's source, parsed; None where there is none."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of the functions and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False

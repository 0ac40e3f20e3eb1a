"""What running code once must leave as it was: random number generators, and what modules and functions hold.

    >>> with undisturbed(host.modules(), functions):
    ...     graph = tracer.trace(host)

A trace runs a method with symbols.  Random numbers that it draws would be constants of the graph, and symbols that it
puts somewhere would stay there.  Both are undone, and the trace is refused.  So is one that could move an iterator on,
which cannot be undone, before it runs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .functions import NotTraceableError, codes_of
from .values import in_words, is_stream

#: How deep what a module holds is looked through, and how many containers of it.
_DEPTH, _MOST = 4, 5000

_EMPTY = object()

_ATTRIBUTES = "its module's attributes"

#: What every module has in its ``__dict__``.
_INTERNAL = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules"}


@contextlib.contextmanager
def undisturbed(modules: Iterable[nn.Module], functions: Iterable[FunctionType]) -> Iterator[None]:
    """Restores what the code within changed.

    Raises:
        NotTraceableError: if it changed something and ended well.
    """
    held = _held_by(modules, functions)
    with no_random_numbers() as draws:
        try:
            yield
        finally:
            changed = held.restore()
    if changed:
        raise NotTraceableError(f"its code changes {changed}")
    if draws():
        raise NotTraceableError("its code draws random numbers, which a trace would draw once")


def check_iterators(modules: Iterable[nn.Module], functions: Iterable[FunctionType]) -> None:
    """Whether functions could move an iterator on.

    Raises:
        NotTraceableError: if there is one where they come to it.
    """
    _held_by(modules, functions)


def _held_by(modules: Iterable[nn.Module], functions: Iterable[FunctionType]) -> _Held:
    """What is to be looked at again: all that modules hold, and what functions name and have with them."""
    functions = list(functions)
    names = [{name for code in codes_of(function.__code__) for name in code.co_names} for function in functions]
    held = _Held(frozenset().union(*names))
    for module in modules:
        held.look(module.__dict__, _ATTRIBUTES, skip=_INTERNAL)
    for function, named in zip(functions, names, strict=True):
        for name in named & set(function.__globals__):
            held.look(function.__globals__[name], name)
        held.look_at_function(function)
    return held


@contextlib.contextmanager
def no_random_numbers() -> Iterator[Callable[[], bool]]:
    """Restores the random number generators; what it gives says, afterwards, whether they had changed."""
    before = _generators()
    drawn = False
    try:
        yield lambda: drawn
    finally:
        for now, (state, restore) in zip([state for state, _ in _generators()], before, strict=False):
            if not _is_same_state(now, state):
                drawn = True
                restore(state)


def _generators() -> list[tuple[Any, Callable[[Any], Any]]]:
    found: list[tuple[Any, Callable[[Any], Any]]] = [
        (torch.get_rng_state(), torch.set_rng_state),
        (random.getstate(), random.setstate),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append((numpy.random.get_state(legacy=True), numpy.random.set_state))
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        found.append((torch.stack(torch.cuda.get_rng_state_all()), torch.cuda.set_rng_state_all))
    return found


def _is_same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if type(one).__module__ == "numpy":
        return bool((one == other).all())
    if isinstance(one, tuple):
        return all(map(_is_same_state, one, other))
    return bool(one == other)


class _Held:
    """Containers, and the variables of functions within functions, as they were.

    Args:
        names: what the code names, of which it comes to iterators.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.seen: dict[int, tuple[Any, Any, str, frozenset[str]]] = {}
        self.functions: set[FunctionType] = set()
        self.cells: list[tuple[CellType, Any]] = []

    def look(self, value: Any, name: str, depth: int = 0, skip: frozenset[str] = frozenset()) -> None:
        """Remembers a container, and what is in it."""
        if id(value) in self.seen or depth > _DEPTH or len(self.seen) > _MOST:
            return
        kind = type(value)
        if isinstance(value, dict):
            self.seen[id(value)] = value, dict(value), name, skip
            for key, item in list(value.items()):
                if key not in skip and not (skip and key not in self.names and is_stream(item)):
                    self.look(item, f"self.{key}" if depth == 0 and skip else name, depth + 1)
        elif isinstance(value, list | set | collections.deque):
            self.seen[id(value)] = value, kind(value) if kind in (list, set) else list(value), name, skip
            for item in list(value):
                self.look(item, name, depth + 1)
        elif isinstance(value, tuple):
            for item in value:
                self.look(item, name, depth + 1)
        elif isinstance(value, FunctionType):
            self.look_at_function(value, depth)
        elif isinstance(value, MethodType):
            self.look(value.__self__, name, depth + 1)
            self.look(value.__func__, name, depth + 1)
        elif isinstance(value, functools.partial):
            self.look((value.func, value.args, value.keywords), name, depth + 1)
        elif is_stream(value):
            raise NotTraceableError(f"its code may move {name} on, {in_words(value)}")
        elif isinstance(getattr(value, "__dict__", None), dict) and not _is_left(value):
            self.look(value.__dict__, name, depth)

    def look_at_function(self, function: FunctionType, depth: int = 0) -> None:
        """Remembers what a function has with it: the variables around it, and the defaults of its arguments."""
        if function in self.functions or str(function.__module__).partition(".")[0] == "torch":
            return
        self.functions.add(function)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look(default, f"a default of {function.__name__}'s arguments", depth + 1)
        for cell in function.__closure__ or ():
            self.cells.append((cell, _contents(cell)))
            self.look(_contents(cell), "a variable outside it", depth + 1)

    def restore(self) -> str:
        """Puts back what changed; its name, the most telling one, or ""."""
        names = []
        for cell, contents in self.cells:
            if _contents(cell) is contents:
                continue
            names.append("a variable outside it")
            if contents is _EMPTY:
                del cell.cell_contents
            else:
                cell.cell_contents = contents
        for value, before, name, skip in self.seen.values():
            if isinstance(value, dict):
                # compared by identity: values may be anything
                keys = {*value, *before} - skip
                same = all(key in value and key in before and value[key] is before[key] for key in keys)
                if not same:
                    for key in keys:
                        if key in before:
                            value[key] = before[key]
                        else:
                            del value[key]
            elif isinstance(value, set):
                same = value == before
                if not same:
                    value.clear()
                    value.update(before)
            else:
                same = len(value) == len(before) and all(map(_is, value, before))
                if not same:
                    value.clear()
                    value.extend(before)
            if not same:
                names.append(name)
        return max(names, key=lambda name: name != _ATTRIBUTES, default="")


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_left(value: Any) -> bool:
    """Whether an object is none that code keeps things in: modules are looked at each by itself."""
    if isinstance(value, type | FunctionType | nn.Module | Tensor) or callable(getattr(value, "original", None)):
        return True
    return type(value).__module__.partition(".")[0] in ("torch", "builtins", "numpy", "logging")

"""What running code once must leave as it was: random number generators, and what modules and functions hold.

    >>> with undisturbed(host.modules(), functions):
    ...     graph = tracer.trace(host)

A trace runs a method with symbols.  Random numbers that it draws would be constants of the graph, and symbols that it
puts somewhere would stay there.  Both are undone, and the trace is refused.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .functions import NotTraceableError, codes_of

#: How deep what a module holds is looked through, and how many containers of it.
_DEPTH, _MOST = 4, 5000

_ATTRIBUTES = "its module's attributes"

#: What every module has in its ``__dict__``.
_INTERNAL = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules"}


@contextlib.contextmanager
def undisturbed(modules: Iterable[nn.Module], functions: Iterable[FunctionType]) -> Iterator[None]:
    """Restores what the code within changed.

    Raises:
        NotTraceableError: if it changed something and ended well.
    """
    held = _Held()
    for module in modules:
        held.look(module.__dict__, _ATTRIBUTES, skip=_INTERNAL)
    for function in functions:
        names = {name for code in codes_of(function.__code__) for name in code.co_names}
        for name in names & set(function.__globals__):
            held.look(function.__globals__[name], name)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                held.look(cell.cell_contents, "a variable outside it")
    with no_random_numbers() as draws:
        try:
            yield
        finally:
            changed = held.restore()
    if changed:
        raise NotTraceableError(f"its code changes {changed}")
    if draws():
        raise NotTraceableError("its code draws random numbers, which a trace would draw once")


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
    """Containers as they were."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Any, Any, str, frozenset[str]]] = {}

    def look(self, value: Any, name: str, depth: int = 0, skip: frozenset[str] = frozenset()) -> None:
        """Remembers a container, and what is in it."""
        if id(value) in self.seen or depth > _DEPTH or len(self.seen) > _MOST:
            return
        kind = type(value)
        if isinstance(value, dict):
            self.seen[id(value)] = value, dict(value), name, skip
            for key, item in list(value.items()):
                if key not in skip:
                    self.look(item, f"self.{key}" if depth == 0 and skip else name, depth + 1)
        elif isinstance(value, list | set | collections.deque):
            self.seen[id(value)] = value, kind(value) if kind in (list, set) else list(value), name, skip
            for item in list(value):
                self.look(item, name, depth + 1)
        elif isinstance(value, tuple):
            for item in value:
                self.look(item, name, depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and not _is_left(value):
            self.look(value.__dict__, name, depth)

    def restore(self) -> str:
        """Puts back what changed; its name, the most telling one, or ""."""
        names = []
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


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_left(value: Any) -> bool:
    """Whether an object is none that code keeps things in: modules are looked at each by itself."""
    if isinstance(value, type | FunctionType | nn.Module | Tensor) or callable(getattr(value, "original", None)):
        return True
    return type(value).__module__.partition(".")[0] in ("torch", "builtins", "numpy", "logging")

"""What code reads of modules while it is traced: every attribute, by whatever name it comes to it, absent ones too.

    >>> reads = Reads(host)
    >>> with reads.recorded():
    ...     host(x)                                       # if hasattr(self, "scale"): ...
    >>> reads.guards()
    [Guard(path=(), name="scale", value=Presence.ABSENT), ...]

Contract
--------
* Reads are seen where Python makes them (``__getattribute__``), so it makes no difference which function reads, whether
  it says ``self.drop.p``, ``getattr(part, name, None)`` or ``hasattr``, and in which object it found the module.
* A plain value, a function, or a container of them is compared at every call; of a tensor or a submodule, whose values
  are not in a graph, only that there is one.  An iterator refuses the trace before it is advanced.
* A tensor that is neither parameter nor buffer is a symbol too, so that its shape or values make no numbers of a graph.
* Of what is no module (``self.config.x``) only is compared, but in compiled code, that it is the same object.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .functions import NotTraceableError
from .values import Itself, Presence, UnkeptError, in_words, is_stream, kept

#: The guard of this name is of the names of the submodules, which code goes through in a loop.
PARTS = "_modules"

#: What nn.Module reads of every module, and computes nothing with.
_INTERNAL = frozenset(nn.Module().__dict__) - {"training", PARTS}


@dataclass(frozen=True)
class Guard:
    """What a graph depends on: the attribute ``name`` of the submodule at ``path``, and what it was.

    Attributes:
        owner: the module where it is no submodule, such as an activation in a list.
    """

    path: tuple[str, ...]
    name: str
    value: Any
    owner: nn.Module | None = None


def found(module: nn.Module, name: str) -> Any:
    """What a guard is compared with."""
    return tuple(module._modules) if name == PARTS else getattr(module, name, Presence.ABSENT)


class Reads:
    """What is read of a module and its parts."""

    def __init__(self, host: nn.Module) -> None:
        self._host = host
        #: what stands for a tensor that is a plain attribute, by the module and the name
        self.stand_in: Callable[[nn.Module, str], Any] | None = None
        self._names: dict[int, set[str]] = {}
        self._modules: dict[int, nn.Module] = {}
        self._refused = ""
        self._is_on = False

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records what is read within, but in :meth:`paused`.

        Raises:
            NotTraceableError: if an iterator was read.
        """

        def read(module: nn.Module, name: str) -> Any:
            if not self._is_on or _is_internal(name):
                return super(nn.Module, module).__getattribute__(name)
            self._names.setdefault(id(module), set()).add(name)
            self._modules[id(module)] = module
            value = super(nn.Module, module).__getattribute__(name)
            if is_stream(value):
                self._refused = f"its code may move self.{name} on, {in_words(value)}"
                raise NotTraceableError(self._refused)
            if isinstance(value, Tensor) and self.stand_in is not None and name in vars(module):
                with self.paused():
                    return self.stand_in(module, name)
            return value

        # nn.Module has none of its own, so that it is taken off again, not put back
        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            del nn.Module.__getattribute__
        if self._refused:  # which the code may have caught
            raise NotTraceableError(self._refused)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the tracer itself reads is no read."""
        was, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = was

    def guards(self, parts: Collection[nn.Module], *, of_mode: bool) -> list[Guard]:
        """What the reads depended on, as it is now.

        Args:
            parts: the modules whose code was traced, whose submodules and parameters are compared anyway.
            of_mode: whether there is a graph for every mode of theirs.

        Raises:
            NotTraceableError: if something may change in a way that would not be seen.
        """
        guards = []
        traced = set(map(id, parts))
        places = list(self._host.named_modules(remove_duplicate=False))  # either of two paths may get another
        within = {id(module) for _, module in places}
        others = [("", module) for key, module in self._modules.items() if key not in within]
        for path, module in (*places, *others):
            own = id(module) in traced
            for name in sorted(self._names.get(id(module), ())):
                if own and (name in (*module._parameters, *module._buffers, *module._modules, PARTS)):
                    continue
                if own and of_mode and name == "training":
                    continue
                value = found(module, name)
                try:
                    expected = kept(value)
                except UnkeptError as error:
                    place = ".".join(filter(None, ("self", path, name)))
                    raise NotTraceableError(f"its code reads {place}, {error}") from None
                if (expected is Presence.PRESENT or isinstance(expected, Itself)) and _is_of_class(module, name):
                    continue  # a property that computes something, of what is recorded itself
                if inspect.ismethod(value) and name not in module.__dict__:
                    continue  # which method it is, is compared with the class
                owner = None if id(module) in within else module
                guards.append(Guard(tuple(path.split(".")) if path else (), name, expected, owner))
        return guards


def _is_internal(name: str) -> bool:
    if name in ("training", PARTS):
        return False
    return name.startswith("__") or name in _INTERNAL or hasattr(nn.Module, name)


def _is_of_class(module: nn.Module, name: str) -> bool:
    return not any(name in held for held in (module.__dict__, module._parameters, module._buffers, module._modules))

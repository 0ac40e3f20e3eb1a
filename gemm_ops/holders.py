"""Which adapters hold a ``FusedLinear``: what makes a call of the layer itself one around an adapter.

    >>> hold(adapter, layer)
    >>> layer.within_adapter, holders_of(layer)
    (True, ['LoRALinear'])
    >>> del adapter                                   # or: del adapter.base
    >>> layer.within_adapter, holders_of(layer)
    (False, [])

An adapter holds a layer as long as it is alive and has the layer among its modules, wherever else the layer is
registered, until the layer is put in the adapter's place (``model.up = model.up.base_layer``).  Nothing here keeps it
alive.  ``within_adapter`` is set on the layer because PyTorch's compiler, which traces the layer's ``forward``, guards
on an attribute and does not trace weak references.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .modules import FusedLinear


@dataclass
class _Hold:
    adapter: weakref.ref[nn.Module]
    replaced: bool = False  # whether the layer was put in the adapter's place


_holds: weakref.WeakKeyDictionary[FusedLinear, list[_Hold]] = weakref.WeakKeyDictionary()


def hold(adapter: nn.Module, layer: FusedLinear) -> None:
    """Notes that an adapter takes a layer."""
    layer.within_adapter = True
    known = _holds.setdefault(layer, [])
    for one in known:
        if one.adapter() is adapter:
            one.replaced = False
            return
    known.append(_Hold(weakref.ref(adapter)))
    weakref.finalize(adapter, _look_again, weakref.ref(layer)).atexit = False


def hold_called(adapter: nn.Module, layer: FusedLinear) -> None:
    """Notes that an adapter is called, and has a layer within that it got unseen."""
    if not any(one.adapter() is adapter for one in _holds.get(layer, ())):
        hold(adapter, layer)


def replace(old: nn.Module | None, layer: FusedLinear) -> None:
    """Notes that a layer is put in the place of a module, which may be or have an adapter that holds it."""
    parts = [] if old is None else list(old.modules())
    for one in _holds.get(layer, ()):
        if any(part is one.adapter() for part in parts):
            one.replaced = True
    holders_of(layer)


def holders_of(layer: FusedLinear) -> list[str]:
    """The classes of the adapters that hold a layer; if none does any longer, the layer is an ordinary one again.

    Not the adapters: the traceback of an error that names them would keep them alive.
    """
    alive = [one.adapter() for one in _holds.get(layer, ()) if not one.replaced]
    found = [
        type(adapter).__name__
        for adapter in alive
        if adapter is not None and any(m is layer for m in adapter.modules())
    ]
    layer.within_adapter = bool(found)
    return found


def _look_again(reference: weakref.ref[FusedLinear]) -> None:
    layer = reference()
    if layer is not None:
        holders_of(layer)

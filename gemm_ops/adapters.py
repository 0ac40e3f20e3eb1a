"""Adapters on a ``FusedLinear``: what LoRA and its kin add belongs before the epilogue.

    >>> model = get_peft_model(model, LoraConfig(target_modules=["up"]))        # model.up is a FusedLinear
    >>> model.up(x)                                   # gelu(x @ weight.T + bias + scaling * lora_B(lora_A(x)))

    >>> class LoRALinear(nn.Module):                  # a wrapper of one's own
    ...     def __init__(self, base, rank):
    ...         super().__init__()
    ...         self.base, self.down, self.up = base, nn.Linear(...), nn.Linear(...)
    ...         gemm_ops.epilogue_last(self)
    ...     def forward(self, x):
    ...         return self.base(x) + self.up(self.down(x))

Contract
--------
* An adapter is a module that holds a linear layer and computes what a linear layer with other weights would: with any
  formula (LoRA, DoRA, VeRA, OFT, IA3 ...), from the layer's result or from its parameters.  So its forward runs whole,
  with the layer as a mere ``nn.Linear``, and the layer's epilogue follows, as one elementwise kernel.  Then it computes
  unmerged what it computes merged, whatever it is.
* Adapters of peft are recognised when they take a layer, by a hook of PyTorch that sees every module registered: an
  object of peft that registers a ``FusedLinear``, or an adapter on one, as ``base_layer``.  Others call
  :func:`epilogue_last`.
* An adapter's class becomes a subclass of itself with the same name and another ``forward``, as that of parametrised
  modules does; copies and pickles are right.  Nothing of peft is replaced or imported.
* Never silently wrong: a layer within an adapter that is called around the adapter's ``forward`` raises, as long as the
  adapter is alive and holds it (:mod:`gemm_ops.holders`), and so does an adapter whose change would not be what merging
  makes of it.
* A LoRA of peft that is merged or disabled calls the layer as it is: the epilogue is fused into its product.

What a wrapper adds that is neither of peft nor marked comes after the epilogue: nothing tells ``base(x) + delta`` from
a residual connection.  Nor can a layer know that other code multiplies by its weight (``F.linear(x, base.weight)``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.module import register_module_module_registration_hook

from epilogues import Epilogue, EpilogueError

from .added_bias import BIAS, adds_bias_first, after_bias, is_identity
from .addressing.views import stands_for_others
from .arguments import Outputs
from .errors import ProblemError
from .holders import hold, hold_called, holders_of, replace
from .outputs import in_padded_rows
from .standalone import apply

if TYPE_CHECKING:
    from .modules import FusedLinear

#: How a layer within an adapter is called: as a mere nn.Linear, or with its epilogue.
BARE, WHOLE = "bare", "whole"

_calls = threading.local()
_classes: dict[type[nn.Module], type[nn.Module]] = {}
_layer_class: type[FusedLinear]


def epilogue_last(adapter: nn.Module) -> None:
    """Makes a module that wraps a ``FusedLinear`` compute as if the layer were a linear one, and the epilogue last.

        >>> class LoRALinear(nn.Module):
        ...     def __init__(self, base: nn.Linear, rank: int):
        ...         super().__init__()
        ...         self.base = base
        ...         ...
        ...         if isinstance(base, gemm_ops.FusedLinear):
        ...             gemm_ops.epilogue_last(self)

    Within the module's ``forward`` the layer then gives ``x @ weight.T + bias``, and so may other ways to compute from
    its parameters; what ``forward`` returns, (..., out_features), goes through the layer's epilogue.  Operands of the
    epilogue are keywords of the module's call, and its ``forward`` takes them and may hand them on to the layer.
    Adapters of peft do not need it.

    Args:
        adapter: a module with one ``FusedLinear`` within.

    Raises:
        TypeError: there is no ``FusedLinear`` within, or several.
    """
    if not isinstance(adapter, nn.Module):
        given = f"the class {adapter.__name__}" if isinstance(adapter, type) else type(adapter).__name__
        hint = ": call it with self in its constructor" if isinstance(adapter, type) else ""
        raise TypeError(f"epilogue_last takes a module around one FusedLinear, got {given}{hint}")
    if isinstance(adapter, _layer_class):
        raise TypeError(
            "epilogue_last takes a module around one FusedLinear, got the layer itself, whose epilogue is last already"
        )
    layers = _layers_in(adapter)
    if len(layers) != 1:
        raise TypeError(
            "epilogue_last takes a module around one FusedLinear; "
            f"this {type(adapter).__name__} has {len(layers)} within"
        )
    _mark(adapter, layers[0])


def calling_mode(layer: FusedLinear) -> str:
    """How a layer within an adapter is called.

    Raises:
        EpilogueError: around the adapter's forward.
    """
    for called, mode in reversed(getattr(_calls, "stack", ())):
        if called is layer:
            return mode
    holders = holders_of(layer)
    if not holders:
        return WHOLE
    name = holders[0]
    raise EpilogueError(
        f"this FusedLinear is within an adapter, a {name}, and was called by something other than its forward "
        "(a direct call, or code that replaces that forward, as X-LoRA does): what is added to its result would come "
        f"after the epilogue; call the {name}, or take the layer out first: merge_and_unload() or unload() of peft; of "
        "a wrapper of your own put the layer in its place, delete the attribute that holds it, or let the wrapper go"
    )


def check_not_sharded(tensor: object) -> None:
    """Refuses what an adapter computes of a layer that ``parallelize_module`` has sharded.

    Raises:
        ProblemError: for a DTensor.
    """
    if not torch.compiler.is_compiling() and isinstance(tensor, Tensor) and stands_for_others(tensor):
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            raise ProblemError("an adapter on a FusedLinear that is sharded over devices: merge the adapter first")


def watch(layer_class: type[FusedLinear]) -> None:
    """Begins to recognise the adapters of peft on layers of this class."""
    global _layer_class
    _layer_class = layer_class
    register_module_module_registration_hook(_see_registration)


def _see_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Called by PyTorch for every submodule that any module gets."""
    if torch.compiler.is_compiling():  # which compiles this call too, of modules that are half made
        return
    if not isinstance(submodule, nn.Module):
        return
    if name == "base_layer" and _is_of_peft(module):
        for layer in _layers_in(submodule)[:1]:
            _mark(module, layer)
    elif isinstance(module, _EpilogueLast):
        for layer in _layers_in(submodule):
            hold(module, layer)
    elif isinstance(submodule, _layer_class) and submodule.within_adapter and name in module._modules:
        replace(module._modules[name], submodule)


def _is_of_peft(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def _layers_in(module: nn.Module) -> list[FusedLinear]:
    return [each for each in module.modules() if isinstance(each, _layer_class)]


def _mark(adapter: nn.Module, layer: FusedLinear) -> None:
    hold(adapter, layer)
    if not isinstance(adapter, _EpilogueLast):
        adapter.__class__ = _class_for(type(adapter))
    assert isinstance(adapter, _EpilogueLast)
    adapter._epilogue_of(layer)  # now, as PyTorch's compiler would have to trace it


class _EpilogueLast(nn.Module):
    """Comes before an adapter's own class; see the module's first page."""

    _known: tuple[Epilogue, bool, Epilogue] | None = None

    def forward(self, *args: Any, **keywords: Any) -> Any:
        layers = _layers_in(self)
        if not layers or _is_bare(layers[0]):  # an adapter within another: the outer one's epilogue follows
            return super().forward(*args, **keywords)
        if len(layers) > 1:
            raise EpilogueError(
                f"the adapter {type(self).__name__} has {len(layers)} FusedLinear layers within, and which epilogue "
                "follows is not clear: use an adapter that changes the weight of one"
            )
        (layer,) = layers
        if not layer.within_adapter and not torch.compiler.is_compiling():
            hold_called(self, layer)
        if _passes_through(self):
            with _calling(layer, WHOLE):
                return super().forward(*args, **keywords)
        whole = layer.epilogue_of_call(keywords if layer.bias is None else ())
        epilogue = self._epilogue_of(layer)
        if layer.bias is not None and not adds_bias_first(whole):
            _check_leaves_bias(self, whole)
        with _calling(layer, BARE):
            adapted = super().forward(*args, **keywords)
        check_not_sharded(adapted)
        if not _is_tensor(adapted):
            raise TypeError(f"the adapter {type(self).__name__} gave a {type(adapted).__name__}, not a tensor")
        if is_identity(epilogue):
            return _padded(adapted, layer)
        operands = {name: value for name, value in keywords.items() if name in whole.operands}
        if layer.bias is not None and BIAS in epilogue.operands:
            operands[BIAS] = layer.bias
        return _padded(apply(adapted, epilogue, **operands), layer)

    def _epilogue_of(self, layer: FusedLinear) -> Epilogue:
        """What follows this adapter's forward."""
        has_bias = layer.bias is not None
        if self._known is None or self._known[0] is not layer.epilogue or self._known[1] != has_bias:
            self._known = layer.epilogue, has_bias, after_bias(layer.epilogue) if has_bias else layer.epilogue
        return self._known[2]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for layer in _layers_in(self):  # copies, of which nothing is noted yet
            hold(self, layer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, own = super().__reduce_ex__(max(int(protocol), 2)), _own_class(self)
        return (_rebuild, (own,), *made[2:]) if type(self) is _class_for(own) else made


def _class_for(own: type[nn.Module]) -> type[nn.Module]:
    """A subclass that stands for an adapter's class; always the same one."""
    if own not in _classes:
        _classes[own] = _make_class(own)
    return _classes[own]


def _make_class(own: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (_EpilogueLast, own), names)


def _own_class(adapter: nn.Module) -> type[nn.Module]:
    """The class that an adapter had."""
    bases = type(adapter).__mro__  # with FSDP's class before ours, if it shards the adapter
    own: type[nn.Module] = bases[bases.index(_EpilogueLast) + 1]
    return own


def _rebuild(own: type[nn.Module]) -> nn.Module:
    made = _class_for(own)
    return made.__new__(made)


@contextmanager
def _calling(layer: FusedLinear, mode: str) -> Iterator[None]:
    before = getattr(_calls, "stack", ())
    layer.within_adapter = True  # also one that was taken out, of an adapter that is called again
    _calls.stack = (*before, (layer, mode))
    try:
        yield
    finally:
        _calls.stack = before


def _is_bare(layer: FusedLinear) -> bool:
    modes = [mode for called, mode in getattr(_calls, "stack", ()) if called is layer]
    return modes[-1:] == [BARE]


def _is_tensor(value: object) -> bool:
    return isinstance(value, (Tensor, Proxy))  # which stands for one where torch.fx traces


def _is_lora(adapter: nn.Module) -> bool:
    own = _own_class(adapter)
    return (own.__module__, own.__name__) == ("peft.tuners.lora.layer", "Linear")


def _passes_through(adapter: Any) -> bool:
    """Whether the adapter gives what the layer gives; asked of peft's LoRA, whose forward is known to."""
    return _is_lora(adapter) and bool(adapter.disable_adapters or adapter.merged)


def _check_leaves_bias(adapter: Any, epilogue: Epilogue) -> None:
    """Refuses an adapter that may change the bias, of an epilogue that does not just add it to the accumulator."""
    if not _own_class(adapter).__module__.startswith("peft."):
        return  # whoever called epilogue_last knows
    if not _is_lora(adapter) or any(getattr(adapter, "lora_bias", {}).values()):
        raise EpilogueError(
            f"the epilogue {epilogue.name} does not just add its bias to the accumulator, so that what the adapter "
            f"{type(adapter).__name__} adds could not be merged into weight and bias: use a LoRA with lora_bias=False, "
            "or an epilogue of acc + bias"
        )


def _padded(outputs: Outputs, layer: FusedLinear) -> Outputs:
    """As the layer's ``padded_output`` has it: views of rows that begin at multiples of 16 bytes."""
    if not layer.padded_output or isinstance(outputs, Proxy):  # torch.fx has no shapes to decide by
        return outputs
    if isinstance(outputs, dict):
        return {name: in_padded_rows(tensor) for name, tensor in outputs.items()}
    return in_padded_rows(outputs)

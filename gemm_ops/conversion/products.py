"""Modules that multiply by a weight: which they are, and what keeps a fused call from standing in for one.

    >>> obstacle(nn.Linear(8, 8))                  # None: weight and bias say all that it does
    >>> obstacle(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    'its weight or bias is computed (a parametrisation, weight_norm, pruning)'

A product is an ``nn.Linear``, weight (N, K), or a ``Conv1D`` of the package transformers (GPT-2), weight (K, N).
A fused call reads the module's own parameters at every call and runs nothing else of it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as module_hooks

#: The dtypes of weights that a fused call multiplies by; others are quantised.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_PARAMETER_OR_NONE = (nn.Parameter, type(None))


def product_kind(module: object) -> str | None:
    """``Linear`` or ``Conv1D``; None of what is no product."""
    if isinstance(module, nn.Linear):
        return "Linear"
    library = sys.modules.get("transformers.pytorch_utils")  # whoever has a Conv1D has imported it
    is_conv = library is not None and isinstance(module, library.Conv1D)
    return "Conv1D" if is_conv else None


def obstacle(module: nn.Module) -> str | None:
    """Why a call of this product cannot be fused; None if it can."""
    kind, name = product_kind(module), type(module).__name__
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return f"this {name} does not know its in_features yet: run the model once first"
    own = {nn.Linear.forward, nn.LazyLinear.forward} if kind == "Linear" else {_conv1d_forward()}
    if "weight" not in module._parameters or any(key not in module._parameters for key in ("weight", "bias")):
        return "its weight or bias is computed (a parametrisation, weight_norm, pruning)"
    if type(module).forward not in own:
        return f"{name} has a forward of its own"
    if not is_called_plainly(module):
        return f"{name} has a __call__ of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if has_hooks(module):
        return "it has hooks, which a fused call would not run"
    weight = module._parameters["weight"]
    assert weight is not None
    if weight.ndim != 2 or weight.dtype not in FLOATS:
        return f"its weight is {weight.ndim}-dimensional and {weight.dtype}, not a matrix of floats"
    bias, n = module._parameters["bias"], weight.shape[0 if kind == "Linear" else 1]
    if bias is not None and bias.shape != (n,):
        return f"its bias has the shape {tuple(bias.shape)}, not ({n},)"
    return None


def is_still(module: nn.Module, expected: type[nn.Module]) -> bool:
    """Whether a product is what :func:`obstacle` found fusable; asked at every call, so it builds no sentences."""
    if type(module) is not expected:  # first: whatever is in a product's place by now may be no module
        return False
    held = module._parameters
    return (
        "forward" not in module.__dict__
        and type(held.get("weight")) is nn.Parameter
        and "bias" in held
        and type(held["bias"]) in _PARAMETER_OR_NONE
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks, its own or those of all modules."""
    return has_own_hooks(module) or bool(module_hooks._has_any_global_hook())


def has_own_hooks(module: nn.Module) -> bool:
    # written out: a fused call asks it every time
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_called_plainly(module: nn.Module) -> bool:
    """Whether calling the module runs its forward and hooks, and nothing that its class has put around them."""
    kind = type(module)
    if "_call_impl" in module.__dict__ or "_wrapped_call_impl" in module.__dict__:
        return False
    if kind._call_impl is not nn.Module._call_impl or kind._wrapped_call_impl is not nn.Module._wrapped_call_impl:
        return False
    # asked while torch.fx traces too, which has another __call__ then
    return kind.__call__ is nn.Module.__call__ or _hands_on(module)


def _hands_on(module: nn.Module) -> bool:
    """Whether a ``__call__`` of its own calls nn.Module's as it is: torch.fx's, and older transformers' layers."""
    if isinstance(module, fx.GraphModule):
        wrapped = getattr(module, "_wrapped_call", None)  # what it calls, made as it is called first
        return wrapped is None or wrapped.cls_call is None
    checkpoints = getattr(module, "gradient_checkpointing", False) and module.training
    return type(module).__call__.__module__ == "transformers.modeling_layers" and not checkpoints


def submodule(host: nn.Module, path: tuple[str, ...]) -> Any:
    """What is at a path of attributes: a submodule, as a rule.

    Raises:
        AttributeError: in PyTorch's words, if there is nothing any more.
    """
    found: Any = host
    for name in path:
        found = found._modules[name] if name in found._modules else getattr(found, name)
    return found


def weight_matrix(module: nn.Module) -> Tensor:
    """The (K, N) matrix that a product multiplies by; a view."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.t() if isinstance(module, nn.Linear) else weight


def features(module: nn.Module) -> tuple[int, int]:
    """K and N."""
    if isinstance(module, nn.Linear):  # whose weight may be packed or not known yet
        return module.in_features, module.out_features
    k, n = weight_matrix(module).shape
    return k, n


def _conv1d_forward() -> object:
    library = sys.modules.get("transformers.pytorch_utils")
    return None if library is None else library.Conv1D.forward

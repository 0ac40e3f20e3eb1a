"""What ``torch.fx.symbolic_trace`` sees of this package: a call is one node, and so is a ``FusedLinear``.

    >>> traced = torch.fx.symbolic_trace(nn.Sequential(FusedLinear(6, 4, epilogue="gelu"), nn.Tanh()))
    >>> [node.op for node in traced.graph.nodes]
    ['placeholder', 'call_module', 'call_module', 'output']

To fx a module is a leaf if its class is in ``torch.nn``, which nobody else can say of their own: it calls the layer's
``forward`` with proxies, and that records the layer, as fx would an ``nn.Linear``.  What cannot be a leaf (the layer
that is itself traced; one with hooks, which fx has run by then; one within an adapter, which has to run around it) is
a call of a function of the layer's parameters.

Nothing here is for ``torch.compile`` or ``torch.export``; see :mod:`gemm_ops.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from epilogues import Epilogue

from .operators import epilogue_of

if TYPE_CHECKING:
    from .modules import FusedLinear


def tracer_of(*values: object) -> Any:
    """What records a call with these arguments: the tracer of one that is an ``fx.Proxy``; else None."""
    for value in values:
        if isinstance(value, fx.Proxy):
            return value.tracer
    return None


def record_call(
    tracer: Any, function: Callable[..., Any], args: tuple[Any, ...], epilogue: Any, keywords: Mapping[str, Any]
) -> Any:
    """The proxy of ``function(*args, epilogue, **keywords)``."""
    if isinstance(epilogue, Epilogue):  # a node has no such argument, but takes what another makes of a text
        epilogue = tracer.create_proxy("call_function", epilogue_of, (epilogue.text,), {})
    return tracer.create_proxy("call_function", function, (*args, epilogue), dict(keywords))


def record_layer(
    layer: FusedLinear, x: fx.Proxy, operands: Mapping[str, Any] | fx.Proxy, call: Callable[..., Any]
) -> Any:
    """The proxy of a layer's call; ``call`` computes it of the layer's parameters."""
    tracer: Any = x.tracer
    path = None if layer._forward_hooks or layer._forward_pre_hooks else _path_of(tracer, layer)
    if path:  # "" is the module that is traced
        return tracer.create_proxy("call_module", path, (x,), operands)
    epilogue = layer.epilogue_of_call(() if isinstance(operands, fx.Proxy) else operands)
    # of the module that is traced the keywords are one proxy, and a node takes no such keywords
    keywords = {"bias": layer.bias, "padded_output": layer.padded_output, "operands": operands}
    return record_call(tracer, call, (x, layer.weight), epilogue, keywords)


def _path_of(tracer: Any, module: nn.Module) -> str | None:
    try:
        return str(tracer.path_of_module(module))
    except (AttributeError, NameError):  # a tracer of no module, or of one that the layer is not in
        return None

"""What may draw random numbers in one mode or the other: a fused call must not change who draws before whom.

    >>> may_draw(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)).eval())
    True

A fused call stands where the last of its nodes was.  With dropout among them it would draw after what was between, and
the same seed would give other masks.  So dropout is not moved over what may draw too.
"""

from __future__ import annotations

import functools

import torch
from torch import fx, nn

from .functions import NotTraceableError
from .inspection import read_code
from .products import has_hooks, product_kind

#: PyTorch's modules that draw, in training at least.
_DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
#: Functions of PyTorch that draw and are no operators.
_NAMES = ("dropout", "gumbel", "multi_head_attention", "fractional_max_pool")


def may_draw(module: nn.Module) -> bool:
    """Whether calling a module may draw: of those that are not PyTorch's nothing is known."""
    return any(_part_may_draw(part) for part in module.modules())


def _part_may_draw(part: nn.Module) -> bool:
    if isinstance(part, _DRAWING) or has_hooks(part):
        return True
    return not type(part).__module__.startswith("torch.nn.") and product_kind(part) is None


def step_may_draw(module: nn.Module) -> bool:
    """The same of a module that is known to be elementwise, and to draw nothing in the mode that it is in."""
    for part in module.modules():
        if isinstance(part, _DRAWING):
            return True
        try:
            if "training" in read_code(part, "forward").attributes:
                return True
        except NotTraceableError:
            return True
    return False


def node_may_draw(node: fx.Node, path: str, host: nn.Module) -> bool:
    """Whether a node of a graph may draw.

    Args:
        path: of the submodule that it calls, "" for none.
    """
    if path:
        return may_draw(host.get_submodule(path))
    if node.op == "call_method":
        return _draws(str(node.target))
    if node.op != "call_function":
        return False
    target = node.target
    home = str(getattr(target, "__module__", None) or "").partition(".")[0]
    known = home in ("", "torch", "_operator", "builtins", "math") or isinstance(target, torch._ops.OpOverloadPacket)
    return not known or _draws(str(getattr(target, "__name__", target)).partition(".")[0])


@functools.lru_cache(maxsize=1024)
def _draws(name: str) -> bool:
    """Whether a function or method of PyTorch of that name draws, as PyTorch tags its operators."""
    if any(part in name for part in _NAMES):
        return True
    found = getattr(torch.ops.aten, name, None)
    if not isinstance(found, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(found, each).tags for each in found.overloads())

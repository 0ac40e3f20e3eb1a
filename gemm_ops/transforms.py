"""Whether PyTorch transforms what is computed here, so that it has to see operation by operation.

>>> are_transforms_active()                      # True within torch.func.grad, vmap, jvp ..., and forward-mode AD
False
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from epilogues import EpilogueError

from .announce import announce

#: Why such a call is computed operation by operation, in words.
TRANSFORMED = (
    "PyTorch transforms it operation by operation: it is within a transform of torch.func, within forward-mode "
    "differentiation, or of distributed tensors"
)


def are_transforms_active() -> bool:
    """Whether a call is within a transform of ``torch.func`` or a level of forward-mode differentiation.

    Raises:
        EpilogueError: if it is, and torch.compile traces it: a graph has one operator for a call, which no transform
            sees through.  What ``jvp`` makes of such an operator is zero, without a word.
    """
    active = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if active and torch.compiler.is_dynamo_compiling():
        raise EpilogueError(
            "within transforms of torch.func and forward-mode differentiation gemm_ops cannot be compiled: leave the "
            "transform out of torch.compile, or the call"
        )
    if active:
        announce(
            "computed by PyTorch operation by operation, not fused: within a transform of torch.func or forward-mode "
            "differentiation"
        )
    return active

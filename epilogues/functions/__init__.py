"""The operations of the language, as functions.

    >>> import epilogues as ep
    >>> @ep.epilogue
    ... def swiglu(acc, bias: ep.Row, gate: ep.Aux):
    ...     return ep.silu(acc + bias) * gate
    >>> ep.silu(torch.randn(4))            # the same computation, eagerly

Contract
--------
* Inside an epilogue the arguments are its values and Python numbers, and the result is a value.
* On tensors the operation is computed there and then, as the reference does: in float32 (float64 if one of
  the tensors is float64), the result not rounded.  On numbers alone the result is a Python number.
* Every function computes what the PyTorch function of the same name does, NaN and infinity included.
* Comparisons give conditions, on tensors of dtype bool; used as a value, a condition is 1 or 0.

One function for each row of :mod:`epilogues.operations`, and those that are composed of several.
"""

from __future__ import annotations

from . import activations, arithmetic, comparisons, mathematics, special
from .activations import *  # noqa: F403
from .apply import cast as cast
from .arithmetic import *  # noqa: F403
from .comparisons import *  # noqa: F403
from .mathematics import *  # noqa: F403
from .special import *  # noqa: F403

__all__ = ["cast"]
__all__ += activations.__all__
__all__ += arithmetic.__all__
__all__ += comparisons.__all__
__all__ += mathematics.__all__
__all__ += special.__all__

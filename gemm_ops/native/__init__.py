"""The host's work of warm calls, in C++: what is looked up, filled in, launched and recorded each time.

    >>> found = native.product(x, weight, True, epilogue, False, {"bias": bias})      # None: Python sees to it
    >>> native.remember_plan(plan, (a, b), epilogue, {"bias": bias}, padded_output=False)

Why: on the host a warm call through Python (:mod:`gemm_ops.plan`, :mod:`gemm_ops.recording`) takes as long as a small
kernel, and its backward longer than PyTorch's own, all of which is C++.

Layers
------
* ``cpp/values.h``: the arguments, and the key of a call: epilogue, backend, and of each tensor dtype, device, extents,
  strides and alignment.  ``cpp/plan.h``: a kernel made ready, and the tables.  ``cpp/recording.h``: the node that
  autograd sees, and its backward by steps known beforehand.  ``cpp/module.cpp``: what Python calls.
  ``cpp/operators.h``: the operators of graphs.
* :mod:`.extension` builds and loads that; :mod:`.form` is how a plan says what it does, and
  :mod:`.describe_recording` says what a recorded call is.

Contract
--------
* Everything is decided in Python, at the first call of its kind; here is only repeated what was decided.  A call that
  is not exactly of a known kind, or that anything looks on (functorch, dispatch modes, tracing, subclasses,
  forward-mode derivatives), gives None, and Python computes it.
* So results are those of the Python path to the bit, and gradients too.
* The module is built in the background when the first plan is made, some 20 s with the machine's C++ compiler, and kept
  in the cache of kernels; until then, and where it cannot be built, which is said once, calls go through Python.
  ``GEMM_OPS_NATIVE=0`` leaves it out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from epilogues import Epilogue, builders

from ..announce import announce
from ..errors import BuildError, ToolchainError
from ..forcing import ASKED, asked_variable
from .describe_recording import Finish, describe_recording
from .extension import load_extension

__all__ = [
    "elementwise",
    "forget",
    "is_loaded",
    "layer",
    "load",
    "product",
    "remember_name",
    "remember_plan",
    "remember_recording",
    "remember_text",
    "set_callbacks",
    "signature",
]


def _none(*_: object) -> Any:
    """What there is before the module is loaded: Python sees to everything."""
    return None


#: ``product(a, b, turned, epilogue, padded_output, operands)``: the result of a product; ``turned``: b is a weight.
product: Callable[..., Any] = _none
#: ``layer(x, attributes, operands)``: that of a :class:`gemm_ops.FusedLinear`, by its ``__dict__``.
layer: Callable[..., Any] = _none
#: ``elementwise(x, epilogue, operands)``: that of an epilogue over x.
elementwise: Callable[..., Any] = _none
#: ``signature(x, *others)``: bytes that tell dtypes, devices, extents and autocast; of tensors, numbers and None.
signature: Callable[..., Any] = _none

#: Classes of arguments that calls are looked up with.
_LOOKED_UP = (Tensor, nn.Parameter, float, int)

_module: ModuleType | None = None
_lock = threading.Lock()
_started = False
_failure = ""
_callbacks: tuple[Callable[..., Any], ...] = ()


def set_callbacks(
    compute_elementwise: Callable[..., Any],
    compute_product: Callable[..., Any],
    operators: tuple[Callable[..., Any], Callable[..., Any]],
) -> None:
    """Says what computes that there is no plan of yet.

    Args:
        compute_elementwise: of x, an epilogue and its operands by name, the outputs by name.
        compute_product: of a and b their product by a fused kernel.
        operators: ``apply`` and ``matmul`` of graphs: of leading tensors, operands, numbers, given, epilogue, needs and
            padded_output the outputs in order.
    """

    def outputs(x: Tensor, epilogue: Epilogue, operands: tuple[Tensor | float, ...]) -> tuple[Tensor, ...]:
        found = compute_elementwise(x, epilogue, dict(zip(epilogue.operands, operands, strict=True)))
        return tuple(found[name] for name in epilogue.outputs)

    global _callbacks
    _callbacks = (outputs, compute_product, builders.identity(), *operators)


def load() -> ModuleType:
    """The module, built now if need be.

    Raises:
        ToolchainError, BuildError: as :func:`gemm_ops.native.extension.load_extension`.
    """
    global _module, product, layer, elementwise, signature
    with _lock:
        if _module is None:
            module = load_extension()
            module.configure(asked_variable(), ASKED, *_callbacks)
            module.register_operators("CUDA")
            _module = module
            product, layer, elementwise = module.product, module.layer, module.elementwise
            signature = module.signature
    return _module


def is_loaded() -> bool:
    """Whether warm calls are computed here."""
    return _module is not None


def _start() -> None:
    """Loads the module in the background, once."""
    global _started
    if _started or os.environ.get("GEMM_OPS_NATIVE") == "0":
        return
    _started = True
    threading.Thread(target=_load_or_note_why, name="gemm_ops.native", daemon=True).start()


def _load_or_note_why() -> None:
    global _failure
    try:
        load()
    except (BuildError, ToolchainError) as error:
        # said by the next call, in the caller's thread and of the caller's line
        _failure = f"calls take more of the host's time, as their C++ part cannot be built: {error}"


def remember_plan(
    plan: Any,
    leading: tuple[Tensor, ...],
    epilogue: Epilogue,
    operands: Mapping[str, Tensor | float],
    padded_output: bool,
) -> None:
    """Lets calls alike this one run the plan from here on.

    Args:
        plan: what :func:`gemm_ops.plan.remember_plan` keeps.
        leading: the tensors before the operands: a and b, or x.
    """
    if _module is None:
        _start()
        if _failure:
            announce(_failure)
        return
    _module.add_epilogue(epilogue, tuple(epilogue.operands), tuple(epilogue.outputs))
    values = tuple(operands[name] for name in epilogue.operands)
    plan.is_native = _module.add_plan(leading, epilogue, values, padded_output, plan.native_form(), plan)


def forget() -> None:
    """Drops all that was remembered: calls are decided anew, in Python, and remembered again."""
    if _module is not None:
        _module.clear()


def remember_recording(
    node: Any, leading: tuple[Tensor, ...], epilogue: Epilogue, operands: Mapping[str, Tensor | float], finish: Finish
) -> None:
    """Lets calls alike this one be recorded from here on.

    Args:
        node: what autograd recorded this call with, as :func:`gemm_ops.gradients.keep` left it.
        leading: the tensors before the operands.
        finish: computes the gradients of leading tensors and operands from those of the outputs, through Python.
    """
    values = tuple(operands[name] for name in epilogue.operands)
    # others go through Python every time, and are not to be described every time
    if _module is None or not all(type(value) in _LOOKED_UP for value in (*leading, *values)):
        return
    described = describe_recording(node, len(leading), epilogue, finish)
    if described is None:
        return
    _module.add_epilogue(epilogue, tuple(epilogue.operands), tuple(epilogue.outputs))
    _module.add_recording(leading, epilogue, values, *described)


def remember_text(text: str, needs: str, dtype: Any, epilogue: Epilogue) -> None:
    """Says which epilogue an operator of a graph computes.

    Args:
        text: as :func:`gemm_ops.operators.epilogue_of` reads it.
        needs: of what gradients will be needed.
        dtype: of the matrices, which decides what is stored for them.
        epilogue: with what is stored for the backward.
    """
    if _module is not None:
        _module.add_text(text, needs, dtype, epilogue)


def remember_name(name: str | None, has_bias: bool, epilogue: Epilogue) -> None:
    """Says which epilogue a name means, with the addition of a bias or without."""
    if _module is not None:
        _module.add_name(name, has_bias, epilogue)

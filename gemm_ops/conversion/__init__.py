"""Conversion of whole models: what follows a linear layer becomes its GEMM's epilogue.

    >>> model, report = gemm_ops.fuse(model)
    >>> print(report)
    >>> gemm_ops.unfuse(model)

Contract
--------
* Nothing of the model is replaced but the code of methods that call linear layers: a method is traced with torch.fx,
  the layer and the elementwise operations after it become one call, and the new code is set as an attribute of that
  one module.  Classes, parameters, submodules, hooks of submodules and state-dict keys stay.  No layer becomes a
  ``FusedLinear``: that would take apart what other code holds on to (tied layers, adapters, initialisers), and could
  express neither a residual nor a gate.
* Anything elementwise is recognised, by tracing it with the language of epilogues; there is no list of activations.
* The new code runs where the trace stands for the method.  Other calls (an optional argument that the trace has at its
  default, a flag that has changed, a hook on a layer) run the original method, and layers that are no longer plain
  (pruned, parametrised, quantised, wrapped by an adapter) are called as they are.
* Code is traced where one run with symbols says what every run does.  Code that asks for types, catches exceptions,
  keeps something (in attributes, defaults of arguments, closures, iterators), asks for global state of PyTorch, calls a
  module whose class has a ``__call__`` of its own, or draws random numbers is refused with a reason; what running it
  once has changed is put back.
* What the code read of modules is compared at every call: numbers, flags, functions, containers of them, whether there
  is such an attribute; and the functions of the class.
* Results are those of the original within its own rounding: a fused epilogue rounds once.  Random numbers are drawn in
  the order of the code.

Limits: numbers that code reads from other objects than modules (``self.config.x``) and from globals, and functions that
are globals, are those of the time of :func:`fuse`; functions behind ``functools.lru_cache`` are taken to give the same
for the same; what code prints or warns it says while it is traced; functions of other packages than the method's, which
are not read, are taken to compute with tensors and nothing else; ``torch.jit.script`` refuses fused code, and
``torch.jit.trace`` takes the original's; a shallow copy of a module (``copy.copy``, ``nn.DataParallel``) calls the
original's new code; hooks that come after ``torch.compile`` are seen if PyTorch looks for them, as with any module
(``torch._dynamo.config.skip_nnmodule_hook_guards = False``), and classes that are patched after it may not be; where
layers have hooks, compiled code may call them in another order than the code does (up, gate for gate, up); dropout that
has come later into the place of a fused activation may draw after what the code calls later;
``torch.export(strict=False)``, the default of newer versions, exports the original code, and ``strict=True`` the fused
one; weights of odd K are copied into padded rows at every call on a GPU, where a ``FusedLinear`` keeps them so.

============================  ===================================================================================
``convert``                   :func:`fuse`, :func:`unfuse`: which modules are looked at, from the inside out
``functions``                 which functions a method runs, and their source
``writing``                   what code writes into: containers of a module, tensors that it is given
``inspection``                what a method's code says before it is traced
``reads`` ``values``          what it reads of modules while it is traced; how that is compared later
``undisturbed``               what tracing has to leave as it was
``graph_search``              its graphs, and the conditions under which they stand
``drawing``                   what may draw random numbers, which a fused call must not move dropout over
``regions`` ``patterns``      matches in a graph; what they are called
``products``                  which modules multiply, and what keeps one from being fused
``steps``                     what follows a product as data, that runs on tensors and traces to an epilogue
``sites``                     a fused call: how much of its steps one GEMM can take
``rewrite``                   generated code in the place of a method, and taking it off
``report``                    what was fused, and what was left and why
============================  ===================================================================================
"""

from .convert import Fusion, fuse, unfuse
from .patterns import NAMES as PATTERN_NAMES
from .report import Fused, Left, Report

__all__ = ["Fused", "Fusion", "Left", "PATTERN_NAMES", "Report", "fuse", "unfuse"]

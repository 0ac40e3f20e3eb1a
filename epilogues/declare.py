"""Declaring an epilogue: the decorator, and the object it makes.

    >>> @epilogue
    ... def bias_gelu(acc, bias: Row):
    ...     return ep.gelu(acc + bias)
    >>> bias_gelu.reference(a @ b, bias=bias)          # unfused, in PyTorch
    >>> @epilogue
    ... def bias_gelu_residual(acc, bias: Row, residual: Aux):
    ...     return bias_gelu(acc, bias) + residual      # epilogues compose

Contract
--------
* The function is traced when it is decorated, so mistakes are reported there.  An ``nn.Module`` is a function
  too, by the signature of its ``forward``; it is traced as it then is, in training or in evaluation.
* An :class:`Epilogue` never changes.  Two are equal if their trees are, and their operands and outputs have
  the same names: then they can be called alike.  Caches of kernels go by ``.tree``, where names don't count.
* An epilogue's declarations hold in another one too: operands handed on as they are have its kinds and dtypes.
* Pickling keeps the tree and the name, not the function; the copy computes the same and composes too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from .compiling import MAKE_OUTSIDE, refuse_tracing, untraced
from .dtypes import torch_dtype
from .errors import EpilogueError
from .operand_shapes import check_names, is_number, operand_number
from .outputs import Outputs
from .passes.compute_dtype import known_compute_dtype, write_out_compute_dtype
from .reference import evaluate, round_number
from .source import explain, plain_function, short, user_location
from .symbol import Symbol
from .tracing import Trace, replay, trace, trace_of
from .tree import MAIN_OUTPUT, ROUNDINGS, EpilogueTree, Kind, Operand
from .validation import validate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gemm_ops.explain import ChainReport, Device, Options, Report

    from .gradients.backward import Backward


class Epilogue:
    """What happens to the accumulator of a GEMM before it is stored.  Made by :func:`epilogue`."""

    __name__: str
    __qualname__: str

    @untraced(MAKE_OUTSIDE)
    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        *,
        rounding: str = "once",
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        named = plain_function(function) if isinstance(function, functools.partial) else function
        chosen = name or str(getattr(named, "__name__", type(function).__name__))
        is_module = isinstance(function, torch.nn.Module)
        dtype = known_compute_dtype(compute_dtype)
        _check_goes_together(chosen, _known_rounding(rounding), dtype)
        self._set(replace(trace(function, chosen, rounding), compute_dtype=dtype), chosen)
        self.__qualname__ = chosen
        # the attributes of a function, not the state of an object that can be called
        updated = ("__dict__",) if inspect.isfunction(function) else ()
        functools.update_wrapper(self, plain_function(function) if is_module else function, updated=updated)
        self.__name__ = chosen

    @classmethod
    @untraced(MAKE_OUTSIDE)
    def from_tree(cls, tree: EpilogueTree, name: str = "epilogue") -> Epilogue:
        """The epilogue that a tree describes.

        Raises:
            EpilogueError: if the tree breaks a rule of :mod:`epilogues.validation`.
        """
        validate(tree)
        made = cls.__new__(cls)
        made._set(tree, name)
        made.__name__ = made.__qualname__ = name
        return made

    def _set(self, tree: EpilogueTree, name: str) -> None:
        self._tree = tree
        self._name = name
        self._text = tree.to_json()  # not when first asked for: PyTorch's compiler traces no lazy attributes

    @property
    def tree(self) -> EpilogueTree:
        """What is computed."""
        return self._tree

    @property
    def name(self) -> str:
        """What error messages and reports call it."""
        return self._name

    @property
    def text(self) -> str:
        """The tree as JSON, by which operators of PyTorch are told what to compute."""
        return self._text

    @functools.cached_property
    def operands(self) -> Mapping[str, Kind]:
        """The operands' names, in order, and how each spreads over the accumulator."""
        return MappingProxyType({operand.name: operand.kind for operand in self.tree.operands})

    @functools.cached_property
    def outputs(self) -> tuple[str, ...]:
        """The outputs' names, "D" first."""
        return tuple(store.name for store in self.tree.outputs)

    def with_rounding(self, rounding: str) -> Epilogue:
        """The same epilogue with its values rounded in another way.

            >>> unfused = ep.builders.bias_activation("gelu").with_rounding("eager")

        Args:
            rounding: "once", at explicit casts and when stored; "eager", after the GEMM and after every operation as
                eager PyTorch does after ``torch.matmul``; "eager_linear", as after ``F.linear``, which adds its bias
                (a row operand added to the accumulator) before it rounds.  See :mod:`epilogues.passes.eager_rounding`.

        Raises:
            EpilogueError: for any other rounding.
        """
        refuse_tracing(MAKE_OUTSIDE)
        if _known_rounding(rounding) == self.tree.rounding:
            return self
        _check_goes_together(self.name, rounding, self.tree.compute_dtype)
        return Epilogue.from_tree(replace(self.tree, rounding=rounding), self.name)

    def with_compute_dtype(self, dtype: torch.dtype | str) -> Epilogue:
        """The same epilogue with every operation computed in ``dtype``; see :mod:`epilogues.passes.compute_dtype`.

        Raises:
            DtypeError: for dtypes other than float32, float16 and bfloat16.
            EpilogueError: if the epilogue has eager rounding.
        """
        refuse_tracing(MAKE_OUTSIDE)
        name = known_compute_dtype(dtype)
        if name == self.tree.compute_dtype:
            return self
        _check_goes_together(self.name, self.tree.rounding, name)
        return Epilogue.from_tree(replace(self.tree, compute_dtype=name), self.name)

    def __call__(self, acc: Any, /, *args: Any, **operands: Any) -> Any:
        """Inside another epilogue: this one, of its values.  On tensors: :meth:`reference`.

        Operands may be given by position here, in the order of the function's parameters.
        """
        named = self._by_name(args, operands)
        recorder = trace_of((acc, *named.values()))
        if recorder is None:
            return self.reference(acc, **named)
        try:
            check_names(self.tree, named)
        except EpilogueError as error:
            raise EpilogueError(explain(f"epilogue {self.name}: {error}", user_location())) from None
        if self.tree.rounding != "once" and self.tree.rounding != recorder.rounding:
            message = (
                f"epilogue {self.name} has rounding={self.tree.rounding!r} and is used in epilogue {recorder.name}, "
                f"which has rounding={recorder.rounding!r}"
            )
            advice = f"declare both alike, or use {self.name}.with_rounding('once')"
            raise EpilogueError(explain(message, user_location(), instead=advice))
        _check_goes_together(self.name, recorder.rounding, self.tree.compute_dtype)
        start = recorder.value(acc)
        return self._compose(start, {op.name: self._given(recorder, op, named[op.name]) for op in self.tree.operands})

    def _given(self, recorder: Trace, operand: Operand, value: Any) -> Symbol:
        """What another epilogue gives for an operand, held to the operand's declaration."""
        if is_number(value) and operand.dtype is not None:
            value = round_number(operand_number(operand, value), operand.dtype, torch.device("cpu")).item()
        symbol = recorder.value(value)
        recorder.hand_on(symbol, operand, self.name)
        return symbol

    def _compose(self, acc: Symbol, values: dict[str, Symbol]) -> Any:
        # the tree and not the function: what that closes over, or the object it is a method of, may have changed
        outputs = replay(write_out_compute_dtype(self.tree), acc, values)
        return Outputs(outputs, self.name) if len(outputs) > 1 else outputs[MAIN_OUTPUT]

    def _by_name(self, args: tuple[Any, ...], operands: dict[str, Any]) -> dict[str, Any]:
        names = list(self.operands)
        if len(args) > len(names):
            raise EpilogueError(
                explain(
                    f"epilogue {self.name}: expected the accumulator and {len(names)} operands "
                    f"({', '.join(names) or 'none'}), got {len(args)} operands",
                    user_location(),
                )
            )
        positional = dict(zip(names, args, strict=False))
        twice = sorted(positional.keys() & operands.keys())
        if twice:
            raise EpilogueError(
                explain(f"epilogue {self.name}: operand {', '.join(twice)} given twice", user_location())
            )
        return {**positional, **operands}

    def reference(
        self,
        acc: Tensor,
        /,
        *,
        compute_dtype: torch.dtype | None = None,
        keep_casts: bool = True,
        out_dtype: torch.dtype | str | None = None,
        **operands: Tensor | float,
    ) -> Any:
        """What the epilogue computes, unfused, in PyTorch; see :func:`epilogues.reference.evaluate`.

        Args:
            compute_dtype: float32 or float64; None: float64 for a float64 accumulator, as for float64 matrices, else
                float32.

        Returns:
            The output tensor, or, of an epilogue with several outputs, a dict of them by name.
        """
        if compute_dtype is None:
            compute_dtype = torch.float64 if getattr(acc, "dtype", None) == torch.float64 else torch.float32
        outputs = evaluate(
            self.tree,
            acc,
            operands,
            compute_dtype=compute_dtype,
            keep_casts=keep_casts,
            out_dtype=out_dtype,
        )
        return outputs if len(outputs) > 1 else outputs[MAIN_OUTPUT]

    def backward(
        self,
        needs: Iterable[str] | None = None,
        *,
        outputs: Iterable[str] | None = None,
        dtype: torch.dtype | str | None = None,
        save_dtype: torch.dtype | str | None = None,
        m: int = 4096,
        n: int = 4096,
    ) -> Backward:
        """The epilogues of the backward pass, and the forward that stores what they read.

        ``bias_gelu.backward(needs=("accumulator", "bias"))``; see :func:`epilogues.gradients.derivative.derivative`.
        """
        from .gradients.derivative import derivative

        return derivative(self, needs, outputs=outputs, dtype=dtype, save_dtype=save_dtype, m=m, n=n)

    @overload
    def explain(self, m: int, n: int, k: int, **options: Unpack[Options]) -> Report: ...

    @overload
    def explain(self, m: int, n: int, k: None = ..., **options: Unpack[Options]) -> ChainReport: ...

    def explain(
        self,
        m: int,
        n: int,
        k: int | None = None,
        *,
        dtype: torch.dtype | str = torch.bfloat16,
        operand_dtypes: Mapping[str, torch.dtype | str] | None = None,
        device: Device | str | torch.device | None = None,
        measure: bool = False,
    ) -> Report | ChainReport:
        """The fusion decision report for a product (M, K) by (K, N): whether to fuse, and why; computes nothing.

            >>> report = scaled_residual.explain(4096, 4096, 4096)
            >>> print(report)                      # or report.to_markdown(), report.to_json(), report.decision ...
            >>> print(scaled_residual.explain(4096, 4096))         # not behind a GEMM: scaled_residual.elementwise(x)

        The report is made by :mod:`gemm_ops.explain`, which knows devices, and which is imported here and not before.

        Args:
            m, n, k: extents, from 0 on; M is the product of leading dimensions.  No k: :meth:`elementwise` on (M, N).
            dtype: of the matrices, or of that tensor: bfloat16, float16 or float32.
            operand_dtypes: name -> dtype of operands that differ from what the epilogue fixes or the matrices have.
            device: whose speed to reckon with: a name such as "h200" or "a100-80", or a CUDA device; None: the current
                CUDA device, and an H200 where there is none.
            measure: measure the CUDA device's bandwidth instead of taking the published one.

        Raises:
            EpilogueError: (or a subclass) for extents, dtypes, operands or a device that make no sense, and for an
                operand whose kind is not annotated.
        """
        from gemm_ops.explain import explain as make_report

        return make_report(self, m, n, k, dtype=dtype, operand_dtypes=operand_dtypes, device=device, measure=measure)

    def elementwise(
        self, x: Tensor, /, *, out: Tensor | Mapping[str, Tensor] | None = None, **operands: Tensor | float
    ) -> Any:
        """The epilogue of a tensor that is there already, in one kernel where the device has one for it.

            >>> y = bias_gelu.elementwise(x, bias=bias)

        As ``explain`` it asks the machine, through :mod:`gemm_ops`, which is imported here and not before; see
        :func:`gemm_ops.apply`.
        """
        from gemm_ops import apply

        return apply(x, self, out=out, **operands)

    def _identity(self) -> tuple[object, ...]:
        return (self.tree, tuple(self.operands), self.outputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Epilogue) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        parameters = ["acc", *(f"{name}: {kind.value}" for name, kind in self.operands.items())]
        return f"<epilogue {self.name}({', '.join(parameters)}) -> {', '.join(self.outputs)}>"

    def __copy__(self) -> Epilogue:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Epilogue:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.tree.to_json(), self.name, self.__doc__))


def _rebuild(text: str, name: str, doc: str | None) -> Epilogue:
    made = Epilogue.from_tree(EpilogueTree.from_json(text), name)
    made.__doc__ = doc
    return made


def _check_goes_together(name: str, rounding: str, compute_dtype: str) -> None:
    if rounding != "once" and compute_dtype != "f32":
        message = f"epilogue {name}: compute_dtype {torch_dtype(compute_dtype)} with rounding={rounding!r}"
        why = "eager PyTorch computes in the tensors' own dtypes"
        raise EpilogueError(explain(message, user_location(), why=why, instead="take one of the two"))


def _known_rounding(rounding: str) -> str:
    if rounding not in ROUNDINGS:
        raise EpilogueError(f"expected a rounding among {', '.join(map(repr, ROUNDINGS))}, got {short(rounding)}")
    return rounding


@overload
def epilogue(
    function: Callable[..., Any],
    /,
    *,
    name: str | None = None,
    rounding: str = "once",
    compute_dtype: torch.dtype = torch.float32,
) -> Epilogue: ...


@overload
def epilogue(
    *, name: str | None = None, rounding: str = "once", compute_dtype: torch.dtype = torch.float32
) -> Callable[[Callable[..., Any]], Epilogue]: ...


def epilogue(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    rounding: str = "once",
    compute_dtype: torch.dtype = torch.float32,
) -> Epilogue | Callable[[Callable[..., Any]], Epilogue]:
    """Makes an epilogue of a function of the accumulator; see the module's example.

    Args:
        function: first parameter the accumulator, the others operands annotated Row, Column, Scalar or Aux.
            Or a module with such a ``forward``.
        name: what to call it; the function's name if not given.
        rounding: where values are rounded; see :meth:`Epilogue.with_rounding`.
        compute_dtype: what operations are computed in; see :meth:`Epilogue.with_compute_dtype`.

    Raises:
        EpilogueError: if the function cannot be fused, naming the line that is the reason.
    """
    refuse_tracing(MAKE_OUTSIDE)
    if function is None:
        return functools.partial(epilogue, name=name, rounding=rounding, compute_dtype=compute_dtype)
    if not callable(function):
        hint = "" if not isinstance(function, str) else f"; did you mean epilogues.builders.activation({function!r})?"
        raise EpilogueError(f"epilogue: expected a function, got {type(function).__name__} {short(function)}{hint}")
    if inspect.isclass(function):
        hint = (
            f"; make an instance: epilogue({function.__name__}(...))" if issubclass(function, torch.nn.Module) else ""
        )
        raise EpilogueError(f"epilogue: expected a function, got the class {function.__name__}{hint}")
    if isinstance(function, Epilogue):
        made = function if name is None else Epilogue.from_tree(function.tree, name)
        made = made if rounding == "once" else made.with_rounding(rounding)
        return made.with_compute_dtype(compute_dtype)
    return Epilogue(function, name, rounding=rounding, compute_dtype=compute_dtype)

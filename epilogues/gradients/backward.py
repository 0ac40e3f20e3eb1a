"""The backward of an epilogue as a result: what the forward stores, what the backward computes, what is left to sum.

    >>> backward = ep.builders.bias_activation("gelu").backward()
    >>> print(backward)
    forward: D, saved_add (stored for the backward)
    backward from the gradient of D, reading saved_add:
      accumulator: output D
      bias: output D, summed over M
    >>> outputs = backward.forward.reference(a @ b, bias=bias)
    >>> backward.gradients({"D": grad}, outputs, {"bias": bias})
    {"accumulator": ..., "bias": ...}

Contract
--------
* A pass is an epilogue whose accumulator is the gradient of one output of the forward.  That gradient is itself the
  result of a GEMM where layers follow each other, so the pass can ride in it; or it runs by itself, elementwise.
* The operands of a pass are operands of the forward, values that the forward stored, and gradients of further
  outputs; ``BackwardPass.sources`` says which is which.
* The gradient of a row, a column or a scalar is a sum over elements, which no epilogue computes: an output of the
  pass holds the terms, and ``over`` says along which extents to sum them.  So is that of an aux where it was given
  for fewer batches than there are.  Which dimensions these are depends on the operand's shape; ``Gradient.dims``
  tells them.
* A value is stored once, whatever it is the gradient of: often a bias's terms are the accumulator's gradient itself.

:func:`epilogues.gradients.derivative.derivative` makes these objects.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..declare import Epilogue
from ..dtypes import dtype_name, torch_dtype
from ..errors import BroadcastError, DtypeError, EpilogueError
from ..operand_shapes import bind_kind, repeated_dims, spread_shape
from ..reference import check_dense, evaluate
from ..source import short
from ..tree import MAIN_OUTPUT, EpilogueTree, Kind, Operand

#: What the accumulator is called where operands go by name.
ACCUMULATOR = "accumulator"
#: The extents that an operand's gradient is summed over, batch dimensions not counted that the operand has or has
#: not; None: known when the operand's kind is.
SUMMED_OVER: dict[Kind, tuple[str, ...] | None] = {
    Kind.AUX: (),
    Kind.ROW: ("M",),
    Kind.COLUMN: ("N",),
    Kind.SCALAR: ("M", "N"),
    Kind.AUTO: None,
}


@dataclass(frozen=True)
class Source:
    """What one operand of a pass is.

    Attributes:
        operand: its name in the pass.
        role: "operand" of the forward, "saved" output of the forward, or "gradient" of an output of the forward.
        name: the name of that operand or output.
    """

    operand: str
    role: Literal["operand", "saved", "gradient"]
    name: str


@dataclass(frozen=True)
class Gradient:
    """Where the gradient with respect to one input of the forward is found.

    Attributes:
        target: "accumulator", or the operand's name.
        output: the output of the pass.
        over: the extents to sum that output over, in float32: ("M",) for a row, ("N",) for a column, both for a
            scalar, none for an aux and the accumulator.  Batch dimensions are summed over too where the operand
            does not have them, of an aux too; :meth:`dims` tells them.  None: an operand without annotation, summed
            over what its kind says.
    """

    target: str
    output: str
    over: tuple[str, ...] | None

    def dims(self, shape: Sequence[int], accumulator: Sequence[int]) -> tuple[int, ...]:
        """The dimensions of the output to sum over, for an operand that was given in a shape.

            >>> gradient = Gradient("bias", "D", ("M",))
            >>> gradient.dims((8,), accumulator=(2, 3, 8)), gradient.dims((2, 1, 8), accumulator=(2, 3, 8))
            ((0, 1), (1,))

        The gradient is ``output.sum(dims).reshape(shape)`` where there are any, else ``output.reshape(shape)``.

        Args:
            shape: the operand's, () of a number.
            accumulator: the output's shape, which is that of the accumulator: (..., M, N).

        Raises:
            BroadcastError: if the shape is not one that the operand can have.
        """
        known = all(type(extent) is int for extent in (*shape, *accumulator))  # those of a graph may be symbols
        dims = _cached_dims if known else _dims
        return dims(self.target, self.over, tuple(shape), tuple(accumulator))

    def of(self, operand: Tensor | float, terms: Tensor, compute_dtype: torch.dtype = torch.float32) -> Tensor:
        """The gradient of an operand, in its shape and dtype.

        Args:
            operand: as the forward was given it; of a number, the gradient has no dimensions and ``compute_dtype``.
            terms: the output of the pass.
            compute_dtype: what to sum in.
        """
        if isinstance(operand, Tensor):
            return self.summed(terms, operand.shape, operand.dtype, compute_dtype)
        return self.summed(terms, (), compute_dtype, compute_dtype)

    def summed(
        self, terms: Tensor, shape: Sequence[int], dtype: torch.dtype, compute_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The gradient of an operand of a shape and a dtype, as :meth:`of` has it.

        >>> gradient.summed(outputs["D"], bias.shape, bias.dtype)
        """
        dims = self.dims(shape, terms.shape)
        if dims:  # of no dimensions, sum means all
            # PyTorch sums 16-bit terms in fp32 and rounds once: with a sum in fp32 the cast would be a kernel more
            same = terms.dtype == dtype and dtype.itemsize == 2 and compute_dtype == torch.float32
            terms = terms.sum(dims) if same else terms.sum(dims, dtype=compute_dtype)
        # the terms themselves where they are it: autograd minds two gradients that are one tensor, not two views of one
        terms = terms if terms.shape == tuple(shape) else terms.reshape(shape)
        return terms if terms.dtype == dtype else terms.to(dtype)

    def __str__(self) -> str:
        how = "summed over what its kind says" if self.over is None else f"summed over {' and '.join(self.over)}"
        return f"{self.target}: output {self.output}" + (f", {how}" if self.over != () else "")


def _dims(
    target: str, over: tuple[str, ...] | None, shape: tuple[int, ...], accumulator: tuple[int, ...]
) -> tuple[int, ...]:
    *m_shape, n = accumulator
    kind = next(kind for kind, summed in SUMMED_OVER.items() if summed == over)
    kind = bind_kind(Operand(target, kind, 0), shape, tuple(m_shape), n)
    return repeated_dims(spread_shape(kind, shape, tuple(m_shape), n), accumulator)


_cached_dims = functools.lru_cache(maxsize=4096)(_dims)


@dataclass(frozen=True)
class BackwardPass:
    """One epilogue of the backward.

    Attributes:
        gradient_of: the output of the forward whose gradient is the accumulator of the pass, shape (..., M, N).
        epilogue: what is computed.
        sources: what its operands are, in their order.
        gradients: what its outputs are.
    """

    gradient_of: str
    epilogue: Epilogue
    sources: tuple[Source, ...]
    gradients: tuple[Gradient, ...]

    def operands(
        self, grads: Mapping[str, Tensor], saved: Mapping[str, Tensor], operands: Mapping[str, Tensor | float]
    ) -> dict[str, Any]:
        """The operands to call the pass with, by name.

        Args:
            grads: gradients of outputs of the forward, by name.
            saved: outputs of the forward, by name.
            operands: operands of the forward, by name.

        Raises:
            EpilogueError: if something is missing.
        """
        given: dict[str, Mapping[str, Any]] = {"operand": operands, "saved": saved, "gradient": grads}
        return {source.operand: _of(given[source.role], source.name, source.role) for source in self.sources}


@dataclass(frozen=True)
class Backward:
    """The backward of an epilogue; see the module's example.

    Attributes:
        forward: the epilogue to run forward: the same outputs, and those stored for the backward.
        passes: what the backward runs; mostly one, from the gradient of D.  A gradient that does not depend on that
            of D is in a pass of its own, none at all is left where every gradient is zero.
        zero: those asked for that are zero: "accumulator" or operands' names.
        saved: the outputs of ``forward`` that the backward reads.
        added: those of them that the forward stores for the backward only.
        recomputed: how many operations of the forward the backward computes again.
        bytes_written: bytes that the forward writes for the backward only, for the extents that were asked about.
        bytes_read: bytes of saved values and operands that the backward reads, incoming gradients not counted.
    """

    forward: Epilogue
    passes: tuple[BackwardPass, ...]
    zero: tuple[str, ...]
    saved: tuple[str, ...]
    added: tuple[str, ...]
    recomputed: int
    bytes_written: int
    bytes_read: int

    @property
    def trees(self) -> tuple[EpilogueTree, ...]:
        """The trees of the passes."""
        return tuple(one.epilogue.tree for one in self.passes)

    @property
    def reduce_outside(self) -> tuple[Gradient, ...]:
        """The gradients that are left to be summed, of all passes."""
        return tuple(found for one in self.passes for found in one.gradients if found.over != ())

    def gradients(
        self,
        grads: Mapping[str, Tensor | None] | Tensor,
        saved: Mapping[str, Tensor] | Tensor,
        operands: Mapping[str, Tensor | float] | None = None,
        *,
        compute_dtype: torch.dtype = torch.float32,
        keep_casts: bool = True,
        out_dtype: torch.dtype | str | None = None,
    ) -> dict[str, Tensor]:
        """The gradients, computed in PyTorch by the reference.

        Args:
            grads: the gradients of the forward's outputs by name, shape (..., M, N); of D alone where only that
                one is needed.  None for an output, as autograd has where nothing depends on it: zeros.
            saved: the outputs of ``forward`` by name; D alone where that is its only output.
            operands: the operands that the forward was given; None: it takes none.
            compute_dtype: as for the reference; float32 or float64.
            keep_casts: as for the reference.
            out_dtype: the dtype of the accumulator's gradient; None: that of the incoming gradient.

        Returns:
            By name, the gradient of the accumulator, shape (..., M, N), and of each operand asked for, in the
            operand's shape and dtype (of a Python number a tensor without dimensions, of ``compute_dtype``).

        Raises:
            EpilogueError: if something is missing or unknown, or has a wrong shape, dtype or device.
        """
        kept = _by_name("saved", saved, self.forward.outputs, "output of the forward")
        given = self._given_gradients(grads, kept)
        names = tuple(operand.name for operand in self.forward.tree.operands)
        operands = {} if operands is None else _by_name("operands", operands, names, "operand")
        found: dict[str, Tensor] = {}
        for one in self.passes:
            start = _of(given, one.gradient_of, "gradient")
            inner = one.operands(given, kept, operands)
            _check_like(start, one, inner, wide=compute_dtype == torch.float64)
            outputs = evaluate(
                one.epilogue.tree,
                start,
                inner,
                compute_dtype=compute_dtype,
                keep_casts=keep_casts,
                out_dtype=out_dtype,
            )
            for gradient in one.gradients:
                value = outputs[gradient.output]
                if gradient.target != ACCUMULATOR:
                    value = gradient.of(_of(operands, gradient.target, "operand"), value, compute_dtype)
                found[gradient.target] = value
        for target in self.zero:
            found[target] = self._zero(target, given, operands, compute_dtype)
        return found

    def _given_gradients(
        self, grads: Mapping[str, Tensor | None] | Tensor, saved: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """The gradients by name, zeros for None."""
        own = tuple(name for name in self.forward.outputs if name not in self.added)
        given = _by_name("grads", grads, own, "output")
        for name, value in given.items():
            if value is not None and (not isinstance(value, Tensor) or value.ndim == 0):
                shown = "a tensor without dimensions" if isinstance(value, Tensor) else short(value)
                raise EpilogueError(f"gradient of output {name}: expected a tensor of shape (..., M, N), got {shown}")
        like = next((value for value in (*given.values(), *saved.values()) if isinstance(value, Tensor)), None)
        if like is None:
            if given:
                raise EpilogueError(f"grads: expected the gradient of an output, got None for {', '.join(given)}")
            return {}
        return {name: torch.zeros_like(like) if value is None else value for name, value in given.items()}

    def _zero(
        self,
        target: str,
        grads: Mapping[str, Tensor],
        operands: Mapping[str, Tensor | float],
        compute_dtype: torch.dtype,
    ) -> Tensor:
        if target == ACCUMULATOR:
            if not grads:
                raise EpilogueError("grads: expected the gradient of an output, got nothing")
            return torch.zeros_like(next(iter(grads.values())))
        given = _of(operands, target, "operand")
        return torch.zeros_like(given) if isinstance(given, Tensor) else torch.zeros((), dtype=compute_dtype)

    def __str__(self) -> str:
        stored = [f"{name} (stored for the backward)" if name in self.added else name for name in self.forward.outputs]
        lines = [f"forward: {', '.join(stored)}"]
        for one in self.passes:
            reading = ", ".join(source.operand for source in one.sources)
            start = f"backward from the gradient of {one.gradient_of}"
            lines.append(f"{start}, reading {reading}:" if reading else f"{start}:")
            lines += [f"  {gradient}" for gradient in one.gradients]
        if self.zero:
            lines.append(f"zero: {', '.join(self.zero)}")
        return "\n".join(lines)


def _by_name(what: str, given: Any, known: tuple[str, ...], role: str) -> dict[str, Any]:
    """What was given, by names out of those known; a tensor is that of the main output."""
    if isinstance(given, Tensor) and what != "operands":
        given = {MAIN_OUTPUT: given}
    if not isinstance(given, Mapping):
        alone = "" if what == "operands" else f", or the tensor of {MAIN_OUTPUT} alone"
        raise EpilogueError(
            f"{what}: expected a dict from names to tensors{alone}, got {type(given).__name__} {short(given)}"
        )
    unknown = [name for name in given if name not in known]
    if unknown:
        listed = ", ".join(known) or "none"
        raise EpilogueError(f"{what}: unknown {role} {', '.join(map(str, unknown))}; expected names out of {listed}")
    return dict(given)


def _check_like(start: Tensor, one: BackwardPass, inner: Mapping[str, Any], *, wide: bool) -> None:
    """Checks the tensors of a pass that the user gave under other names than the pass has, in the user's words."""
    shape = tuple(start.shape)
    _check_tensor(f"gradient of output {one.gradient_of}", start, shape, start.device, wide=True)
    fixed = {operand.name: operand for operand in one.epilogue.tree.operands}
    for source in one.sources:
        if source.role != "operand":
            what = "output" if source.role == "saved" else "gradient of output"
            told = f"{what} {source.name}" + (" of the forward" if source.role == "saved" else "")
            value = inner[source.operand]
            _check_tensor(told, value, shape, start.device, wide=wide)
            own = fixed[source.operand].dtype
            if own is not None and value.dtype != torch_dtype(own):
                raise DtypeError(f"{told}: expected dtype {torch_dtype(own)}, got {value.dtype}")


def _check_tensor(what: str, value: Any, shape: tuple[int, ...], device: torch.device, *, wide: bool) -> None:
    if not isinstance(value, Tensor):
        raise EpilogueError(f"{what}: expected a tensor of shape {shape}, got {type(value).__name__} {short(value)}")
    check_dense(what, value)
    if tuple(value.shape) != shape:
        raise BroadcastError(
            f"{what}: expected shape {shape}, as the gradients given before it have, got {tuple(value.shape)}"
        )
    if value.device != device:
        raise EpilogueError(f"{what} is on {value.device} and the other gradients on {device}; expected one device")
    if not (wide and value.dtype == torch.float64):
        try:
            dtype_name(value.dtype)
        except DtypeError as error:
            raise DtypeError(f"{what}: {error}") from None


def _of(given: Mapping[str, Any], name: str, role: str) -> Any:
    """What was given under a name."""
    if name in given:
        return given[name]
    what = {"operand": "operand", "saved": "output of the forward", "gradient": "gradient of output"}[role]
    listed = ", ".join(given) or "nothing"
    raise EpilogueError(f"missing {what} {name}, which the backward needs; got {listed}")

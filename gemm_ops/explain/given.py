"""What a report is asked of, checked: extents, dtypes, operands, a device; what reports of GEMMs and chains share.

    >>> given = read_request(epilogue, {"m": 4096, "n": 4096}, "bf16", {"bias": "f32"}, device="h200", measure=False)
    >>> given.device.name, given.facts["bias"]
    ('H200 SXM', (Kind.ROW, 'f32'))

Tensors on PyTorch's meta device stand for those of a call, so that a report takes no memory, whatever the extents are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch

from epilogues import Epilogue, EpilogueError, Kind
from epilogues.analysis import Cost
from epilogues.dtypes import dtype_name, torch_dtype
from epilogues.errors import DtypeError, did_you_mean
from epilogues.passes.compute_dtype import write_out_compute_dtype
from epilogues.source import short
from epilogues.tree import EpilogueTree, Node

from .devices import DEFAULT, DEVICES, Device, find_device, measure_bandwidth, present_device
from .units import in_rate

_MOST = 2**31 - 1  # kernels and BLAS libraries count rows and columns in 32 bits


class Options(TypedDict, total=False):
    """Keywords of :meth:`epilogues.Epilogue.explain`."""

    dtype: torch.dtype | str
    operand_dtypes: Mapping[str, torch.dtype | str] | None
    device: Device | str | torch.device | None
    measure: bool


class AllOptions(Options, total=False):
    """Keywords of :func:`gemm_ops.explain.explain`."""

    cost: Cost | None
    origin: str


@dataclass(frozen=True)
class Request:
    """What a report is asked of.

    Attributes:
        epilogue: the user's.
        element: short dtype name of the matrices, or of the tensor.
        facts: name -> kind and short dtype name of every operand.
        device: whose figures are used.
        device_note: what to know of that choice; "" if nothing.
        declared: the tree with all kinds and dtypes, as it is otherwise: not yet rounded as eager PyTorch rounds.
        resolved: as a kernel computes it.
    """

    epilogue: Epilogue
    element: str
    facts: Mapping[str, tuple[Kind, str]]
    device: Device
    device_note: str
    declared: EpilogueTree
    resolved: EpilogueTree

    def operands(self, m: int, n: int) -> dict[str, torch.Tensor | float]:
        """Operands without memory for a result (M, N)."""
        shapes = {Kind.ROW: (n,), Kind.COLUMN: (m,), Kind.AUX: (m, n)}
        return {
            name: 1.0 if kind is Kind.SCALAR else empty(shapes[kind], dtype)
            for name, (kind, dtype) in self.facts.items()
        }


def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")


def read_request(
    epilogue: Epilogue,
    extents: Mapping[str, int],
    dtype: torch.dtype | str,
    operand_dtypes: Mapping[str, torch.dtype | str] | None,
    *,
    device: Device | str | torch.device | None,
    measure: bool,
) -> Request:
    """Checks what the arguments of ``explain`` say.

    Args:
        epilogue, dtype, operand_dtypes, device, measure: as the user gave them.
        extents: by name, such as ``{"m": 64, "n": 64, "k": 64}``.

    Raises:
        EpilogueError: (or a subclass) for whatever makes no sense.
    """
    if not isinstance(epilogue, Epilogue):
        given = f"{type(epilogue).__name__} {short(epilogue)}"
        raise EpilogueError(f"explain: expected an Epilogue, got {given}; epilogues.builders has ready-made ones")
    for name, extent in extents.items():
        if isinstance(extent, bool) or not isinstance(extent, int) or not 0 <= extent <= _MOST:
            raise EpilogueError(f"{name}: expected a whole number from 0 to 2^31 - 1, got {short(extent)}")
    largest = sorted(extents.values())[-2:]
    if math.prod(largest) * 4 >= 2**63:
        problem = " x ".join(map(str, extents.values()))
        raise EpilogueError(f"a problem of {problem} has matrices of more than 2^63 bytes, which no memory holds")
    element = dtype_name(dtype)
    figures, note = _device(device, measure)
    facts = _operand_facts(epilogue, element, {} if operand_dtypes is None else operand_dtypes)
    numbers = {operand.name: "number" for operand in epilogue.tree.operands if operand.kind is Kind.SCALAR}
    return Request(
        epilogue,
        element,
        facts,
        figures,
        note,
        declared=_with_dtypes(epilogue.tree, facts, element),
        resolved=epilogue.tree.resolve(facts, element, numbers),
    )


def _device(device: Device | str | torch.device | None, measure: bool) -> tuple[Device, str]:
    """The figures to use, and what to know of that choice."""
    if isinstance(device, Device):
        found, note = device, ""
    elif isinstance(device, str | torch.device):
        found, note = find_device(str(device)), ""
    elif device is not None:
        hint = f"; a CUDA device is named 'cuda:{device}'" if type(device) is int and 0 <= device < 1024 else ""
        given = f"{type(device).__name__} {short(device)}"
        raise EpilogueError(f"device: expected a name such as 'h200', a torch.device or a Device, got {given}{hint}")
    elif (present := present_device()) is not None:
        found, note = present, ""
    else:
        found = DEVICES[DEFAULT]
        note = "assumed, as no device is named and no CUDA device is here"
    if measure:
        where = "cuda" if device is None else str(device).strip().lower()
        if isinstance(device, Device) or where in DEVICES:
            raise EpilogueError(f"bandwidth is measured on a CUDA device, not on the figures of the {found.name}")
        published = in_rate(found.bandwidth, "B/s")
        found = dataclasses.replace(found, bandwidth=measure_bandwidth(where))
        note = f"bandwidth measured by copying; published are {published}"
    return found, note


def _operand_facts(
    epilogue: Epilogue, element: str, given: Mapping[str, torch.dtype | str]
) -> dict[str, tuple[Kind, str]]:
    """Name -> kind and short dtype name of every operand."""
    if not isinstance(given, Mapping):
        example = f"such as {{{next(iter(epilogue.operands), 'bias')!r}: torch.float32}}"
        what = f"{type(given).__name__} {short(given)}"
        raise EpilogueError(f"operand_dtypes: expected a mapping of operand name to dtype, {example}, got {what}")
    unknown = [name for name in given if not isinstance(name, str) or name not in epilogue.operands]
    if unknown:
        names = ", ".join(name if isinstance(name, str) else short(name) for name in unknown)
        known = ", ".join(epilogue.operands) or "none"
        meant = did_you_mean(unknown[0], epilogue.operands)
        raise EpilogueError(f"operand_dtypes: unknown operand {names}; the epilogue has {known}{meant}")
    facts: dict[str, tuple[Kind, str]] = {}
    for operand in epilogue.tree.operands:
        if operand.kind is Kind.AUTO:
            raise EpilogueError(
                f"operand {operand.name} of epilogue {epilogue.name} has no kind; annotate it as Row, Column, Scalar "
                "or Aux, as a report has no tensor to tell it from"
            )
        default = operand.dtype or ("f32" if operand.kind is Kind.SCALAR else element)
        try:
            dtype = dtype_name(given.get(operand.name, default))
        except DtypeError as error:
            raise DtypeError(f"operand_dtypes: operand {operand.name}: {error}") from None
        if operand.dtype is not None and dtype != operand.dtype:
            raise EpilogueError(
                f"operand_dtypes: operand {operand.name} is {dtype}, and the epilogue fixes it to {operand.dtype}"
            )
        facts[operand.name] = operand.kind, dtype
    return facts


def _with_dtypes(tree: EpilogueTree, facts: Mapping[str, tuple[Kind, str]], element: str) -> EpilogueTree:
    """The tree with kinds and dtypes, and as it is otherwise: not yet rounded as eager PyTorch rounds."""
    change: dict[int, Node] = {
        id(operand): dataclasses.replace(operand, kind=facts[operand.name][0], dtype=facts[operand.name][1])
        for operand in tree.operands
    }
    mapped = tree.map_nodes(change)
    stores = [dataclasses.replace(store, dtype=tree.output_dtype(store, element)) for store in mapped.outputs]
    return write_out_compute_dtype(dataclasses.replace(mapped, outputs=tuple(stores)))

"""Makes the report: binds an epilogue to a problem that has no tensors yet, and asks every pass.

    >>> report = explain(builders.scaled_residual(), 4096, 4096, 4096, device="h200")

The problem is that of ``linear(x, weight, epilogue, ...)`` with contiguous tensors: x (M, K), weight (N, K), operands
of the dtypes given.  Tensors on PyTorch's meta device stand for them, so that a report takes no memory, whatever the
extents are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from epilogues import Epilogue, EpilogueError, Kind, analysis
from epilogues.dtypes import dtype_name, torch_dtype
from epilogues.errors import DtypeError, did_you_mean
from epilogues.passes.compute_dtype import write_out_compute_dtype
from epilogues.passes.eager_rounding import write_out_compositions
from epilogues.source import short
from epilogues.tree import EpilogueTree, Node, Operand

from ..dispatch import Call, bind_call
from ..kernels.families import families_for
from ..lowering.functors import variant_of
from .coverage import cover
from .decision import Facts, decide_fusion
from .devices import DEFAULT, DEVICES, Device, find_device, measure_bandwidth, present_device
from .estimate import copied_bytes, estimate_times, instructions_of
from .kernel import built_resources, choose_kernel
from .limitations import limitations
from .registers import estimate_registers
from .report import Report
from .script import comparison_script
from .units import in_rate

_MOST = 2**31 - 1  # kernels and BLAS libraries count rows and columns in 32 bits


def explain(
    epilogue: Epilogue,
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    operand_dtypes: Mapping[str, torch.dtype | str] | None = None,
    device: Device | str | torch.device | None = None,
    measure: bool = False,
    cost: analysis.Cost | None = None,
    origin: str = "",
) -> Report:
    """The fusion decision report of an epilogue on one problem; see the module's first page.

    Args:
        epilogue: whose operands all say their kind.
        m, n, k: extents of x (M, K) and weight (N, K), from 0 on; M is the product of all leading dimensions.
        dtype: of the matrices: bfloat16, float16 or float32.
        operand_dtypes: name -> dtype of the operands that differ; else the dtype that the epilogue fixes, or the
            matrices'.  Scalars are Python numbers, which kernels take as float32.
        device: whose figures to use: a :class:`Device`, a name of :data:`gemm_ops.explain.DEVICES`, or a CUDA device;
            None: the current CUDA device, and where there is none an H200.
        measure: use the measured bandwidth of the CUDA device in place of the published one.
        cost: instructions of each operation by name; None: the operation table's.
        origin: ``module:attribute`` that the comparison script imports the epilogue from; "": found out.

    Raises:
        EpilogueError: (or a subclass) for extents, dtypes, operands or a device that make no sense.
    """
    if not isinstance(epilogue, Epilogue):
        given = f"{type(epilogue).__name__} {short(epilogue)}"
        raise EpilogueError(f"explain: expected an Epilogue, got {given}; epilogues.builders has ready-made ones")
    for name, extent in (("m", m), ("n", n), ("k", k)):
        if isinstance(extent, bool) or not isinstance(extent, int) or not 0 <= extent <= _MOST:
            raise EpilogueError(f"{name}: expected a whole number from 0 to 2^31 - 1, got {short(extent)}")
    if max(m * n, m * k, n * k) * 4 >= 2**63:
        raise EpilogueError(f"a problem of {m} x {n} x {k} has matrices of more than 2^63 bytes, which no memory holds")
    if cost is not None and not callable(cost):
        raise EpilogueError(f"cost: expected a function from an operation's name to instructions, got {short(cost)}")
    element = dtype_name(dtype)
    figures, note = _device(device, measure)
    facts = _operand_facts(epilogue, element, {} if operand_dtypes is None else operand_dtypes)
    declared = _with_dtypes(epilogue.tree, facts, element)
    call = _bind(epilogue, m, n, k, element, facts)
    resolved = epilogue.tree.resolve(facts, element, {op.name: "number" for op in _scalars(epilogue.tree)})

    traffic = analysis.count_traffic(write_out_compositions(declared), m, n, k, element)
    if cost is None:
        cost = analysis.fast_instructions if variant_of(resolved) == "fast" else analysis.exact_instructions
    instructions = instructions_of(resolved, cost)
    kernel = choose_kernel(call, figures)
    if kernel.addressing is not None:
        traffic = traffic.with_copies(copied_bytes(kernel.addressing, element, facts))
    families = [kernel.config.family] if kernel.config else families_for(figures.capability)
    times = estimate_times(
        traffic,
        m,
        n,
        k,
        element,
        figures,
        instructions=instructions,
        family=next(iter(families), "sm80"),
    )
    registers = None if kernel.config is None else estimate_registers(resolved, kernel.config)
    coverage = cover(declared, element, traffic)
    decision = decide_fusion(Facts(m, n, k, traffic, times, kernel, coverage, registers, figures))
    return Report(
        name=epilogue.name,
        m=m,
        n=n,
        k=k,
        dtype=element,
        device=figures,
        device_note=note,
        decision=decision,
        traffic=traffic,
        times=times,
        instructions=instructions,
        dtypes=analysis.map_dtypes(resolved),
        kernel=kernel,
        registers=registers,
        built=built_resources(kernel.library),
        coverage=coverage,
        limitations=limitations(resolved, kernel, figures),
        script=comparison_script(epilogue, declared, resolved, (m, n, k), element, origin=origin),
        tree=epilogue.tree,
        resolved=resolved,
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


def _scalars(tree: EpilogueTree) -> list[Operand]:
    return [operand for operand in tree.operands if operand.kind is Kind.SCALAR]


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


def _bind(epilogue: Epilogue, m: int, n: int, k: int, element: str, facts: Mapping[str, tuple[Kind, str]]) -> Call:
    """The call ``linear(x, weight, epilogue, ...)`` on tensors without memory."""
    shapes = {Kind.ROW: (n,), Kind.COLUMN: (m,), Kind.AUX: (m, n)}

    def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")

    operands: dict[str, torch.Tensor | float] = {
        name: 1.0 if kind is Kind.SCALAR else empty(shapes[kind], dtype) for name, (kind, dtype) in facts.items()
    }
    return bind_call(empty((m, k), element), empty((n, k), element).t(), epilogue, operands, None)

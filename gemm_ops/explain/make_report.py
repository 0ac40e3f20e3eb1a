"""Makes the report: binds an epilogue to a problem that has no tensors yet, and asks every pass.

    >>> report = explain(builders.scaled_residual(), 4096, 4096, 4096, device="h200")

The problem is that of ``linear(x, weight, epilogue, ...)`` with contiguous tensors: x (M, K), weight (N, K), operands
of the dtypes given; without K it is that of ``apply(x, epilogue, ...)`` on a tensor (M, N), which :mod:`.chain` makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, overload

import torch

from epilogues import Epilogue, EpilogueError, analysis
from epilogues.passes.eager_rounding import write_out_compositions
from epilogues.source import short

from ..dispatch import bind_call
from ..kernels.families import general_families
from ..lowering.functors import variant_of
from .chain import ChainReport, explain_chain
from .coverage import cover
from .decision import Facts, decide_fusion
from .devices import Device
from .estimate import copied_bytes, estimate_times, instructions_of
from .given import AllOptions, Request, empty, read_request
from .kernel import built_resources, choose_kernel
from .limitations import limitations
from .registers import estimate_registers
from .report import Report
from .script import comparison_script

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def explain(epilogue: Epilogue, m: int, n: int, k: int, **options: Unpack[AllOptions]) -> Report: ...


@overload
def explain(epilogue: Epilogue, m: int, n: int, k: None = ..., **options: Unpack[AllOptions]) -> ChainReport: ...


def explain(
    epilogue: Epilogue,
    m: int,
    n: int,
    k: int | None = None,
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    operand_dtypes: Mapping[str, torch.dtype | str] | None = None,
    device: Device | str | torch.device | None = None,
    measure: bool = False,
    cost: analysis.Cost | None = None,
    origin: str = "",
) -> Report | ChainReport:
    """The fusion decision report of an epilogue on one problem; see the module's first page.

    Args:
        epilogue: whose operands all say their kind.
        m, n, k: extents of x (M, K) and weight (N, K), from 0 on; M is the product of all leading dimensions.  Without
            k there is no product: the report is of the standalone kernel, on a tensor (M, N).
        dtype: of the matrices, or of that tensor: bfloat16, float16 or float32.
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
    if cost is not None and not callable(cost):
        raise EpilogueError(f"cost: expected a function from an operation's name to instructions, got {short(cost)}")
    extents = {"m": m, "n": n} if k is None else {"m": m, "n": n, "k": k}
    request = read_request(epilogue, extents, dtype, operand_dtypes, device=device, measure=measure)
    if k is None:
        return explain_chain(request, m, n, cost, origin)
    return _explain_gemm(request, m, n, k, cost, origin)


def _explain_gemm(request: Request, m: int, n: int, k: int, cost: analysis.Cost | None, origin: str) -> Report:
    epilogue, element, figures = request.epilogue, request.element, request.device
    declared, resolved = request.declared, request.resolved
    a, b = empty((m, k), element), empty((n, k), element).t()
    call = bind_call(a, b, epilogue, request.operands(m, n), None)

    traffic = analysis.count_traffic(write_out_compositions(declared), m, n, k, element)
    if cost is None:
        cost = analysis.fast_instructions if variant_of(resolved) == "fast" else analysis.exact_instructions
    instructions = instructions_of(resolved, cost)
    kernel = choose_kernel(call, figures)
    if kernel.addressing is not None:
        traffic = traffic.with_copies(copied_bytes(kernel.addressing, element, request.facts))
    families = (kernel.config.family,) if kernel.config else general_families(figures.capability)
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
        device_note=request.device_note,
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

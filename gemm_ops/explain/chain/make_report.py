"""Makes the report of a chain: binds an epilogue to a tensor that is not there, and asks every pass.

    >>> report = explain_chain(request, 8192, 8192)

The call is ``apply(x, epilogue, ...)`` with contiguous tensors of the dtypes given and new outputs.
"""

from __future__ import annotations

from epilogues import analysis
from epilogues.passes.eager_rounding import write_out_compositions

from ...elementwise_call import bind_elementwise
from ...lowering.functors import variant_of
from ..given import Request, empty
from ..kernel import built_resources
from ..limitations import numeric_limitations
from ..script import comparison_script
from .decision import ChainFacts, decide_chain
from .estimate import estimate_chain_times
from .kernel import ChainKernel, choose_chain_kernel, estimate_chain_registers
from .report import ChainReport


def explain_chain(request: Request, m: int, n: int, cost: analysis.Cost | None = None, origin: str = "") -> ChainReport:
    """The report of a chain on a tensor (M, N).

    Args:
        request: what is asked for, checked.
        m, n: extents.
        cost: instructions of each operation by name; None: the operation table's.
        origin: ``module:attribute`` that the comparison script imports the epilogue from; "": found out.
    """
    epilogue, element, device = request.epilogue, request.element, request.device
    declared, resolved = request.declared, request.resolved
    call = bind_elementwise(empty((m, n), element), epilogue, request.operands(m, n), None)
    traffic = analysis.count_chain_traffic(write_out_compositions(declared), m, n, element)
    fast = variant_of(call.tree) == "fast"
    if cost is None:
        cost = analysis.fast_instructions if fast else analysis.exact_instructions
    instructions = analysis.instructions_per_element(call.tree, cost)
    special = analysis.fast_special_calls if fast else analysis.exact_special_calls
    special_calls = analysis.applied_cost(call.tree, special)
    times = estimate_chain_times(traffic, m * n, instructions=instructions, special_calls=special_calls, device=device)
    kernel = choose_chain_kernel(call, device)
    registers = None if kernel.spec is None else estimate_chain_registers(kernel.spec)
    facts = ChainFacts(m, n, element, call.tree, traffic, times, special_calls, kernel, registers, device)
    return ChainReport(
        name=epilogue.name,
        m=m,
        n=n,
        dtype=element,
        device=device,
        device_note=request.device_note,
        decision=decide_chain(facts),
        traffic=traffic,
        times=times,
        instructions=instructions,
        special_calls=special_calls,
        dtypes=analysis.map_dtypes(resolved),
        kernel=kernel,
        registers=registers,
        built=built_resources(kernel.library),
        limitations=(*_limitations(kernel), *numeric_limitations(resolved)),
        script=comparison_script(epilogue, declared, resolved, (m, n), element, origin=origin),
        tree=epilogue.tree,
        resolved=resolved,
    )


def _limitations(kernel: ChainKernel) -> list[str]:
    if kernel.spec is None or kernel.library is not None:
        return []
    return ["The first call builds the kernel with nvcc, which takes some seconds; it is kept on disk."]

"""What a tree costs: passes over a resolved tree that need no kernel and no device.

    >>> from epilogues import analysis
    >>> traffic = analysis.count_traffic(tree, 4096, 4096, 4096, "bf16")
    >>> traffic.unfused_bytes, traffic.fused_bytes
    (402669568, 134234112)

``spread``       how far each value spreads over the result: (M, N), (N,), (M,), or one for all.
``traffic``      bytes moved by eager PyTorch, with the elementwise tail as one kernel, and all in one kernel.
``roofline``     arithmetic intensity, and the least time that bytes and operations take.
``live_values``  how many values are alive at once while one element is computed.
``costs``        instructions and registers, by the operation table.
``dtype_map``    what dtype every value has, and where it is converted or rounded.
``partial_sums`` what may come before an all-reduce, where devices have parts of the accumulator.

Every pass but ``partial_sums`` takes a resolved tree (:meth:`epilogues.EpilogueTree.resolve`): kinds and dtypes all
known.
"""

from .costs import (
    Cost,
    applied_cost,
    exact_instructions,
    exact_special_calls,
    fast_instructions,
    fast_special_calls,
    inner_registers,
    instructions_per_element,
)
from .dtype_map import NodeDtype, map_dtypes
from .live_values import LiveValues, count_live_values
from .partial_sums import PartialStep, PartialSums, check_partial_sums
from .roofline import Roofline, place_on_roofline
from .spread import Spread, spreads
from .traffic import ChainTraffic, EagerOperation, Traffic, count_chain_traffic, count_traffic

__all__ = [
    "ChainTraffic",
    "Cost",
    "EagerOperation",
    "LiveValues",
    "NodeDtype",
    "PartialStep",
    "PartialSums",
    "Roofline",
    "Spread",
    "Traffic",
    "applied_cost",
    "check_partial_sums",
    "count_chain_traffic",
    "count_live_values",
    "count_traffic",
    "exact_instructions",
    "exact_special_calls",
    "fast_instructions",
    "fast_special_calls",
    "inner_registers",
    "instructions_per_element",
    "map_dtypes",
    "place_on_roofline",
    "spreads",
]

"""How many registers a thread of a kernel needs for an epilogue: an estimate before anything is built.

    >>> use = estimate_registers(tree, config)
    >>> use.needed, use.budget, use.warns
    (189, 232, False)

A thread holds its share of the tile's accumulators from the mainloop on.  The epilogue then walks over that share a
fragment at a time (16 elements on SM90, 8 on SM80).  Within the function of one output the compiler may finish one
element before it begins the next, and loads operands where they are used, so that one element's live values
(:func:`epilogues.analysis.count_live_values`) suffice.  Values that pass from one output's function to another's are
whole fragments, and so are the results that wait for their store.  So

    needed = accumulators + fragment x (carried values + 1) + live values of one element + RESERVED

Seen on kernels built for sm_90a, 128x256x64 cooperative, 128 accumulators a thread, budget 232: no spills with 15
float32 rows (16 live values, estimate 200), nor with 4 rows and 3 matrices; 172 bytes a thread spilled with 50 live
values (estimate 234), 224 and 596 bytes with 4 and 7 outputs that the main one reads back at its end (254 and 305).
"""

from __future__ import annotations

from dataclasses import dataclass

from epilogues.analysis import count_live_values
from epilogues.tree import EpilogueTree

from ..kernels.config import KernelConfig
from ..lowering.stages import split_stages

#: Registers that addresses, loop counters and barriers take: what is left to the warps that only load, 40 on SM90.
RESERVED = 40

#: Registers that a thread of the epilogue may have, by family; beyond them values spill to local memory.  SM90: what
#: CUTLASS gives the warp groups that multiply (``MmaRegisterRequirement``).  SM80: the most that a thread can have.
#: Skinny: what lets 512 threads share a multiprocessor.
BUDGET = {"sm90": 232, "sm80": 255, "skinny": 128}

_FRAGMENT = {"sm90": 16, "sm80": 8, "skinny": 1}
_THREADS_PER_WARP = 32


@dataclass(frozen=True)
class RegisterUse:
    """The estimate for one kernel, in registers of 32 bits per thread.

    Attributes:
        live: the most values of one element that are alive at once.
        live_at: the operation at which that is so.
        carried: the most values that pass from one output's function to another's at once.
        accumulators: a thread's share of the tile.
        fragment: elements computed at a time.
        needed: the estimate.
        budget: above this, spilling is to be expected.
    """

    live: int
    live_at: str
    carried: int
    accumulators: int
    fragment: int
    needed: int
    budget: int

    @property
    def warns(self) -> bool:
        """Whether values are expected to spill."""
        return self.needed > self.budget

    @property
    def live_limit(self) -> int:
        """The live values of one element at which the estimate reaches the budget."""
        return self.budget - RESERVED - self.accumulators - self.fragment * (self.carried + 1)


def estimate_registers(tree: EpilogueTree, config: KernelConfig) -> RegisterUse:
    """The estimate for a resolved tree in a kernel configuration; see the module's first page."""
    live, carried = count_live_values(tree), carried_values(tree)
    # a skinny kernel's are in shared memory by then
    accumulators = 0 if config.family == "skinny" else config.tile[0] * config.tile[1] // _epilogue_threads(config)
    fragment, budget = _FRAGMENT[config.family], BUDGET[config.family]
    needed = accumulators + fragment * (carried + 1) + live.peak + RESERVED
    return RegisterUse(live.peak, live.at, carried, accumulators, fragment, needed, budget)


def carried_values(tree: EpilogueTree) -> int:
    """The most values of outputs, besides the accumulator, that later outputs' functions wait for at once."""
    stages = split_stages(tree)
    most = 0
    for place in range(len(stages)):
        made = {id(earlier.output.value) for earlier in stages[:place]}
        needed = {id(leaf) for later in stages[place:] for leaf in later.leaves}
        most = max(most, len(made & needed))
    return most


def _epilogue_threads(config: KernelConfig) -> int:
    """Threads that share a tile's accumulators."""
    if config.family == "sm90":
        return 256 if config.schedule == "cooperative" else 128
    warps = (config.tile[0] // config.warp[0]) * (config.tile[1] // config.warp[1])
    return warps * _THREADS_PER_WARP

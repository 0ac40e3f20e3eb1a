"""The standalone kernel that a chain would get on a device that need not be there, and its registers.

    >>> kernel = choose_chain_kernel(call, device)
    >>> kernel.spec.title, kernel.refusal
    ('elementwise bf16 pieces+bf16 pieces -> bf16 pieces, 2-d, sm_90', '')
    >>> estimate_chain_registers(kernel.spec).warns
    False

Contract: the rules are those of :mod:`gemm_ops.elementwise_call`, which calls go by, for contiguous tensors and new
outputs; gradients are no subject here.  Nothing is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epilogues.analysis import count_live_values

from ...build.cache import find_library
from ...elementwise.body import inputs_of, occupancy_of
from ...elementwise.spec import ElementwiseSpec
from ...elementwise_call import ElementwiseCall, lay_out
from ..devices import Device


@dataclass(frozen=True)
class ChainKernel:
    """The kernel that would compute a call.

    Attributes:
        spec: the kernel; None if none takes the call.
        refusal: why none does, in words; "" if one does.
        library: where it is built already; None if it is not.
    """

    spec: ElementwiseSpec | None
    refusal: str
    library: Path | None = None


def choose_chain_kernel(call: ElementwiseCall, device: Device) -> ChainKernel:
    """The kernel of a call on a device; see the module's first page."""
    layout = lay_out(call)
    if isinstance(layout, str):
        return ChainKernel(None, layout)
    assert call.x_dtype is not None
    major, minor = device.capability
    spec = ElementwiseSpec.of(call.tree, call.x_dtype, layout, f"{major}{minor}")
    return ChainKernel(spec, "", find_library(spec))


@dataclass(frozen=True)
class ChainRegisters:
    """The estimate for one kernel, in registers of 32 bits per thread.

    Attributes:
        live: the most values of one element that are alive at once.
        live_at: the operation at which that is so; "load" if it is so before the first.
        needed: the estimate.
        budget: above this, spilling is to be expected.
        blocks: blocks of 128 threads that share a multiprocessor with such a budget.
    """

    live: int
    live_at: str
    needed: int
    budget: int
    blocks: int

    @property
    def warns(self) -> bool:
        """Whether values may spill.

        On the safe side: nvcc spilled nothing in chains of 16 float32 inputs with up to 301 registers by this
        estimate, 204 bytes in one with 288, and 812 to 2920 in those from 368 on.
        """
        return self.needed > self.budget


def estimate_chain_registers(spec: ElementwiseSpec) -> ChainRegisters:
    """The estimate that the kernel is built with; see :func:`gemm_ops.elementwise.body.occupancy_of`."""
    live = count_live_values(spec.tree)
    occupancy = occupancy_of(spec.tree, inputs_of(spec.tree, spec.x_dtype, spec.inputs), spec.width)
    return ChainRegisters(live.peak, live.at, occupancy.needed, occupancy.budget, occupancy.blocks)

"""What a fused kernel of a tree does not do today, for one problem.

    >>> for line in limitations(tree, kernel, device):
    ...     print("-", line)

These are the package's own limits as they are now.  What ends here has to end in the code that it names.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

from epilogues.operations import OPERATIONS
from epilogues.tree import Apply, Cast, EpilogueTree

from ..lowering.functors import variant_of
from ..lowering.stages import split_stages
from ..tuner.advice import FUSED
from .devices import Device
from .estimate import uses_older_instructions
from .kernel import KernelChoice
from .units import count

#: What nvcc takes for a kernel, by family.
_BUILD_TIMES = {"sm90": "about a minute", "sm80": "about half a minute", "skinny": "a few seconds"}


def limitations(tree: EpilogueTree, kernel: KernelChoice, device: Device) -> tuple[str, ...]:
    """The limitations of a resolved tree and the kernel chosen for it on a device, a sentence or two each."""
    found = [
        "The report is about the forward pass. In training that also stores what the backward reads of the accumulator,"
        " mostly one matrix; the backward is one elementwise kernel and the two products.",
    ]
    if kernel.spec is None:
        return (f"No kernel takes this problem: {kernel.refusal}.", *found)
    if uses_older_instructions(kernel.spec.config.family, device):
        why = kernel.passed_over or "no other family runs on this device"
        known = "the share of the peak that these reach was measured on an H200" + (
            "" if device.capability[0] == 9 else " and is a guess for this device"
        )
        found.append(
            f"The kernel is of the sm80 family ({why}): it multiplies with mma.sync, which is slower than what cuBLAS "
            f"uses on this device ({known})."
        )
    fused = kernel.way == FUSED
    if fused and kernel.addressing is not None and kernel.addressing.b.copy:
        found.append("The weight is copied in every call; FusedLinear keeps it in padded rows, so that it need not be.")
    if fused and kernel.library is None:
        seconds = _BUILD_TIMES[kernel.spec.config.family]
        found.append(f"The first call builds the kernel with nvcc, which takes {seconds}; it is kept on disk.")
    found += numeric_limitations(tree)
    if repeated := repeated_operations(tree):
        which = f"{count(len(repeated), 'operation')} that the main output shares with others"
        verb = "is" if len(repeated) == 1 else "are"
        most = max(repeated.values())
        often = "twice" if most == 2 else f"up to {most} times"
        found.append(f"{which} {verb} computed {often}: nothing can read the main output within a kernel.")
    return tuple(found)


def numeric_limitations(tree: EpilogueTree) -> list[str]:
    """How the results of a resolved tree may differ from eager PyTorch's."""
    found = []
    if tree.rounding == "once":
        found.append(
            "Not bit-identical to eager PyTorch, which rounds after every operation: values are rounded at casts and "
            'when stored only, which is closer to the exact result. epilogue.with_rounding("eager") rounds alike.'
        )
    if variant_of(tree) == "fast" and (approximate := approximated(tree)):
        found.append(f"Approximated, to well below the rounding of the 16-bit output: {', '.join(approximate)}.")
    return found


def approximated(tree: EpilogueTree) -> list[str]:
    """The operations of a tree that have a faster, less exact variant for 16-bit outputs, in order."""
    used = {node.operation: None for node in tree.nodes if isinstance(node, Apply)}
    return [operation for operation in used if OPERATIONS[operation].functor in _fast_functors()]


@functools.cache
def _fast_functors() -> frozenset[str]:
    """What namespace ``fast`` of the device functions defines; everything else is as in ``exact``."""
    text = (Path(__file__).resolve().parent.parent / "cuda" / "functors.cuh").read_text()
    body = text.partition("namespace fast {")[2].partition("}  // namespace fast")[0]
    return frozenset(re.findall(r"EP_DEVICE float (\w+)\(", body))


def repeated_operations(tree: EpilogueTree) -> dict[int, int]:
    """id(node) -> how often it is computed, of the operations that the functions of several outputs compute."""
    times = Counter(id(node) for stage in split_stages(tree) for node in stage.body if isinstance(node, (Apply, Cast)))
    return {node: often for node, often in times.items() if often > 1}

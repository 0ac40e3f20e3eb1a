"""Which kernel a problem would get on a device that need not be there, and what is known of that kernel.

    >>> choice = choose_kernel(call, device)
    >>> choice.config, choice.refusal
    ('sm90_cooperative_128x256x64_2x1', '')

Contract: the rules are those of :mod:`gemm_ops.kernels.selection`, and of :mod:`gemm_ops.tuner.advice` where something
was measured, which dispatch asks too, with the device's compute capability, multiprocessors and name.  What is asked
about are contiguous matrices ``x`` (M, K) and ``weight`` (N, K), as ``F.linear`` takes them, and new outputs; gradients
are no subject here.  Nothing is built, and CUTLASS is not imported.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..addressing import Addressing
from ..build.cache import RECORD, find_library
from ..dispatch import Call, describe_routes
from ..kernels.config import KernelConfig
from ..kernels.selection import Target, problem_refusal, select_kernel
from ..kernels.spec import KernelSpec
from ..tuner.advice import FUSED, advise
from ..two_passes import find_alone
from .devices import Device


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that would compute a call.

    Attributes:
        spec: the kernel; None if no family takes the call.
        refusal: why none does, in words; "" if one does.
        library: where it is built already; None if it is not.
        passed_over: why the families that the device would rather use do not take the call, in words; "".
        routes: how each tensor reaches the kernel, in words.
        addressing: the same as data.
        way: what the default backend computes the call by, one of :mod:`gemm_ops.tuner.advice`: this kernel, or
            something that was measured to be faster.
        reason: what tuning measured of that, in words; "" where it is the rules' choice.
    """

    spec: KernelSpec | None
    refusal: str
    library: Path | None = None
    passed_over: str = ""
    routes: tuple[str, ...] = ()
    addressing: Addressing | None = None
    way: str = FUSED
    reason: str = ""

    @property
    def config(self) -> KernelConfig | None:
        return None if self.spec is None else self.spec.config


def choose_kernel(call: Call, device: Device) -> KernelChoice:
    """The kernel of a call on a device; see the module's first page."""
    refused = problem_refusal(call.problem, len(call.operands), len(call.tree.outputs))
    if refused:
        return KernelChoice(None, refused)
    assert call.problem.element is not None
    target = Target(device.capability, device.multiprocessors, device.driver_name)
    selection = select_kernel(call.tree, call.problem.element, call.request, target=target)
    if selection.spec is None:
        return KernelChoice(None, selection.reason)
    alone = find_alone(call) is not None
    advice = advise(call.tree, call.problem.element, call.request, selection, target, alone=alone)
    return KernelChoice(
        advice.spec,
        "",
        library=find_library(advice.spec),
        passed_over=selection.reason,
        routes=describe_routes(call.epilogue, advice.addressing, "x", "weight"),
        addressing=advice.addressing,
        way=advice.way,
        reason=advice.reason,
    )


@dataclass(frozen=True)
class BuiltResources:
    """What the compiler says of a built kernel.

    Attributes:
        registers: per thread, at launch; SM90 kernels move registers between warp groups once they run.
        spilled: bytes that a thread keeps in local memory, mostly for want of registers; 0 is right.
        source: which tool said so.
    """

    registers: int
    spilled: int
    source: str


def built_resources(library: Path | None) -> BuiltResources | None:
    """Registers and spills of a built kernel: from the compiler's own words, else from ``cuobjdump``.

    None if the kernel is not built, or neither knows.
    """
    if library is None:
        return None
    try:
        record = json.loads((library.parent / RECORD).read_text())
    except (OSError, ValueError):
        record = {}
    output = str(record.get("output", "")) if isinstance(record, dict) else ""
    used, local = re.findall(r"Used (\d+) registers", output), re.findall(r"(\d+) bytes stack frame", output)
    if used:
        return BuiltResources(max(map(int, used)), max(map(int, local), default=0), "ptxas, when it was built")
    return _ask_cuobjdump(library)


def _ask_cuobjdump(library: Path) -> BuiltResources | None:
    tool = shutil.which("cuobjdump")
    if tool is None:
        return None
    command = [tool, "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    used, local = re.findall(r"\bREG:(\d+)", done.stdout), re.findall(r"\bLOCAL:(\d+)", done.stdout)
    stack = re.findall(r"\bSTACK:(\d+)", done.stdout)
    if done.returncode != 0 or not used:
        return None
    return BuiltResources(max(map(int, used)), max(map(int, local + stack), default=0), "cuobjdump")

"""Which kernel a problem would get on a device that need not be there, and what is known of that kernel.

    >>> choice = choose_kernel(call, device)
    >>> choice.config, choice.refusal
    ('sm90_cooperative_128x256x64_2x1', '')

Contract: the rules are those of :func:`gemm_ops.dispatch.decide`, asked with the device's compute capability and
multiprocessors.  What is asked about are contiguous matrices ``x`` (M, K) and ``weight`` (N, K), as ``F.linear`` takes
them, and new outputs; gradients are no subject here.  Nothing is built, and CUTLASS is not imported.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..build.cache import RECORD, find_library
from ..dispatch import Call
from ..kernels.config import KernelConfig
from ..kernels.families import arch_of, choose_config, families_for, refusal
from ..kernels.spec import KernelSpec
from ..runtime.abi import MAX_OPERANDS, MAX_OUTPUTS
from .devices import Device


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that would compute a call.

    Attributes:
        spec: the kernel; None if no family takes the call.
        refusal: why none does, in words; "" if one does.
        library: where it is built already; None if it is not.
    """

    spec: KernelSpec | None
    refusal: str
    library: Path | None = None

    @property
    def config(self) -> KernelConfig | None:
        return None if self.spec is None else self.spec.config


def choose_kernel(call: Call, device: Device) -> KernelChoice:
    """The kernel of a call on a device; see the module's first page."""
    problem = call.problem
    reasons: list[str] = []
    if problem.element not in ("f16", "bf16"):
        reasons.append(f"the kernels take float16 and bfloat16 matrices, not {str(problem.dtype).partition('.')[2]}")
    elif 0 in (problem.m, problem.n, problem.k):
        reasons.append("an extent is 0, so there is nothing to multiply")
    elif len(call.operands) > MAX_OPERANDS or len(call.output_layouts) > MAX_OUTPUTS:
        reasons.append(f"a kernel has at most {MAX_OPERANDS} operands and {MAX_OUTPUTS} outputs")
    elif not families_for(device.capability):
        reasons.append(f"no kernel family runs on compute capability {'.'.join(map(str, device.capability))}")
    if reasons:
        return KernelChoice(None, reasons[0])
    outputs = call.epilogue.outputs
    facts = [operand.facts for operand in call.operands]
    for family in families_for(device.capability):
        reason = refusal(family, problem, facts, call.output_layouts)
        if not reason:
            config = choose_config(family, problem, call.tree, device.multiprocessors)
            if config is not None:
                spec = _spec(call, config, arch_of(family, device.capability))
                return KernelChoice(spec, "", find_library(spec))
            reason = "the epilogue's auxiliary matrices leave no room in shared memory"
        reason = _in_users_names(reason, outputs)
        if reason not in reasons:
            reasons.append(reason)
    return KernelChoice(None, "; ".join(reasons))


def _in_users_names(reason: str, outputs: tuple[str, ...]) -> str:
    """A refusal with the names that ``linear`` has for the matrices, and the epilogue for its outputs."""
    for name, known in (("a:", "x:"), ("b:", "weight:")):
        if reason.startswith(name):
            reason = known + reason.removeprefix(name)
    return re.sub(r"^output (\d+):", lambda match: f"output {outputs[int(match[1])]}:", reason)


def _spec(call: Call, config: KernelConfig, arch: str) -> KernelSpec:
    problem = call.problem
    assert problem.a is not None and problem.b is not None and problem.element is not None
    return KernelSpec(call.tree, config, problem.element, str(problem.a.layout), str(problem.b.layout), arch)


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

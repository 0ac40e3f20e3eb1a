"""Does a case fit in memory?

    >>> shortage(Case(10**6, 10**6, 10**6, "bf16", "identity"), load_epilogue("identity"))
    "does not fit in the memory of cpu: its tensors take at least 32.7 TiB, of 22.1 GiB"

A case that does not is skipped: nothing is wrong with a kernel.  It is asked before anything is allocated, as
Linux promises more memory than it has and ends the process that believes it; and allocations may still fail.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

import epilogues as ep
import gemm_ops
from epilogues.dtypes import torch_dtype

from .cases import Case

_MEMINFO = Path("/proc/meminfo")
#: limits of a container, of the second and first version of control groups
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

# What allocators say, where the class of the exception does not tell.
_MESSAGES = (
    *("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory"),
    *("alloc_failed", "storage size calculation overflowed", "integer multiplication overflow"),
)


def shortage(case: Case, epilogue: ep.Epilogue) -> str | None:
    """Why a case cannot be run in this memory; None if it may fit."""
    need, capacity = needed(case, epilogue), available(case.device)
    if capacity is None or need <= capacity:
        return None
    return f"{out_of_memory(case, epilogue)}, of {_readable(capacity)}"


def out_of_memory(case: Case, epilogue: ep.Epilogue) -> str:
    """The reason of a case whose allocations fail."""
    need = _readable(needed(case, epilogue))
    return f"does not fit in the memory of {case.device}: its tensors take at least {need}"


def is_allocation_error(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # a compiler that ran out of memory says nothing about the case's tensors
    if not isinstance(error, RuntimeError) or isinstance(error, gemm_ops.BuildError):
        return False
    text = str(error).lower()
    return any(message in text for message in _MESSAGES)


def needed(case: Case, epilogue: ep.Epilogue) -> int:
    """Bytes that a check holds at the same time, at least: inputs and operands; both matrices, the product,
    what float32 accumulation may move it by and their sum in float64.
    """
    m, n, k = case.m, case.n, case.k
    named = {operand.name: operand.dtype for operand in epilogue.tree.operands}
    elements = {ep.Kind.ROW: n, ep.Kind.COLUMN: m, ep.Kind.AUX: m * n}
    total = (m + n) * k * (case.torch_dtype.itemsize + 8) + 3 * m * n * 8
    for name, kind in epilogue.operands.items():
        own = named.get(name)
        dtype = case.torch_dtype if own is None else torch_dtype(own)
        total += elements.get(kind, 0) * dtype.itemsize
    return total


def available(device: str) -> int | None:
    """Bytes that a case can have at most; None if there is no telling."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            found.append(int(path.read_text()))
    return min(found, default=None)


def _readable(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"

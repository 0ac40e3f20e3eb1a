"""Where a sweep ran: what a reader needs to repeat it, and to judge its numbers."""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
from typing import Any

import torch

from .errors import InputError


def choose_device(name: str | None, where: str = "--device") -> str:
    """The device to run on: the one named, or else CUDA where there is a device and the CPU where not.

    Raises:
        InputError: for a name that is no device, or a device that is not there.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{where}: {name!r} is not a device: expected cpu, cuda or cuda:INDEX") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise InputError(f"{where}: sweeps do not run on {name!r}: expected cpu, cuda or cuda:INDEX")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InputError(f"{where}: {name!r}: torch {torch.__version__} finds no CUDA device here")
        if device.index is not None and device.index >= count:
            raise InputError(f"{where}: {name!r}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return name


def describe(device: str) -> dict[str, Any]:
    """Device, versions and time, as JSON data."""
    found: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "device_name": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device_name"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
    return found


def describe_driver(device: str) -> dict[str, Any]:
    """Of a CUDA device the driver's version and what nvidia-smi says of the clocks, as JSON data.

    Clocks are told for a reader to judge times by; nothing is locked or changed.  Without nvidia-smi both say so.
    """
    unknown = "unknown: nvidia-smi does not tell"
    properties = torch.cuda.get_device_properties(device)
    asked = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
    found = _ask_nvidia_smi(f"GPU-{properties.uuid}", asked)
    if found is None:
        return {"l2_bytes": properties.L2_cache_size, "driver": unknown, "clocks": unknown}
    driver, clock, largest, memory, power = found
    clocks = f"not locked; SM {clock} of at most {largest}, memory {memory}, power limit {power}, before the run"
    return {"l2_bytes": properties.L2_cache_size, "driver": driver, "clocks": clocks}


def _ask_nvidia_smi(uuid: str, asked: tuple[str, ...]) -> list[str] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--id={uuid}", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return values if len(values) == len(asked) else None

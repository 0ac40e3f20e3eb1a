"""Where a sweep ran: what a reader needs to repeat it, and to judge its numbers."""

from __future__ import annotations

import datetime
import platform
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

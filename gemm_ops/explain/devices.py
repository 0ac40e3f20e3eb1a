"""Devices and how fast they are: the vendor's figures, the present device's, or a measured bandwidth.

    >>> find_device("h200").bandwidth
    4800000000000.0
    >>> present_device()                            # None where there is no CUDA device
    >>> dataclasses.replace(device, bandwidth=measure_bandwidth("cuda"), origin="measured")

The table has what NVIDIA's data sheets publish: memory bandwidth, and dense (not sparse) peak rates of bfloat16 with
float32 accumulation and of float32 without tensor cores, which PyTorch uses for float32 unless told otherwise.  L2
sizes and numbers of multiprocessors are from NVIDIA's architecture papers and what the driver reports; of the present
device they are always asked of the driver.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import torch

from epilogues import EpilogueError
from epilogues.errors import did_you_mean

#: what is assumed where no device is named and none is there
DEFAULT = "h200"


@dataclass(frozen=True)
class Device:
    """A device's figures; rates are per second, sizes in bytes.

    Attributes:
        name: what people call it.
        bandwidth: bytes per second to and from memory.
        peak16: floating-point operations per second on float16 and bfloat16 matrices, dense.
        peak32: the same on float32 matrices, without tensor cores.
        l2: bytes of the L2 cache.
        multiprocessors: how many there are.
        capability: the compute capability.
        origin: where the figures are from, in words.
    """

    name: str
    bandwidth: float
    peak16: float
    peak32: float
    l2: int
    multiprocessors: int
    capability: tuple[int, int]
    origin: str

    @property
    def driver_name(self) -> str:
        """What the driver calls it, under which results of tuning are kept."""
        return _CALLED.get(self.name, self.name)

    def peak(self, element: str) -> float:
        """Operations per second on matrices of a short dtype name."""
        return self.peak32 if element == "f32" else self.peak16


def _published(
    name: str,
    gigabytes: float,
    tera16: float,
    tera32: float,
    l2: int,
    multiprocessors: int,
    capability: tuple[int, int],
) -> Device:
    origin = f"published figures (NVIDIA's data sheet of the {name})"
    return Device(name, gigabytes * 1e9, tera16 * 1e12, tera32 * 1e12, l2 * 2**20, multiprocessors, capability, origin)


#: name on the command line -> figures; the L2 cache of the H200 is what its driver states
DEVICES: dict[str, Device] = {
    "h200": _published("H200 SXM", 4800, 989, 67, 60, 132, (9, 0)),
    "h100": _published("H100 SXM", 3350, 989, 67, 50, 132, (9, 0)),
    "h100-pcie": _published("H100 PCIe", 2000, 756, 51, 50, 114, (9, 0)),
    "a100-40": _published("A100 40GB", 1555, 312, 19.5, 40, 108, (8, 0)),
    "a100-80": _published("A100 80GB SXM", 2039, 312, 19.5, 40, 108, (8, 0)),
    "l40s": _published("L40S", 864, 362, 91.6, 48, 142, (8, 9)),
    "rtx4090": _published("RTX 4090", 1008, 165.2, 82.6, 72, 128, (8, 9)),
    "b200": _published("B200", 8000, 2250, 80, 126, 148, (10, 0)),
}

#: what people call a device -> what its driver does, where there is one variant
_CALLED = {
    "H200 SXM": "NVIDIA H200",
    "H100 SXM": "NVIDIA H100 80GB HBM3",
    "H100 PCIe": "NVIDIA H100 PCIe",
    "A100 40GB": "NVIDIA A100-SXM4-40GB",
    "A100 80GB SXM": "NVIDIA A100-SXM4-80GB",
    "L40S": "NVIDIA L40S",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "B200": "NVIDIA B200",
}

# What the driver calls them.  The first that is found counts: an "A100 80GB PCIe" has almost the bandwidth of the SXM.
_DRIVER_NAMES = (
    (r"\bH200\b", "h200"),
    (r"\bH100\b.*\bPCIe\b", "h100-pcie"),
    (r"\bH100\b.*\b(80GB HBM3|SXM)", "h100"),
    (r"\bA100\b.*\b80GB\b", "a100-80"),
    (r"\bA100\b.*\b40GB\b", "a100-40"),
    (r"\bL40S\b", "l40s"),
    (r"\bRTX 4090(?! (D|Laptop))", "rtx4090"),
    (r"\bB200\b", "b200"),
)


def find_device(name: str) -> Device:
    """The figures of a device by its name in :data:`DEVICES`, or of a CUDA device ("cuda", "cuda:1").

    Capitals do as well.

    Raises:
        EpilogueError: if there is no such device.
    """
    given, name = name, name.strip().lower()
    if name in DEVICES:
        return DEVICES[name]
    if re.fullmatch(r"cuda(:[0-9]{1,9})?", name):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise EpilogueError(f"device {name!r}: torch {torch.__version__} finds no CUDA device here; {_choices()}")
        index = int(name.partition(":")[2] or torch.cuda.current_device())
        if index >= count:
            raise EpilogueError(f"device {name!r}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
        return _present(index)
    meant = did_you_mean(given, DEVICES)
    raise EpilogueError(f"unknown device {given!r}: {_choices()}, or cuda, cuda:INDEX{meant}")


def _choices() -> str:
    return f"expected one of {', '.join(DEVICES)}"


def present_device() -> Device | None:
    """The figures of the current CUDA device; None where there is none."""
    return _present(torch.cuda.current_device()) if torch.cuda.is_available() else None


def recognise(driver_name: str) -> str | None:
    """The name in :data:`DEVICES` of a device as the driver calls it, such as "NVIDIA H100 80GB HBM3"."""
    return next((name for pattern, name in _DRIVER_NAMES if re.search(pattern, driver_name)), None)


def _present(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    known = recognise(properties.name)
    figures = DEVICES[known or DEFAULT]
    origin = figures.origin
    if known is None:
        origin = f"no figures of the {properties.name} are known here: bandwidth and peak are those of the H200"
    return dataclasses.replace(
        figures,
        name=properties.name,
        l2=properties.L2_cache_size,
        multiprocessors=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
        origin=origin,
    )


_COPY_BYTES = 2**30  # far more than any L2 cache
_ROUNDS = 11


def measure_bandwidth(device: str | torch.device = "cuda") -> float:
    """Bytes per second that a CUDA device moves between its memory and itself, by copying a large tensor.

    Takes 2 GiB of its memory, or a quarter of what is free, and some milliseconds.  A copy reads and writes every
    byte, so twice the tensor's size is moved; the best of several rounds counts.

    Raises:
        EpilogueError: if there is no such CUDA device.
    """
    try:
        where = torch.device(device)
    except RuntimeError:
        where = None
    if where is None or where.type != "cuda" or not torch.cuda.is_available():
        raise EpilogueError(f"bandwidth is measured on a CUDA device that is there, not on {str(device)!r}")
    with torch.cuda.device(where):
        free, _ = torch.cuda.mem_get_info()
        size = min(_COPY_BYTES, free // 8)
        source = torch.zeros(size, dtype=torch.uint8, device=where)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(_ROUNDS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) * 1e-3)
    return 2 * size / min(seconds)

"""The copy into padded rows, as a function: our own kernel near the bandwidth limit, PyTorch's where that does not fit.

    >>> padded = pad_rows(x)                            # (4095, 4093) -> (4095, 4096), zeros at the end of each row

Measured on an H200: 21 us for 4095 x 4093 bfloat16, where a copy of whole aligned rows takes 19 and PyTorch's ``copy_``
into the same rows 43; 78, 66 and 155 us for 8191 x 8191.  Setting up the GEMM while its copy runs (programmatic
dependent launch, in a CUDA graph) gains 0.2 us of 13 to 18 at small M and nothing at large.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..addressing.views import pitch_of
from ..announce import announce
from ..errors import LaunchError, ToolchainError
from ..kernels.pad_spec import PadSpec
from ..when_to_build import NotBuilt, build_in_background, obstacle
from .abi import PadArguments
from .loading import load_once, open_library
from .streams import current_stream


def pad_rows(source: Tensor) -> Tensor:
    """A copy of a tensor (..., rows, columns) whose rows begin at multiples of 16 bytes: (..., rows, pitch).

    What follows the columns is 0.  Goes to the current stream of the tensor's device.
    """
    size, columns = source.element_size(), source.shape[-1]
    pitch = pitch_of(columns, size)
    target = torch.empty((*source.shape[:-1], pitch), dtype=source.dtype, device=source.device)
    if not target.numel():
        return target
    levels = _levels(source)
    kernel = _load(source.device) if levels is not None and source.is_cuda and size in (2, 4) else None
    if levels is None or kernel is None:
        target[..., :columns].copy_(source)
        target[..., columns:].zero_()
        return target
    (batch, batch_stride), (rows, row_stride) = levels
    last = (batch - 1) * batch_stride + (rows - 1) * row_stride + columns
    arguments = PadArguments(
        source=source.data_ptr(),
        source_pitch=row_stride * size,
        source_batch_pitch=batch_stride * size,
        source_bytes=last * size,
        destination=target.data_ptr(),
        destination_pitch=pitch * size,
        destination_batch_pitch=rows * pitch * size,
        batch=batch,
        rows=rows,
        row_bytes=columns * size,
        multiprocessors=_multiprocessors(source.device),
    )
    stream = current_stream(source.device)
    if code := kernel.pad_rows_run(ctypes.byref(arguments), stream):
        words = kernel.pad_rows_error_text(code).decode()
        raise LaunchError(f"copy into padded rows: CUDA says: {words} (shape {tuple(source.shape)})")
    return target


def _levels(source: Tensor) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(extent, stride) of a batch of matrices, and of the rows of one; None if the tensor is no such thing."""
    if source.shape[-1] > 1 and source.stride(-1) != 1:
        return None
    levels: list[tuple[int, int]] = []
    for extent, stride in zip(source.shape[:-1], source.stride()[:-1], strict=True):
        if extent == 1:
            continue
        if levels and levels[-1][1] == extent * stride:
            levels[-1] = levels[-1][0] * extent, stride
        else:
            levels.append((extent, stride))
    if len(levels) > 2 or any(extent > 2**31 - 1 for extent, _ in levels):
        return None
    padded = [(1, 0)] * (2 - len(levels)) + levels
    return padded[0], padded[1]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_kernels: dict[torch.device, ctypes.CDLL] = {}


def _load(device: torch.device) -> ctypes.CDLL | None:
    """The built kernel for a device; None, said once, where it is not built and is not waited for, or cannot be."""
    if (found := _kernels.get(device)) is not None:
        return found
    major, minor = torch.cuda.get_device_capability(device)
    spec = PadSpec(f"{major}{minor}")
    try:
        reason = obstacle(spec)
    except ToolchainError as error:
        reason = str(error)
    if reason is None:
        found = _kernels[device] = load_once(spec, _open)
        return found
    announce(f"matrices are copied into padded rows by PyTorch, at half the speed: {reason}")
    if isinstance(reason, NotBuilt) and reason.spec is not None:
        build_in_background(reason.spec)
    return None


def _open(path: Path) -> ctypes.CDLL:
    library = open_library(path, ("pad_rows_run", "pad_rows_error_text"))
    library.pad_rows_run.argtypes = [ctypes.POINTER(PadArguments), ctypes.c_void_p]
    library.pad_rows_run.restype = ctypes.c_int
    library.pad_rows_error_text.argtypes = [ctypes.c_int]
    library.pad_rows_error_text.restype = ctypes.c_char_p
    return library

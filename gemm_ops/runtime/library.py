"""A built kernel in this process: loaded once, called through ctypes.

    >>> kernel = load_kernel(spec)
    >>> kernel.launch(arguments, kernel.workspace_size(arguments), device)

Contract: a launch goes to PyTorch's current stream of the device, takes its workspace from PyTorch's allocator
(so the memory is safe to reuse in stream order, and comes from the graph's pool during a capture), and does not
synchronise.  The caller makes the device current.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ..errors import LaunchError
from ..kernels.spec import KernelSpec
from .abi import GemmArguments
from .loading import load_once, open_library
from .streams import current_stream

_FUNCTIONS = ("gemm_workspace_size", "gemm_run", "gemm_status_text", "gemm_cuda_error_text")


class Kernel:
    """The host functions of one built kernel."""

    def __init__(self, spec: KernelSpec, path: Path) -> None:
        self.spec = spec
        self.path = path
        library = open_library(path, _FUNCTIONS)
        self._workspace_size = library.gemm_workspace_size
        self._workspace_size.argtypes = [ctypes.POINTER(GemmArguments)]
        self._workspace_size.restype = ctypes.c_int64
        self.run_function = library.gemm_run
        self._run = self.run_function
        self._run.argtypes = [ctypes.POINTER(GemmArguments), ctypes.c_void_p, ctypes.c_void_p]
        self._run.restype = ctypes.c_int
        self._status_text = library.gemm_status_text
        self._status_text.argtypes = [ctypes.c_int]
        self._status_text.restype = ctypes.c_char_p
        self._cuda_error_text = library.gemm_cuda_error_text
        self._cuda_error_text.argtypes = [ctypes.c_int]
        self._cuda_error_text.restype = ctypes.c_char_p

    def workspace_size(self, arguments: GemmArguments) -> int:
        """Bytes of device memory that a launch needs; a question of extents, not of pointers."""
        return int(self._workspace_size(ctypes.byref(arguments)))

    def launch(self, arguments: GemmArguments, workspace_bytes: int, device: torch.device) -> None:
        """Starts the kernel on the device's current stream.

        Raises:
            LaunchError: if CUTLASS or the CUDA runtime refuses.
        """
        # kept until after the launch; freed in stream order, as any temporary of PyTorch's own operators
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device) if workspace_bytes else None
        stream = current_stream(device)
        pointer = None if workspace is None else workspace.data_ptr()
        code = self._run(ctypes.byref(arguments), pointer, stream)
        if code != 0:
            self.raise_failure(code, arguments)

    def raise_failure(self, code: int, arguments: GemmArguments) -> None:
        """Raises a LaunchError that says what a launch's code means."""
        raise LaunchError(
            f"{self.spec.title}: {self._status_text(code).decode()}; "
            f"CUDA says: {self._cuda_error_text(code).decode()} "
            f"(M={arguments.m}, N={arguments.n}, K={arguments.k}, {self.path})"
        )


def load_kernel(spec: KernelSpec) -> Kernel:
    """The kernel of a spec, built and loaded if need be.

    Raises:
        BuildError: if it cannot be built, or cannot be loaded even when freshly built.
    """
    return load_once(spec, lambda path: Kernel(spec, path))

"""A built kernel in this process: loaded once, called through ctypes.

    >>> kernel = load_kernel(spec)
    >>> kernel.launch(arguments, kernel.workspace_size(arguments), device)

Contract: a launch goes to PyTorch's current stream of the device, takes its workspace from PyTorch's allocator
(so the memory is safe to reuse in stream order, and comes from the graph's pool during a capture), and does not
synchronise.  The caller makes the device current.
"""

from __future__ import annotations

import _ctypes
import ctypes
import threading
from pathlib import Path

import torch

from ..build.cache import SOURCE, discard
from ..build.compiler import build_kernel, raise_failure, remember_failure
from ..errors import BuildError, LaunchError
from ..kernels.spec import KernelSpec
from .abi import GemmArguments

_FUNCTIONS = ("gemm_workspace_size", "gemm_run", "gemm_status_text", "gemm_cuda_error_text")

_loaded: dict[str, Kernel] = {}
_loading = threading.Lock()


class Kernel:
    """The host functions of one built kernel."""

    def __init__(self, spec: KernelSpec, path: Path) -> None:
        self.spec = spec
        self.path = path
        library = ctypes.CDLL(str(path))
        if missing := [name for name in _FUNCTIONS if not hasattr(library, name)]:
            # closed, for the loader gives an open library again for the same path, whatever is there by then
            _ctypes.dlclose(library._handle)
            raise OSError(f"{path} has no {', '.join(missing)}")
        self._workspace_size = library.gemm_workspace_size
        self._workspace_size.argtypes = [ctypes.POINTER(GemmArguments)]
        self._workspace_size.restype = ctypes.c_int64
        self._run = library.gemm_run
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
        stream = torch.cuda.current_stream(device).cuda_stream
        pointer = None if workspace is None else workspace.data_ptr()
        code = self._run(ctypes.byref(arguments), pointer, stream)
        if code != 0:
            raise LaunchError(
                f"{self.spec.title}: {self._status_text(code).decode()}; "
                f"CUDA says: {self._cuda_error_text(code).decode()} "
                f"(M={arguments.m}, N={arguments.n}, K={arguments.k}, {self.path})"
            )


def is_loaded(spec: KernelSpec) -> bool:
    """Whether the kernel is loaded in this process."""
    return spec.key in _loaded


def load_kernel(spec: KernelSpec) -> Kernel:
    """The kernel of a spec, built and loaded if need be.

    Raises:
        BuildError: if it cannot be built, or cannot be loaded even when freshly built.
    """
    kernel = _loaded.get(spec.key)
    if kernel is None:
        with _loading:
            kernel = _loaded.get(spec.key)
            if kernel is None:
                kernel = _loaded[spec.key] = _load(spec)
    return kernel


def _load(spec: KernelSpec) -> Kernel:
    raise_failure(spec)
    path = build_kernel(spec)
    try:
        return Kernel(spec, path)
    except OSError:
        # not a library of this machine (a cache carried over, a damaged disk): build it here, once
        discard(spec)
        path = build_kernel(spec)
        try:
            return Kernel(spec, path)
        except OSError as error:
            failure = BuildError(
                f"the kernel built at {path} does not load: {error}", source=str(path.with_name(SOURCE))
            )
            remember_failure(spec, failure)
            raise failure from error

"""What can go wrong with a fused GEMM, one class per kind, and the warning for computing unfused.

    >>> try:
    ...     gemm_ops.linear(x, weight, "gelu")
    ... except gemm_ops.BuildError as error:
    ...     print(error.command, error.output)

Mistakes in an epilogue or its operands are :class:`epilogues.EpilogueError` and its subclasses.
"""

from __future__ import annotations


class ProblemError(ValueError):
    """The matrices do not make a GEMM: shapes that do not match, mixed dtypes, tensors on two devices."""


class UnsupportedProblemError(ValueError):
    """A backend was asked for by name (:func:`gemm_ops.use_backend`) and cannot take this problem."""


class BuildError(RuntimeError):
    """A kernel could not be built.

    Attributes:
        command: the compiler's command line, or "" if no compiler was started.
        output: everything the compiler printed.
        source: path of a file with the kernel's source and the compiler's output, or "".
    """

    def __init__(self, message: str, command: str = "", output: str = "", source: str = "") -> None:
        super().__init__(message)
        self.command = command
        self.output = output
        self.source = source

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.command, self.output, self.source)


class ToolchainError(BuildError):
    """No usable nvcc was found, or no CUTLASS headers."""


class BundleError(RuntimeError):
    """A bundle of built kernels cannot be written, or is not one that can be unpacked here."""


class LaunchError(RuntimeError):
    """CUTLASS or the CUDA runtime refused to start a kernel."""


class FallbackWarning(UserWarning):
    """A call is computed by the PyTorch reference backend, for the reason the warning gives."""

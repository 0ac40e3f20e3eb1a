"""Launching a standalone elementwise kernel.

    >>> layout = plan_layout(x.shape, [view_of(x, x.shape), view_of(bias, x.shape)], [view_of(out, x.shape)])
    >>> spec = ElementwiseSpec.of(tree, "bf16", layout, "90")
    >>> block = fill_block(block_template(layout), x, [bias], [out])
    >>> start(load_elementwise(spec), block, out, spec.title)

Contract: the tensors are those that the layout was planned for, or others with the same strides and the same addresses
modulo 32.  A launch goes to PyTorch's current stream of the device, needs no memory and does not synchronise, so it can
be captured.  The caller makes the device current, and answers for what outputs share with other tensors: an output may
be exactly an input, anything else must not overlap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ..elementwise.arguments import ElementwiseArguments
from ..elementwise.layout import Layout, Placement
from ..elementwise.spec import ElementwiseSpec
from ..errors import LaunchError
from .loading import load_once, open_library
from .streams import current_stream


def start(library: ctypes.CDLL, block: ElementwiseArguments, output: Tensor, title: str) -> None:
    """Starts a loaded kernel on the current stream of the main output's device.

    Raises:
        LaunchError: if the CUDA runtime refuses; says the kernel's title.
    """
    device = output.device
    code = library.elementwise_run(ctypes.byref(block), current_stream(device))
    if code != 0:
        raise_failure(library, code, title, f" (shape {tuple(output.shape)})")


def raise_failure(library: ctypes.CDLL, code: int, title: str, where: str = "") -> None:
    """Raises a LaunchError that says what a launch's code means."""
    raise LaunchError(f"{title}: CUDA says: {library.elementwise_error_text(code).decode()}{where}")


def fill_block(
    template: bytes,
    x: Tensor,
    operands: Sequence[Tensor | float],
    outputs: Sequence[Tensor],
) -> ElementwiseArguments:
    """The argument block of one launch, made of that of all launches."""
    block = ElementwiseArguments.from_buffer_copy(template)
    for argument, given in zip(block.inputs, (x, *operands), strict=False):
        if isinstance(given, Tensor):
            argument.data = given.data_ptr()
        else:
            argument.value = given
    for argument, output in zip(block.outputs, outputs, strict=False):
        argument.data = output.data_ptr()
    return block


def block_template(layout: Layout) -> bytes:
    """The argument block without what may differ from launch to launch: pointers and numbers."""
    block = ElementwiseArguments(columns=layout.columns, pieces_per_row=layout.pieces_per_row, wrap=layout.wrap)
    for place, extent in enumerate(layout.outer):
        block.outer[place] = extent
    for arguments, placements in ((block.inputs, layout.inputs), (block.outputs, layout.outputs)):
        for argument, placement in zip(arguments, placements, strict=False):
            _place(argument, placement)
    return bytes(block)


def _place(argument: ctypes.Structure, placement: Placement) -> None:
    argument.bytes = placement.bytes
    argument.column_stride = placement.column_stride
    for place, stride in enumerate(placement.strides):
        argument.strides[place] = stride


def load_elementwise(spec: ElementwiseSpec) -> ctypes.CDLL:
    """The library of a kernel, built and loaded if need be.

    Raises:
        BuildError: if it cannot be built, or cannot be loaded even when freshly built.
    """
    return load_once(spec, _open)


def _open(path: Path) -> ctypes.CDLL:
    library = open_library(path, ("elementwise_run", "elementwise_error_text"))
    library.elementwise_run.argtypes = [ctypes.POINTER(ElementwiseArguments), ctypes.c_void_p]
    library.elementwise_run.restype = ctypes.c_int
    library.elementwise_error_text.argtypes = [ctypes.c_int]
    library.elementwise_error_text.restype = ctypes.c_char_p
    return library

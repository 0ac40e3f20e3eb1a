"""How a plan says what it does, so that it can be done without it.

>>> form = NativeForm(address_of_function(library.gemm_run), True, 0, block, inputs, outputs, dtypes, shape)
>>> BY_PYTHON                                      # its owner runs it: ``owner.run_values(values)``
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch


class NativeForm(NamedTuple):
    """A launch as ``cpp/plan.h`` has it.

    Attributes:
        function: the address of the library's function; 0: the plan's ``run_values`` computes the outputs, or PyTorch
            does, where ``is_product``.
        takes_workspace: whether the function takes a workspace, between the block and the stream.
        workspace_bytes: how much.
        block: the argument block, without what may differ from launch to launch.
        inputs: of each input, in bytes from the block's begin, where its address and where its value go.
        outputs: of each output, where its address goes.
        dtypes: of the outputs.
        shape: of the outputs.
        pitch: elements from row to row of new outputs, which are views of padded rows; 0: they are contiguous.
        like_first: whether outputs lie as the first input does.
        is_product: whether PyTorch, in place of the function, multiplies the first input by the second: one output.
        bias: which input it adds to every row; -1 for none.
    """

    function: int
    takes_workspace: bool = False
    workspace_bytes: int = 0
    block: bytes = b""
    inputs: tuple[tuple[int, int], ...] = ()
    outputs: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    shape: tuple[int, ...] = ()
    pitch: int = 0
    like_first: bool = False
    is_product: bool = False
    bias: int = -1


BY_PYTHON = NativeForm(0)


def address_of_function(function: Any) -> int:
    """The address of a function of a library that ctypes loaded."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def slots(block: Any, field: str, count: int) -> tuple[tuple[int, int], ...]:
    """Where the first elements of an array of arguments have their ``data`` and ``value``, from the block's begin.

    Args:
        block: the ctypes structure that has the array.
        field: the array's name.
        count: how many elements.
    """
    array, element = getattr(block, field), dict(block._fields_)[field]._type_
    value = element.value.offset if hasattr(element, "value") else 0
    starts = (array.offset + place * ctypes.sizeof(element) for place in range(count))
    return tuple((start + element.data.offset, start + value) for start in starts)


def data_slots(block: Any, field: str, count: int) -> tuple[int, ...]:
    """The same of arguments that are always tensors."""
    return tuple(data for data, _ in slots(block, field, count))

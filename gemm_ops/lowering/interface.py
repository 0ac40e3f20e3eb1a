"""The CUTLASS Python interface, imported so that it works on any machine.

    >>> cppgen = load_interface()
    >>> frontend = cppgen.EVTFrontendBase(90)

What is wrong with a plain ``import cutlass_cppgen`` (version 4.2.0.0), and is put right here:

* it creates ``compiled_cache.db`` in the current directory: its connection goes to a database in memory;
* it asks cuda-python for a version and a device as soon as something needs them, which fails without a GPU
  and with cuda-python 13: nothing here asks, a compute capability is passed everywhere.

The import takes more than two seconds, so only lowering a kernel that is not built yet comes here.
"""

from __future__ import annotations

import functools
import sqlite3
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ..errors import ToolchainError

_CACHE_FILE = "compiled_cache.db"
_lock = threading.Lock()


@functools.cache
def load_interface() -> SimpleNamespace:
    """The parts of the interface that lowering uses.

    Raises:
        ToolchainError: if ``nvidia-cutlass`` is not installed or cannot be imported.
    """
    connect = sqlite3.connect

    def connect_in_memory(database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        return connect(":memory:" if database == _CACHE_FILE else database, *args, **kwargs)

    try:
        with _lock, mock.patch.object(sqlite3, "connect", connect_in_memory):
            from cutlass_cppgen.backend.evt.backend import sm80_nodes, sm90_nodes
            from cutlass_cppgen.backend.evt.backend.emitter_base import FusionCallbacks
            from cutlass_cppgen.backend.evt.frontend.frontend_base import EVTFrontendBase
            from cutlass_cppgen.backend.evt.ir import ComputeNode, TopoVisitorNode
            from cutlass_cppgen.backend.evt.ir.tensor import Tensor
            from cutlass_cppgen.backend.library import FunctionalOp
            from cutlass_library import LayoutType
    except ImportError as error:
        raise ToolchainError(
            f"the CUTLASS Python interface cannot be imported ({error}): kernels are built through the package "
            "nvidia-cutlass, install it with `pip install nvidia-cutlass==4.2.0.0`"
        ) from error
    return SimpleNamespace(
        ComputeNode=ComputeNode,
        EVTFrontendBase=EVTFrontendBase,
        FunctionalOp=FunctionalOp,
        FusionCallbacks=FusionCallbacks,
        LayoutType=LayoutType,
        Tensor=Tensor,
        TopoVisitorNode=TopoVisitorNode,
        sm80_nodes=sm80_nodes,
        sm90_nodes=sm90_nodes,
    )

"""A device of a kind: elementwise kernels run on the host, on tensors in host memory, as if it were a GPU.

>>> def test_something(host: HostDevice) -> None:       # the fixture is in conftest.py
...     gemm_ops.apply(x, "relu")
...     assert len(host.launched) == 1
"""

from __future__ import annotations

import pytest
import torch
from elementwise_host import host_kernel
from torch import Tensor

from gemm_ops import elementwise_call, elementwise_plan, native
from gemm_ops.elementwise.arguments import ElementwiseArguments
from gemm_ops.elementwise.spec import ElementwiseSpec


def leave_native_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets calls go through Python alone."""
    monkeypatch.setattr(native, "_started", True)
    monkeypatch.setattr(native, "_module", None)
    for name in ("product", "layer", "elementwise", "signature"):
        monkeypatch.setattr(native, name, lambda *_: None)


class HostDevice:
    """Counts the launches, which run on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[ElementwiseSpec] = []
        leave_native_out(monkeypatch)  # whose launches nobody here would see
        monkeypatch.setattr(elementwise_call, "runs_kernels", lambda device: device.type == "cpu")
        monkeypatch.setattr(elementwise_call, "obstacle", lambda spec, **_: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(elementwise_plan, "load_elementwise", lambda spec: spec)
        monkeypatch.setattr(elementwise_plan, "start", self._start)

    def _start(self, spec: ElementwiseSpec, block: ElementwiseArguments, output: Tensor, title: str) -> None:
        assert title == spec.title and output.device.type == "cpu"
        self.launched.append(spec)
        host_kernel(spec).run(block)

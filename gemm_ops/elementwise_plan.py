"""What a repeated elementwise call reuses: its kernel and its argument block.

    >>> plan = ElementwisePlan(epilogue, tree, spec, layout, x.device)
    >>> outputs = plan.run(x, {"bias": bias}, out={})

As :mod:`gemm_ops.plan` for products: made once for a class of calls, found again by :func:`gemm_ops.plan.plan_key`.
Running it fills in pointers and launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epilogues import Epilogue
from epilogues.dtypes import torch_dtype
from epilogues.tree import EpilogueTree

from .elementwise.arguments import ElementwiseArguments
from .elementwise.layout import Layout
from .elementwise.spec import ElementwiseSpec
from .native.form import NativeForm, address_of_function, data_slots, slots
from .plan import made_current
from .runtime.elementwise import block_template, fill_block, load_elementwise, raise_failure, start


class ElementwisePlan:
    """A kernel made ready for one class of calls.

    Args:
        epilogue: what is computed.
        tree: its tree, resolved.
        spec: the kernel, built and loaded if need be.
        layout: how the tensors lie.
        device: where they lie.

    Raises:
        BuildError: if the kernel cannot be built or loaded.
    """

    is_native = False

    def __init__(
        self, epilogue: Epilogue, tree: EpilogueTree, spec: ElementwiseSpec, layout: Layout, device: torch.device
    ) -> None:
        self.epilogue = epilogue  # also keeps its id from being given to another
        self.title, self.device = spec.title, device
        self.library = load_elementwise(spec)
        self.template = block_template(layout)
        self.operand_names = tuple(epilogue.operands)
        dtypes = [torch_dtype(str(store.dtype)) for store in tree.outputs]
        self.outputs = tuple(zip(epilogue.outputs, dtypes, strict=True))

    def native_form(self) -> NativeForm:
        """The launch, for :mod:`gemm_ops.native`."""
        return NativeForm(
            function=address_of_function(self.library.elementwise_run),
            block=self.template,
            inputs=slots(ElementwiseArguments, "inputs", 1 + len(self.operand_names)),
            outputs=data_slots(ElementwiseArguments, "outputs", len(self.outputs)),
            dtypes=tuple(dtype for _, dtype in self.outputs),
            like_first=True,
        )

    def run_values(self, values: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The outputs in order, of x and the operands in order."""
        x, *operands = values
        return tuple(self.run(x, dict(zip(self.operand_names, operands, strict=True)), {}).values())

    def raise_failure(self, code: int) -> None:
        """Raises what a launch's code means."""
        raise_failure(self.library, code, self.title)

    def run(self, x: Tensor, operands: Mapping[str, Tensor | float], out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Launches the kernel on the current stream of the tensors' device.

        Args:
            x, operands: tensors as the plan was made for.
            out: the caller's outputs by name; empty to allocate tensors that lie as x does, as those of PyTorch's own
                elementwise operators.

        Raises:
            LaunchError: if the kernel does not start.
        """
        outputs = dict(out) if out else {name: torch.empty_like(x, dtype=dtype) for name, dtype in self.outputs}
        values = [operands[name] for name in self.operand_names]
        written = [outputs[name] for name, _ in self.outputs]
        block = fill_block(self.template, x, values, written)
        with made_current(self.device):
            start(self.library, block, written[0], self.title)
        return outputs

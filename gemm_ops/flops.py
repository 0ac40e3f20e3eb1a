"""How many operations a product counts as in ``torch.utils.flop_counter``: as many as PyTorch's own.

>>> with FlopCounterMode() as counter:
...     layer(x)                                                # 2 * M * N * K, as nn.Linear's; its epilogue as none
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import operators  # noqa: F401  defines what is counted here

Shape = Sequence[int]


@register_flop_formula([torch.ops.gemm_ops.matmul, torch.ops.gemm_ops.matmul_inference])
def count_product(a: Shape, b: Shape, *_: Any, out_shape: Sequence[Shape], **__: Any) -> int:
    """The operations of a product of matrices of these shapes; the first output has the product's shape."""
    return 2 * math.prod(out_shape[0]) * a[-1]

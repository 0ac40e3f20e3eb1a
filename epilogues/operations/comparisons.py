"""Rows of the operation table that give conditions: comparisons, tests, logic.

A condition is true or false.  It feeds ``where`` and logic, and nothing else; it is never stored or cast.
"""

from __future__ import annotations

import torch

from .row import row

ROWS = (
    row("gt", torch.gt, None, None, result="condition", note="false if either is NaN"),
    row("ge", torch.ge, None, None, result="condition", note="false if either is NaN"),
    row("lt", torch.lt, None, None, result="condition", note="false if either is NaN"),
    row("le", torch.le, None, None, result="condition", note="false if either is NaN"),
    row("eq", torch.eq, None, None, result="condition", note="false if either is NaN"),
    row("ne", torch.ne, None, None, result="condition", note="true if either is NaN"),
    row("isnan", torch.isnan, None, result="condition"),
    row("isinf", torch.isinf, None, result="condition", note="either infinity"),
    row("isfinite", torch.isfinite, None, result="condition", note="neither infinite nor NaN"),
    row("logical_and", torch.logical_and, None, None, result="condition", conditions=(0, 1)),
    row("logical_or", torch.logical_or, None, None, result="condition", conditions=(0, 1)),
    row("logical_xor", torch.logical_xor, None, None, result="condition", conditions=(0, 1)),
    row("logical_not", torch.logical_not, None, result="condition", conditions=(0,)),
)

#: What arithmetic on nothing but conditions is, as PyTorch has it for tensors of dtype bool; None: refused.
ON_CONDITIONS = {
    "add": "logical_or",
    "mul": "logical_and",
    "maximum": "logical_or",
    "minimum": "logical_and",
    "sub": None,
    "neg": None,
}

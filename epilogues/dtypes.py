"""The dtypes of the language, under the short names the tree, its JSON form and the kernels use.

    >>> from epilogues.dtypes import dtype_name, torch_dtype
    >>> dtype_name(torch.bfloat16), torch_dtype("f16")
    ('bf16', torch.float16)
    >>> dtype_name("float16")
    'f16'

Trees hold the short names only; where a user names a dtype, the other names of :data:`ALIASES` do as well,
in capitals or not.
Any other dtype raises :class:`~epilogues.errors.DtypeError`.
"""

from __future__ import annotations

import torch

from .errors import DtypeError, did_you_mean

#: short name -> torch dtype; what operands may be loaded as, values cast to, and outputs stored as.
DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}

#: what a user may call a dtype -> its short name
ALIASES: dict[str, str] = {
    alias: name
    for name, aliases in {
        "f32": "f32 fp32 float32",
        "f16": "f16 fp16 float16",
        "bf16": "bf16 bfloat16",
    }.items()
    for alias in aliases.split()
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype | str) -> str:
    """The short name ("f32", "f16", "bf16") of a dtype given as a torch dtype or by one of its names.

    Raises:
        DtypeError: for any other dtype.
    """
    if isinstance(dtype, str):
        name = ALIASES.get(dtype.lower().removeprefix("torch."))
    else:
        name = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if name is None:
        from .source import short  # which needs trees, and these need this module

        known = ", ".join(str(known) for known in _NAMES)
        meant = did_you_mean(dtype, ALIASES)
        raise DtypeError(f"dtype {short(dtype)} has no place in an epilogue: expected one of {known}{meant}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name; the inverse of :func:`dtype_name`."""
    return DTYPES[dtype_name(name)]

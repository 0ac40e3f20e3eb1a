"""Where cuBLAS and one kernel for the epilogue are faster than a fused kernel, as measured.

    >>> faster_in_two_passes(16, 4096, 4096, addressing, "sm90")
    'cuBLAS and one kernel for the epilogue were measured faster than a fused kernel, for few rows of aligned matrices'
    >>> faster_in_two_passes(4096, 4096, 4096, addressing, "sm90")
    ''

Measured on an H200 with bias + GELU in bf16, by M: the time of the two over that of the fused kernel.

========  ========  ====  ====  ====  ====  ====  ====  ====
N         K            1     8    16    32    48    64    96
========  ========  ====  ====  ====  ====  ====  ====  ====
256       256       1.07  1.13  1.13  1.14  1.14  1.15  1.13
1024      1024      1.36  1.05  1.06  1.08  1.14  1.17  1.10
4096      1024      0.69  0.72  0.74  0.80  0.93  1.21  0.90
4096      4096      0.56  0.53  0.61  0.72  0.92  1.00  0.95
11008     4096      0.77  0.85  0.83  0.93  1.07  1.08  0.87
4096      11008     0.56  0.63  0.66  0.71  1.00  1.19  0.82
========  ========  ====  ====  ====  ====  ====  ====  ====

The TMA loads of the SM90 kernels take longer the more of a tile's 64 rows lie outside of the matrix.  Where cuBLAS has
slow kernels (an odd N or K) the fused kernel is two to eight times as fast, whatever M is.
"""

from __future__ import annotations

from ..addressing import Addressing

_TILE_ROWS = 64
#: Rows of a last tile up to which most of it is outside of the matrix.
_FEW_ROWS = 32
#: From here on more tiles are whole than not.
_MANY_ROWS = 128
#: Elements of the weight; of fewer the fused kernel's one launch is what counts.
_LEAST_WEIGHT = 2**22


_REASON = (
    "cuBLAS and one kernel for the epilogue were measured faster than a fused kernel, for few rows of aligned matrices"
)


def faster_in_two_passes(m: int, n: int, k: int, addressing: Addressing, family: str) -> str:
    """Why a product and its epilogue are to be computed one after the other; "" where fused is as fast.

    Args:
        m, n, k: extents of the product.
        addressing: how the tensors would reach the fused kernel.
        family: the fused kernel's.
    """
    if family != "sm90" or m >= _MANY_ROWS or not 1 <= m % _TILE_ROWS <= _FEW_ROWS or n * k < _LEAST_WEIGHT:
        return ""
    aligned = n % 8 == 0 and not addressing.a.copy and not addressing.b.copy
    if not aligned or addressing.batch > 1 or addressing.loops:
        return ""
    return _REASON

"""How the tensors of a call reach a kernel: taken as they lie, loaded and stored at any alignment, or copied first.

    >>> addressing = address("sm90", request)
    >>> addressing.a.copy, addressing.b.way, addressing.outputs[0].way
    ('padded', 'tma', 'unaligned')

``views``      what there is to know of each tensor: strides over the dimensions of the call, element size, alignment
``collapse``   the leading dimensions as one M, one batch, and loops over what is left
``placement``  what is decided for each tensor, and in words
``rules``      what the families share: copies until nothing changes
``sm90``       the rules of the SM90 kernels: TMA where pointer and strides are multiples of 16 bytes
``sm80``       the rules of the SM80 kernels: vectors as wide as extents, pointer and strides allow

Contract: everything here is a function of shapes, strides, dtypes and addresses modulo 16.  No tensor is read, nothing
is allocated, no device is needed.  A tensor is copied only where no kernel reaches it as it is: for A and B on SM90,
where pointer and strides are no multiples of 16 bytes or neither stride is 1; for a row or a column operand, where its
elements are not one after another.  Broadcast and batch dimensions are strides of 0 and never copied, leading
dimensions are merged wherever strides allow.
"""

from .families import address
from .placement import Addressing, Placement
from .views import OperandView, OutputView, Request, View

__all__ = ["Addressing", "OperandView", "OutputView", "Placement", "Request", "View", "address"]

"""An epilogue tree as one standalone CUDA kernel: every input read once, every output written once.

    >>> layout = plan_layout(shape, [view_of(x), view_of(bias)], [view_of(out)])
    >>> spec = ElementwiseSpec.of(tree, "bf16", layout, "90")
    >>> block = fill_block(block_template(layout), x, [bias], [out])        # gemm_ops.runtime.elementwise
    >>> start(load_elementwise(spec), block, out, spec.title)

The layers, in the order in which a call passes them:

``layout``     how the tensors lie: dimensions merged and reordered, and how each tensor is reached along them.
``body``       the tree as a C++ function of one element, and the kernel's inputs and outputs around it.
``spec``       a kernel's identity on disk, and its source; what the build takes.
``arguments``  the block that Python fills and the kernel reads.

The device side is ``cuda/elementwise_walk.cuh`` (which elements a thread takes), ``cuda/elementwise_pieces.cuh``
(loading and storing them) and ``templates/elementwise.cu.j2``; the operations are those of ``cuda/functors.cuh``, as in
the GEMM epilogues.
"""

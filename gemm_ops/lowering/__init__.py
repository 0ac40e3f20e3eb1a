"""From a resolved epilogue tree to the C++ of an epilogue visitor, through the CUTLASS Python interface.

The layers, in the order in which a tree passes them:

``stages``      splits the tree at its outputs: one elementwise function per output, over operands and over
                values that other outputs store.  Knows nothing of CUDA or CUTLASS.
``expressions`` writes one node as a C++ expression.
``functors``    writes each function as one N-ary C++ functor.
``visitor``     builds the interface's DAG IR (loads, one compute node per function, stores), runs its passes,
                and emits the visitor types and the initialiser of their arguments.
``interface``   the only module that imports ``cutlass_cppgen``; works around what is wrong with its import.

Why one functor per output and not one compute node per operation: the interface's functor list is short, its
graph has no parallel edges (``x * x``), and a single functor lets the compiler see the whole expression at once.
It costs nothing: builds take as long and registers are the same.
"""

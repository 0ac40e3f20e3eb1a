"""Ready-made epilogues of training: a forward that keeps what backward needs, and that backward.

    >>> saved = gemm_ops.linear(x, weight, train("gelu"), bias=bias)                 # D and preact
    >>> grad = gemm_ops.matmul(grad_output, next_weight, activation_backward("gelu"), preact=saved["preact"])

The GEMM of the next layer's backward gives the gradient with respect to this activation's output; its epilogue
makes of it the gradient with respect to the activation's input, so that no kernel of its own is needed.
"""

from __future__ import annotations

from typing import Any

from ..declare import Epilogue
from ..signature import Row
from ..symbol import Symbol
from ..tree import MAIN_OUTPUT, Accumulator, EpilogueTree, Kind, Node, Operand, Store
from .names import activation_function, builder, named
from .pointwise import activation as activation_epilogue
from .pointwise import identity


@builder
def train(activation: str | None = "gelu_tanh", **params: Any) -> Epilogue:
    """D = act(preact) and preact = acc + bias[n], both stored; backward needs preact."""
    act = activation_function(activation, **params)

    def train(acc: Symbol, bias: Row) -> Any:
        preact = acc + bias
        return {"D": act(preact), "preact": preact}

    return Epilogue(train, named("train", activation))


@builder
def activation_backward(activation: str | None, **params: Any) -> Epilogue:
    """D = acc * act'(preact[m, n]): the accumulator is the gradient of act's output, D that of its input.

    Kinks, bounds and zeros are as PyTorch's autograd has them; where a derivative is 0 on one side of a kink, D is 0
    there whatever the accumulator, infinity and NaN too.  Of the identity, which has no preact, it is the identity.
    """
    from ..gradients.chain_rule import ACCUMULATOR, differentiate

    found = differentiate(activation_epilogue(activation, **params), (ACCUMULATOR,), (MAIN_OUTPUT,))
    backward = EpilogueTree((Store(MAIN_OUTPUT, found.gradients[ACCUMULATOR]),))
    # the forward's accumulator is read, and the incoming gradient is what the GEMM computes
    change: dict[int, Node] = {id(found.incoming[MAIN_OUTPUT]): Accumulator()}
    for node in backward.nodes:
        if isinstance(node, Accumulator):
            change[id(node)] = Operand("preact", Kind.AUX, 0, location=node.location)
    made = Epilogue.from_tree(backward.map_nodes(change), named("backward", activation))
    return made if made.operands else identity()

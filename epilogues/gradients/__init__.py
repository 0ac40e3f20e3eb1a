"""What a backward pass needs of an epilogue: trees of gradients, values to save, sums left to do outside.

    >>> backward = ep.builders.bias_activation("gelu").backward()

``derivative`` is the entrance; ``chain_rule`` differentiates, ``saved_values`` chooses what to save and what to compute
again, ``backward`` is the result.  Nothing here is imported before it is used.
"""

"""Passes: functions from a tree to a tree that computes the same, or the same with other roundings.

    >>> from epilogues.passes.simplify import simplify
    >>> simplify(wordy.tree)

``simplify`` and its parts (``rewriting`` the engine, ``patterns`` and ``constant_folding`` the rules' helpers) never
change a bit of a result.  ``eager_rounding`` inserts the casts that eager PyTorch makes, ``compute_dtype`` those of a
narrower arithmetic; both are about values and come before ``simplify``.
"""

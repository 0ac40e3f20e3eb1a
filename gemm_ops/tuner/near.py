"""Which result says something of a problem, or an epilogue, that was not measured.

    >>> [each.problem.m for each in near_results(asked, tree, results)]
    [4096, 8192]                                        # of a problem with M = 5000, the nearest first

Contract: near are results of the same device, dtype, layouts, access, batch and class of epilogues, whose N and K are
multiples of 8 where those asked for are (cuBLAS has other kernels elsewhere), and whose extents are near:

* the same N and K (the layers of a network, which sees many M), and an M within a factor of 2, of 1.25 where either is
  below 128: there the share of a tile that lies outside of the matrix decides;
* or all three extents within 5 %.

What a near result says of a fused kernel is taken if that has as many waves of tiles on the problem asked for as on the
one measured (or more than 8 on both: of many waves the last one counts little), and if the wave model expects it to be
no more than 5 % slower there than the model's own choice.  What it says of PyTorch being faster, of which there is no
model, is taken only within 1.25 of M, where the fused kernel it was compared with has as many waves.

Of the very problem, results of other epilogues that read and write as many matrices say which fused kernel is fastest,
those of about as much arithmetic first: the products are the same.  The wave model may expect that to be 15 % slower
than its own choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from ..kernels.candidates import Candidate
from ..kernels.waves import tiles
from .classes import ProblemClass, instructions_of, matrices_of
from .records import Measured

#: How far M may be off where N and K are the same.
M_RATIO = 2.0
#: The same where M is small, or PyTorch was faster.
SMALL_RATIO = 1.25
_SMALL_M = 128
#: How far all extents may be off.
ANY_RATIO = 1.05
#: From here on more waves are as good as as many.
MANY_WAVES = 8
#: How much slower than its own choice the wave model may expect a kernel to be.
TRUSTED = 1.05

#: The same of a kernel that was measured at the very problem, with another epilogue.
TRUSTED_OF_EPILOGUE = 1.15

_ALIGNED_ELEMENTS = 8


def near_results(asked: ProblemClass, tree: str, results: Iterable[Measured]) -> list[Measured]:
    """The results whose extents are near, the nearest first; of exactly this class is none of them."""
    alike = asked.alike
    found = [
        each
        for each in results
        if each.tree == tree and each.problem != asked and each.problem.alike == alike and is_near(asked, each.problem)
    ]
    return sorted(found, key=lambda each: distance(asked, each.problem))


def like_results(asked: ProblemClass, tree: str, results: Iterable[Measured]) -> list[Measured]:
    """The results of exactly this problem for epilogues that move as much, those of like arithmetic first."""
    matrices, instructions = matrices_of(tree), instructions_of(tree)
    found = [
        each for each in results if each.problem == asked and each.tree != tree and matrices_of(each.tree) == matrices
    ]
    return sorted(
        found, key=lambda each: (abs(math.log2((1 + instructions_of(each.tree)) / (1 + instructions))), each.tree)
    )


def is_near(asked: ProblemClass, other: ProblemClass) -> bool:
    """Whether extents are near; see the module's first page."""
    pairs = ((asked.n, other.n), (asked.k, other.k))
    if any((one % _ALIGNED_ELEMENTS == 0) != (another % _ALIGNED_ELEMENTS == 0) for one, another in pairs):
        return False
    if all(one == another for one, another in pairs):
        limit = SMALL_RATIO if min(asked.m, other.m) < _SMALL_M else M_RATIO
        return _ratio(asked.m, other.m) <= limit
    return max(_ratio(asked.m, other.m), *(_ratio(*pair) for pair in pairs)) <= ANY_RATIO


def distance(asked: ProblemClass, other: ProblemClass) -> float:
    """How far extents are apart: the logarithms of their ratios, added."""
    pairs = ((asked.m, other.m), (asked.n, other.n), (asked.k, other.k))
    return sum(math.log(_ratio(*pair)) for pair in pairs)


def has_as_many_waves(candidate: Candidate, other: ProblemClass, multiprocessors: int) -> bool:
    """Whether a kernel has as many waves on its problem as on another one, or many on both."""
    config, here = candidate.spec.config, candidate.addressing
    there = dataclasses.replace(here, m=other.m, n=other.n, k=other.k)
    one, another = (-(-tiles(config, each, config.swizzle) // multiprocessors) for each in (here, there))
    return one == another or min(one, another) > MANY_WAVES


def pytorch_is_as_near(asked: ProblemClass, other: ProblemClass) -> bool:
    """Whether what was measured of PyTorch may be taken."""
    return _ratio(asked.m, other.m) <= SMALL_RATIO


def _ratio(one: int, other: int) -> float:
    return max(one, other) / min(one, other)

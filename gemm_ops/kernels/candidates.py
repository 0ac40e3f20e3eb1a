"""Every kernel that could compute a problem, best first by the wave model: what there is to measure.

    >>> found = rank_candidates(tree, "bf16", request, Target((9, 0), 132), most=8)
    >>> found[0].name, round(found[0].expected, 1)
    ('sm90_pingpong_128x128x64_1x2 swizzle 1', 186.5)

Contract: the first candidate is what :func:`gemm_ops.kernels.selection.select_kernel` takes, then those of all families
that run on the device, by :func:`gemm_ops.kernels.waves.expected_time`.  A family's whole table is in the pool, as far
as it fits in shared memory; a longer table, or one family more, means more candidates and nothing else.  SM80 kernels
are candidates where no other family takes a problem: no mma.sync kernel is as fast as one of wgmma.

The raster is an argument of SM90 kernels and not compiled in, so the same library is a candidate with each swizzle that
may matter: where there is more than one wave of tiles, those that add no wave of padding.  A candidate's name, of its
configuration and its swizzle, is what results are kept by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from epilogues.tree import EpilogueTree

from ..addressing import Addressing, Request, address
from .config import KernelConfig
from .families import CONFIGS, UNALIGNED_STAGES, arch_of, choose_config, families_for, takes
from .selection import Target, select_kernel
from .spec import KernelSpec
from .waves import choose_raster, expected_time, tiles

#: Swizzles that CUTLASS's scheduler knows.
SWIZZLES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """A kernel for a problem.

    Attributes:
        spec: the kernel, with the swizzle it is to be launched with.
        addressing: how the tensors reach it.
        expected: microseconds, by the wave model; of use to compare candidates of one problem by.
    """

    spec: KernelSpec
    addressing: Addressing
    expected: float

    @property
    def name(self) -> str:
        """What results are kept by; see :func:`name_of`."""
        return name_of(self.spec.config)


def name_of(config: KernelConfig) -> str:
    """A configuration with its swizzle, such as ``sm90_pingpong_128x128x64_1x2 swizzle 4``."""
    return f"{config.name} swizzle {config.swizzle}"


def rank_candidates(
    tree: EpilogueTree, element: str, request: Request, target: Target, *, most: int | None = None
) -> tuple[Candidate, ...]:
    """The candidates of a problem, best first; the choice of the rules is the first.

    Args:
        tree: resolved.
        element: short dtype name of A and B.
        request: the tensors.
        target: the device.
        most: how many kernels to build at most, each with all its swizzles; None: all.
    """
    chosen = select_kernel(tree, element, request, target=target).spec
    first = None if chosen is None else chosen.key
    kernels: dict[str, list[Candidate]] = {}
    for each in _pool(tree, element, request, target):
        kernels.setdefault(each.spec.key, []).append(each)
    # of each kernel the swizzle that the model takes comes first, as they are made in that order
    ranked = sorted(kernels, key=lambda key: (key != first, kernels[key][0].expected))
    return tuple(each for key in ranked[:most] for each in kernels[key])


def find_candidate(
    name: str, tree: EpilogueTree, element: str, request: Request, target: Target, family: str | None = None
) -> Candidate | None:
    """The candidate of a name; None if there is no such kernel any more, or it does not take the problem.

    Args:
        family: the only one to look in; None: any.
    """
    config_name, _, swizzle = name.rpartition(" swizzle ")
    for each, addressing, config in _fitting(tree, request, target):
        if config.name == config_name and swizzle.isdigit() and (family is None or each == family):
            laid = dataclasses.replace(config, swizzle=int(swizzle))
            return _candidate(tree, element, each, addressing, laid, target)
    return None


def is_kernel(name: str) -> bool:
    """Whether some problem has a candidate of this name, on some device."""
    config_name, _, swizzle = name.rpartition(" swizzle ")
    return swizzle.isdecimal() and any(config.name == config_name for config in _every_config())


def _every_config() -> Iterator[KernelConfig]:
    for family, configs in CONFIGS.items():
        yield from configs
        if family == "sm80":  # of matrices that are not aligned the stages are fewer
            yield from (dataclasses.replace(config, stages=UNALIGNED_STAGES) for config in configs)


def _pool(tree: EpilogueTree, element: str, request: Request, target: Target) -> Iterator[Candidate]:
    for family, addressing, config in _fitting(tree, request, target):
        for swizzle in _swizzles(family, config, addressing, target.multiprocessors):
            laid = dataclasses.replace(config, swizzle=swizzle)
            yield _candidate(tree, element, family, addressing, laid, target)


def _candidate(
    tree: EpilogueTree, element: str, family: str, addressing: Addressing, config: KernelConfig, target: Target
) -> Candidate:
    arch = arch_of(family, target.capability)
    layouts = addressing.a.layout, addressing.b.layout
    spec = KernelSpec(tree, config, element, *layouts, arch, addressing.access)
    return Candidate(spec, addressing, expected_time(config, config.swizzle, addressing, tree, target.multiprocessors))


def _fitting(tree: EpilogueTree, request: Request, target: Target) -> Iterator[tuple[str, Addressing, KernelConfig]]:
    """Every configuration that could compute the problem, with its family and the addressing of that."""
    empty = True
    for family in families_for(target.capability):
        if family == "sm80" and not empty:
            return
        addressing = address(family, request)
        if isinstance(addressing, str):
            continue
        for config in CONFIGS[family]:
            if family == "sm80":
                chosen = choose_config(family, addressing, tree, target.multiprocessors)
                assert isinstance(chosen, KernelConfig)
                config = dataclasses.replace(config, stages=chosen.stages)
            elif not takes(config, tree, addressing):
                continue
            empty = False
            yield family, addressing, config


def _swizzles(family: str, config: KernelConfig, problem: Addressing, multiprocessors: int) -> tuple[int, ...]:
    """The swizzles to try, the model's first."""
    if family != "sm90":  # compiled in, or none
        return (config.swizzle,)
    first = choose_raster(config, problem, multiprocessors)
    least = -(-tiles(config, problem) // multiprocessors)
    if least == 1:  # all tiles run at the same time
        return (first,)
    others = [each for each in SWIZZLES if -(-tiles(config, problem, each) // multiprocessors) == least]
    return tuple(dict.fromkeys((first, *others)))

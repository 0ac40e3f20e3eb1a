"""One problem measured: candidates ranked, built, checked, timed; the result kept.

    >>> task = plan_task(call, most=12)                       # which kernels; builds nothing
    >>> build_in_order([task.specs], jobs=16)                        # all of them, in parallel
    >>> measured = measure_task(task, seconds=5.0)            # checked, then timed in rounds
    >>> keep([measured])                                      # counts from the next call on

:func:`tune_if_asked` does all of it at a call, within ``gemm_ops.tuning("now")``; ``python -m shape_sweeps tune`` for
many problems, whose kernels it builds together.  A kernel that cannot be built, does not start, or computes something
else than PyTorch is dropped, with its reason, and costs no more than itself.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..build.buildable import Buildable
from ..build.cache import find_library
from ..build.compiler import build_kernels, raise_failure
from ..dispatch import Call, multiprocessor_count, target_of
from ..elementwise_call import Walk
from ..errors import BuildError, LaunchError
from ..forcing import forced_backend
from ..kernels.candidates import Candidate, rank_candidates
from ..kernels.pad_spec import PadSpec
from ..kernels.selection import problem_refusal
from ..kernels.sources import cutlass_version, generator_digest
from ..plan import forget_plans
from ..runtime.loading import is_loaded
from ..two_passes import CublasAlone, find_tail
from ..when_to_build import building, way_of_building
from . import known
from .classes import ProblemClass, problem_class, tree_class
from .contenders import (
    Contender,
    by_operations,
    computed,
    cublas_contender,
    find_fault,
    fused_contender,
    poisoned_outputs,
    rounds_once,
)
from .context import seconds_of_tuning, way_of_tuning
from .measuring import Stopwatch, measure_in_rounds
from .records import BY_OPERATIONS, CUBLAS_ALONE, DATE_FORMAT, NOT_BUILT, TWO_PASSES, Measured, pick_best, utc_now
from .stopwatch import CudaStopwatch, copies_of_weight

#: How many kernels of a problem are built at most.
MOST = 12
#: Of the seconds that tuning at a call may take, what goes to rounds at most, and at least.
_MOST_SECONDS_OF_ROUNDS, _LEAST_SECONDS_OF_ROUNDS = 5.0, 0.5
#: Of them, the share after which no further build begins.
_SHARE_OF_BUILDS = 0.6


class Watch:
    """Is told how tuning gets on; this one does nothing."""

    def building(self, kernels: int) -> None:
        """So many kernels are about to be built, or found in the cache."""

    def built(self, kernel: Buildable, seconds: float, cached: bool) -> None:
        """One kernel is there."""

    def not_built(self, kernel: Buildable, error: BuildError) -> None:
        """One cannot be built."""

    def dropped(self, task: Task, name: str, reason: str) -> None:
        """A contender is out."""

    def measuring(self, task: Task, contenders: int) -> None:
        """Rounds of so many contenders begin."""


@dataclass
class Task:
    """A problem to measure.

    Attributes:
        call: its tensors.
        problem, tree: its classes.
        candidates: fused kernels, best first.
        tail: of two passes; None where there are none.
        specs: the kernels to build.
        dropped: name -> why it is not measured.
    """

    call: Call
    problem: ProblemClass
    tree: str
    candidates: tuple[Candidate, ...]
    tail: Walk | CublasAlone | None
    specs: tuple[Buildable, ...]
    dropped: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[ProblemClass, str]:
        """What its result is found by."""
        return self.problem, self.tree

    @property
    def title(self) -> str:
        """The problem in words."""
        return f"{self.problem.extents} {self.problem.element} {self.call.epilogue.name}"


def refusal(call: Call) -> str:
    """Why a call cannot be measured, in words; "" if it can."""
    problem = call.problem
    if problem.device.type != "cuda":
        return f"the tensors are on the device {str(problem.device)!r}, and times are those of CUDA devices"
    if not call.is_in_memory:
        return "a tensor has no memory of its own, being inside torch.vmap, fake, or distributed"
    return problem_refusal(problem, len(call.operands), len(call.tree.outputs))


def plan_task(call: Call, *, most: int = MOST) -> Task | str:
    """What there is to measure of a call, or why there is nothing, in words.  Builds and computes nothing.

    Args:
        most: how many kernels to build at most.
    """
    if refused := refusal(call):
        return refused
    element, target = call.problem.element, target_of(call.problem.device)
    assert element is not None
    problem = problem_class(call.request, element, target)
    if problem is None:
        return "no kernel takes it in one launch"
    candidates = rank_candidates(call.tree, element, call.request, target, most=most)
    if not candidates:
        return "no kernel takes it"
    found = find_tail(call)
    if not isinstance(found, (str, CublasAlone)) and not rounds_once(call):
        found = "PyTorch rounds the product of a batch"
    tail = None if isinstance(found, str) else found
    specs: list[Buildable] = [each.spec for each in candidates]
    specs += [] if tail is None or tail.spec is None else [tail.spec]
    if any(each.addressing.a.copy or each.addressing.b.copy for each in candidates):
        specs.append(PadSpec("".join(map(str, target.capability))))
    unique = tuple({spec.key: spec for spec in specs}.values())
    task = Task(call, problem, tree_class(call.tree), candidates, tail, unique)
    if isinstance(found, str):
        task.dropped[TWO_PASSES] = str(found)
    return task


def all_built() -> contextlib.AbstractContextManager[None]:
    """A context in which kernels are waited for, unless none is to be built."""
    return building("never" if way_of_building() == "never" else "wait")


class _OutOfTime(Exception):
    """No further build may begin."""


def build_in_order(
    wanted: Sequence[Sequence[Buildable]],
    *,
    jobs: int | None = None,
    until: float | None = None,
    watch: Watch | None = None,
) -> None:
    """Builds the kernels of tasks, in parallel: the first of every task, then the second, and so on.

    What cannot be built is dropped when its task is measured.

    Args:
        wanted: of each task its ``specs``.
        jobs: how many compilers run at a time.
        until: when, by ``time.perf_counter``, builds that did not begin are left; None: all are built.
    """
    if way_of_building() == "never":
        return
    ordered = [spec for place in itertools.zip_longest(*wanted) for spec in place if spec is not None]
    # first the small ones, which many contenders may need
    ordered.sort(key=lambda spec: spec.kind == "gemm")
    unique = list({spec.key: spec for spec in ordered}.values())
    told = watch or Watch()

    def on_done(kernel: Buildable, seconds: float, cached: bool) -> None:
        told.built(kernel, seconds, cached)
        if until is not None and time.perf_counter() > until:
            raise _OutOfTime

    told.building(len(unique))
    with contextlib.suppress(BuildError, _OutOfTime):  # each task says which of its kernels are not measured
        build_kernels(unique, jobs=jobs, on_done=on_done, on_failed=told.not_built)


def measure_task(
    task: Task,
    seconds: float,
    *,
    watch: Watch | None = None,
    make_stopwatch: Callable[[Task, Sequence[Contender]], tuple[Stopwatch, dict[str, str]]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Checks and times what is built of a task.

    Args:
        seconds: of the rounds.
        make_stopwatch: gives a stopwatch that knows the contenders, and why it does not know some; None: CUDA graphs.
        clock: seconds.
    """
    watch = watch or Watch()
    call = task.call
    with torch.no_grad(), without_autocast(call.problem.device.type):
        ready = _right_ones(task, watch)
        stopwatch, failed = (make_stopwatch or cuda_stopwatch)(task, ready)
        for name, reason in failed.items():
            _drop(task, watch, name, reason)
        names = [each.name for each in ready if each.name not in failed]
        watch.measuring(task, len(names))
        rounds = measure_in_rounds(names, stopwatch, seconds, clock=clock)
    best = pick_best({name: rounds.us[name] for name in rounds.last})
    return Measured(
        problem=task.problem,
        tree=task.tree,
        us=rounds.us,
        best=best,
        model=task.candidates[0].name,
        dropped=dict(task.dropped),
        rounds=rounds.count,
        date=utc_now().strftime(DATE_FORMAT),
        versions=versions(),
        example=call.epilogue.name,
    )


def _right_ones(task: Task, watch: Watch) -> list[Contender]:
    """The contenders whose outputs are right; PyTorch by operations is always one, and what the others are held to."""
    call = task.call
    reference = by_operations(call)
    expected = computed(reference, call)
    multiprocessors = multiprocessor_count(call.problem.device)
    makers: dict[str, Callable[[], Contender]] = {}
    built = {spec.key: _is_there(spec) for spec in task.specs}
    for each in task.candidates:
        if built[each.spec.key]:
            makers[each.name] = lambda each=each: fused_contender(call, each, multiprocessors)  # type: ignore[misc]
        else:
            _drop(task, watch, each.name, _why_not_built(each.spec))
    if (tail := task.tail) is not None:
        if tail.spec is None or built[tail.spec.key]:
            makers[TWO_PASSES if tail.spec else CUBLAS_ALONE] = lambda: cublas_contender(call, tail)
        else:
            _drop(task, watch, TWO_PASSES, _why_not_built(tail.spec))
    ready = []
    for name, make in makers.items():
        try:
            contender = make()
            fault = find_fault(computed(contender, call), expected)
        except (BuildError, LaunchError) as error:
            _drop(task, watch, name, str(error).partition("\n")[0])
            continue
        if fault:
            _drop(task, watch, name, f"wrong: {fault}")
        else:
            ready.append(contender)
    return [*ready, reference]


def _why_not_built(spec: Buildable) -> str:
    try:
        raise_failure(spec)
    except BuildError as error:
        return f"cannot be built: {str(error).partition(chr(10))[0]}"
    return NOT_BUILT


def _is_there(spec: Buildable) -> bool:
    return is_loaded(spec) or find_library(spec) is not None


def _drop(task: Task, watch: Watch, name: str, reason: str) -> None:
    task.dropped[name] = reason
    watch.dropped(task, name, reason)


def cuda_stopwatch(task: Task, contenders: Sequence[Contender]) -> tuple[Stopwatch, dict[str, str]]:
    """CUDA graphs of the contenders, and why there are none of some."""
    call, failed = task.call, {}
    stopwatch = CudaStopwatch(call.problem.device, copies_of_weight(call.b))
    for contender in contenders:
        try:
            stopwatch.add(contender.name, _into_new(contender, call))
        except (LaunchError, RuntimeError) as error:  # what cannot be captured, PyTorch says as a RuntimeError
            if contender.name == BY_OPERATIONS:
                raise
            failed[contender.name] = f"not captured: {str(error).partition(chr(10))[0]}"
    return stopwatch, failed


def _into_new(contender: Contender, call: Call) -> Callable[[Tensor], object]:
    """A call of a contender into new outputs; where the caller gives outputs, into some that lie alike."""
    out = poisoned_outputs(call) if call.out else {}
    return lambda b: contender.run(b, out)


def versions() -> dict[str, str]:
    """What results depend on besides the device."""
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cutlass": cutlass_version(),
        "kernels": generator_digest("gemm")[:12],
    }


def keep(results: Iterable[Measured]) -> None:
    """Keeps results here and on disk; calls from now on are decided by them, whatever was decided before."""
    known.remember(results)
    forget_plans()


class Saying(Watch):
    """Says on standard error what takes time at a call."""

    def building(self, kernels: int) -> None:
        self._say(f"building {kernels} kernels, or finding them in the cache")

    def not_built(self, kernel: Buildable, error: BuildError) -> None:
        self._say(f"{kernel.title} cannot be built: {str(error).partition(chr(10))[0]}")

    def dropped(self, task: Task, name: str, reason: str) -> None:
        if reason != NOT_BUILT:
            self._say(f"{name} is left out: {reason}")

    def measuring(self, task: Task, contenders: int) -> None:
        self._say(f"measuring {contenders} ways to compute {task.title}")

    @staticmethod
    def _say(text: str) -> None:
        print(f"gemm_ops: tuning: {text}", file=sys.stderr, flush=True)


_tuning = threading.RLock()  # one at a time: they would slow each other
_tried: set[tuple[ProblemClass, str]] = set()


def tune_if_asked(call: Call) -> bool:
    """Measures a call's class, within ``tuning("now")``, if nothing was measured of it.

    Gives whether it is still to be measured, because a CUDA graph is being captured: then what is decided of the call
    is not to be remembered.
    """
    if way_of_tuning() != "now" or forced_backend() != "auto" or refusal(call):
        return False
    element, target = call.problem.element, target_of(call.problem.device)
    assert element is not None
    problem = problem_class(call.request, element, target)
    if problem is None or not target.name:
        return False
    key = problem, tree_class(call.tree)
    if key in _tried or known.find(*key) is not None:
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    with _tuning:
        if key not in _tried and known.find(*key) is None:  # another thread may have
            _tried.add(key)  # whatever comes of it: no call is to try again
            try:
                keep(_tune(call))
            except RuntimeError as error:  # no memory for copies, say: the call itself may well be computed
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                warnings.warn(f"a call is not tuned: {reason}", RuntimeWarning, stacklevel=2)
    return False


def _tune(call: Call) -> list[Measured]:
    """The result of a call's class, within the seconds there are; none if there is nothing to measure."""
    began, seconds = time.perf_counter(), seconds_of_tuning()
    with all_built():
        task = plan_task(call)
        if isinstance(task, str):
            return []
        watch = Saying()
        build_in_order([task.specs], until=began + _SHARE_OF_BUILDS * seconds, watch=watch)
        left = began + seconds - time.perf_counter()
        return [measure_task(task, min(max(left, _LEAST_SECONDS_OF_ROUNDS), _MOST_SECONDS_OF_ROUNDS), watch=watch)]

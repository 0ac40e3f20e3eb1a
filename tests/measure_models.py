"""Measures whole models on a GPU, in bf16 and with random weights: eager PyTorch, fused, ``torch.compile``, and both.

    $ PYTHONPATH=. python tests/measure_models.py                           # all of them, four layers each
    $ PYTHONPATH=. python tests/measure_models.py --models gpt2,llama --layers 2 --no-compile --json models.json

Models have their real widths and few layers; language models have no vocabulary head, which beside few layers would be
most of the time (``--heads`` gives them one).  What is measured is the forward pass in evaluation mode without
gradients, and a training step: forward, a scalar loss, backward (``--optimizer``: and AdamW).

There are two tables.  One is of wall clock time around several calls and a synchronisation, so that the host's time
counts where the GPU waits for it.  The other is of CUDA graphs of the same calls: the GPU's time alone.  Contenders are
called in interleaved rounds, and medians compared.

Every contender's outputs and gradients, and every graph's, are compared with those of the model in fp32: the error may
be that of eager PyTorch in bf16, with room for the luck of single roundings.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure_misaligned import capture
from sized_models import MODELS, Size, make
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gemm_ops
from gemm_ops.conversion import sites

MODES = ("forward", "training")
CONTENDERS = ("eager", "fused", "compile", "compile fused")
RATIOS = (("eager", "fused"), ("compile", "fused"), ("compile", "compile fused"))
#: Seconds that a contender is called for in a round.
_ROUND = 0.05
#: Errors may be as much larger than eager PyTorch's, and this much beside it.
_ROOM, _FLOOR = 1.5, 4 * torch.finfo(torch.bfloat16).eps
#: Gradients as much smaller than the largest are rounding alone, and so are those with such an error in eager PyTorch.
_NEGLIGIBLE, _NOISE = 1e-5, 0.3


def main_output(result: Any) -> Tensor:
    found: Tensor = result if isinstance(result, Tensor) else result[0]
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@dataclass
class Agreement:
    """Compares with fp32.  What is checked first, eager PyTorch, says how large errors may be.

    Attributes:
        output, gradients: of the model in fp32.
        own: eager PyTorch's errors by name.
    """

    output: Tensor
    gradients: dict[str, Tensor]
    own: dict[str, float] = field(default_factory=dict)

    def check(self, output: Tensor, found: Mapping[str, Tensor] | None) -> dict[str, float]:
        """The error of the output, and of the worst gradient where there are some.

        Raises:
            ArithmeticError: if something is not finite, or too far away.
        """
        errors = {"output": relative(output, self.output)}
        if found is not None:
            if found.keys() != self.gradients.keys():
                raise ArithmeticError(
                    f"other parameters have gradients: {sorted(found.keys() ^ self.gradients.keys())}"
                )
            largest = max(float(gradient.norm()) for gradient in self.gradients.values())
            for name, gradient in self.gradients.items():
                if gradient.norm() > _NEGLIGIBLE * largest and self.own.get(name, 0.0) < _NOISE:
                    errors[f"gradient of {name}"] = relative(found[name], gradient)
        for name, error in errors.items():
            own = self.own.setdefault(name, error)
            noise = name != "output" and own >= _NOISE
            if not (math.isfinite(error) and (noise or error <= _ROOM * own + _FLOOR)):
                raise ArithmeticError(f"{name}: error {error:.1e}, that of eager PyTorch {own:.1e}")
        worst = {name: error for name, error in errors.items() if name != "output" and self.own[name] < _NOISE}
        shown = {"output": errors["output"]}
        return shown | {"gradient": max(worst.values())} if worst else shown


@contextmanager
def full_precision() -> Iterator[None]:
    """Without TF32 and without fused attention."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [each.allow_tf32 for each in settings]
    try:
        for each in settings:
            each.allow_tf32 = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.allow_tf32 = value


def exact_agreement(model: nn.Module, x: Tensor) -> tuple[Agreement, Tensor]:
    """What to compare with in any mode, there being no dropout; and the weights of the outputs in the loss."""
    exact = copy.deepcopy(model).float().train()
    with full_precision():
        output = main_output(exact(x.float() if x.is_floating_point() else x))
        weights = torch.randn_like(output).bfloat16()
        (output * weights).sum().backward()
    return Agreement(output.detach(), gradients(exact)), weights


@dataclass(frozen=True)
class Contender:
    """What is called, and the module that holds the parameters."""

    call: Callable[[Tensor], Any]
    module: nn.Module


def step_of(
    contender: Contender, mode: str, x: Tensor, weights: Tensor, optimizer: torch.optim.Optimizer | None
) -> Callable[[], Tensor]:
    """What is timed; gives the output."""

    def forward() -> Tensor:
        with torch.no_grad():
            return main_output(contender.call(x))

    def training() -> Tensor:
        for parameter in contender.module.parameters():
            parameter.grad = None
        output = main_output(contender.call(x))
        (output * weights).sum(dtype=torch.float32).backward()
        if optimizer is not None:
            optimizer.step()
        return output.detach()

    return forward if mode == "forward" else training


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The epilogues of the fused calls that happen meanwhile."""
    plain, found = sites.matmul, list[str]()

    def recording(a: Tensor, b: Tensor, epilogue: Any, **operands: Any) -> Any:
        found.append(epilogue.name)
        return plain(a, b, epilogue, **operands)

    setattr(sites, "matmul", recording)  # noqa: B010  (the module does not export it)
    try:
        yield found
    finally:
        setattr(sites, "matmul", plain)  # noqa: B010


def measure(
    calls: Mapping[str, Callable[[], object]], rounds: int, synchronize: Callable[[], None]
) -> dict[str, float]:
    """Milliseconds of one call of each contender, the host's time included."""

    def timed(call: Callable[[], object], count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return (time.perf_counter() - start) / count

    counts = {}
    for name, call in calls.items():
        timed(call, 2)
        counts[name] = min(100, max(2, math.ceil(_ROUND / timed(call, 2))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            times[name].append(timed(calls[name], counts[name]))
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


@dataclass
class Result:
    """Of one model.

    Attributes:
        name, layers: which.
        fused, left: how many linear layers of either kind the conversion reports.
        calls: how many fused calls there were, by mode.
        errors: by mode and contender, of "output" and "gradient".
        wall, graph: milliseconds, by mode and contender.
        graph_breaks: of ``torch.compile``, by mode and contender.
        problems: what failed, and why.
        seconds: how long all of it took.
    """

    name: str
    layers: int
    fused: int = 0
    left: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    errors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    wall: dict[str, dict[str, float]] = field(default_factory=dict)
    graph: dict[str, dict[str, float]] = field(default_factory=dict)
    graph_breaks: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Notes what fails, and goes on."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.problems.append(f"{what}: {type(error).__name__}: {' | '.join(lines[:3])}"[:600])

    def summary(self) -> str:
        parts = [f"{self.name}, {self.layers} layers: {self.fused} of {self.fused + self.left} linear layers fused"]
        for mode, wall in self.wall.items():
            errors = self.errors.get(mode, {})
            own, found = errors.get("eager", {}), errors.get("fused", {})
            shown = ", ".join(f"{kind} {found[kind]:.1e} (eager {own[kind]:.1e})" for kind in found if kind in own)
            graphs = f"; as graphs {in_words(self.graph[mode])}" if self.graph.get(mode) else ""
            called = f"{self.calls.get(mode, 0)} fused calls"
            parts.append(f"{mode}, {called}: {in_words(wall)}{graphs}; errors: {shown}")
        return " | ".join([*parts, f"{self.seconds:.0f} s", *(f"FAILED {problem}" for problem in self.problems)])


def ratios(times: Mapping[str, float]) -> dict[str, str]:
    return {
        f"{one}/{other}": f"{times[one] / times[other]:.2f}" if {one, other} <= times.keys() else "-"
        for one, other in RATIOS
    }


def in_words(times: Mapping[str, float]) -> str:
    return ", ".join(f"{pair} {ratio}" for pair, ratio in ratios(times).items() if ratio != "-")


def table(title: str, results: Sequence[Result], of: Callable[[Result], Mapping[str, Mapping[str, float]]]) -> str:
    lines = [
        "",
        title,
        " " * 26 + "".join(f"{name:>15}" for name in CONTENDERS) + "".join(f"  {x}" for x in ratios({})),
    ]
    for result in results:
        for mode, times in of(result).items():
            shown = [f"{f'{times[name]:.3f}' if name in times else '-':>15}" for name in CONTENDERS]
            shown += [f"  {ratio:>{len(pair)}}" for pair, ratio in ratios(times).items()]
            lines.append(f"{f'{result.name}, {mode}':26}{''.join(shown)}")
    return "\n".join(lines)


def breaks() -> int:
    return sum(importlib.import_module("torch._dynamo.utils").counters["graph_break"].values())


def measure_model(name: str, size: Size, options: argparse.Namespace) -> Result:
    """Everything about one model; what fails is noted in the result."""
    start, result = time.perf_counter(), Result(name, size.layers)
    torch.manual_seed(0)
    torch.compiler.reset()
    with result.noting("model"):
        model, x = make(name, size, options.device)
        fused, report = gemm_ops.fuse(model)
        result.fused, result.left = len(report.fused), len(report.left)
        agreement, weights = exact_agreement(model, x)
        contenders = {"eager": Contender(model, model), "fused": Contender(fused, fused)}
        if options.compile:
            contenders["compile"] = Contender(torch.compile(model, dynamic=False), model)
            contenders["compile fused"] = Contender(torch.compile(fused, dynamic=False), fused)
        for mode in options.modes:
            with result.noting(mode):
                measure_mode(mode, contenders, agreement, x, weights, options, result)
    result.seconds = time.perf_counter() - start
    return result


def measure_mode(
    mode: str,
    contenders: Mapping[str, Contender],
    agreement: Agreement,
    x: Tensor,
    weights: Tensor,
    options: argparse.Namespace,
    result: Result,
) -> None:
    """The times of one mode, of those contenders and graphs whose results agree."""
    on_gpu = x.is_cuda
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    steps: dict[str, Callable[[], Tensor]] = {}
    graphs: dict[str, Callable[[], object]] = {}
    errors = result.errors.setdefault(mode, {})

    def check(name: str, output: Tensor) -> dict[str, float]:
        return agreement.check(output, gradients(contenders[name].module) if mode == "training" else None)

    for name, contender in contenders.items():
        with result.noting(f"{mode}, {name}"):
            contender.module.train(mode == "training")
            optimizer = None
            if options.optimizer and mode == "training":  # at a rate of zero all work is done, and no weight changes
                optimizer = torch.optim.AdamW(contender.module.parameters(), lr=0.0, fused=True, capturable=on_gpu)
            step, before = step_of(contender, mode, x, weights, optimizer), breaks()
            if name == "fused":
                with counted_calls() as calls:
                    step()
                result.calls[mode] = len(calls)
            errors[name] = check(name, step())
            steps[name] = step
            if name.startswith("compile"):
                result.graph_breaks.setdefault(mode, {})[name] = breaks() - before
    result.wall[mode] = measure(steps, options.rounds, synchronize)
    for name, step in steps.items() if on_gpu else ():
        with result.noting(f"{mode}, graph of {name}"):
            outputs: list[Tensor] = []

            def call(step: Callable[[], Tensor] = step, outputs: list[Tensor] = outputs) -> None:
                outputs[:] = [step()]

            graph = capture(call, 1)
            graph.replay()
            synchronize()
            check(name, outputs[0])
            graphs[name] = graph.replay
    if graphs:
        result.graph[mode] = measure(graphs, options.rounds, synchronize)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
            return text.split(",")

        return read

    parser = argparse.ArgumentParser(description="Whole models on a GPU: eager, fused, torch.compile, and both.")
    parser.add_argument("--models", type=names(list(MODELS)), default=list(MODELS), help="separated by commas")
    parser.add_argument("--modes", type=names(MODES), default=list(MODES), help="forward, training, or both")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--heads", action="store_true", help="give language models their vocabulary heads")
    parser.add_argument("--optimizer", action="store_true", help="a training step has a step of AdamW")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--json", type=Path, help="a file to write the results to, after every model")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each model as it is done, then two tables; 1 if anything failed."""
    options = parse(arguments)
    # every layer is a module of its own to a compiler that a graph break has brought to its code
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = 128
    results: list[Result] = []
    for name in options.models:
        results.append(measure_model(name, Size(options.layers, options.heads, options.tiny), options))
        print(results[-1].summary(), flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(table("ms of a call, the host's time included", results, lambda result: result.wall))
    if any(result.graph for result in results):
        print(table("ms of a call as a CUDA graph", results, lambda result: result.graph))
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())

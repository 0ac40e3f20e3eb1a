"""Writes a script that compares a fused call with eager PyTorch: numbers anywhere, times on a GPU.

    >>> text = comparison_script(epilogue, tree, resolved, (4096, 4096, 4096), "bf16", origin="")
    >>> Path("compare.py").write_text(text)
    $ python compare.py                     # or: python compare.py M N K

With a shape (4096, 4096) it compares the standalone kernel, of ``gemm_ops.apply``, on a tensor of that shape.

The script needs this package and PyTorch, nothing else.  Its unfused computation is written out, a PyTorch function a
line.  Both results are held against float64: the fused one may be as far off as the unfused one and a twentieth, or as
rounding explains, and NaN or infinite where the exact one is, but for as many elements as the unfused one is wrong
there.  An epilogue that can be imported is; any other is rebuilt from its JSON form.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from epilogues import Epilogue
from epilogues.analysis.traffic import linear_bias
from epilogues.tree import Accumulator, Apply, Cast, Constant, EpilogueTree, Kind, Node, Operand

_TEMPLATE = '''\
"""{name}, fused against eager PyTorch: {problem} = {extents}, {dtype}.

    python THIS_FILE            # with these extents; on a CPU with none beyond {cpu_extent}
    python THIS_FILE {usage:11}# with others

Exit code 0 if the fused result is as near to float64 as the unfused one; 1 if not; 2 for wrong arguments.
Written by gemm_ops.explain.
"""

import functools
import statistics
import sys
from types import SimpleNamespace

import torch
from torch.nn import functional as F

import epilogues as ep
import gemm_ops
from epilogues.operations import OPERATIONS

{load}

DTYPE = {torch_dtype}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
{names} = {shape} if DEVICE == "cuda" else {cpu_shape}
if len(sys.argv) > 1:
    if len(sys.argv) != {number} or not all(argument.isascii() and argument.isdigit() for argument in sys.argv[1:]):
        given = " ".join(sys.argv[1:])
        print(f"{{sys.argv[0]}}: expected {counted} extents {usage} or nothing, got {{given}}", file=sys.stderr)
        sys.exit(2)
    {names} = map(int, sys.argv[1:])

#: The relative error that rounding explains: half a unit in the last place for the store, and for each cast.
ROUNDING = {rounding}

op = SimpleNamespace(**{{name: row.reference for name, row in OPERATIONS.items()}})


@functools.cache
def number(value):
    return torch.tensor(value, device=DEVICE)


def make_inputs(seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape, dtype, scale=1.0):
        return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)

{tensors}    operands = {{
{operands}    }}
    return {inputs}, operands


def fused({inputs}, operands):
    result = {fused}
    return result if isinstance(result, dict) else {{"D": result}}


def unfused({inputs}, given):
{unfused}

def exact({inputs}, operands):
    acc = {exact}
    result = epilogue.reference(acc, compute_dtype=torch.float64, keep_casts=False, **operands)
    return result if isinstance(result, dict) else {{"D": result}}


def relative_error(result, truth, compared):
    difference = torch.where(compared, result.double() - truth, 0.0).norm()
    scale = torch.where(compared, truth, 0.0).norm()
    return float(difference / scale) if scale else float(difference)


def count_misplaced(result, truth):
    """How many elements are NaN or infinite and should not be, or should be and are not."""
    result = result.double()
    same = torch.where(truth.isfinite(), result.isfinite(), (result == truth) | (result.isnan() & truth.isnan()))
    return int((~same).sum())


def check():
    inputs = make_inputs(0)
    got, eager, truth = fused(*inputs), unfused(*inputs), exact(*inputs)
    good = True
    for name, value in truth.items():
        compared = value.isfinite() & got[name].isfinite() & eager[name].isfinite()
        error = relative_error(got[name], value, compared)
        unfused_error = relative_error(eager[name], value, compared)
        limit = max(1.05 * unfused_error, ROUNDING[name] + {accumulated}2.0**-23)
        good = good and error <= limit
        print(f"output {{name}}: error {{error:.2e}} fused, {{unfused_error:.2e}} unfused, limit {{limit:.2e}}"
              + ("" if error <= limit else "   TOO LARGE"))
        if not compared.all():
            # a value next to a pole or to the end of a range may fall on either side of it
            misplaced, unfused_misplaced = count_misplaced(got[name], value), count_misplaced(eager[name], value)
            allowed = 2 * unfused_misplaced + value.numel() // 1000
            good = good and misplaced <= allowed
            print(f"output {{name}}: {{int(compared.sum())}} of {{value.numel()}} elements are finite and compared; "
                  f"NaN or infinity misplaced in {{misplaced}} fused, {{unfused_misplaced}} unfused, limit {{allowed}}"
                  + ("" if misplaced <= allowed else "   TOO MANY"))
    return good


def measure(rounds=21, calls=10):
    sets = [make_inputs(seed) for seed in range(3)]  # so that the cache does not hold what the last call read
    contenders = {{"fused": fused, "unfused": unfused}}
    times = {{name: [] for name in contenders}}
    for contender in contenders.values():
        for inputs in sets:
            contender(*inputs)
    for turn in range(rounds):
        for name in sorted(contenders, reverse=bool(turn % 2)):  # clocks change: take turns in going first
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for call in range(calls):
                contenders[name](*sets[call % len(sets)])
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / calls)
    medians = {{name: statistics.median(values) for name, values in times.items()}}
    for name, value in medians.items():
        print(f"{{name:8}} {{value:10.1f}} us")
    print(f"unfused / fused: {{medians['unfused'] / medians['fused']:.2f}}")


if __name__ == "__main__":
    with torch.no_grad():
        print(f"{{epilogue.name}}: {shown}, {{DTYPE}}, on {{DEVICE}}")
        passed = check()
        if DEVICE == "cuda" and 0 not in ({names}):
            measure()
        else:
            print("no times: they are taken on a GPU")
    sys.exit(0 if passed else 1)
'''


@dataclass(frozen=True)
class _Form:
    """What differs between a script for a GEMM and one for a standalone kernel.

    Attributes:
        names: of the extents.
        counted: how many there are, in words.
        tensors: the lines that draw what is computed on.
        inputs: the names of those.
        fused: the fused call.
        exact: the accumulator in float64.
        accumulated: a factor of float32's rounding, for what adding up loses.
    """

    names: tuple[str, ...]
    counted: str
    tensors: str
    inputs: str
    fused: str
    exact: str
    accumulated: str


_GEMM = _Form(
    names=("M", "N", "K"),
    counted="three",
    tensors="""\
    x = normal(M, K, dtype=DTYPE)
    weight = normal(N, K, dtype=DTYPE, scale=max(K, 1) ** -0.5)
""",
    inputs="x, weight",
    fused="gemm_ops.linear(x, weight, epilogue, **operands)",
    exact="x.double() @ weight.double().t()",
    accumulated="max(K, 1) ** 0.5 * ",
)
_CHAIN = _Form(
    names=("M", "N"),
    counted="two",
    tensors="    x = normal(M, N, dtype=DTYPE)\n",
    inputs="x",
    fused="gemm_ops.apply(x, epilogue, **operands)",
    exact="x.double()",
    accumulated="",
)

_CPU_EXTENT = 256
_TORCH = {"f32": "torch.float32", "f16": "torch.float16", "bf16": "torch.bfloat16"}
_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# PyTorch functions that take their parameters as numbers: one kernel, where the table's reference may have several
_WITH_NUMBERS = {
    "leaky_relu": "F.leaky_relu",
    "threshold": "F.threshold",
    "softplus": "F.softplus",
    "elu": "F.elu",
    "celu": "F.celu",
    "hardshrink": "F.hardshrink",
    "softshrink": "F.softshrink",
}


def comparison_script(
    epilogue: Epilogue,
    tree: EpilogueTree,
    resolved: EpilogueTree,
    shape: tuple[int, ...],
    element: str,
    *,
    origin: str = "",
) -> str:
    """The text of the script.

    Args:
        epilogue: as the user has it.
        tree: its tree with all kinds and dtypes known, before eager rounding: what the unfused function is.
        resolved: the same with every cast: what the kernel rounds.
        shape: M, N, K; without K, the script is for the standalone kernel.
        element: short dtype name of the matrices, or of the tensor.
        origin: ``module:attribute`` to import the epilogue from; "": asked of the epilogue itself.
    """
    form = _GEMM if len(shape) == 3 else _CHAIN
    return _TEMPLATE.format(
        name=re.sub(r"[^\w .:<>-]", "_", epilogue.name),
        problem=" x ".join(form.names),
        extents=" x ".join(map(str, shape)),
        usage=" ".join(form.names),
        names=", ".join(form.names),
        number=1 + len(form.names),
        counted=form.counted,
        shown=" x ".join(f"{{{name}}}" for name in form.names),
        shape=shape,
        cpu_shape=tuple(min(extent, _CPU_EXTENT) for extent in shape),
        tensors=form.tensors,
        inputs=form.inputs,
        fused=form.fused,
        exact=form.exact,
        accumulated=form.accumulated,
        dtype=_TORCH[element].removeprefix("torch."),
        torch_dtype=_TORCH[element],
        cpu_extent=_CPU_EXTENT,
        load=_load(epilogue, origin or find_origin(epilogue)),
        rounding={store.name: _rounding(resolved, str(store.dtype)) for store in resolved.outputs},
        operands="".join(f"        {operand.name!r}: {_make(operand)},\n" for operand in tree.operands),
        unfused=_unfused(tree, element) if form is _GEMM else _unfused_chain(tree),
    )


def find_origin(epilogue: Epilogue) -> str:
    """``module:attribute`` that gives the epilogue when imported; "" if there is none."""
    module_name, name = getattr(epilogue, "__module__", ""), getattr(epilogue, "__qualname__", "")
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__" or not getattr(module, "__file__", None):
        return ""
    return f"{module_name}:{name}" if name.isidentifier() and getattr(module, name, None) is epilogue else ""


def _load(epilogue: Epilogue, origin: str) -> str:
    """The lines that make the name ``epilogue``."""
    if not origin:
        text = epilogue.tree.to_json().replace('}, {"n', '},\n {"n')
        return f"epilogue = ep.Epilogue.from_tree(ep.EpilogueTree.from_json('''{text}'''), {epilogue.name!r})"
    module_name, _, attribute = origin.partition(":")
    lines = [f"from {module_name} import {attribute.partition('.')[0]} as found"]
    _, dot, rest = attribute.partition(".")
    lines.append(f"epilogue = found{dot}{rest}")
    if folder := _folder(module_name):
        lines.insert(0, f"sys.path.append({folder!r})")
    return "\n".join(lines)


def _folder(module_name: str) -> str:
    """The folder that the module's top package is found in."""
    file = getattr(importlib.import_module(module_name), "__file__", None)
    if file is None:
        return ""
    path = Path(file).resolve()
    above = module_name.count(".") + (path.name == "__init__.py")
    return str(path.parents[above])


def _make(operand: Operand) -> str:
    """An expression that draws an operand."""
    dtype = _TORCH[str(operand.dtype)]
    if operand.kind is Kind.SCALAR:
        return "0.75"
    shape = {Kind.ROW: "N", Kind.COLUMN: "M", Kind.AUX: "M, N"}[operand.kind]
    return f"normal({shape}, dtype={dtype})"


def _rounding(tree: EpilogueTree, dtype: str) -> float:
    return _ROUNDOFF[dtype] + sum(_ROUNDOFF[node.dtype] for node in tree.nodes if isinstance(node, Cast))


def _unfused(tree: EpilogueTree, element: str) -> str:
    """The body of ``unfused`` with a GEMM: a line for each PyTorch function."""
    bias = linear_bias(tree, element)
    in_linear = "" if bias is None else f", given[{bias[1].name!r}]"
    product = f"F.linear(x, weight{in_linear})" if tree.rounding != "eager" else "torch.matmul(x, weight.t())"
    done = {id(node): "product" for node in tree.nodes if isinstance(node, Accumulator)}
    return _written_out(tree, [f"product = {product}"], done | ({} if bias is None else {id(bias[0]): "product"}))


def _unfused_chain(tree: EpilogueTree) -> str:
    """The same without one."""
    return _written_out(tree, [], {id(node): "x" for node in tree.nodes if isinstance(node, Accumulator)})


def _written_out(tree: EpilogueTree, lines: list[str], names: dict[int, str]) -> str:
    """A line for each PyTorch function, after the lines that make the values that have names already."""
    for node in tree.nodes:
        if id(node) in names:
            continue
        if isinstance(node, Operand):
            names[id(node)] = _operand(node)
        elif isinstance(node, Constant):
            names[id(node)] = f"number({_number(node.value)})"
        else:
            names[id(node)] = name = f"v{len(lines)}"
            lines.append(f"{name} = {_call(node, names)}")
    outputs = ", ".join(
        f"{store.name!r}: {names[id(store.value)]}.to({_TORCH[str(store.dtype)]})" for store in tree.outputs
    )
    lines.append(f"return {{{outputs}}}")
    return "".join(f"    {line}\n" for line in lines)


def _operand(operand: Operand) -> str:
    given = f"given[{operand.name!r}]"
    if operand.kind is Kind.SCALAR:
        return f"number({given})"
    return f"{given}[:, None]" if operand.kind is Kind.COLUMN else given


def _call(node: Node, names: dict[int, str]) -> str:
    if isinstance(node, Cast):
        return f"{names[id(node.value)]}.to({_TORCH[node.dtype]})"
    assert isinstance(node, Apply)
    first, *others = node.operands
    if node.operation in _WITH_NUMBERS and all(isinstance(other, Constant) for other in others):
        parameters = [_number(other.value) for other in others if isinstance(other, Constant)]
        return f"{_WITH_NUMBERS[node.operation]}({', '.join([names[id(first)], *parameters])})"
    return f"op.{node.operation}({', '.join(names[id(child)] for child in node.operands)})"


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'

"""Shape sweeps: find the shape that breaks or slows a fused GEMM, and hand over the proof.

    $ python -m shape_sweeps run --quick
    $ python -m shape_sweeps run --shapes suite-medium,33x65x127 --epilogues bias_gelu --json sweep.json
    $ python -m shape_sweeps explain residual --shape 4096,4096,4096          # or M,N: without a GEMM
    $ python -m shape_sweeps build --shapes suite --device h200 --pack kernels.tar.xz
    $ python -m shape_sweeps unpack kernels.tar.xz
    $ python -m shape_sweeps benchmark --peers no-compile --json run.json --markdown table.md
    $ python -m shape_sweeps tune --shapes suite --epilogues bias_gelu --dtypes bf16
    $ python -m shape_sweeps list

The rooms, along the way of a case::

    shapes, catalogue   what can be chosen: shapes and epilogues, by name or the user's own
    cases               one case as plain data, the product of what was chosen, the command that reruns it
    runner              plan (which kernels?), build them, run every case:
      inputs            draw the matrices and operands; padded_inputs: in padded rows
      guards            allocate outputs that show what was written, and what was not
      eager             compute it unfused
      compare           judge it against float64 and against the unfused result
      timing            time it against unfused and bare GEMMs, call by call
    records             what came of it, as data
    report, export      the same for the terminal, and as JSON and CSV
    plots               the same as a picture

and around it, for the command line::

    cli                 the entry, and the exit codes
    options, commands   what can be asked for, and what is then done
    explain_command     the report whether fusing an epilogue pays, which :mod:`gemm_ops.explain` makes
    build_command       kernels ahead of time, for devices that are not there; bundles of them
    benchmark/          the suite against all its peers, and its targets; timed by
      graph_timing      CUDA graphs in interleaved rounds
      host_timing       what a call takes of the host
    tune_command        which kernels are fastest, measured and kept; tune_calls, tune_report: of what, and in print
    outputs, streams    files that results go to; standard output, which may be closed, full or a broken pipe
    memory              which cases do not fit in it

The same from Python::

    from shape_sweeps import Case, load_epilogue, run_sweep
    sweep = run_sweep([Case(33, 65, 127, "bf16", "gate")], {"gate": load_epilogue("gate")})
    assert not sweep.failures, sweep.failures[0].reason
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case, product
    from .catalogue import load_epilogue
    from .errors import InputError
    from .records import CaseRecord, Sweep
    from .runner import Observer, run_sweep
    from .shapes import SHAPE_SETS, Shape, ShapeSet, parse_shapes

__all__ = [
    "SHAPE_SETS",
    "Case",
    "CaseRecord",
    "InputError",
    "Observer",
    "Shape",
    "ShapeSet",
    "Sweep",
    "load_epilogue",
    "parse_shapes",
    "product",
    "run_sweep",
]

#: name -> where it is defined.  Imported when asked for, as the command line must get ready to be interrupted
#: before PyTorch is imported.
_HOMES = {
    **dict.fromkeys(("Case", "product"), "cases"),
    "load_epilogue": "catalogue",
    "InputError": "errors",
    **dict.fromkeys(("CaseRecord", "Sweep"), "records"),
    **dict.fromkeys(("Observer", "run_sweep"), "runner"),
    **dict.fromkeys(("SHAPE_SETS", "Shape", "ShapeSet", "parse_shapes"), "shapes"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

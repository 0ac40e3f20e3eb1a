"""Writes the function of one stage as a C++ functor over fragments.

    >>> print(functor_source(stage, "Functor0", "fast"))
    template <class T> struct Functor0;
    ...

The functor takes one ``cutlass::Array<float, N>`` per leaf, and then any number of arrays that it ignores: the
visitor's graph must have a single sink, so the main output's node takes every auxiliary store as an input.
What the body says is the business of :mod:`.expressions`.
"""

from __future__ import annotations

from epilogues.tree import EpilogueTree

from .expressions import expression
from .stages import Stage

_TEMPLATE = """\
// {comment}
template <class T> struct {name};
template <> struct {name}<float> {{
  CUTLASS_DEVICE static float apply({parameters}) {{
    namespace fn = ep::{variant};
{lines}
    return {result};
  }}
}};
template <int Size> struct {name}<cutlass::Array<float, Size>> {{
  using Fragment = cutlass::Array<float, Size>;
  template <class... Ignored>
  CUTLASS_DEVICE Fragment operator()({fragments}Ignored const&...) const {{
    Fragment result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Size; ++i) {{
      result[i] = {name}<float>::apply({elements});
    }}
    return result;
  }}
}};
"""


def variant_of(tree: EpilogueTree) -> str:
    """Which variant of the device functions a resolved tree needs: fp32 outputs show the fast ones' error."""
    if tree.rounding != "once":
        return "eager"
    return "exact" if any(store.dtype == "f32" for store in tree.outputs) else "fast"


def functor_source(stage: Stage, name: str, variant: str) -> str:
    """The C++ of one stage's functor, called ``name``, using the ``variant`` ("exact", "fast", "eager") functions."""
    names = {id(leaf): f"leaf{i}" for i, leaf in enumerate(stage.leaves)}
    lines: list[str] = []
    for node in stage.body:
        names[id(node)] = f"v{len(lines)}"
        # auto: comparisons give bool
        lines.append(f"    auto const v{len(lines)} = {expression(node, names)};")
    leaves = [names[id(leaf)] for leaf in stage.leaves]
    return _TEMPLATE.format(
        comment=f"output {stage.index}, stored as {stage.output.dtype}",
        name=name,
        variant=variant,
        parameters=", ".join(f"float {leaf}" for leaf in leaves),
        lines="\n".join(lines) if lines else "    // the value is a leaf itself",
        result=names[id(stage.output.value)],
        fragments="".join(f"Fragment const& {leaf}, " for leaf in leaves),
        elements=", ".join(f"{leaf}[i]" for leaf in leaves),
    )

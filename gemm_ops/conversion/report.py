"""What a conversion did: the fused calls, and the products that were left, with reasons.

>>> model, report = gemm_ops.fuse(model)
>>> print(report)
>>> report.to_json()
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Fused:
    """A fused call, or several of one layer that are alike.

    Attributes:
        path: the product's path in the model.
        pattern: such as "activation + gate".
        epilogue: the steps and operands in words: "act, mul(gate)".
        k, n: the product's features.
        method: whose code calls it: "layers.0.mlp.forward".
        note: on when it is fused, "" for always.
        calls: how many calls of this kind the method has.
    """

    path: str
    pattern: str
    epilogue: str
    k: int
    n: int
    method: str
    note: str = ""
    calls: int = 1


@dataclass(frozen=True)
class Left:
    """One product that is not fused to anything, or is not in some call of it, and why."""

    path: str
    kind: str
    k: int
    n: int
    reason: str


@dataclass(frozen=True)
class Report:
    """What :func:`gemm_ops.fuse` did to a model.

    Attributes:
        fused: the fused calls.
        left: the products, and calls of fused ones, with none.
    """

    fused: tuple[Fused, ...] = ()
    left: tuple[Left, ...] = ()

    def to_json(self) -> str:
        """The report as a JSON object with the lists "fused" and "left"."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        layers, calls = len({each.path for each in self.fused}), sum(each.calls for each in self.fused)
        total = len({each.path for each in self.fused} | {each.path for each in self.left})
        lines = [f"fused {layers} of {total} linear layers" + (f", in {calls} calls" if calls != layers else "")]
        fused = [
            (
                each.path,
                f"{each.k} -> {each.n}",
                each.pattern,
                each.epilogue,
                f"in {each.method}" + (f", {each.calls} times" if each.calls > 1 else ""),
                each.note,
            )
            for each in self.fused
        ]
        lines += _table(fused)
        if self.left:
            lines += ["left as they are"]
            lines += _table([(each.path, f"{each.k} -> {each.n}", each.reason) for each in self.left])
        return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]

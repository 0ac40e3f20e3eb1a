"""The costs that the operation table states are those of the GPU."""

from __future__ import annotations

import pytest
import torch
from measure_costs import measure

from epilogues.operations import OPERATIONS

pytestmark = pytest.mark.gpu


def test_costs_are_as_measured() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the table is that of a Hopper GPU")
    wrong = []
    for name, measured in measure().items():
        cost = OPERATIONS[name].cost
        for what, stated, found in zip(
            ("exact", "fast", "registers"), (cost.exact, cost.fast, cost.registers), measured, strict=True
        ):
            # compilers and clocks differ a little; a table that is off by a quarter misleads
            if abs(stated - found) > 2 + 0.25 * max(stated, found):
                wrong.append(f"{name}: {what} {found}, the table says {stated}")
    assert not wrong, "\n".join(wrong)

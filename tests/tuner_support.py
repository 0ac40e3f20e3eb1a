"""What the tests of tuning share: a call on an H200 that is not there, results, a stopwatch that is told the times."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import epilogues as ep
from gemm_ops import dispatch
from gemm_ops.kernels.selection import Target
from gemm_ops.tuner import known
from gemm_ops.tuner.classes import ProblemClass, problem_class, tree_class
from gemm_ops.tuner.records import DATE_FORMAT, Measured, pick_best, utc_now

H200 = Target((9, 0), 132, "NVIDIA H200")


def call_on_h200(m: int, n: int, k: int, epilogue: str = "gelu") -> dispatch.Call:
    """``linear`` of contiguous bf16 tensors, which have no memory."""
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    call = dispatch.bind_call(x, weight.t(), ep.builders.activation(epilogue), {}, None)
    there = dataclasses.replace(call.problem, device=torch.device("cuda", 0))
    return dataclasses.replace(call, problem=there)


def class_of(call: dispatch.Call) -> ProblemClass:
    found = problem_class(call.request, "bf16", H200)
    assert found is not None
    return found


def result_of(call: dispatch.Call, us: Mapping[str, float], **others: str) -> Measured:
    """A result of the call's class."""
    fields = {"date": "2026-11-30 12:00:00", "model": next(iter(us))} | others
    return Measured(class_of(call), tree_class(call.tree), dict(us), pick_best(us), rounds=9, **fields)  # type: ignore[arg-type]


def in_hours(hours: float) -> str:
    """The date of a result of so many hours from now; before now, if negative."""
    return (utc_now() + datetime.timedelta(hours=hours)).strftime(DATE_FORMAT)


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Results count, none is known yet, and the device is an H200; gives the cache folder."""
    monkeypatch.setenv("GEMM_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GEMM_OPS_TUNE")
    monkeypatch.setattr(known, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(known, "_said", set())
    monkeypatch.setattr(known, "_here", {})
    monkeypatch.setattr(known, "_files", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H200.capability)
    monkeypatch.setattr(dispatch, "multiprocessor_count", lambda device: H200.multiprocessors)
    monkeypatch.setattr(dispatch, "device_name", lambda device: H200.name)
    return tmp_path / "cache"


class Told:
    """A stopwatch of given times, whose clock runs with them."""

    def __init__(self, us: Mapping[str, float]) -> None:
        self.us, self.asked, self.now = dict(us), list[str](), 0.0

    def time(self, name: str) -> float:
        self.asked.append(name)
        self.now += self.us[name] * 1e-6
        return self.us[name]

    def clock(self) -> float:
        return self.now

"""Skips GPU tests where there is no device; builds the kernels of all selected GPU cases first, in parallel."""

from __future__ import annotations

import contextlib
import sys
import time

import pytest
import torch
from host_device import HostDevice
from native_support import extension, fake_kernels  # noqa: F401  fixtures

HAS_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def built_cases(request: pytest.FixtureRequest) -> None:
    """Builds what the selected tests' cases need: a test at a time would take an hour."""
    from gpu_support import Case, make_inputs

    import gemm_ops

    specs = []
    for item in request.session.items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        if isinstance(case, Case):
            a, b, operands = make_inputs(case)
            with gemm_ops.use_backend(case.backend), contextlib.suppress(gemm_ops.UnsupportedProblemError):
                specs.append(gemm_ops.backend_for(a, b, case.epilogue, **operands).spec)
    specs = [spec for spec in specs if spec is not None]
    start, fresh = time.perf_counter(), [0]

    def count(spec: object, seconds: float, cached: bool) -> None:
        fresh[0] += not cached

    try:
        gemm_ops.build_kernels(specs, on_done=count)
    except gemm_ops.BuildError as error:
        # the tests whose kernels failed say so themselves
        print(error, file=sys.stderr)
    print(f"\n{fresh[0]} kernels built in {time.perf_counter() - start:.0f} s", file=sys.stderr)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """Elementwise kernels run on the host, as if it were a device."""
    from gemm_ops import plan

    monkeypatch.setattr(plan, "_plans", {})
    return HostDevice(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see what the rules choose, on any machine, whatever was measured there; those of tuning ask for it."""
    monkeypatch.setenv("GEMM_OPS_TUNE", "off")


@pytest.fixture(autouse=True)
def _fresh_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees the fallback warnings that it causes."""
    from gemm_ops import announce

    monkeypatch.setattr(announce, "_announced", set())

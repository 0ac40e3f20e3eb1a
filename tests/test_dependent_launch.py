"""Whether launches may overlap: what the environment says, and the record that kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemm_ops.runtime import dependent_launch
from gemm_ops.runtime.dependent_launch import pointer_to_record, way_of_overlap, without_overlap


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment as it is before the first plan."""
    monkeypatch.delenv("GEMM_OPS_OVERLAP", raising=False)
    pointer_to_record.cache_clear()
    yield
    pointer_to_record.cache_clear()
    monkeypatch.undo()
    pointer_to_record()


@pytest.mark.parametrize(("said", "enabled"), [(None, 1), ("", 1), ("on", 1), ("off", 0), ("OFF", 0)])
def test_environment(monkeypatch: pytest.MonkeyPatch, said: str | None, enabled: int) -> None:
    if said is not None:
        monkeypatch.setenv("GEMM_OPS_OVERLAP", said)
    assert pointer_to_record().contents.enabled == enabled


def test_what_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_OPS_OVERLAP", "maybe")
    with pytest.raises(ValueError, match="GEMM_OPS_OVERLAP should be one of on, off, got 'maybe'"):
        way_of_overlap()
    with pytest.raises(ValueError, match="GEMM_OPS_OVERLAP"):
        pointer_to_record()


@pytest.mark.parametrize("said", ["on", "off"])
def test_context(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Off within, also where it is the first to ask; then what it was, also after an error."""
    monkeypatch.setenv("GEMM_OPS_OVERLAP", said)
    with pytest.raises(RuntimeError, match="inside"), without_overlap():
        assert pointer_to_record().contents.enabled == 0
        raise RuntimeError("inside")
    assert pointer_to_record().contents.enabled == int(said == "on")


def test_one_record_for_all() -> None:
    assert pointer_to_record() is pointer_to_record()
    assert pointer_to_record().contents.overlapped == dependent_launch.overlapped_launches()

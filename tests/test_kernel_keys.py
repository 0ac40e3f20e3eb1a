"""What a kernel's key covers: everything that its library depends on, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gemm_support import finish, resolved, spec_of, start

import epilogues as ep
from epilogues.tree import Accumulator, Apply, Constant, EpilogueTree, Kind, Operand, Store
from gemm_ops.build.cache import find_library
from gemm_ops.kernels import sources
from gemm_ops.kernels.config import SKINNY_CONFIGS, SM80_CONFIGS, SM90_CONFIGS


def key_tree(
    value: float = 0.5,
    kind: Kind = Kind.ROW,
    operand_dtype: str = "bf16",
    output: str = "bf16",
    operation: str = "add",
    names: tuple[str, str] = ("bias", "preact"),
) -> EpilogueTree:
    acc, operand = Accumulator(), Operand(names[0], kind, 0, operand_dtype)
    z = Apply(operation, (Apply("mul", (acc, Constant(value))), operand))
    return EpilogueTree((Store("D", z, output), Store(names[1], acc, "f32")))


BASE = spec_of(key_tree())
LARGE, SMALL = SM80_CONFIGS
SWAPPED, SKINNY = spec_of(key_tree(), "swapped"), spec_of(key_tree(), "skinny")

DIFFERENT = {
    "constant": spec_of(key_tree(value=0.25)),
    "zero": spec_of(key_tree(value=0.0)),
    "minus zero": spec_of(key_tree(value=-0.0)),
    "nan": spec_of(key_tree(value=math.nan)),
    "kind": spec_of(key_tree(kind=Kind.COLUMN)),
    "operand dtype": spec_of(key_tree(operand_dtype="f16")),
    "output dtype": spec_of(key_tree(output="f16")),
    "operation": spec_of(key_tree(operation="sub")),
    "fewer outputs": spec_of(EpilogueTree(key_tree().outputs[:1])),
    "layout of a": dataclasses.replace(BASE, layout_a="column"),
    "layout of b": dataclasses.replace(BASE, layout_b="row"),
    "element": dataclasses.replace(BASE, element="f16"),
    "arch": dataclasses.replace(BASE, arch="100a"),
    "tile": dataclasses.replace(BASE, config=dataclasses.replace(BASE.config, tile=(128, 128, 64))),
    "cluster": dataclasses.replace(BASE, config=dataclasses.replace(BASE.config, cluster=(1, 2))),
    "schedule": dataclasses.replace(BASE, config=dataclasses.replace(BASE.config, schedule="pingpong")),
    "family": spec_of(key_tree(), "sm80"),
    "sm80 arch": spec_of(key_tree(), "sm80", arch="90"),
    "sm80 stages": dataclasses.replace(spec_of(key_tree(), "sm80"), config=dataclasses.replace(LARGE, stages=3)),
    "sm80 warp": dataclasses.replace(spec_of(key_tree(), "sm80"), config=dataclasses.replace(LARGE, warp=(32, 64, 32))),
    "sm80 swizzle": dataclasses.replace(spec_of(key_tree(), "sm80"), config=dataclasses.replace(LARGE, swizzle=4)),
    "sm80 tile": dataclasses.replace(spec_of(key_tree(), "sm80"), config=SMALL),
    "swapped": SWAPPED,
    "swapped tile": dataclasses.replace(SWAPPED, config=dataclasses.replace(SWAPPED.config, tile=(32, 128, 64))),
    "swapped operands alone": dataclasses.replace(BASE, config=dataclasses.replace(BASE.config, swapped=True)),
    "skinny": SKINNY,
    "skinny tile": dataclasses.replace(SKINNY, config=SKINNY_CONFIGS[0]),
    "skinny stages": dataclasses.replace(SKINNY, config=dataclasses.replace(SKINNY.config, stages=7)),
    "skinny warps": dataclasses.replace(SKINNY, config=dataclasses.replace(SKINNY.config, split_k=3)),
    "skinny arch": spec_of(key_tree(), "skinny", arch="80"),
    "skinny element": spec_of(key_tree(), "skinny", "f16"),
    "skinny operation": spec_of(key_tree(operation="sub"), "skinny"),
}


def test_different_kernels_have_different_keys() -> None:
    keys = {"base": BASE.key} | {name: spec.key for name, spec in DIFFERENT.items()}
    assert len(set(keys.values())) == len(keys), keys
    assert all(re.fullmatch(r"[0-9a-f]{32}", key) for key in keys.values())


def test_names_do_not_count() -> None:
    same = spec_of(key_tree(names=("offset", "raw")))
    assert same.key == BASE.key
    # as they should not: the sources are the same to the letter
    assert same.source() == BASE.source()


def test_what_is_an_argument_does_not_count() -> None:
    config = dataclasses.replace(BASE.config, swizzle=8, pace=0.1, startup=7)
    same = dataclasses.replace(BASE, config=config)
    assert same.key == BASE.key and same.source() == BASE.source()
    sm80 = spec_of(key_tree(), "sm80")
    assert dataclasses.replace(sm80, config=dataclasses.replace(LARGE, pace=0.1, startup=7)).key == sm80.key


def test_a_swizzle_that_is_compiled_in_is_in_the_source() -> None:
    assert DIFFERENT["sm80 swizzle"].source() != spec_of(key_tree(), "sm80").source()


@pytest.fixture
def fresh_digest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sources._digest.cache_clear()
    yield
    monkeypatch.undo()
    sources._digest.cache_clear()


def key_now() -> str:
    sources._digest.cache_clear()
    return dataclasses.replace(BASE).key


def test_the_generator_counts(fresh_digest: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel is another one if a template, a device function, the lowering or CUTLASS changes."""
    package = tmp_path / "gemm_ops"
    shutil.copytree(sources._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "_PACKAGE", package)
    before = key_now()
    assert before == BASE.key
    files = ("templates/sm90.cu.j2", "templates/host.cu.j2", "cuda/functors.cuh", "lowering/visitor.py")
    for file in (*files, "lowering/functors.py", "runtime/abi.py", "kernels/spec.py", "build/flags.py"):
        text = (package / file).read_text()
        (package / file).write_text(text + "\n")
        assert key_now() != before, file
        (package / file).write_text(text)
    pieces = package / "cuda" / "elementwise_pieces.cuh"
    pieces.write_text(pieces.read_text() + "\n")
    assert key_now() == before, "a file of another kind of kernels"
    (package / "functional.py").write_text("")
    (package / "lowering" / "__pycache__").mkdir()
    assert key_now() == before
    monkeypatch.setenv("CUTLASS_PATH", "/somewhere/else")
    assert key_now() != before
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(sources, "cutlass_version", lambda: "4.3.0.0")
    assert key_now() != before


def test_every_file_that_sources_are_made_of_counts_for_some_kind_of_kernels() -> None:
    package = sources._PACKAGE
    counted = {file for patterns in sources.GENERATORS.values() for each in patterns for file in package.glob(each)}
    for patterns in sources.GENERATORS.values():
        assert all(any(package.glob(each)) for each in patterns), "a pattern that names nothing"
    for folder in ("cuda", "templates", "lowering", "elementwise"):
        assert {file for file in (package / folder).iterdir() if file.is_file()} <= counted
    for kind, patterns in sources.GENERATORS.items():
        files = {file for each in patterns for file in package.glob(each)}
        included = {name for file in files for name in re.findall(r'#include "([a-z_]+\.cuh)"', file.read_text())}
        assert included <= {file.name for file in files}, kind


_WARM = """
import sys
import gemm_ops
from gemm_ops.build.cache import find_library
from gemm_support import resolved, spec_of
import epilogues as ep
spec = spec_of(resolved(ep.builders.SUITE["residual"]()))
print(spec.key, find_library(spec))
loaded = [name for name in ("cutlass_cppgen", "cutlass_library", "jinja2") if name in sys.modules]
assert not loaded, loaded
assert spec.source() and "cutlass_cppgen" in sys.modules
"""


def test_keys_and_the_cache_need_no_cutlass(tmp_path: Path) -> None:
    spec = spec_of(resolved(ep.builders.SUITE["residual"]()))
    library = tmp_path / "kernels" / spec.key / "kernel.so"
    library.parent.mkdir(parents=True)
    library.write_text("a library")
    output = finish(start(_WARM, tmp_path, GEMM_OPS_CACHE=str(tmp_path)))
    assert output.split() == [spec.key, str(library)]
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]


def test_title_says_what_the_kernel_is() -> None:
    assert BASE.title == f"{SM90_CONFIGS[0].name} bf16 row/column -> bf16+f32, sm_90a"
    assert find_library(dataclasses.replace(BASE, arch="none")) is None

"""What decides on a kernel, without a device: layouts, families, configurations, keys of plans."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_support import resolved
from torch import Tensor

import epilogues as ep
from epilogues.tree import Accumulator, Apply, EpilogueTree, Kind, Operand, Store
from gemm_ops import dispatch
from gemm_ops.kernels.config import SM80_CONFIGS, SM90_CONFIGS
from gemm_ops.kernels.families import arch_of, choose_config, families_for, refusal, sm90_stages
from gemm_ops.operands import OperandFacts
from gemm_ops.outputs import bind_outputs
from gemm_ops.plan import plan_key
from gemm_ops.problem import Matrix, Problem, read_matrix, read_problem
from gemm_ops.runtime.abi import MAX_OPERANDS

# Layouts.


def aligned(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    tensor = torch.empty(rows, columns, dtype=dtype)
    assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
    return tensor


def shifted(rows: int, columns: int, elements: int) -> Tensor:
    """Rows at an aligned distance that start a few elements after an aligned address."""
    wide = -(-(columns + elements) // 8) * 8
    return aligned(rows, wide)[:, elements : elements + columns]


OVERLAP = "its elements overlap in memory (strides {}, {})"
LAYOUTS: dict[str, tuple[Callable[[], Tensor], Matrix]] = {
    "contiguous": (lambda: aligned(16, 32), Matrix("row", 32)),
    "transposed": (lambda: aligned(32, 16).t(), Matrix("column", 16)),
    "square": (lambda: aligned(16, 16), Matrix("row", 16)),
    "columns of a wider one": (lambda: aligned(16, 64)[:, 8:40], Matrix("row", 64)),
    "rows of a higher one": (lambda: aligned(16, 32)[3:9], Matrix("row", 32)),
    "every second row": (lambda: aligned(16, 32)[::2], Matrix("row", 64)),
    "odd columns, padded rows": (lambda: aligned(16, 40)[:, :33], Matrix("row", 40)),
    "transposed, padded": (lambda: aligned(32, 24)[:, :17].t(), Matrix("column", 24)),
    "odd columns": (
        lambda: aligned(16, 33),
        Matrix("row", 33, "its leading dimension of 33 elements is not a multiple of 16 bytes"),
    ),
    "odd rows, transposed": (
        lambda: aligned(32, 17).t(),
        Matrix("column", 17, "its leading dimension of 17 elements is not a multiple of 16 bytes"),
    ),
    "starts 2 bytes off": (
        lambda: shifted(16, 32, 1),
        Matrix("row", 40, "it starts 2 bytes after a multiple of 16 bytes"),
    ),
    "starts 8 bytes off": (
        lambda: shifted(16, 32, 4),
        Matrix("row", 40, "it starts 8 bytes after a multiple of 16 bytes"),
    ),
    "every second column": (lambda: aligned(16, 64)[:, ::2], Matrix(None, 0, "neither of its strides (64, 2) is 1")),
    "one row expanded": (lambda: aligned(1, 32).expand(16, 32), Matrix(None, 0, OVERLAP.format(0, 1))),
    "one column expanded": (lambda: aligned(16, 1).expand(16, 32), Matrix(None, 0, OVERLAP.format(1, 0))),
    "one number expanded": (
        lambda: aligned(1, 1).expand(16, 32),
        Matrix(None, 0, "neither of its strides (0, 0) is 1"),
    ),
    "windows": (lambda: aligned(1, 64).as_strided((16, 32), (2, 1)), Matrix(None, 0, OVERLAP.format(2, 1))),
    # the stride of an extent of 1 means nothing, so one that is aligned is taken
    "one odd row": (lambda: aligned(1, 33), Matrix("row", 40)),
    "one row of a wider one": (lambda: aligned(16, 33)[:1], Matrix("row", 40)),
    "one column of many": (lambda: aligned(32, 1), Matrix("column", 32)),
    "one odd column": (lambda: aligned(33, 1), Matrix("column", 40)),
    "one column of a padded one": (lambda: aligned(16, 8)[:, :1], Matrix("row", 8)),
    "one column of an odd one": (
        lambda: aligned(16, 9)[:, :1],
        Matrix("row", 9, "its leading dimension of 9 elements is not a multiple of 16 bytes"),
    ),
    "one number": (lambda: aligned(1, 1), Matrix("row", 8)),
    "one number off": (lambda: shifted(1, 1, 1), Matrix("row", 8, "it starts 2 bytes after a multiple of 16 bytes")),
    "one row of every second column": (
        lambda: aligned(1, 64)[:, ::2],
        Matrix("column", 2, "its leading dimension of 2 elements is not a multiple of 16 bytes"),
    ),
    "fp32": (lambda: aligned(16, 36, torch.float32), Matrix("row", 36)),
    "fp32, one odd row": (lambda: aligned(1, 33, torch.float32), Matrix("row", 36)),
    "fp32, odd": (
        lambda: aligned(16, 34, torch.float32),
        Matrix("row", 34, "its leading dimension of 34 elements is not a multiple of 16 bytes"),
    ),
}


@pytest.mark.parametrize(("make", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_read_matrix(make: Callable[[], Tensor], expected: Matrix) -> None:
    tensor = make()
    rows, columns = tensor.shape
    assert read_matrix(tensor, rows, columns, *tensor.stride()) == expected
    if not expected.misalignment:
        # the addresses that a kernel computes from it are those of the elements
        outer, inner = (0, 1) if expected.layout == "row" else (1, 0)
        for element in ((0, 0), (rows - 1, 0), (0, columns - 1), (rows - 1, columns - 1)):
            offset = element[outer] * expected.leading_dimension + element[inner]
            assert tensor.data_ptr() + offset * tensor.element_size() == tensor[element].data_ptr()


def test_read_problem() -> None:
    x, weight = torch.empty(2, 3, 16, 64).bfloat16(), torch.empty(32, 64).bfloat16()
    problem, flat = read_problem(x, weight.t())
    assert (problem.m, problem.n, problem.k) == (96, 32, 64) and problem.m_shape == (2, 3, 16)
    assert problem.output_shape == (2, 3, 16, 32) and problem.element == "bf16"
    assert (problem.a, problem.b) == (Matrix("row", 64), Matrix("column", 64))
    assert flat.shape == (96, 64) and flat.data_ptr() == x.data_ptr()
    # leading dimensions that cannot be counted as one are copied
    problem, flat = read_problem(x.transpose(0, 1), weight.t())
    assert problem.a == Matrix("row", 64) and flat.data_ptr() != x.data_ptr()
    problem, _ = read_problem(x[0, 0, 0], weight.t())
    assert (problem.m, problem.m_shape, problem.output_shape) == (1, (), (32,))
    problem, _ = read_problem(x, torch.empty(3, 64, 32).bfloat16())
    assert problem.a is problem.b is None and (problem.m, problem.m_shape) == (96, (2, 3, 16))
    problem, _ = read_problem(x.double(), weight.t().double())
    assert problem.element is None


def test_layouts_of_new_outputs_are_those_that_pytorch_gives() -> None:
    for m, n, epilogue in ((16, 32, "f32"), (16, 33, "bf16"), (1, 33, "f16"), (16, 34, "f32"), (16, 36, "f32")):
        problem, _ = read_problem(torch.empty(m, 64), torch.empty(64, n))
        tree = EpilogueTree((Store("D", Accumulator(), epilogue),))
        _, ((promised, dtype),) = bind_outputs(tree.outputs, tree, problem, None, [])
        fresh = torch.empty(m, n, dtype={"f32": torch.float32, "f16": torch.half, "bf16": torch.bfloat16}[dtype])
        seen = read_matrix(fresh, m, n, *fresh.stride())
        assert (promised.layout, promised.leading_dimension) == (seen.layout, seen.leading_dimension)
        assert bool(promised.misalignment) == bool(seen.misalignment)


# Families.


def make_problem(m: int = 128, n: int = 256, k: int = 64, **changes: Any) -> Problem:
    made = Problem(m, n, k, (m,), torch.bfloat16, "bf16", torch.device("cpu"), Matrix("row", k), Matrix("column", k))
    return dataclasses.replace(made, **changes)


def output(dtype: str = "bf16", **changes: Any) -> tuple[Matrix, str]:
    return dataclasses.replace(Matrix("row", 256), **changes), dtype


ROW = OperandFacts("bias", Kind.ROW, "bf16")
AUX = OperandFacts("residual", Kind.AUX, "bf16", matrix=Matrix("row", 256))

# (problem, operands, outputs), what SM90 says, what SM80 says
REFUSALS: dict[str, tuple[tuple[Problem, list[OperandFacts], list[tuple[Matrix, str]]], str, str]] = {
    "taken": ((make_problem(), [ROW, AUX], [output()]), "", ""),
    "batched b": ((make_problem(a=None, b=None), [], [output()]), "b has batch dimensions", "b has batch dimensions"),
    "huge m": (
        (make_problem(m=2**31), [], [output()]),
        "an extent is larger than 2^31 - 1",
        "an extent is larger than 2^31 - 1",
    ),
    "large m": ((make_problem(m=2**31 - 8), [], [output()]), "", ""),
    "misaligned a": ((make_problem(a=Matrix("row", 63, "odd")), [], [output()]), "a: odd", "a: odd"),
    "misaligned b": ((make_problem(b=Matrix("row", 63, "odd")), [], [output()]), "b: odd", "b: odd"),
    "a without layout": (
        (make_problem(a=Matrix(None, 0, "neither")), [], [output()]),
        "a: neither",
        "a: neither",
    ),
    "a by columns": ((make_problem(a=Matrix("column", 128)), [], [output()]), "", ""),
    "misaligned aux": (
        (make_problem(), [ROW, dataclasses.replace(AUX, matrix=Matrix("row", 255, "odd"))], [output()]),
        "operand 'residual': odd",
        "operand 'residual': odd",
    ),
    "aux by columns": (
        (make_problem(), [dataclasses.replace(AUX, matrix=Matrix("column", 128))], [output()]),
        "operand 'residual': its rows are not contiguous",
        "operand 'residual': its rows are not contiguous",
    ),
    "misaligned output": (
        (make_problem(), [], [output(), output("f32", misalignment="odd")]),
        "output 1: odd",
        "output 1: odd",
    ),
    "output by columns": (
        (make_problem(), [], [output(layout="column", leading_dimension=128)]),
        "output 0: its rows are not contiguous",
        "output 0: its rows are not contiguous",
    ),
    "odd n, padded output": (
        (make_problem(n=257), [], [output(leading_dimension=264)]),
        "output 0: its rows of N=257 elements are not a multiple of 16 bytes",
        "output 0: its rows of N=257 elements are not a multiple of 16 bytes",
    ),
    "n that suits fp32 only": (
        (make_problem(n=260), [], [output("f32"), output("f16", leading_dimension=264)]),
        "output 1: its rows of N=260 elements are not a multiple of 16 bytes",
        "output 1: its rows of N=260 elements are not a multiple of 16 bytes",
    ),
    "n a multiple of 4, fp32": (
        (make_problem(n=260), [], [output("f32", leading_dimension=260)]),
        "",
        "",
    ),
    "n a multiple of 4, b by rows": (
        (make_problem(n=260, b=Matrix("row", 264)), [], [output("f32", leading_dimension=260)]),
        "",
        "b: its contiguous extent 260 is not a multiple of 8 elements",
    ),
    "odd k, padded": (
        (make_problem(k=63, a=Matrix("row", 64), b=Matrix("column", 64)), [], [output()]),
        "",
        "a: its contiguous extent 63 is not a multiple of 8 elements",
    ),
    "odd k, b": (
        (make_problem(k=63, a=Matrix("column", 128), b=Matrix("column", 64)), [], [output()]),
        "",
        "b: its contiguous extent 63 is not a multiple of 8 elements",
    ),
    "odd m, a by columns": (
        (make_problem(m=129, a=Matrix("column", 136)), [], [output()]),
        "",
        "a: its contiguous extent 129 is not a multiple of 8 elements",
    ),
    "odd m": ((make_problem(m=129), [], [output()]), "", ""),
    "row off": (
        (make_problem(), [dataclasses.replace(ROW, aligned=False)], [output()]),
        "",
        "operand 'bias': it does not start at a multiple of 16 bytes",
    ),
    "column off": (
        (make_problem(), [OperandFacts("scale", Kind.COLUMN, "f32", aligned=False)], [output()]),
        "",
        "",
    ),
}


@pytest.mark.parametrize(("arguments", "sm90", "sm80"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(arguments: tuple[Any, Any, Any], sm90: str, sm80: str) -> None:
    assert refusal("sm90", *arguments) == sm90
    assert refusal("sm80", *arguments) == sm80


def test_families_by_capability() -> None:
    expected = {(7, 5): (), (8, 0): ("sm80",), (8, 9): ("sm80",), (9, 0): ("sm90", "sm80"), (10, 0): ("sm80",)}
    assert {capability: families_for(capability) for capability in expected} == expected
    assert [arch_of("sm90", (9, 0)), arch_of("sm80", (9, 0)), arch_of("sm80", (8, 6))] == ["90a", "90", "86"]
    assert arch_of("sm80", (12, 0)) == "120"


BIAS_GELU = resolved(ep.builders.SUITE["bias_gelu"]())
CHOICES = {
    (4096, 4096, 4096): "sm90_cooperative_128x256x64_2x1",
    (8192, 8192, 8192): "sm90_cooperative_128x256x64_2x1",
    (4096, 11008, 4096): "sm90_pingpong_128x128x64_1x2",
    (8192, 14336, 4096): "sm90_pingpong_128x128x64_1x2",
    (1024, 4096, 4096): "sm90_cooperative_128x256x64_2x1",
    (1000, 3000, 2000): "sm90_cooperative_128x192x64_2x1",
    (128, 4096, 4096): "sm90_pingpong_64x64x128_1x1",
    (16, 4096, 4096): "sm90_pingpong_64x64x128_1x1",
    (1, 4096, 4096): "sm90_pingpong_64x64x128_1x1",
}


@pytest.mark.parametrize(("shape", "name"), CHOICES.items(), ids=str)
def test_choice_of_configuration(shape: tuple[int, int, int], name: str) -> None:
    """The measured choices of ``kernels/config.py``, on 132 multiprocessors."""
    config = choose_config("sm90", make_problem(*shape), BIAS_GELU, 132)
    assert config is not None and config.name == name


def test_raster_of_the_pingpong_tiles() -> None:
    for shape, swizzle in (((4096, 11008, 4096), 1), ((8192, 14336, 4096), 8)):
        config = choose_config("sm90", make_problem(*shape), BIAS_GELU, 132)
        assert config is not None and config.swizzle == swizzle


def test_every_configuration_is_chosen_for_some_shape() -> None:
    """A row of the table that nothing chooses is a row too many."""
    shapes = [(m, n, 4096) for m in (16, 128, 512, 1024, 2048, 4096, 8192) for n in range(512, 16384, 512)]
    for family, table in (("sm90", SM90_CONFIGS), ("sm80", SM80_CONFIGS)):
        chosen = {choose_config(family, make_problem(*shape), BIAS_GELU, 132).name for shape in shapes}  # type: ignore
        assert chosen == {config.name for config in table}


def test_sm80_takes_large_tiles_where_they_fill_the_device() -> None:
    large, small = SM80_CONFIGS
    assert choose_config("sm80", make_problem(4096, 4096), BIAS_GELU, 132) == large  # 1024 tiles
    assert choose_config("sm80", make_problem(1408, 1536), BIAS_GELU, 132) == large  # 11 x 12 = 132
    assert choose_config("sm80", make_problem(1280, 1664), BIAS_GELU, 132) == small  # 10 x 13 = 130


def tree_of(matrices: int, dtype: str = "bf16", outputs: int = 1) -> EpilogueTree:
    value: Any = Accumulator()
    for position in range(matrices):
        value = Apply("add", (value, Operand(f"m{position}", Kind.AUX, position, dtype)))
    return EpilogueTree(tuple(Store("D" if i == 0 else f"o{i}", value, dtype) for i in range(outputs)))


def test_matrices_of_the_epilogue_take_their_share_of_shared_memory() -> None:
    problem = make_problem(4096, 4096, 4096)
    stages = {config.name: sm90_stages(config, tree_of(0)) for config in SM90_CONFIGS}
    # (232448 - 1024 - 2 * 128 * 32 * 2 bytes) / ((128 + 256) * 64 * 2), and so on
    assert stages["sm90_cooperative_128x256x64_2x1"] == 4
    assert stages["sm90_pingpong_128x128x64_1x2"] == 6
    names = []
    for matrices in range(MAX_OPERANDS + 1):
        tree = tree_of(matrices)
        config = choose_config("sm90", problem, tree, 132)
        names.append(config.name if config else None)
        if config is not None:
            assert sm90_stages(config, tree) >= 2
            if any(sm90_stages(other, tree) >= 3 for other in SM90_CONFIGS):
                assert sm90_stages(config, tree) >= 3
    assert names[0] == "sm90_cooperative_128x256x64_2x1"
    # ever smaller tiles, and then none
    areas = [area_of(name) for name in names]
    assert areas == sorted(areas, reverse=True) and areas[-1] == 0 and len(set(areas)) >= 3
    assert choose_config("sm80", problem, tree_of(MAX_OPERANDS), 132) == SM80_CONFIGS[0]


def area_of(name: str | None) -> int:
    rows, columns, _ = name.split("_")[2].split("x") if name else (0, 0, 0)
    return int(rows) * int(columns)


def test_wider_elements_take_more() -> None:
    config = SM90_CONFIGS[0]
    row = EpilogueTree((Store("D", Apply("add", (Accumulator(), Operand("r", Kind.ROW, 0, "f32"))), "bf16"),))
    assert sm90_stages(config, tree_of(4, "f32")) < sm90_stages(config, tree_of(4)) < sm90_stages(config, tree_of(0))
    assert sm90_stages(config, tree_of(0, outputs=6)) < sm90_stages(config, row) == sm90_stages(config, tree_of(0))


def test_the_suite_has_a_configuration_for_every_aligned_shape() -> None:
    suite = Path(__file__).parent.parent.parent / "shared" / "suite.json"
    shapes = [[4096, 4096, 4096], [1, 4096, 4096], [777, 1544, 1032]]
    if suite.is_file():
        listed = json.loads(suite.read_text())["shapes"]
        shapes = [shape for group in ("large", "medium", "decode") for shape in listed[group]]
    for build in ep.builders.SUITE.values():
        for m, n, k in shapes:
            for family in ("sm90", "sm80"):
                assert choose_config(family, make_problem(m, n, k), resolved(build()), 132) is not None


# Keys of plans.

DEQUANT = ep.builders.SUITE["dequant"]()
SCALED = ep.builders.SUITE["residual"]()
TRAIN = ep.builders.SUITE["train_gelu"]()


def scaled_call() -> dict[str, Any]:
    a, b = aligned(16, 64), aligned(64, 32)
    row, residual = torch.empty(32).bfloat16(), aligned(16, 32)
    operands = {"scale": row, "bias": row, "alpha": 0.5, "residual": residual}
    return {"a": a, "b": b, "epilogue": SCALED, "operands": operands, "out": None, "forced": "auto"}


def key_with(**changes: Any) -> object:
    call = scaled_call()
    call["operands"] |= changes.pop("operands", {})
    return plan_key(**(call | changes))


def test_plan_key_is_the_same_for_other_values() -> None:
    key = key_with()
    assert key is not None and hash(key) == hash(key_with()) and key == key_with()
    assert key == key_with(operands={"alpha": 2}) == key_with(operands={"residual": aligned(16, 32)})
    # the order in which operands are given does not matter
    call = scaled_call()
    call["operands"] = dict(reversed(call["operands"].items()))
    assert plan_key(**call) == key


KEYS: dict[str, dict[str, Any]] = {
    "m": {"a": aligned(24, 64), "operands": {"residual": aligned(24, 32)}},
    "leading dimensions": {
        "a": aligned(16, 64).view(4, 4, 64),
        "operands": {"residual": aligned(16, 32).view(4, 4, 32)},
    },
    "stride of a": {"a": aligned(16, 128)[:, :64]},
    "layout of a": {"a": aligned(64, 16).t()},
    "layout of b": {"b": aligned(32, 64).t()},
    "alignment of a": {"a": shifted(16, 64, 1)},
    "alignment of b": {"b": shifted(64, 32, 1)},
    "dtype": {"a": aligned(16, 64).half(), "b": aligned(64, 32).half()},
    "device": {"a": torch.empty(16, 64, dtype=torch.bfloat16, device="meta")},
    "operand dtype": {"operands": {"scale": torch.empty(32)}},
    "operand alignment": {"operands": {"scale": torch.empty(33).bfloat16()[1:]}},
    "operand stride": {"operands": {"residual": aligned(16, 64)[:, :32]}},
    "operand shape": {"operands": {"scale": torch.empty(1, 32).bfloat16()}},
    "scalar a tensor": {"operands": {"alpha": torch.empty(1)}},
    "backend": {"forced": "sm80"},
    "out": {"out": aligned(16, 32)},
    "stride of out": {"out": aligned(16, 64)[:, :32]},
    "alignment of out": {"out": shifted(16, 32, 1)},
    "dtype of out": {"out": aligned(16, 32).float()},
    "epilogue": {"epilogue": ep.Epilogue.from_tree(SCALED.tree, "other")},
}


def test_plan_key_differs_for_everything_that_decides() -> None:
    keys = {"base": key_with()} | {name: key_with(**changes) for name, changes in KEYS.items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_plan_key_differs_in_which_operand_is_a_number() -> None:
    two = ep.epilogue(_two_scalars)
    tensor = torch.empty(1)
    a, b = aligned(16, 64), aligned(64, 32)
    keys = {
        plan_key(a, b, two, {"first": first, "second": second}, None, "auto")
        for first, second in ((1.0, 2.0), (tensor, 2.0), (1.0, tensor), (tensor, tensor))
    }
    assert len(keys) == 4 and None not in keys


def _two_scalars(acc: Any, first: ep.Scalar, second: ep.Scalar) -> Any:
    return acc * first + second


def without(name: str) -> dict[str, Any]:
    call = scaled_call()
    del call["operands"][name]
    return call


NO_KEY: dict[str, Callable[[], dict[str, Any]]] = {
    "missing operand": lambda: without("alpha"),
    "unknown operand": lambda: scaled_call() | {"operands": scaled_call()["operands"] | {"other": 1.0}},
    "another operand": lambda: without("alpha") | {"operands": without("alpha")["operands"] | {"other": 1.0}},
    "bool": lambda: scaled_call() | {"operands": scaled_call()["operands"] | {"alpha": True}},
    "list": lambda: scaled_call() | {"operands": scaled_call()["operands"] | {"alpha": [1.0]}},
    "None": lambda: scaled_call() | {"operands": scaled_call()["operands"] | {"alpha": None}},
    "gradient of a": lambda: scaled_call() | {"a": aligned(16, 64).requires_grad_()},
    "gradient of an operand": lambda: (
        scaled_call() | {"operands": scaled_call()["operands"] | {"alpha": torch.ones(1, requires_grad=True)}}
    ),
    "gradient of out": lambda: scaled_call() | {"out": aligned(16, 32).requires_grad_()},
    "out without D": lambda: scaled_call() | {"out": {"E": aligned(16, 32)}},
    "out with one too many": lambda: scaled_call() | {"out": {"D": aligned(16, 32), "E": aligned(16, 32)}},
    "out a list": lambda: scaled_call() | {"out": [aligned(16, 32)]},
    "out of lists": lambda: scaled_call() | {"out": {"D": [1.0]}},
    "one out of two": lambda: (
        scaled_call() | {"epilogue": TRAIN, "operands": {"bias": torch.empty(32)}, "out": aligned(16, 32)}
    ),
}


@pytest.mark.parametrize("make", NO_KEY.values(), ids=NO_KEY)
def test_no_plan_for_what_goes_the_long_way(make: Callable[[], dict[str, Any]]) -> None:
    assert plan_key(**make()) is None


def test_gradients_that_nobody_wants_do_not_count() -> None:
    a = aligned(16, 64).requires_grad_()
    with torch.no_grad():
        assert key_with(a=a) == key_with()
    with torch.inference_mode():
        assert key_with(a=a) == key_with()


def test_no_plan_for_outputs_that_share_memory() -> None:
    """The key says nothing of where tensors lie, so a call that shares memory has to go where that is refused."""
    call = scaled_call()
    residual = call["operands"]["residual"]
    assert plan_key(**(call | {"out": residual})) is None
    assert plan_key(**(call | {"out": residual.clone()})) is not None
    assert plan_key(**(call | {"out": call["a"][:, :32]})) is None
    buffer = aligned(32, 32)
    train = {"epilogue": TRAIN, "operands": {"bias": torch.empty(32)}}
    assert plan_key(**(call | train | {"out": {"D": buffer[:16], "preact": buffer[16:]}})) is not None
    assert plan_key(**(call | train | {"out": {"D": buffer[:16], "preact": buffer[8:24]}})) is None


def test_out_given_by_name_or_not_is_one_plan() -> None:
    out = aligned(16, 32)
    assert key_with(out=out) == key_with(out={"D": out}) != key_with()


# Calls, as far as they go without a device.


def test_a_call_is_direct_only_without_copies() -> None:
    a, b = aligned(16, 64), aligned(64, 32)
    operands: dict[str, Any] = {"row_scale": torch.ones(16), "col_scale": torch.ones(32), "bias": torch.ones(32)}

    def is_direct(a: Tensor = a, **changes: Tensor) -> bool:
        return dispatch.bind_call(a, b, DEQUANT, operands | changes, None).is_direct

    assert (
        is_direct()
        and is_direct(row_scale=torch.ones(16, 1))
        and is_direct(a.view(4, 4, 64), row_scale=torch.ones(4, 4))
    )
    assert not is_direct(bias=torch.ones(64)[::2])
    assert not is_direct(aligned(16, 64).view(4, 4, 64).transpose(0, 1), row_scale=torch.ones(4, 4))


@pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")
def test_resolved_trees_go_by_structure() -> None:
    """One tree for epilogues that differ in names, and the names of each in its results."""

    def one(acc: Any, bias: ep.Row) -> Any:
        return {"D": acc + bias, "first": acc}

    def two(acc: Any, offset: ep.Row) -> Any:
        return {"D": acc + offset, "second": acc}

    a, b, row = aligned(16, 64), aligned(64, 32), torch.ones(32)
    calls = [
        dispatch.bind_call(a, b, ep.epilogue(one), {"bias": row}, None),
        dispatch.bind_call(a, b, ep.epilogue(two), {"offset": row}, None),
    ]
    assert calls[0].tree is calls[1].tree
    decisions = [dispatch.decide(call) for call in calls]
    assert [
        list(dispatch.compute_unfused(call, decision)) for call, decision in zip(calls, decisions, strict=True)
    ] == [
        ["D", "first"],
        ["D", "second"],
    ]


def test_bound_operands() -> None:
    a, b = aligned(16, 64), aligned(64, 32)
    residual = aligned(16, 48)[:, :32]
    call = dispatch.bind_call(
        a, b, SCALED, {"scale": torch.ones(33)[1:], "bias": aligned(1, 32), "alpha": 2, "residual": residual}, None
    )
    facts = [operand.facts for operand in call.operands]
    assert [fact.kind for fact in facts] == [Kind.ROW, Kind.ROW, Kind.SCALAR, Kind.AUX]
    assert [fact.dtype for fact in facts] == ["f32", "bf16", "f32", "bf16"]
    assert [fact.aligned for fact in facts] == [False, True, True, True]
    assert facts[3].matrix == Matrix("row", 48)
    assert call.operands[2].tensor is None and call.operands[2].value == 2.0
    assert [str(operand.dtype) for operand in call.tree.operands] == ["f32", "bf16", "f32", "bf16"]
    assert call.tree.outputs[0].dtype == "bf16"

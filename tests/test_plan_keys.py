"""The keys of plans: calls that are computed alike have one, all others differ, and some go the long way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_support import aligned, shifted

import epilogues as ep
from gemm_ops.plan import plan_key

DEQUANT = ep.builders.SUITE["dequant"]()
SCALED = ep.builders.SUITE["residual"]()
TRAIN = ep.builders.SUITE["train_gelu"]()


def scaled_call() -> dict[str, Any]:
    a, b = aligned(16, 64), aligned(64, 32)
    row, residual = torch.empty(32).bfloat16(), aligned(16, 32)
    operands = {"scale": row, "bias": row, "alpha": 0.5, "residual": residual}
    return {"a": a, "b": b, "epilogue": SCALED, "operands": operands, "out": None, "how": "auto"}


def key_of(a: torch.Tensor, b: torch.Tensor, **others: Any) -> object:
    return plan_key((a, b), **others)


def key_with(**changes: Any) -> object:
    call = scaled_call()
    call["operands"] |= changes.pop("operands", {})
    return key_of(**(call | changes))


def test_plan_key_is_the_same_for_other_values() -> None:
    key = key_with()
    assert key is not None and hash(key) == hash(key_with()) and key == key_with()
    assert key == key_with(operands={"alpha": 2}) == key_with(operands={"residual": aligned(16, 32)})
    # the order in which operands are given does not matter
    call = scaled_call()
    call["operands"] = dict(reversed(call["operands"].items()))
    assert key_of(**call) == key


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
    "backend": {"how": "sm80"},
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
        plan_key((a, b), two, {"first": first, "second": second}, None, "auto")
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
    assert key_of(**make()) is None


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
    assert key_of(**(call | {"out": residual})) is None
    assert key_of(**(call | {"out": residual.clone()})) is not None
    assert key_of(**(call | {"out": call["a"][:, :32]})) is None
    buffer = aligned(32, 32)
    train = {"epilogue": TRAIN, "operands": {"bias": torch.empty(32)}}
    assert key_of(**(call | train | {"out": {"D": buffer[:16], "preact": buffer[16:]}})) is not None
    assert key_of(**(call | train | {"out": {"D": buffer[:16], "preact": buffer[8:24]}})) is None


def test_a_plan_for_outputs_in_place_where_that_is_allowed() -> None:
    x, two = aligned(16, 32), {"D": aligned(16, 32), "preact": aligned(16, 32)}
    bias = {"bias": torch.empty(32)}
    for out in (x, {"D": x}):
        assert plan_key((x,), DEQUANT, bias, out, "auto", in_place=True) is None  # not its operands
        assert plan_key((x,), ep.builders.bias(), bias, out, "auto", in_place=True) is not None
        assert plan_key((x,), ep.builders.bias(), bias, out, "auto") is None
    assert plan_key((x,), ep.builders.bias(), bias, x.view(32, 16), "auto", in_place=True) is None
    assert plan_key((x,), TRAIN, bias, two, "auto", in_place=True) is not None
    assert plan_key((x,), TRAIN, bias, two | {"D": x}, "auto", in_place=True) is not None
    assert plan_key((x,), TRAIN, bias, {"D": two["D"], "preact": two["D"]}, "auto", in_place=True) is None


def test_out_given_by_name_or_not_is_one_plan() -> None:
    out = aligned(16, 32)
    assert key_with(out=out) == key_with(out={"D": out}) != key_with()

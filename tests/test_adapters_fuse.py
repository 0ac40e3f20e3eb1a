"""``gemm_ops.fuse`` and adapters of peft, on models of transformers: put on before and after, merged and taken off."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, fused_calls
from test_conversion_models import gpt2, llama
from torch import Tensor, nn
from torch.nn import functional as F

import gemm_ops
from gemm_ops import FusedLinear

__all__ = ["fused_calls"]
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

MODELS = {"gpt2": (gpt2, ["c_fc", "c_proj"]), "llama": (llama, ["gate_proj", "up_proj", "down_proj"])}
each_model = pytest.mark.parametrize(("make", "targets"), MODELS.values(), ids=MODELS)


def adapt(model: nn.Module, targets: list[str]) -> Any:
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return adapted.eval()


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@each_model
def test_fused_before_the_adapters(make: Any, targets: list[str], fused_calls: FusedCalls) -> None:
    torch.manual_seed(0)
    model, (ids,) = make()
    model.eval()
    plain = copy.deepcopy(model)
    fused, _ = gemm_ops.fuse(model)
    before = fused_calls.during(lambda: logits(fused, ids))
    assert before > 0
    torch.manual_seed(1)
    adapted = adapt(fused, targets)
    torch.manual_seed(1)
    expected = logits(adapt(plain, targets), ids)
    close(logits(adapted, ids), expected)
    merged = adapted.merge_and_unload()
    close(logits(merged, ids), expected)
    assert fused_calls.during(lambda: logits(merged, ids)) == before, "fused calls come back after merging"


@each_model
def test_fused_with_the_adapters_on(make: Any, targets: list[str], fused_calls: FusedCalls) -> None:
    torch.manual_seed(0)
    model, (ids,) = make()
    model.eval()
    adapted = adapt(model, targets)
    expected = logits(adapted, ids)
    fused, _ = gemm_ops.fuse(adapted)
    close(logits(fused, ids), expected)
    fused(ids).logits.sum().backward()
    assert all(p.grad is not None for n, p in fused.named_parameters() if "lora_" in n)
    with fused.disable_adapter():
        assert (logits(fused, ids) - expected).abs().max() > 1e-3
    merged = fused.merge_and_unload()
    close(logits(merged, ids), expected)
    again, _ = gemm_ops.fuse(merged)
    close(logits(again, ids), expected)
    assert fused_calls.during(lambda: logits(again, ids)) > 0


def test_a_fused_linear_with_an_adapter_in_a_fused_model() -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = FusedLinear(8, 12, epilogue="gelu"), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x))

    block, x = Block().eval(), torch.randn(3, 8)
    adapted = adapt(block, ["up"])
    expected = adapted(x)
    lora = block.up
    weight = lora.base_layer.weight + lora.get_delta_weight("default")
    close(expected, x + block.down(F.gelu(F.linear(x, weight, lora.base_layer.bias))))
    fused, report = gemm_ops.fuse(adapted)
    assert report.fused
    close(fused(x), expected)
    close(fused.merge_and_unload()(x), expected)

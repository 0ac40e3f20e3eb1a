"""``gemm_ops.fuse`` on architectures as they are published, small and with random weights.

Those of transformers, timm and torchvision are the libraries' own code, unmodified.  timm and torchvision are not
everywhere (torchvision imports beside the PyTorch that it was built for only, and timm not without it), so MLP-Mixer
and ConvNeXt are written here too, as timm has them.
"""

from __future__ import annotations

import collections
import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_support import FusedCalls, Inputs, check_agreement, fuse_copy, fused_calls, main_output
from torch import Tensor, nn

import gemm_ops

__all__ = ["fused_calls"]
pytestmark = pytest.mark.filterwarnings("ignore::gemm_ops.FallbackWarning")

TOKENS = 64


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="the package transformers is not installed (extra test)")


def _importable(name: str) -> Any:
    """A package that may be absent, or not import beside this PyTorch."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}")


def _of_images(model: nn.Module) -> tuple[nn.Module, Inputs]:
    """With an input, and a last layer that is not all zeros, as some libraries initialise it."""
    nn.init.normal_([module for module in model.modules() if isinstance(module, nn.Linear)][-1].weight, std=0.2)
    return model, (torch.randn(2, 3, 32, 32),)


def _ids() -> Inputs:
    return (torch.randint(0, TOKENS, (2, 9)),)


def gpt2() -> tuple[nn.Module, Inputs]:
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config), _ids()


def bert() -> tuple[nn.Module, Inputs]:
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config), _ids()


def vit() -> tuple[nn.Module, Inputs]:
    transformers = _transformers()
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config), (torch.randn(2, 3, 16, 16),)


def llama() -> tuple[nn.Module, Inputs]:
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config), _ids()


def whisper() -> tuple[nn.Module, Inputs]:
    transformers = _transformers()
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
    )
    return transformers.WhisperForAudioClassification(config), (torch.randn(2, 8, 32),)


def encoder(norm_first: bool) -> tuple[nn.Module, Inputs]:
    layer = nn.TransformerEncoderLayer(
        32, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first), (torch.randn(2, 9, 32),)


class Mlp(nn.Module):
    """As in timm: every layer optional in some model."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, features)
        self.drop2 = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, features: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.mlp_tokens = Mlp(tokens, 24)
        self.drop_path = nn.Identity()
        self.norm2 = nn.LayerNorm(features)
        self.mlp_channels = Mlp(features, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        x = x + self.drop_path(self.mlp_channels(self.norm2(x)))
        return x


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(*[MixerBlock(16, 32) for _ in range(2)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.blocks(x)
        x = self.norm(x).mean(dim=1)
        return self.head(x)


class ConvNeXtBlock(nn.Module):
    """As in timm and torchvision, with the pointwise convolutions as linear layers and a layer scale."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(features, features, 7, padding=3, groups=features)
        self.norm = nn.LayerNorm(features)
        self.mlp = Mlp(features, 4 * features)
        self.gamma = nn.Parameter(0.5 * torch.rand(features))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv_dw(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.mlp(x)
        x = x.mul(self.gamma)
        x = x.permute(0, 3, 1, 2)
        return x + shortcut


def mixer() -> tuple[nn.Module, Inputs]:
    return Mixer(), (torch.randn(2, 3, 16, 16),)


def convnext() -> tuple[nn.Module, Inputs]:
    blocks = [ConvNeXtBlock(16) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 16, 2, 2), *blocks), (torch.randn(2, 3, 8, 8),)


def timm_mixer() -> tuple[nn.Module, Inputs]:
    kind = _importable("timm.models.mlp_mixer").MlpMixer
    return _of_images(kind(num_classes=5, img_size=32, patch_size=8, num_blocks=2, embed_dim=32))


def timm_vit(init_values: float | None) -> tuple[nn.Module, Inputs]:
    kind = _importable("timm.models.vision_transformer").VisionTransformer
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return _of_images(kind(num_classes=5, init_values=init_values, **sizes))


def timm_convnext() -> tuple[nn.Module, Inputs]:
    kind = _importable("timm.models.convnext").ConvNeXt
    return _of_images(kind(num_classes=5, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), ls_init_value=0.5))


def torchvision_vit() -> tuple[nn.Module, Inputs]:
    kind = _importable("torchvision.models").VisionTransformer
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return _of_images(kind(num_classes=5, **sizes))


def torchvision_convnext() -> tuple[nn.Module, Inputs]:
    convnext = _importable("torchvision.models.convnext")
    blocks = [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)]
    return _of_images(convnext.ConvNeXt(blocks, layer_scale=0.5, num_classes=5))


#: How to make a model; of every pattern how many calls are fused, and how many linear layers are left.
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Inputs]], dict[str, int], int]] = {
    "GPT-2": (gpt2, {"activation": 2, "residual": 2}, 5),
    "BERT": (bert, {"residual": 4, "activation": 3}, 7),
    "ViT": (vit, {"activation": 2, "residual": 2}, 9),
    "Llama": (llama, {"activation + gate": 2, "residual": 2}, 11),
    "Whisper's encoder": (whisper, {"activation": 2, "residual": 2}, 10),
    "TransformerEncoder": (lambda: encoder(False), {"activation": 2}, 4),
    "TransformerEncoder, norm first": (lambda: encoder(True), {"activation": 2}, 4),
    "MLP-Mixer": (mixer, {"activation": 4, "residual": 2}, 3),
    "ConvNeXt": (convnext, {"activation": 2, "scale": 2}, 0),
    "timm MLP-Mixer": (timm_mixer, {"activation": 4, "residual": 2}, 3),
    "timm ViT": (lambda: timm_vit(None), {"activation": 2, "residual": 4}, 3),
    "timm ViT, layer scale": (lambda: timm_vit(0.5), {"activation": 2, "residual + scale": 4}, 3),
    # the layer scale is applied after a permutation
    "timm ConvNeXt": (timm_convnext, {"activation": 4}, 5),
    "torchvision ViT": (torchvision_vit, {"activation": 2, "residual": 2}, 3),
    "torchvision ConvNeXt": (torchvision_convnext, {"activation": 2}, 3),
}
each_model = pytest.mark.parametrize("name", MODELS)


def make(name: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]()
    return model, inputs


def distance(model: nn.Module, other: nn.Module, inputs: Inputs) -> float:
    wanted, found = main_output(model(*inputs)).detach(), main_output(other(*inputs)).detach()
    assert found.dtype == wanted.dtype
    return float((found - wanted).abs().max() / wanted.abs().max())


@each_model
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_fused_counts_and_agreement(name: str, training: bool, fused_calls: FusedCalls) -> None:
    _, counts, left = MODELS[name]
    model, inputs = make(name)
    model.train(training)
    fused, report = fuse_copy(model)
    assert collections.Counter(each.pattern for each in report.fused) == counts, str(report)
    assert len(report.left) == left and all(each.reason for each in report.left), str(report)
    with (
        torch.no_grad() if training else torch.enable_grad()
    ):  # nn.TransformerEncoder has a fast path without gradients
        assert fused_calls.during(lambda: fused(*inputs)) == sum(counts.values())
    for dtype in (torch.float32, torch.bfloat16):
        check_agreement(model, fused, inputs, dtype)


@each_model
def test_autocast(name: str) -> None:
    model, inputs = make(name)
    fused, _ = gemm_ops.fuse(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert distance(model, fused, inputs) < 0.02


@each_model
def test_copies_and_unfuse(name: str, fused_calls: FusedCalls) -> None:
    model, inputs = make(name)
    fused, report = gemm_ops.fuse(model)
    count = len(report.fused)
    for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), gemm_ops.fuse(fused).model):
        assert fused_calls.during(lambda: distance(fused, made, inputs)) == 2 * count  # noqa: B023
        assert distance(fused, made, inputs) == 0.0
    gemm_ops.unfuse(fused)
    assert fused_calls.during(lambda: fused(*inputs)) == 0
    assert torch.equal(main_output(fused(*inputs)), main_output(model(*inputs)))
    assert all(
        vars(one).keys() == vars(other).keys() for one, other in zip(fused.modules(), model.modules(), strict=True)
    )


@each_model
def test_training_steps(name: str) -> None:
    """Three steps of the model and of its conversion, from the same weights, end at the same place."""
    model, inputs = make(name)
    fused, _ = gemm_ops.fuse(model)
    for each in (model, fused):
        optimiser = torch.optim.SGD(each.parameters(), lr=0.05)
        for _ in range(3):
            optimiser.zero_grad()
            main_output(each(*inputs)).square().mean().backward()
            optimiser.step()
    for (key, wanted), found in zip(model.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, msg=lambda text: f"{key}: {text}")  # noqa: B023


@each_model
def test_compiled_at_once(name: str) -> None:
    """Without graph breaks and a call before, with all that is fused."""
    model, inputs = make(name)
    fused, report = gemm_ops.fuse(model)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    wanted = main_output(model(*inputs))
    torch.testing.assert_close(main_output(compiled(*inputs)), wanted)
    (graph,) = graphs
    assert sum(str(node.target).startswith("gemm_ops.matmul") for node in graph.graph.nodes) == len(report.fused)


@pytest.mark.parametrize("name", ["bart", "mbart", "pegasus"])
def test_encoder_layers_that_clamp_in_half_precision(name: str, fused_calls: FusedCalls) -> None:
    """They are traced for other dtypes; the original computes where there is a sign of float16."""
    transformers = _transformers()
    prefix = {"bart": "Bart", "mbart": "MBart", "pegasus": "Pegasus"}[name]
    config = getattr(transformers, f"{prefix}Config")(
        d_model=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, dropout=0.0
    )
    config._attn_implementation = "eager"
    kind = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    model = getattr(kind, f"{prefix}EncoderLayer")(config).eval()
    fused, report = fuse_copy(model)
    assert collections.Counter(each.pattern for each in report.fused) == {"activation": 1, "residual": 1}
    x = torch.randn(2, 9, 32)
    mask = torch.zeros(2, 1, 9, 9)

    def check(x: Tensor, mask: Tensor | None, expected: int) -> None:
        with torch.no_grad():
            wanted = main_output(model(x, attention_mask=mask))
            calls = fused_calls.during(lambda: torch.testing.assert_close(main_output(fused(x, mask)), wanted))
        assert calls == expected

    for given in (mask, None):
        check(x, given, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        check(x, None, 0)
    for net in (model, fused):
        net.half()
    check(x.half(), None, 0)
    if name == "bart":  # whose norm comes last: no sign of it before
        for net in (model, fused):
            net.float().final_layer_norm.register_forward_hook(lambda module, args, result: result.half())
        assert main_output(model(x, None)).dtype == torch.float16
        with pytest.raises(RuntimeError, match=r"has become torch\.float16 within code that gemm_ops\.fuse traced"):
            fused(x, None)


def test_generation_with_a_cache(fused_calls: FusedCalls) -> None:
    """The cache is handed on to attention, so the blocks stay fused."""
    for name in ("GPT-2", "Llama"):
        model, (ids,) = make(name)
        fused, report = gemm_ops.fuse(model.eval())
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        wanted = model.generate(ids, **options)
        calls = fused_calls.during(lambda: torch.testing.assert_close(fused.generate(ids, **options), wanted))  # noqa: B023
        assert calls == 5 * len(report.fused)


def test_gradient_checkpointing_of_transformers(fused_calls: FusedCalls) -> None:
    model, inputs = make("Llama")
    fused, _ = gemm_ops.fuse(model)
    for each in (model, fused):
        each.train().gradient_checkpointing_enable()
        main_output(each(*inputs)).square().mean().backward()
    assert fused_calls.epilogues
    for wanted, found in zip(model.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_labels_and_options_go_through() -> None:
    """Arguments that the model itself knows."""
    model, (ids,) = make("BERT")
    fused, _ = gemm_ops.fuse(model)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    for options in (
        {"labels": ids},
        {"output_attentions": False, "output_hidden_states": True},
        {"return_dict": False},
    ):
        wanted = model(ids, attention_mask=mask, **options)
        found = fused(ids, attention_mask=mask, **options)
        assert len(found) == len(wanted)
        torch.testing.assert_close(found[0], wanted[0])


def test_save_pretrained(tmp_path: Any) -> None:
    transformers = _transformers()
    model, inputs = make("GPT-2")
    fused, _ = gemm_ops.fuse(model)
    fused.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert distance(model.eval(), loaded.eval(), inputs) == 0.0

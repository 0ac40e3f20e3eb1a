"""Models at their real widths and with few layers, with random weights: what ``measure_models`` measures.

    >>> model, x = make("gpt2", Size(layers=2), "cuda")

The models are those of the packages transformers, timm, torchvision, and of PyTorch.  There is no dropout, so that
results can be compared.  Language models have no vocabulary head, which beside few layers would be most of the time,
unless one is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ATTENTION = "sdpa_without_mask"


@dataclass(frozen=True)
class Size:
    """Which size of a model to make.

    Attributes:
        layers: how many.
        heads: whether language models have a vocabulary head.
        tiny: whether widths and batches are such that a CPU computes them at once.
    """

    layers: int = 4
    heads: bool = False
    tiny: bool = False


#: A model, and a function that makes its inputs.
Made = tuple[nn.Module, Callable[[], Tensor]]


def _ids(vocabulary: int, batch: int, tokens: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, vocabulary, (batch, tokens))


def _images(batch: int, size: Size) -> Callable[[], Tensor]:
    return (lambda: torch.randn(2, 3, 32, 32)) if size.tiny else (lambda: torch.randn(batch, 3, 224, 224))


def _transformers() -> Any:
    """The package, with an attention that makes no masks: when traced or captured its own makes one for no reason."""
    library: Any = importlib.import_module("transformers")
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    library.AttentionInterface.register(_ATTENTION, functions["sdpa"])
    return library


def gpt2(size: Size) -> Made:
    library = _transformers()
    vocabulary, width, heads, batch, tokens = (64, 32, 4, 2, 9) if size.tiny else (50257, 768, 12, 8, 1024)
    config = library.GPT2Config(
        vocab_size=vocabulary,
        n_positions=tokens,
        n_embd=width,
        n_layer=size.layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation=_ATTENTION,
    )
    model = library.GPT2LMHeadModel(config) if size.heads else library.GPT2Model(config)
    return model, _ids(vocabulary, batch, tokens)


def bert(size: Size) -> Made:
    library = _transformers()
    vocabulary, width, heads, batch, tokens = (64, 32, 4, 2, 9) if size.tiny else (30522, 768, 12, 16, 512)
    config = library.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=tokens,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=_ATTENTION,
    )
    model = library.BertForMaskedLM(config) if size.heads else library.BertModel(config, add_pooling_layer=False)
    return model, _ids(vocabulary, batch, tokens)


def vit(size: Size) -> Made:
    library = _transformers()
    width, heads = (32, 4) if size.tiny else (768, 12)
    config = library.ViTConfig(
        hidden_size=width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=32 if size.tiny else 224,
        num_labels=1000,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=_ATTENTION,
    )
    return library.ViTForImageClassification(config), _images(64, size)


def llama(size: Size) -> Made:
    library = _transformers()
    vocabulary, width, inner, heads, batch, tokens = (
        (64, 32, 88, 4, 2, 9) if size.tiny else (32000, 2048, 5632, 16, 4, 1024)
    )
    config = library.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation=_ATTENTION,
    )
    model = library.LlamaForCausalLM(config) if size.heads else library.LlamaModel(config)
    return model, _ids(vocabulary, batch, tokens)


def encoder(size: Size) -> Made:
    width, heads, batch, tokens = (32, 4, 2, 9) if size.tiny else (768, 12, 16, 512)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, size.layers), lambda: torch.randn(batch, tokens, width)


def mixer(size: Size) -> Made:
    library: Any = importlib.import_module("timm")
    image, width = (32, 32) if size.tiny else (224, 768)
    model = library.models.mlp_mixer.MlpMixer(img_size=image, patch_size=16, num_blocks=size.layers, embed_dim=width)
    return model, _images(64, size)


def convnext(size: Size) -> Made:
    """Twelve layers are the real depths; layer scales are as large as those of trained models."""
    library: Any = importlib.import_module("timm")
    depths = [max(1, depth * size.layers // 12) for depth in (3, 3, 27, 3)]
    small = {"dims": (8, 16, 32, 64)} if size.tiny else {}
    return library.create_model("convnext_base", depths=depths, ls_init_value=0.5, **small), _images(32, size)


def torchvision_vit(size: Size) -> Made:
    library: Any = importlib.import_module("torchvision")
    image, heads, width = (32, 4, 32) if size.tiny else (224, 12, 768)
    model = library.models.VisionTransformer(image, 16, size.layers, heads, width, 4 * width)
    return model, _images(64, size)


def timm_vit(size: Size) -> Made:
    library: Any = importlib.import_module("timm")
    small = {"img_size": 32, "embed_dim": 32, "num_heads": 4} if size.tiny else {}
    return library.create_model("vit_base_patch16_224", depth=size.layers, **small), _images(64, size)


MODELS: dict[str, Callable[[Size], Made]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "llama": llama,
    "encoder": encoder,
    "mixer": mixer,
    "convnext": convnext,
    "torchvision_vit": torchvision_vit,
    "timm_vit": timm_vit,
}


def make(name: str, size: Size, device: str) -> tuple[nn.Module, Tensor]:
    """A model in bf16, and its input.  No parameter is left at zero or one, so that every one of them shows."""
    with torch.device(device):
        model, make_input = MODELS[name](size)
        x = make_input()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.to(torch.bfloat16), x.bfloat16() if x.is_floating_point() else x

"""The elementwise tails of public models, written as the models have them: traced unchanged, or refused and why.

Each is named by its model and the file of the model's code.  The first parameter is the result of a projection; what
the model computes elsewhere is an operand.  The formulas are in this file's own words, the calls are the models'.
"""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from epilogues import Aux, Column, Kind, ReductionError, Row, Scalar, UnsupportedOperationError, epilogue
from epilogues.validation import validate

M, N = 6, 8


def gpt2(acc, bias: Row):
    """GPT-2, transformers/activations.py NewGELUActivation: the tanh GELU from its formula, with pow."""
    x = acc + bias
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gpt_neox_fast(acc, bias: Row):
    """GPT-NeoX and Bloom, transformers/activations.py FastGELUActivation, bloom's gelu_forward."""
    x = acc + bias
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def bert(acc, bias: Row):
    """BERT, google-research/bert and its ports: GELU from erf."""
    x = acc + bias
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def llama(acc, up: Aux):
    """Llama and Mistral, modeling_llama.py LlamaMLP: act_fn(gate_proj(x)) * up_proj(x)."""
    return F.silu(acc) * up


def deepseek(acc, up: Aux, weight_scale: Row, token_scale: Column):
    """DeepSeek-V3, inference/model.py and kernel.py: scaled product of fp8 matrices, then SwiGLU."""
    return F.silu(acc * token_scale * weight_scale) * up


def gemma(acc, up: Aux):
    """Gemma, modeling_gemma.py GemmaMLP: GeGLU with the tanh GELU."""
    return nn.functional.gelu(acc, approximate="tanh") * up


def gemma2_softcap(acc, cap: Scalar):
    """Gemma 2, modeling_gemma2.py: final logits between -cap and cap."""
    logits = acc / cap
    logits = torch.tanh(logits)
    return logits * cap


def t5_gated(acc, linear: Aux):
    """Flan-T5, modeling_t5.py T5DenseGatedActDense: gelu_new of one projection times the other."""
    hidden = 0.5 * acc * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (acc + 0.044715 * torch.pow(acc, 3.0))))
    return hidden * linear


def t5_fp16(acc, residual: Aux):
    """T5, modeling_t5.py T5Block: the residual stream clamped to what float16 holds."""
    hidden = residual + acc
    return torch.clamp(hidden, min=-64504.0, max=64504.0)


def vit(acc, bias: Row, residual: Aux):
    """ViT, timm/models/vision_transformer.py Block: x + mlp(norm(x))."""
    return residual + (acc + bias)


def swin_v2_logits(acc, logit_scale: Scalar):
    """Swin V2, timm/models/swin_transformer_v2.py WindowAttention: the logit scale bounded, then exponentiated."""
    return acc * torch.clamp(logit_scale, max=math.log(1.0 / 0.01)).exp()


def convnext(acc, bias: Row, gamma: Row, shortcut: Aux):
    """ConvNeXt, models/convnext.py Block: layer scale, then the shortcut."""
    x = acc + bias
    x = gamma * x
    return shortcut + x


def cait(acc, bias: Row, gamma_2: Row, shortcut: Aux):
    """CaiT, timm/models/cait.py LayerScaleBlock: x + gamma_2 * mlp(norm2(x))."""
    return shortcut + gamma_2 * (acc + bias)


def mobilenet_v3(acc, bias: Row):
    """MobileNetV3, torchvision and timm hard_swish: x * relu6(x + 3) / 6."""
    x = acc + bias
    return x * (F.relu6(x + 3.0) / 6.0)


def efficientnet(acc, bias: Row, gate: Aux):
    """EfficientNet, efficientnet_pytorch/model.py: squeeze-and-excite on a swish."""
    x = acc + bias
    x = x * torch.sigmoid(x)
    return torch.sigmoid(gate) * x


def yolov4(acc, scale: Row, shift: Row):
    """YOLOv4, darknet ports: a folded batch norm, then Mish as x * tanh(softplus(x))."""
    x = acc * scale + shift
    return x * torch.tanh(F.softplus(x))


def resnet(acc, scale: Row, shift: Row, identity: Aux):
    """ResNet, torchvision/models/resnet.py: a folded batch norm, the shortcut, then ReLU."""
    out = acc * scale + shift
    out = out + identity
    return F.relu(out)


def gptj(acc, bias: Row, attn_output: Aux, residual: Aux):
    """GPT-J, modeling_gptj.py GPTJBlock: attention and MLP in parallel."""
    return attn_output + (acc + bias) + residual


def falcon(acc, attention: Aux, residual: Aux):
    """Falcon and PaLM, modeling_falcon.py: parallel attention, no biases."""
    mlp_output = acc + attention
    return residual + mlp_output


def whisper(acc, bias: Row, embed_pos: Aux):
    """Whisper, whisper/model.py AudioEncoder: F.gelu, then position embeddings."""
    return F.gelu(acc + bias) + embed_pos


def clip(acc, bias: Row):
    """CLIP, clip/model.py QuickGELU."""
    x = acc + bias
    return x * torch.sigmoid(1.702 * x)


def siglip(acc, logit_scale: Scalar, logit_bias: Scalar):
    """SigLIP, modeling_siglip.py: logits of the contrastive head."""
    return acc * logit_scale.exp() + logit_bias


def siglip_loss(acc, logit_scale: Scalar, logit_bias: Scalar, labels: Aux):
    """SigLIP, open_clip/loss.py SigLipLoss: -logsigmoid(labels * logits), the sum left outside."""
    logits = acc * logit_scale + logit_bias
    return -F.logsigmoid(labels * logits)


def rwkv_key(acc):
    """RWKV-4, RWKV_TimeMix and ChannelMix in src/model.py: squared ReLU of the key."""
    return torch.square(torch.relu(acc))


def rwkv_receptance(acc, kv: Aux):
    """RWKV-4, ChannelMix in src/model.py: sigmoid(receptance) * kv."""
    return torch.sigmoid(acc) * kv


def mamba_gate(acc, y: Aux):
    """Mamba, mamba_simple.py: the scan's result times silu(z)."""
    return y * F.silu(acc)


def mamba_dt(acc, dt_bias: Row):
    """Mamba, mamba_simple.py: the step sizes, softplus(dt + bias)."""
    return F.softplus(acc + dt_bias)


def griffin(acc, bias: Row, a_param: Row):
    """RecurrentGemma, modeling_recurrent_gemma.py: log of the recurrent gate, and the gate itself."""
    gate = torch.sigmoid(acc + bias)
    log_recurrent_gate = -8.0 * gate * F.softplus(a_param)
    return torch.exp(log_recurrent_gate)


def nemotron(acc):
    """Nemotron and Primer, transformers/activations.py ReLUSquaredActivation."""
    return F.relu(acc) ** 2


def phi(acc, bias: Row, attention: Aux, residual: Aux, resid_scale: Scalar):
    """Phi and MiniCPM, modeling_phi.py: parallel branches, the residual scaled."""
    return (acc + bias + attention) * resid_scale + residual


def starcoder(acc, bias: Row):
    """StarCoder 2, modeling_starcoder2.py: gelu_pytorch_tanh of c_fc."""
    return nn.GELU(approximate="tanh")(acc + bias)


def diffusers_geglu(acc, bias: Row, gate: Aux):
    """Stable Diffusion, diffusers/models/activations.py GEGLU, its two halves as two GEMMs."""
    return (acc + bias) * F.gelu(gate)


def dit_modulate(acc, bias: Row, shift: Row, scale: Row, gate: Row, residual: Aux):
    """DiT, models.py modulate() and the gated residual, for one image."""
    x = acc + bias
    x = x * (1 + scale) + shift
    return residual + gate * x


def detr_boxes(acc, bias: Row, reference: Aux):
    """Deformable DETR, models/deformable_detr.py: boxes from offsets, sigmoid(x + inverse_sigmoid(reference))."""
    x = reference.clamp(min=0, max=1)
    x1 = x.clamp(min=1e-5)
    x2 = (1 - x).clamp(min=1e-5)
    return (acc + bias + torch.log(x1 / x2)).sigmoid()


def focal_loss(acc, targets: Aux):
    """RetinaNet, torchvision/ops/focal_loss.py sigmoid_focal_loss, with reduction="none"."""
    alpha, gamma = 0.25, 2
    p = torch.sigmoid(acc)
    ce_loss = F.binary_cross_entropy_with_logits(acc, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    loss = ce_loss * ((1 - p_t) ** gamma)
    alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
    return alpha_t * loss


def siren(acc, bias: Row):
    """SIREN, siren.py SineLayer: sin(omega_0 * linear(x))."""
    return torch.sin(30.0 * (acc + bias))


def nerf_alpha(acc, bias: Row, distance: Column):
    """NeRF, nerf-pytorch run_nerf.py raw2alpha: opacity along a ray."""
    return 1.0 - torch.exp(-F.relu(acc + bias) * distance)


def snake(acc, bias: Row, alpha: Row):
    """BigVGAN, activations.py Snake: x + sin(alpha * x) ** 2 / alpha."""
    x = acc + bias
    return x + (1.0 / (alpha + 1e-9)) * torch.pow(torch.sin(x * alpha), 2)


def gpt_oss(acc, bias: Row, up: Aux):
    """gpt-oss, gpt_oss/torch/model.py swiglu: both halves clamped, alpha 1.702, up + 1."""
    gate = (acc + bias).clamp(min=None, max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def sac(acc, bias: Row):
    """SAC, stable-baselines3 and spinningup core.py: log standard deviations within bounds."""
    return torch.clamp(acc + bias, -20, 2).exp()


TRACED = [
    gpt2,
    gpt_neox_fast,
    bert,
    llama,
    deepseek,
    gemma,
    gemma2_softcap,
    t5_gated,
    t5_fp16,
    vit,
    swin_v2_logits,
    convnext,
    cait,
    mobilenet_v3,
    efficientnet,
    yolov4,
    resnet,
    gptj,
    falcon,
    whisper,
    clip,
    siglip,
    siglip_loss,
    rwkv_key,
    rwkv_receptance,
    mamba_gate,
    mamba_dt,
    griffin,
    nemotron,
    phi,
    starcoder,
    diffusers_geglu,
    dit_modulate,
    detr_boxes,
    focal_loss,
    siren,
    nerf_alpha,
    snake,
    gpt_oss,
    sac,
]


def operands_for(made):
    shapes = {Kind.ROW: (N,), Kind.COLUMN: (M,), Kind.SCALAR: (), Kind.AUX: (M, N)}
    return {name: torch.rand(shapes[kind]) + 0.1 for name, kind in made.operands.items()}


@pytest.mark.parametrize("function", TRACED, ids=lambda f: f.__name__)
def test_traced_unchanged(function):
    torch.manual_seed(0)
    made = epilogue(function)
    validate(made.tree)
    acc, given = torch.randn(M, N) * 3, operands_for(made)
    spread = {name: value[:, None] if made.operands[name] is Kind.COLUMN else value for name, value in given.items()}
    expected = function(acc, **spread)
    torch.testing.assert_close(made.reference(acc, **given), expected, rtol=1e-6, atol=1e-6)
    ours, theirs = acc.clone().requires_grad_(), acc.clone().requires_grad_()
    (ours,) = torch.autograd.grad(made.reference(ours, **given).sum(), ours)
    (theirs,) = torch.autograd.grad(function(theirs, **spread).sum(), theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# refused, and why


class Rotary:
    """Llama, modeling_llama.py: rotate_half and apply_rotary_pos_emb."""

    @staticmethod
    def rotate_half(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    @classmethod
    def apply(cls, acc, cos: Aux, sin: Aux):
        return acc * cos + cls.rotate_half(acc) * sin


def rotary_by_slices(acc, cos: Aux, sin: Aux):
    """GPT-J, modeling_gptj.py rotate_every_two: slices with a step."""
    return acc * cos + torch.stack((-acc[:, 1::2], acc[:, ::2]), dim=-1) * sin


def rms_norm_by_hand(acc, weight_: Row):
    """Llama, modeling_llama.py LlamaRMSNorm, after the projection."""
    variance = acc.pow(2).mean(-1, keepdim=True)
    return weight_ * (acc * torch.rsqrt(variance + 1e-6))


def query_norm(acc, scale: Row):
    """Qwen 3, modeling_qwen3.py: q_norm(q_proj(x)), with PyTorch's own RMSNorm."""
    return F.rms_norm(acc, (N,)) * scale


def post_norm(acc, bias: Row, residual: Aux):
    """BERT, modeling_bert.py BertOutput: LayerNorm(dense(x) + residual)."""
    return nn.LayerNorm(N)(acc + bias + residual)


def cosine_attention(acc, k: Aux):
    """Swin V2, timm/models/swin_transformer_v2.py: normalised queries."""
    return F.normalize(acc, dim=-1) * k


def attention_logits(acc, mask: Aux):
    """Every transformer: softmax of scaled logits plus a mask."""
    return torch.softmax(acc * 0.125 + mask, dim=-1)


def mixtral_routing(acc):
    """Mixtral, modeling_mixtral.py: softmax over experts, then the best two."""
    weights = F.softmax(acc, dim=1, dtype=torch.float)
    return torch.topk(weights, 2, dim=-1)


def deepseek_routing(acc, bias: Row):
    """DeepSeek-V3, modeling_deepseek.py MoEGate: sigmoid scores, the best of them."""
    scores = acc.sigmoid() + bias
    return torch.topk(scores, k=8, dim=-1, sorted=False)[0]


def glu_by_chunks(acc, bias: Row):
    """Stable Diffusion, diffusers/models/activations.py GEGLU: both halves from one projection."""
    hidden, gate = (acc + bias).chunk(2, dim=-1)
    return hidden * F.gelu(gate)


def glu_by_slices(acc):
    """ChatGLM, modeling_chatglm.py swiglu: torch.chunk of the last dimension."""
    x = torch.chunk(acc, 2, dim=-1)
    return F.silu(x[0]) * x[1]


def conformer_glu(acc):
    """Conformer, torchaudio/models/conformer.py: nn.GLU."""
    return nn.GLU()(acc)


def heads(acc, bias: Row):
    """nanoGPT, model.py CausalSelfAttention: the result viewed as heads."""
    return (acc + bias).view(-1, 2, 4).transpose(1, 2)


def clip_features(acc):
    """CLIP, clip/model.py: features divided by their norm."""
    return acc / acc.norm(dim=1, keepdim=True)


def training_loss(acc, target: Aux):
    """Diffusion models, train_text_to_image.py: the mean squared error of the noise."""
    return F.mse_loss(acc.float(), target.float())


def dropout_in_training(acc, bias: Row, residual: Aux):
    """BERT, modeling_bert.py BertSelfOutput in training: dropout(dense(x)) + residual."""
    return nn.Dropout(0.1)(acc + bias) + residual


def drop_path(acc, residual: Aux):
    """DeiT and ConvNeXt, timm/layers/drop.py drop_path in training: whole samples dropped at random."""
    shape = (acc.shape[0],) + (1,) * (acc.ndim - 1)
    return residual + acc * acc.new_empty(shape).bernoulli_(0.9)


def gumbel_noise(acc):
    """VQ-GAN and DALL-E, gumbel noise added to the logits."""
    return acc - torch.log(-torch.log(torch.rand_like(acc)))


def in_place_bias(acc, bias: Row):
    """Megatron-LM and others: the bias added in place, to save memory."""
    acc.add_(bias)
    return F.gelu(acc)


def in_place_residual(acc, residual: Aux):
    """torchvision/models/resnet.py BasicBlock: out += identity."""
    acc += residual
    return acc


def in_place_relu(acc, scale: Row, shift: Row):
    """torchvision/models/vgg.py: nn.ReLU(inplace=True)."""
    return nn.ReLU(inplace=True)(acc * scale + shift)


def clamp_if_infinite(acc):
    """T5 and BART, modeling_bart.py: clamped only if something overflowed."""
    if torch.isinf(acc).any() or torch.isnan(acc).any():
        return torch.clamp(acc, -65504.0, 65504.0)
    return acc


def scale_if_large(acc):
    """Loss scaling and the like: a branch on the largest value."""
    if acc.max() > 0:
        return acc / 2
    return acc


def branch(acc):
    """A branch on the value itself, as if it were a number."""
    return acc if acc > 0 else 0.01 * acc


def causal_mask(acc):
    """nanoGPT, model.py: logits above the diagonal masked."""
    return acc.masked_fill(torch.tril(torch.ones(M, N)) == 0, float("-inf"))


def bn_in_training(acc):
    """ResNet, torchvision/models/resnet.py in training: statistics over the batch."""
    return nn.BatchNorm1d(N)(acc)


def straight_through(acc):
    """VQ-VAE, straight-through estimation: x + (round(x) - x).detach()."""
    return acc + (torch.round(acc) - acc).detach()


#: function, error, what the message says is wrong and why, and what it says to do instead
REFUSED = [
    (Rotary.apply, UnsupportedOperationError, "shape cannot be used", "leave shapes to the operand kinds"),
    (rotary_by_slices, ReductionError, "indexing with [] (getitem) communicates", "index the GEMM's result"),
    (rms_norm_by_hand, ReductionError, "mean communicates between elements (reduction)", "on the GEMM's result"),
    (query_norm, ReductionError, "rms_norm communicates between elements (normalisation)", "rms_norm on the GEMM's"),
    (post_norm, ReductionError, "layer_norm communicates between elements (normalisation)", "return the unnormalised"),
    (cosine_attention, ReductionError, "normalize communicates between elements (normalisation)", "unnormalised"),
    (attention_logits, ReductionError, "softmax communicates between elements (normalisation)", "return the logits"),
    (mixtral_routing, ReductionError, "softmax communicates between elements", "return the logits"),
    (deepseek_routing, ReductionError, "topk communicates between elements (ordering)", "topk on the GEMM's result"),
    (
        glu_by_chunks,
        ReductionError,
        "chunk communicates between elements (change of shape)",
        "split the weight instead",
    ),
    (
        glu_by_slices,
        ReductionError,
        "chunk communicates between elements (change of shape)",
        "split the weight instead",
    ),
    (conformer_glu, ReductionError, "glu communicates between elements", "split the weight instead"),
    (heads, ReductionError, "view communicates between elements (change of shape)", "view on the GEMM's result"),
    (clip_features, ReductionError, "norm communicates between elements (reduction)", "on the GEMM's result"),
    (training_loss, ReductionError, "mse_loss with reduction='mean' communicates", 'write reduction="none"'),
    (dropout_in_training, UnsupportedOperationError, "random numbers are neither", "give them as an Aux operand"),
    (drop_path, UnsupportedOperationError, "shape cannot be used in an epilogue", "leave shapes to the operand kinds"),
    (gumbel_noise, UnsupportedOperationError, "random numbers are neither", "draw the numbers beforehand"),
    (in_place_bias, UnsupportedOperationError, "add_ writes in place", "x = x.add(...)"),
    (in_place_residual, UnsupportedOperationError, "+= writes in place", "write x = x + y"),
    (in_place_relu, UnsupportedOperationError, "relu with inplace=True writes in place", "leave inplace out"),
    (clamp_if_infinite, ReductionError, "any communicates between elements (reduction)", "on the GEMM's result"),
    (scale_if_large, ReductionError, "max communicates between elements (reduction)", "the maximum over a dimension"),
    (branch, UnsupportedOperationError, "a branch on a value (bool())", "torch.where(condition, a, b)"),
    (causal_mask, UnsupportedOperationError, "a tensor of shape (6, 8)", "make it an operand"),
    (bn_in_training, ReductionError, "batch_norm communicates between elements (normalisation)", "unnormalised"),
    (straight_through, UnsupportedOperationError, "detach cannot be used in an epilogue", "compute that part outside"),
]


@pytest.mark.parametrize(("function", "error", "says", "instead"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_refused_for_the_right_reason(function, error, says, instead):
    with pytest.raises(error) as caught:
        epilogue(function)
    assert type(caught.value) is error
    message = str(caught.value)
    assert says in message.split("\n  instead: ")[0]
    assert instead in message.split("\n  instead: ")[1]
    assert re.search(r"\n  at .*test_epilogues_public_models\.py:\d+: \S", message)


def test_all_are_tried_and_say_whose_they_are():
    functions = [*TRACED, *(function for function, *_ in REFUSED)]
    here = {
        value
        for name, value in globals().items()
        if callable(value) and value.__module__ == __name__ and not name.startswith(("test_", "operands_for"))
    } - {Rotary}
    assert here == set(functions) - {Rotary.apply}
    assert all(f.__doc__ or f.__self__.__doc__ for f in functions)
    assert len(TRACED) > 35 and len(REFUSED) > 25

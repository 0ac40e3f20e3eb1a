"""Fuses a model that knows nothing of this package, prints what was done, and takes it off again.

$ python examples/whole_model.py
"""

import torch
from torch import Tensor, nn

import gemm_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class GatedBlock(nn.Module):
    """A gated feed-forward block with a residual, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(160)
        self.gate, self.up, self.down = nn.Linear(160, 432), nn.Linear(160, 432), nn.Linear(432, 160)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return result


def main() -> None:
    """Compares the fused copy with the original, values and gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(GatedBlock(), GatedBlock()).to(DEVICE, DTYPE)
    fused, report = gemm_ops.fuse(model)
    print(report)
    x = torch.randn(33, 160, device=DEVICE, dtype=DTYPE)
    outputs = [each(x) for each in (fused, model)]
    grads = [
        torch.autograd.grad(output.float().square().mean(), list(each.parameters()))
        for output, each in zip(outputs, (fused, model), strict=True)
    ]
    pairs = [("outputs", *outputs), *((f"gradient {i}", *pair) for i, pair in enumerate(zip(*grads, strict=True)))]
    worst = max(((one - other).norm() / other.norm()).item() for _, one, other in pairs)
    print(f"largest relative difference from the original: {worst:.1e}")
    assert worst < 3e-2
    gemm_ops.unfuse(fused)
    assert torch.equal(fused(x), model(x))


if __name__ == "__main__":
    main()

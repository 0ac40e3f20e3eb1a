"""Trains a small model of fused layers and the same of PyTorch's, side by side; prints both losses.

$ python examples/training.py
"""

import torch
from torch import nn

from gemm_ops import FusedLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 60


def fused() -> nn.Module:
    return nn.Sequential(
        FusedLinear(33, 129, epilogue="gelu"), FusedLinear(129, 129, epilogue="silu"), FusedLinear(129, 10)
    )


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 129), nn.GELU(), nn.Linear(129, 129), nn.SiLU(), nn.Linear(129, 10))


def train(model: nn.Module) -> list[float]:
    """The losses of a fit to random labels, in bfloat16 by autocast."""
    torch.manual_seed(1)
    x, labels = torch.randn(256, 33, device=DEVICE), torch.randint(10, (256,), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(STEPS):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Starts both from the same parameters."""
    torch.manual_seed(0)
    one, two = fused().to(DEVICE), plain().to(DEVICE)
    with torch.no_grad():
        for left, right in zip(one.parameters(), two.parameters(), strict=True):
            left.copy_(right)
    curves = train(one), train(two)
    for step in range(0, STEPS, 12):
        print(f"step {step:2}: fused {curves[0][step]:.4f}, PyTorch {curves[1][step]:.4f}")
    assert curves[0][-1] < curves[0][0] / 2
    assert abs(curves[0][11] - curves[1][11]) < 0.1 * curves[1][11]


if __name__ == "__main__":
    main()

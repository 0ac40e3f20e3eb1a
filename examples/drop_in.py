"""Replaces the linear layers and activations of a small model by fused layers; the checkpoint stays the same.

$ python examples/drop_in.py
"""

import torch
from torch import Tensor, nn

from gemm_ops import FusedLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Plain(nn.Module):
    """A feed-forward block as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(320, 1280), nn.GELU(), nn.Linear(1280, 320)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.act(self.up(x)))
        return result


class Fused(nn.Module):
    """The same: the activation has moved into the layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = FusedLinear(320, 1280, epilogue="gelu"), FusedLinear(1280, 320)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x))
        return result


def main() -> None:
    """Compares the two on random data."""
    torch.manual_seed(0)
    plain = Plain().to(DEVICE, DTYPE).eval()
    fused = Fused().to(DEVICE, DTYPE).eval()
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(77, 320, device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        exact = plain.double()(x.double())
        error = (fused(x).double() - exact).norm() / exact.norm()
    print(f"relative error of the fused block: {error.item():.1e}")
    assert error < 1e-2


if __name__ == "__main__":
    main()

"""Modules of every pattern that ``gemm_ops.fuse`` finds, and what it should report of each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layers(nn.Module):
    """Two linear layers of 6 features and some parameters, for the classes below to compute with."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6, bias=bias)
        self.other = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.act = nn.GELU()
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.gamma = nn.Parameter(torch.rand(6))
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mask", (torch.rand(6) > 0.5).float())


class ActivationModule(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.fc(x)))


class InPlaceModule(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.relu(self.fc(x)))


class ActivationFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.fc(x), 0.2)


class ActivationMethod(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).clamp(min=0.1).tanh()


class WrittenOut(Layers):
    """GPT-2's GELU, whose product is read twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


class Swish(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h * torch.sigmoid(1.702 * h)


class Residual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


class ResidualThenActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x) + x)


class ResidualOfDropout(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.fc(x))


class ResidualOfFunctionalDropout(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.fc(x), 0.5, self.training)


class Minus(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sub(x, self.fc(x), alpha=2)


class ScaleByNumber(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x) * 0.125)


class ScaleByParameter(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * self.fc(x)


class LayerScale(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.fc(self.norm(x))


class ScaleByBuffer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) / (1 + self.mask)


class Gate(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.silu(self.fc(x)) * self.other(x))


class GateFirst(Layers):
    """The multiplied half is computed before the activated one."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.other(x)
        return up * F.silu(self.fc(x))


class Elementwise(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(self.fc(x), x, 0.25)


class InPlaceMethod(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x).relu_())


class InPlaceFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.silu(self.fc(x), inplace=True))


class InPlaceByPosition(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.fc(x), True))


class InPlaceResidual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y += x
        return y.mul_(0.5)


class ByKeyword(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(input=self.fc(x), approximate="tanh")


#: The class, the pattern, the steps and operands.
CASES: dict[type[Layers], tuple[str, str]] = {
    ActivationModule: ("activation", "act"),
    InPlaceModule: ("activation", "relu"),
    ActivationFunction: ("activation", "leaky_relu"),
    ActivationMethod: ("activation", "clamp, tanh"),
    WrittenOut: ("activation", "mul, pow, mul, add, mul, tanh, add, mul"),
    Swish: ("activation", "mul, sigmoid, mul"),
    Residual: ("residual", "add(residual)"),
    ResidualThenActivation: ("activation + residual", "add(residual), relu"),
    ResidualOfDropout: ("residual", "dropout, add(residual)"),
    ResidualOfFunctionalDropout: ("residual", "dropout, add(residual)"),
    Minus: ("residual", "sub(residual)"),
    ScaleByNumber: ("scale", "mul"),
    ScaleByParameter: ("scale", "mul(scale)"),
    LayerScale: ("residual + scale", "mul(scale), add(residual)"),
    ScaleByBuffer: ("gate", "truediv(gate)"),
    Gate: ("activation + gate", "silu, mul(gate)"),
    GateFirst: ("activation + gate", "silu, mul(gate)"),
    Elementwise: ("elementwise", "lerp(operand)"),
    ByKeyword: ("activation", "gelu"),
    InPlaceMethod: ("activation", "relu"),
    InPlaceFunction: ("activation", "silu"),
    InPlaceByPosition: ("activation", "relu"),
    InPlaceResidual: ("residual + scale", "add(residual), mul"),
}
each_case = pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)

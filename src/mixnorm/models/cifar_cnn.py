"""The paper's CIFAR CNN: four convolutions with a norm each, and a linear layer (Table "CIFAR CNN architecture")."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Module):
    """Convolution, norm, ReLU: (N, in, H, W) to (N, out, H, W). The norm has its own shift, so the convolution has none."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False)
        self.norm = norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class CifarCNN(nn.Module):
    """(N, 3, 32, 32) to (N, num_classes).

    Args:
        num_classes: 10 or 100 for CIFAR.
        norm: makes a norm from its number of channels; the four are named "conv1.norm" to "conv4.norm".

    Example:
        >>> model = CifarCNN(100)
        >>> mixnorm.convert(model, "conv3.*", num_components=3)
    """

    def __init__(self, num_classes: int = 10, *, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = ConvNorm(3, 64, 5, norm)
        self.conv2 = ConvNorm(64, 128, 5, norm)
        self.conv3 = ConvNorm(128, 128, 5, norm)
        self.conv4 = ConvNorm(128, 256, 3, norm)
        # Rounds up, as the authors' framework does: 32, 16, 8, 4.
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.linear = nn.Linear(256, num_classes)
        self.apply(_lecun_normal)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3):
            x = self.pool(conv(x))
        return self.linear(self.conv4(x).mean((2, 3)))


def _lecun_normal(module: nn.Module) -> None:
    """Weights of deviation 1/√fan_in, which was the authors' framework's default; zero for biases."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        if module.bias is not None:
            nn.init.zeros_(module.bias)

"""Wide ResNet for 32×32 images (Zagoruyko and Komodakis, 2016): norm and ReLU before each convolution, no dropout."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab.models.conv_norm import Norm


class WideBlock(nn.Module):
    """norm, ReLU and 3×3 convolution, twice, added to the input: (N, in, H, W) to (N, out, H/stride, W/stride).

    Where the shapes differ, what is added is a 1×1 convolution of the input after the first norm and ReLU.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm2 = norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        beside = x if self.shortcut is None else self.shortcut(y)
        return beside + self.conv2(F.relu(self.norm2(self.conv1(y))))


class WideResNet(nn.Module):
    """(N, 3, 32, 32) to (N, num_classes), through three stages of blocks. A ReLU follows every norm.

    Args:
        depth: D, the number of layers with weights: 6·n + 4 for n blocks a stage.
        width: W, how many times as wide as the ResNet of 16, 32 and 64 channels.
        num_classes: 10 or 100 for CIFAR.
        norm: makes a norm from its number of channels; they are named "stage1.0.norm1" etc. and "last_norm".

    Example:
        >>> model = WideResNet(16, 4, 100)
        >>> mixnorm.convert(model, activation="relu")
    """

    input_shape = (3, 32, 32)
    layers: ClassVar[dict[str, list[str]]] = {"relu": ["stage*.norm?", "last_norm"], "last_norm": ["last_norm"]}

    def __init__(self, depth: int = 16, width: int = 4, num_classes: int = 10, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            below = max(10, depth - rest)
            raise ValueError(f"depth={depth} is not 6·n + 4 for n blocks a stage: use {below} or {below + 6}")
        channels = 16 * width
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.stage1 = _stage(blocks, 16, channels, 1, norm)
        self.stage2 = _stage(blocks, channels, 2 * channels, 2, norm)
        self.stage3 = _stage(blocks, 2 * channels, 4 * channels, 2, norm)
        self.last_norm = norm(4 * channels)
        self.linear = nn.Linear(4 * channels, num_classes)
        self.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        return self.linear(F.relu(self.last_norm(x)).mean((2, 3)))


def _stage(blocks: int, in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Sequential:
    first = WideBlock(in_channels, out_channels, stride, norm)
    return nn.Sequential(first, *(WideBlock(out_channels, out_channels, 1, norm) for _ in range(blocks - 1)))


def _initialize(module: nn.Module) -> None:
    """As in the authors' code: convolutions of deviation √(2 / (kernel² · in)), no shift in the linear layer."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)

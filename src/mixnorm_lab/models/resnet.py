"""ResNet-18 and ResNet-34 for 32×32 images (He et al., 2016): the stem is a 3×3 convolution, without stride or pooling."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab.models.conv_norm import ConvNorm, Norm

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # in each of the four stages, by the depth


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a norm each, added to their input: (N, in, H, W) to (N, out, H/stride, W/stride).

    A ReLU follows the first norm, and the sum. Where the shapes differ, the input goes through a 1×1 convolution and a norm.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_channels, out_channels, 3, norm, stride=stride)
        self.conv2 = ConvNorm(out_channels, out_channels, 3, norm, then=_unchanged)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = ConvNorm(in_channels, out_channels, 1, norm, stride=stride, then=_unchanged)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(self.conv1(x)) + self.shortcut(x))


class ResNet(nn.Module):
    """(N, 3, 32, 32) to (N, num_classes), through four stages of blocks.

    Args:
        depth: 18 or 34.
        num_classes: 10 or 100 for CIFAR.
        norm: makes a norm from its number of channels. Those that a ReLU follows are "stem.norm" and "stage1.0.conv1.norm"
            etc.; what "stage1.0.conv2.norm" and "stage2.0.shortcut.norm" put out is added first.

    Example:
        >>> model = ResNet(18, 100)
        >>> mixnorm.convert(model, ResNet.layers["relu"], activation="relu")
    """

    input_shape = (3, 32, 32)
    layers: ClassVar[dict[str, list[str]]] = {
        "relu": ["stem.norm", "stage*.conv1.norm"],
        "sum": ["stage*.conv2.norm", "stage*.shortcut.norm"],
    }

    def __init__(self, depth: int = 18, num_classes: int = 10, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        if depth not in BLOCKS:
            raise ValueError(f"depth={depth} is not that of a ResNet here: use {' or '.join(map(str, BLOCKS))}")
        blocks = BLOCKS[depth]
        self.stem = ConvNorm(3, 64, 3, norm)
        self.stage1 = _stage(blocks[0], 64, 64, 1, norm)
        self.stage2 = _stage(blocks[1], 64, 128, 2, norm)
        self.stage3 = _stage(blocks[2], 128, 256, 2, norm)
        self.stage4 = _stage(blocks[3], 256, 512, 2, norm)
        self.linear = nn.Linear(512, num_classes)
        self.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.stem(x)))
        return self.linear(self.stage4(self.stage3(x)).mean((2, 3)))


def _stage(blocks: int, in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride, norm)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels, 1, norm) for _ in range(blocks - 1)))


def _initialize(module: nn.Module) -> None:
    """Convolutions of deviation √(2 / (kernel² · out)), as in the authors' code."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _unchanged(x: Tensor) -> Tensor:
    return x

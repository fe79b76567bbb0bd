"""DenseNet for 32×32 images (Huang et al., 2017): the basic form, without bottlenecks and compression."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab.models.conv_norm import Norm


class DenseLayer(nn.Module):
    """norm, ReLU, 3×3 convolution, beside its input: (N, C, H, W) to (N, C + growth, H, W)."""

    def __init__(self, channels: int, growth: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(F.relu(self.norm(x)))), dim=1)


class Transition(nn.Module):
    """norm, ReLU, 1×1 convolution, average of 2×2: (N, C, H, W) to (N, C, H/2, W/2)."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    """(N, 3, 32, 32) to (N, num_classes), through three dense blocks.

    Args:
        depth: L, the number of layers with weights: 3·n + 4 for n layers a block. 19 is the paper's "20 layers".
        growth: k, the channels that each layer adds.
        num_classes: 10 or 100 for CIFAR.
        norm: makes a norm from its number of channels. Those of the paper's experiments are named "transition1.norm",
            "transition2.norm" and "last_norm".

    Example:
        >>> model = DenseNet(40, 12, 100)
        >>> mixnorm.convert(model, ["transition1.norm", "transition2.norm", "last_norm"], num_components=3)
    """

    input_shape = (3, 32, 32)
    layers: ClassVar[dict[str, list[str]]] = {
        "transition1": ["transition1.norm"],
        "transition2": ["transition2.norm"],
        "last_norm": ["last_norm"],
    }

    def __init__(
        self,
        depth: int = 40,
        growth: int = 12,
        num_classes: int = 10,
        *,
        initial_channels: int = 16,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        layers, rest = divmod(depth - 4, 3)
        if rest or layers < 1:
            below = max(7, depth - rest)
            raise ValueError(f"depth={depth} is not 3·n + 4 for n layers a block: use {below} or {below + 3}")
        channels = initial_channels
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.block1, channels = _block(layers, channels, growth, norm)
        self.transition1 = Transition(channels, norm)
        self.block2, channels = _block(layers, channels, growth, norm)
        self.transition2 = Transition(channels, norm)
        self.block3, channels = _block(layers, channels, growth, norm)
        self.last_norm = norm(channels)
        self.linear = nn.Linear(channels, num_classes)
        self.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transition1(self.block1(self.stem(x)))
        x = self.block3(self.transition2(self.block2(x)))
        return self.linear(F.relu(self.last_norm(x)).mean((2, 3)))


def _block(layers: int, channels: int, growth: int, norm: Norm) -> tuple[nn.Sequential, int]:
    """A dense block, and the channels that leave it."""
    block = nn.Sequential()
    for number in range(1, layers + 1):
        block.add_module(f"layer{number}", DenseLayer(channels, growth, norm))
        channels += growth
    return block, channels


def _initialize(module: nn.Module) -> None:
    """As in the authors' code: convolutions of deviation √(2 / (kernel² · out)), no shift in the linear layer."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)

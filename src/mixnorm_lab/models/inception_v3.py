"""Inception-V3 (Szegedy et al., 2016) for 32×32 images: the paper's form, of output stride 8, without the auxiliary head."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab.models.conv_norm import ConvNorm, Norm, lecun_normal

Conv = tuple[int, int | tuple[int, int]]  # channels out, kernel


class Branches(nn.ModuleList):
    """Branches with one input, their outputs side by side: (N, C, H, W) to (N, sum of their channels, H', W')."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


class PooledConvNorm(ConvNorm):
    """An average of 3×3, then a 1×1 convolution, norm and ReLU.

    The average is taken behind the convolution, which comes to the same, and there are four to ten times fewer channels.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.norm(F.avg_pool2d(self.conv(x), 3, stride=1, padding=1)))


def _ends(layer: str, *convs: str) -> list[str]:
    """The norms of the last convolutions of a layer's branches."""
    return [f"{layer}.{conv}.norm" for conv in convs]


class InceptionV3(nn.Module):
    """(N, 3, 32, 32) to (N, num_classes).

    The first convolution has stride 1 and the first max pooling is left out, as in the paper. The convolutions of the stem
    are padded, while those of stride 2 and the max poolings are not: 32 → 15 → 7 → 3, the paper's final 3×3. (With the
    original's unpadded stem it is 32 → 26 → 12 → 5 → 2.) There is no dropout; the paper has none.

    Names are those of the paper with a dot for the slash: its "inc2/0/2/4", the fifth norm in the third branch of the first
    layer of the second block, is "inc2.0.2.4.norm". Where a branch of the third block forks, each side has a number of its
    own: "inc3.0.1.1.0.norm" and "inc3.0.1.1.1.norm".

    Args:
        num_classes: 10 or 100 for CIFAR.
        norm: makes a norm from its number of channels.

    Example:
        >>> model = InceptionV3(100)
        >>> mixnorm.convert(model, model.layers["inc2/0"] + model.layers["inc3/0"], num_components=5)
    """

    input_shape = (3, 32, 32)
    layers: ClassVar[dict[str, list[str]]] = {
        **{f"inc1/{i}": _ends(f"inc1.{i}", "0.0", "1.1", "2.2", "3.0") for i in range(3)},
        "red1": _ends("red1", "0.0", "1.2"),
        **{f"inc2/{i}": _ends(f"inc2.{i}", "0.0", "1.2", "2.4", "3.0") for i in range(4)},
        "red2": _ends("red2", "0.1", "1.3"),
        **{f"inc3/{i}": _ends(f"inc3.{i}", "0.0", "1.1.0", "1.1.1", "2.2.0", "2.2.1", "3.0") for i in range(2)},
    }

    def __init__(self, num_classes: int = 10, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = _branch(3, [(32, 3), (32, 3), (64, 3), (80, 1), (192, 3)], norm)
        self.pool = nn.MaxPool2d(3, stride=2)
        self.inc1 = nn.Sequential(*[_inc1_layer(c, pooled, norm) for c, pooled in [(192, 32), (256, 64), (288, 64)]])
        self.red1 = Branches(
            [
                _branch(288, [(384, 3)], norm, stride=2),
                _branch(288, [(64, 1), (96, 3), (96, 3)], norm, stride=2),
                nn.MaxPool2d(3, stride=2),
            ]
        )
        self.inc2 = nn.Sequential(*[_inc2_layer(768, narrow, norm) for narrow in (128, 160, 160, 192)])
        self.red2 = Branches(
            [
                _branch(768, [(192, 1), (320, 3)], norm, stride=2),
                _branch(768, [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)], norm, stride=2),
                nn.MaxPool2d(3, stride=2),
            ]
        )
        self.inc3 = nn.Sequential(*[_inc3_layer(c, norm) for c in (1280, 2048)])
        self.linear = nn.Linear(2048, num_classes)
        self.apply(lecun_normal)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inc1(self.pool(self.stem(x)))
        x = self.inc3(self.red2(self.inc2(self.red1(x))))
        return self.linear(x.mean((2, 3)))


def _inc1_layer(channels: int, pooled: int, norm: Norm) -> Branches:
    """(N, channels, H, W) to (N, 224 + pooled, H, W)."""
    return Branches(
        [
            _branch(channels, [(64, 1)], norm),
            _branch(channels, [(48, 1), (64, 5)], norm),
            _branch(channels, [(64, 1), (96, 3), (96, 3)], norm),
            _pool_branch(channels, pooled, norm),
        ]
    )


def _inc2_layer(channels: int, narrow: int, norm: Norm) -> Branches:
    """7×7 convolutions as pairs of 1×7 and 7×1: (N, channels, H, W) to (N, 768, H, W)."""
    return Branches(
        [
            _branch(channels, [(192, 1)], norm),
            _branch(channels, [(narrow, 1), (narrow, (1, 7)), (192, (7, 1))], norm),
            _branch(channels, [(narrow, 1), (narrow, (7, 1)), (narrow, (1, 7)), (narrow, (7, 1)), (192, (1, 7))], norm),
            _pool_branch(channels, 192, norm),
        ]
    )


def _inc3_layer(channels: int, norm: Norm) -> Branches:
    """Two branches fork into 1×3 and 3×1: (N, channels, H, W) to (N, 2048, H, W)."""

    def fork() -> Branches:
        return Branches([ConvNorm(384, 384, (1, 3), norm), ConvNorm(384, 384, (3, 1), norm)])

    return Branches(
        [
            _branch(channels, [(320, 1)], norm),
            _branch(channels, [(384, 1)], norm).append(fork()),
            _branch(channels, [(448, 1), (384, 3)], norm).append(fork()),
            _pool_branch(channels, 192, norm),
        ]
    )


def _branch(channels: int, convs: list[Conv], norm: Norm, *, stride: int = 1) -> nn.Sequential:
    """Convolutions in a row; ``stride`` is the last one's, which is unpadded unless it is 1."""
    branch = nn.Sequential()
    for number, (out, kernel) in enumerate(convs, start=1):
        reduces = stride > 1 and number == len(convs)
        branch.append(ConvNorm(channels, out, kernel, norm, stride=stride if reduces else 1, padded=not reduces))
        channels = out
    return branch


def _pool_branch(channels: int, out: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(PooledConvNorm(channels, out, 1, norm))

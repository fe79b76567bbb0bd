"""The paper's CIFAR CNN: four convolutions with a norm each, and a linear layer (Table "CIFAR CNN architecture")."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from mixnorm_lab.models.conv_norm import ConvNorm, Norm, lecun_normal
from mixnorm_lab.models.relu_max_pool import relu_max_pool


class CifarCNN(nn.Module):
    """(N, 3, 32, 32) to (N, num_classes).

    Args:
        num_classes: 10 or 100 for CIFAR.
        norm: makes a norm from its number of channels; the four are named "conv1.norm" to "conv4.norm".

    Example:
        >>> model = CifarCNN(100)
        >>> mixnorm.convert(model, "conv3.*", num_components=3)
    """

    input_shape = (3, 32, 32)
    layers: ClassVar[dict[str, list[str]]] = {f"conv{i}": [f"conv{i}.norm"] for i in range(1, 5)}

    def __init__(self, num_classes: int = 10, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        # The pooling rounds up, as the authors' framework does: 32, 16, 8, 4.
        self.conv1 = ConvNorm(3, 64, 5, norm, then=relu_max_pool)
        self.conv2 = ConvNorm(64, 128, 5, norm, then=relu_max_pool)
        self.conv3 = ConvNorm(128, 128, 5, norm, then=relu_max_pool)
        self.conv4 = ConvNorm(128, 256, 3, norm)
        self.linear = nn.Linear(256, num_classes)
        self.apply(lecun_normal)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv4(self.conv3(self.conv2(self.conv1(x))))
        return self.linear(x.mean((2, 3)))

"""A perceptron with two hidden layers, for the rows of a table."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab.models.conv_norm import Norm, lecun_normal


class DenseNorm(nn.Module):
    """Linear layer, norm, ReLU: (N, in) to (N, out)."""

    def __init__(self, in_features: int, out_features: int, norm: Norm) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=False)
        self.norm = norm(out_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class MLP(nn.Module):
    """(N, in_features) to (N, num_classes); one class is a number to predict.

    Args:
        width: of both hidden layers.
        norm: makes a norm from its number of channels; the two are named "hidden1.norm" and "hidden2.norm".

    Example:
        >>> model = MLP(30, 2)
        >>> mixnorm.convert(model, "hidden1.norm", num_components=3)
    """

    layers: ClassVar[dict[str, list[str]]] = {f"hidden{i}": [f"hidden{i}.norm"] for i in (1, 2)}

    def __init__(self, in_features: int, num_classes: int, width: int = 128, *, norm: Norm = nn.BatchNorm1d) -> None:
        super().__init__()
        self.hidden1 = DenseNorm(in_features, width, norm)
        self.hidden2 = DenseNorm(width, width, norm)
        self.linear = nn.Linear(width, num_classes)
        self.apply(lecun_normal)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.hidden2(self.hidden1(x)))

"""Instance-enhanced batch norm (Liang et al., 2020): each image scales its channels by what it holds of them itself."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from mixnorm_lab.norms.ghost import GhostBatchNorm

WHOLE = sys.maxsize  # images: all of a batch are one group


class EnhancedBatchNorm(GhostBatchNorm):
    """Batch norm with a gate for each image and channel: (N, C, ...) to the same, y = γ · x̂ · σ(w · m + b) + β.

    m is the mean of the channel over the image as it comes in. As published, w starts at 0 and b at −1. It is no form of
    mixture norm, and says what there is to gain from an image's own statistics. With ``size`` x̂ is ghost batch norm's.
    """

    def __init__(
        self, channels: int, size: int = WHOLE, *, eps: float = 1e-5, momentum: float | None = 0.1
    ) -> None:  # fmt: skip
        super().__init__(channels, size, eps=eps, momentum=momentum)
        self.gate_weight = nn.Parameter(torch.zeros(channels))
        self.gate_bias = nn.Parameter(torch.full((channels,), -1.0))

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        wide = (1, -1, *[1] * (input.dim() - 2))
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        means = x.mean(tuple(range(2, x.dim())), keepdim=True) if x.dim() > 2 else x
        gates = torch.sigmoid(self.gate_weight.view(wide) * means + self.gate_bias.view(wide))
        return torch.lerp(self.bias.view(wide).to(y.dtype), y, gates.to(y.dtype))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}" if self.size == WHOLE else super().extra_repr()

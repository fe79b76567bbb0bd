"""Convolution, norm and ReLU, which several models are made of, and the weights that they start from."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # makes a norm from its number of channels


class ConvNorm(nn.Module):
    """Convolution, norm, ReLU: (N, in, H, W) to (N, out, H, W). The norm has its own shift, so the convolution has none.

    Args:
        kernel: its odd size, or its odd height and width.
        stride: 2 halves the height and width.
        padded: with zeros, so that only the stride changes the height and width.
        then: what follows the norm.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        norm: Norm,
        *,
        stride: int = 1,
        padded: bool = True,
        then: Callable[[Tensor], Tensor] = F.relu,
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded else 0
        self.conv = nn.Conv2d(in_channels, out_channels, (height, width), stride, padding, bias=False)
        self.norm = norm(out_channels)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.norm(self.conv(x)))


def lecun_normal(module: nn.Module) -> None:
    """Weights of deviation 1/√fan_in, which was the authors' framework's default; zero for biases. For ``apply``."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        if module.bias is not None:
            nn.init.zeros_(module.bias)

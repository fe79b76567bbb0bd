"""DCGAN (Radford et al., 2016) for 32×32 images: a generator of one linear and four deconvolution layers, a discriminator.

Sizes are those of chainer-gan-lib, a library for the authors' framework whose defaults (Adam with 0.0002, 0 and 0.9, 100,000
updates, an evaluation every 10,000) are the paper's settings.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab.models.conv_norm import Norm

BOTTOM = 4  # height and width of the smallest map


class DeconvNorm(nn.Module):
    """Deconvolution, norm, ReLU: (N, in, H, W) to (N, out, 2·H, 2·W)."""

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        self.deconv = nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1, bias=False)
        self.norm = norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.deconv(x)))


class LeakyConvNorm(nn.Module):
    """Convolution, norm, leaky ReLU: 3×3 keeps the height and width, 4×4 halves them."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, norm: Norm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride=kernel - 2, padding=1, bias=False)
        self.norm = norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.conv(x)), 0.2)


class Generator(nn.Module):
    """(N, latent), uniform between -1 and 1, to images (N, 3, 32, 32) between -1 and 1.

    Args:
        latent: the dimensions of the noise.
        channels: of the smallest map; each of the first three deconvolutions halves them.
        norm: makes a norm from its number of channels. Those of the paper's experiment are "deconv1.norm" and
            "deconv2.norm"; "deconv3.norm" and "linear_norm" stay batch norms there.

    Example:
        >>> generator = Generator()
        >>> mixnorm.convert(generator, ["deconv1.norm", "deconv2.norm"], num_components=3, em_iters=2)
        >>> images = generator(torch.rand(64, generator.latent) * 2 - 1)
    """

    def __init__(self, latent: int = 128, channels: int = 512, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.latent = latent
        size = channels * BOTTOM**2
        self.linear = nn.Linear(latent, size, bias=False)
        self.linear_norm = norm(size)
        self.deconv1 = DeconvNorm(channels, channels // 2, norm)
        self.deconv2 = DeconvNorm(channels // 2, channels // 4, norm)
        self.deconv3 = DeconvNorm(channels // 4, channels // 8, norm)
        self.deconv4 = nn.ConvTranspose2d(channels // 8, 3, 3, padding=1)
        self.apply(_initialize)

    def forward(self, z: Tensor) -> Tensor:
        # Normalized as a 1×1 map: every unit is a channel of its own, so that one kind of norm fits the whole model.
        x = F.relu(self.linear_norm(self.linear(z)[:, :, None, None]))
        x = x.reshape(len(z), -1, BOTTOM, BOTTOM)
        return torch.tanh(self.deconv4(self.deconv3(self.deconv2(self.deconv1(x)))))


class Discriminator(nn.Module):
    """Images (N, 3, 32, 32) between -1 and 1 to (N,): the log odds that they are real.

    Args:
        channels: of the smallest map, which is 4×4.
        norm: makes a norm from its number of channels; the six are named "conv2.norm" to "conv7.norm". That
            library's have no γ; these have, as PyTorch's do.
    """

    def __init__(self, channels: int = 512, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels // 8, 3, padding=1)
        self.conv2 = LeakyConvNorm(channels // 8, channels // 4, 4, norm)
        self.conv3 = LeakyConvNorm(channels // 4, channels // 4, 3, norm)
        self.conv4 = LeakyConvNorm(channels // 4, channels // 2, 4, norm)
        self.conv5 = LeakyConvNorm(channels // 2, channels // 2, 3, norm)
        self.conv6 = LeakyConvNorm(channels // 2, channels, 4, norm)
        self.conv7 = LeakyConvNorm(channels, channels, 3, norm)
        self.linear = nn.Linear(channels * BOTTOM**2, 1)
        self.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv1(x), 0.2)
        for conv in (self.conv2, self.conv3, self.conv4, self.conv5, self.conv6, self.conv7):
            x = conv(x)
        return self.linear(x.flatten(1)).squeeze(1)


def _initialize(module: nn.Module) -> None:
    """Weights of deviation 0.02, zero for biases."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)

"""Ghost batch norm (Hoffer et al., 2017): batch norm of small groups of the images of a batch; and with a parabola."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mixnorm_lab.internals import Form, Mixture, Parameters, compute_dtype, kernels_for, no_autocast
from mixnorm_lab.norms.any_batch_norm import AnyBatchNorm


class GhostBatchNorm(AnyBatchNorm):
    """Batch norm whose statistics in training are those of ``size`` consecutive images: (N, C, ...) to the same.

    What is left of a batch is a smaller group; a single image that is left joins the group before. The running statistics,
    by which evaluation normalizes, follow the mean of the groups' means and of their variances (with n − 1, as in batch
    norm).
    """

    def __init__(self, channels: int, size: int, *, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.size = size

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        parts, means, variances = [], [], []
        for images, groups in self._grouped(input):
            y, mean, variance = _normalize(images.unflatten(0, (groups, -1)), self._learned(images), self.eps)
            parts.append(y.flatten(0, 1))
            means.append(mean)
            variances.append(variance)
        self._track(torch.cat(means), torch.cat(variances))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _learned(self, x: Tensor) -> Parameters:
        """γ and β, and what else the transform of x learns."""
        precise = compute_dtype(x.dtype)
        return Parameters(self.weight.to(precise), self.bias.to(precise))

    def _grouped(self, x: Tensor) -> list[tuple[Tensor, int]]:
        """The images that make groups of one size, and how many; then those of the last group, if it has another size."""
        whole, rest = divmod(len(x), self.size)
        if rest == 1 and whole > 0:
            whole, rest = whole - 1, self.size + 1
        if not whole or not rest:  # a split would be one more copy of the gradient
            return [(x, whole or 1)]
        first, last = x.split([len(x) - rest, rest])
        return [(first, whole), (last, 1)]

    @torch.no_grad()
    def _track(self, means: Tensor, variances: Tensor) -> None:
        """Statistics of all groups, (groups, C)."""
        share = self.count_batch()
        self.running_mean.lerp_(means.mean(0).to(self.running_mean), share)
        self.running_var.lerp_(variances.mean(0).to(self.running_var), share)

    def extra_repr(self) -> str:
        return f"{self.num_features}, size={self.size}, eps={self.eps}, momentum={self.momentum}"


class GhostParabola(GhostBatchNorm):
    """Ghost batch norm with a parabola: γ (x̂ + d (x̂² − 1)/√2) + β, with one d for each channel that starts at 0.

    This is mixture norm with ``deviation="learned"`` and one component, but for the groups: its noise without its modes.
    """

    def __init__(self, channels: int, size: int, *, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(channels, size, eps=eps, momentum=momentum)
        self.deviation_weight = nn.Parameter(torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return super().forward(input)
        self._check_input_dim(input)
        precise = compute_dtype(input.dtype)
        weight, bias, mean, variance, deviation = (
            t.view(-1, *[1] * (input.dim() - 2))
            for t in (self.weight, self.bias, self.running_mean, self.running_var, self.deviation_weight)
        )
        normalized = (input.to(precise) - mean) * (variance + self.eps).rsqrt()
        curved = normalized + deviation * (normalized.square() - 1) / math.sqrt(2)
        return (weight * curved + bias).to(input.dtype)

    def _learned(self, x: Tensor) -> Parameters:
        return super()._learned(x)._replace(deviation=self.deviation_weight.to(compute_dtype(x.dtype)))


def _normalize(x: Tensor, parameters: Parameters, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Groups (G, n, C, ...) normalized, and their means and variances, (G, C): a mixture norm of one component each."""
    groups, images, channels = x.shape[:3]
    points = x.reshape(groups, images, channels, -1).transpose(2, 3)  # of the library's kernels
    count = points.shape[1] * points.shape[2]
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel in a group when training, got groups {tuple(x.shape[1:])}")
    precise = compute_dtype(x.dtype)
    with no_autocast(x):
        # Every point belongs to the only component, wherever that is; sums are taken about its mean.
        near = points.detach()[:, :1].to(precise).mean((1, 2)).unsqueeze(1)
        only = Mixture(near.new_ones(groups, 1), near, torch.ones_like(near))
        y, found = kernels_for(points, 1, "auto").transform(points, only, parameters, Form(eps))
    mean, variance = found.means.squeeze(1), found.variances.squeeze(1)
    return y.transpose(2, 3).reshape(x.shape), mean, variance * (count / (count - 1))

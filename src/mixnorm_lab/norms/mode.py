"""Mode normalization (Deecke, Murray and Bilen, 2019): several modes, between which a small network shares each image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixnorm_lab.norms.any_batch_norm import AnyBatchNorm


class ModeNorm(AnyBatchNorm):
    """Mode norm: (N, C, ...) to the same, y_n = γ·Σ_k g_nk·(x_n − μ_k)/√(σ²_k + ε) + β.

    The gates g_n, which sum to 1, are the softmax of a linear layer on the averages of an image's channels. μ_k and σ²_k are
    the mean and variance of a batch with the weights g_nk. Gradients go through all of it, the gates as well. The running
    first and second moments of each mode, as published, are kept as a mean and a variance (modes, C); evaluation uses them.
    """

    def __init__(self, channels: int, modes: int, *, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.modes = modes
        self.gate = nn.Linear(channels, modes)
        self.running_mean = torch.zeros(modes, channels)
        self.running_var = torch.ones(modes, channels)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)  # (N, C, P)
        # Products and sums in place of matrices, which are small here: autocast would take those in bf16.
        variances, averages = torch.var_mean(x, 2, correction=0)  # of each image, (N, C)
        scores = (averages.unsqueeze(1) * self.gate.weight).sum(2) + self.gate.bias
        gates = scores.softmax(1).unsqueeze(2)  # (N, K, 1)
        if self.training:
            shares = gates / gates.sum(0)
            mean = (shares * averages.unsqueeze(1)).sum(0)  # (K, C)
            apart = (averages.unsqueeze(1) - mean).square()  # (N, K, C)
            variance = (shares * (variances.unsqueeze(1) + apart)).sum(0)
            self._track(mean.detach(), variance.detach())
        else:
            mean, variance = self.running_mean, self.running_var
        scales = (variance + self.eps).rsqrt()
        # Around a centre, because the sum over the modes is of products with the means, which may be large.
        centre = averages.detach().mean(0) if self.training else mean.mean(0)
        slope = (gates * scales).sum(1) * self.weight
        shift = (gates * scales * (centre - mean)).sum(1) * self.weight + self.bias
        y = torch.addcmul(shift.unsqueeze(2), x - centre.unsqueeze(1), slope.unsqueeze(2))
        return y.view(input.shape).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Lets the statistics of a batch into the running ones: the moments that both have are averaged."""
        share = self.count_batch()
        apart = mean.to(self.running_mean) - self.running_mean
        self.running_var.lerp_(variance.to(self.running_var), share).add_(share * (1 - share) * apart.square())
        self.running_mean.add_(share * apart)

    def extra_repr(self) -> str:
        return f"{self.num_features}, modes={self.modes}, eps={self.eps}, momentum={self.momentum}"

"""Batch renormalization (Ioffe, 2017): batch norm that is corrected towards its running statistics, more and more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mixnorm_lab.norms.any_batch_norm import AnyBatchNorm

WARMUP = 5000  # steps in which it is batch norm, as published
R_MAX, D_MAX = 3.0, 5.0
R_REACHED, D_REACHED = 8, 5  # times the warm-up: 40,000 and 25,000 steps, as published
MOMENTUM = 0.01


class BatchRenorm(AnyBatchNorm):
    """Batch renorm: (N, C, ...) to the same, y = γ·((x − μ_B)/σ_B · r + d) + β in training.

    r = σ_B/σ, between 1/r_max and r_max, and d = (μ_B − μ)/σ, between −d_max and d_max, are taken for constants; μ and σ are
    the running mean and deviation before this batch, and σ_B² has ε inside. r_max is 1 and d_max 0 for ``warmup`` batches;
    then they rise linearly, to 3 after 8 and to 5 after 5 times as many. Evaluation normalizes by μ and σ.
    ``running_var`` holds σ² − ε, whose root is what is averaged.
    """

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float | None = MOMENTUM, warmup: int = WARMUP) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.warmup = warmup

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        r, d = self._corrections(input)
        return F.batch_norm(input, None, None, self.weight * r, self.weight * d + self.bias, training=True, eps=self.eps)

    @torch.no_grad()
    def _corrections(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """r and d (C,) of a batch, which then enters the running statistics."""
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(values, (0, *range(2, x.dim())), correction=0)
        deviation, running = ((v + self.eps).sqrt() for v in (variance.to(self.running_var), self.running_var))
        mean = mean.to(self.running_mean)
        r_max, d_max = self.limits(self.num_batches_tracked)
        r = (deviation / running).clamp(r_max.reciprocal(), r_max)
        d = ((mean - self.running_mean) / running).clamp(-d_max, d_max)
        share = self.count_batch()
        self.running_mean.lerp_(mean, share)
        self.running_var.copy_(running.lerp_(deviation, share).square_().sub_(self.eps).clamp_min_(0))
        return r, d

    def limits(self, batches: Tensor) -> tuple[Tensor, Tensor]:
        """r_max and d_max after a number of batches."""
        since = batches.double() / self.warmup - 1
        r_max = 1 + (R_MAX - 1) * (since / (R_REACHED - 1)).clamp(0, 1)
        return r_max, D_MAX * (since / (D_REACHED - 1)).clamp(0, 1)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, warmup={self.warmup}"

"""Batch norm with dropout behind it: noise that does not come from the batch."""

from __future__ import annotations

from torch import Tensor, nn

from mixnorm_lab.norms.any_batch_norm import AnyBatchNorm


class BatchNormDropout(nn.Module):
    """Batch norm, and behind it dropout of single values with probability ``p``: (N, C, ...) to the same.

    They are two modules, so that statistics are refilled without dropout.
    """

    def __init__(self, channels: int, p: float, *, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = AnyBatchNorm(channels, eps=eps, momentum=momentum)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(x))

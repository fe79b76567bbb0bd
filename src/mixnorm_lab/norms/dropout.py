"""Batch norm with dropout behind it: noise that does not come from the batch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormDropout(nn.Module):
    """Batch norm, and behind it dropout of single values with probability ``p``: (N, C, ...) to the same.

    They are two modules, so that statistics are refilled without dropout.
    """

    def __init__(self, channels: int, p: float, *, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = AnyBatchNorm(channels, eps, momentum)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(x))


class AnyBatchNorm(_BatchNorm):
    """Batch norm of inputs with any number of dimensions from two on."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (N, C, ...), but got one of shape {tuple(input.shape)}")

"""Batch norm of inputs with any number of dimensions, and what norms with running statistics have in common with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class AnyBatchNorm(_BatchNorm):
    """Batch norm of (N, C, ...), from two dimensions on. It always has γ, β and running statistics."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(channels, eps, momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (N, C, ...), but got one of shape {tuple(input.shape)}")

    @torch.no_grad()
    def count_batch(self) -> Any:
        """Counts a batch; returns its share in the running statistics. That is not read back from the device."""
        self.num_batches_tracked += 1
        if self.momentum is None:
            return self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        return self.momentum

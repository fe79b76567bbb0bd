"""Norms that take their statistics from the batches of all ranks together, on a GPU and on a CPU alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mixnorm import synchronize
from mixnorm_lab.training.mixtures import mixture_norms


class _Sum(torch.autograd.Function):
    """The sum over all ranks. Its gradient is that of all ranks' losses together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class _Shared(nn.modules.batchnorm._BatchNorm):
    """A batch norm of all ranks' batches, which are of one size. ``nn.SyncBatchNorm`` is the same for GPUs alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        others, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        count = dist.get_world_size() * x.numel() // x.shape[1]
        mean = _Sum.apply(values.sum(others)) / count
        centered = values - mean.view(shape)
        variance = _Sum.apply(centered.square().sum(others)) / count
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        y = centered * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


class SharedBatchNorm1d(_Shared, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over the batches of all ranks."""


class SharedBatchNorm2d(_Shared, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over the batches of all ranks."""


class SharedBatchNorm3d(_Shared, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over the batches of all ranks."""


_SHARED_OF: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SharedBatchNorm1d,
    nn.BatchNorm2d: SharedBatchNorm2d,
    nn.BatchNorm3d: SharedBatchNorm3d,
}


def share_norms(model: nn.Module) -> None:
    """Makes batch norms and mixture norms take all ranks' statistics, in place. The state dict stays as it is."""
    for module in model.modules():
        if type(module) in _SHARED_OF:
            module.__class__ = _SHARED_OF[type(module)]
    if mixture_norms(model):
        synchronize(model)

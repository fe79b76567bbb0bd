"""Ghost batch norm (Hoffer et al., 2017): batch norm of small groups of the images of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
            y, mean, variance = _normalize(images.unflatten(0, (groups, -1)), self.weight, self.bias, self.eps)
            parts.append(y.flatten(0, 1))
            means.append(mean)
            variances.append(variance)
        self._track(torch.cat(means), torch.cat(variances))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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


def _normalize(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Groups (G, n, C, ...) normalized, and their means and variances, (G, C)."""
    count = x.numel() // (x.shape[0] * x.shape[2])
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel in a group when training, got groups {tuple(x.shape[1:])}")
    y, mean, variance = _Normalize.apply(x, weight, bias, eps)
    return y, mean, variance * (count / (count - 1))


class _Normalize(torch.autograd.Function):
    """The transform with its gradient, in few passes over the values, whatever their memory format is: autograd would keep
    and write several tensors of the size of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        dims, count, precise = _others(x), x.numel() // (x.shape[0] * x.shape[2]), _precise(x)
        mean = x.sum(dims, keepdim=True, dtype=precise) / count
        centered = x - mean
        variance = torch.linalg.vector_norm(centered, 2, dims, keepdim=True).square_() / count
        inverse = (variance + eps).rsqrt_()
        y = torch.addcmul(_wide(bias, x), centered, inverse * _wide(weight, x)).to(x.dtype)
        # In the precision of the input, which keeps no more memory than batch norm does.
        ctx.save_for_backward(centered.to(x.dtype), inverse, weight)
        mean, variance = mean.flatten(1), variance.flatten(1)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        centered, inverse, weight = ctx.saved_tensors
        dims, count, precise = _others(grad), grad.numel() // (grad.shape[0] * grad.shape[2]), _precise(grad)
        total = grad.sum(dims, keepdim=True, dtype=precise)
        along = (grad.to(precise) * centered).sum(dims, keepdim=True) * inverse  # Σ dy·x̂
        grad_weight, grad_bias = (value.sum(0).flatten().to(weight.dtype) for value in (along, total))
        # dx = scale·(dy − mean(dy) − x̂·mean(dy·x̂)), in two passes.
        scale = inverse * _wide(weight, grad)
        grad_x = torch.addcmul(scale * total / -count, centered, scale * inverse * along / -count).addcmul_(grad, scale)
        return grad_x.to(grad.dtype), grad_weight, grad_bias, None


def _others(x: Tensor) -> tuple[int, ...]:
    """All dimensions of (G, n, C, ...) but those of groups and channels."""
    return 1, *range(3, x.dim())


def _precise(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _wide(values: Tensor, x: Tensor) -> Tensor:
    """(C,) beside (G, n, C, ...)."""
    return values.view(-1, *[1] * (x.dim() - 3))

"""ReLU and 3×3 max pooling of stride 2, which the CIFAR CNN has after its first three norms."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE, STRIDE = 3, 2
HAS_TRITON = importlib.util.find_spec("triton") is not None


def relu_max_pool(x: Tensor) -> Tensor:
    """(N, C, H, W) to (N, C, ⌊H/2⌋, ⌊W/2⌋): the last windows may reach over the edge.

    ReLU commutes with the maximum, and has a fourth of the values to do after it. The gradients are the same, too: a window
    without a positive value passes none on in either order.
    """
    if _takes_kernel(x):
        from mixnorm_lab.models.relu_max_pool_kernel import ReluMaxPool

        return ReluMaxPool.apply(x, SIZE, STRIDE)  # type: ignore[no-any-return]
    return F.relu(F.max_pool2d(x, SIZE, STRIDE, ceil_mode=True))


def _takes_kernel(x: Tensor) -> bool:
    """In channels_last, where PyTorch's pooling takes a quarter of the training step of the CIFAR CNN."""
    if not (x.is_cuda and HAS_TRITON and x.is_contiguous(memory_format=torch.channels_last)):
        return False
    fits = min(x.shape[1:]) >= STRIDE and x.numel() < 2**31
    return fits and not torch.compiler.is_compiling()

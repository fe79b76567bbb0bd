"""The optimizer of a run, and its learning rate, which may change between two replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mixnorm.experiments import config

RMSPROP_EPS = 1e-8  # the default of the paper's framework, added to the root, as here


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: config.Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Weight decay is added to the gradient. On a GPU a step can be captured, and the learning rate is a tensor there."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    on_gpu = device.type == "cuda"
    common: dict[str, Any] = {
        "lr": torch.tensor(settings.lr, device=device) if on_gpu else settings.lr,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "rmsprop":
        return torch.optim.RMSprop(wanted, alpha=settings.smoothing, eps=RMSPROP_EPS, capturable=on_gpu, **common)
    if settings.name == "nesterov":
        return torch.optim.SGD(wanted, momentum=settings.momentum, nesterov=settings.momentum > 0, fused=on_gpu, **common)
    return torch.optim.Adam(wanted, capturable=on_gpu, fused=on_gpu, **common)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # in place: a captured step reads this address
        else:
            group["lr"] = rate

"""The optimizer of a run, and its learning rate, which may change between two replays of a CUDA graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm_lab.config.parts.optimizer import Optimizer

RMSPROP_EPS = 1e-8  # the default of the paper's framework, added to the root, as here


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: Optimizer, device: torch.device, of_norms: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """An optimizer that adds weight decay to the gradient, unless it is AdamW. On a GPU a step can be captured, and the rate
    is a tensor.

    With ``decayed="weights"`` biases and norms are left out: what has one dimension, and ``of_norms``, which may have more.
    """
    wanted: Any = [parameter for parameter in parameters if parameter.requires_grad]
    if settings.decayed == "weights":
        known = {id(parameter) for parameter in of_norms}
        spared = [parameter for parameter in wanted if parameter.dim() < 2 or id(parameter) in known]
        decayed = [parameter for parameter in wanted if parameter.dim() >= 2 and id(parameter) not in known]
        wanted = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    on_gpu = device.type == "cuda"
    common: dict[str, Any] = {
        "lr": torch.tensor(settings.lr, device=device) if on_gpu else settings.lr,
        "weight_decay": settings.weight_decay,
    }
    optimizer: torch.optim.Optimizer
    if settings.name == "rmsprop":
        kind = _rmsprop(on_gpu)
        optimizer = kind(wanted, alpha=settings.smoothing, eps=RMSPROP_EPS, capturable=on_gpu, **common)
    elif settings.name in ("nesterov", "sgd"):
        momentum = settings.momentum
        nesterov = settings.name == "nesterov" and momentum > 0
        optimizer = torch.optim.SGD(wanted, momentum=momentum, nesterov=nesterov, fused=on_gpu, **common)
    else:
        adam = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
        optimizer = adam(wanted, betas=settings.betas, capturable=on_gpu, fused=on_gpu, **common)
    if on_gpu:
        optimizer.register_step_pre_hook(align_gradients)
    return optimizer


def _rmsprop(on_gpu: bool) -> type[torch.optim.RMSprop]:
    if on_gpu and importlib.util.find_spec("triton") is not None:
        from mixnorm_lab.training.fused_rmsprop import FusedRMSprop

        return FusedRMSprop
    return torch.optim.RMSprop


def align_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Gives every gradient the strides of its parameter.

    Autograd does so too, but for dimensions of one. Where those differ, as they may in channels_last, a fused step is an
    error, and others go through the parameters one by one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def follow_rates(optimizer: torch.optim.Optimizer, rates: Tensor, number: Tensor) -> None:
    """Gives every step of an optimizer the rate of its number, from now on. Both tensors may change between two steps.

    Where the rate is a tensor, it is copied on the device, so that a captured step has a new one in each replay.
    """

    def take(*_: Any) -> None:
        rate = rates.index_select(0, number.view(1))[0]
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = float(rate)

    optimizer.register_step_pre_hook(take)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # in place: a captured step reads this address
        else:
            group["lr"] = rate

"""Whole models: how they are built, with which norms, and their training step and evaluation, as the trainer has them.

The library is loaded where a model has a norm of it: a new process that trains batch norm does without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab import models

# What mixture norms are converted with, in all places; "gated" is what mixnorm.convert makes by itself.
FORMS: dict[str, dict[str, Any]] = {
    "paper": {"form": "paper"},
    "relu": {"form": "paper", "activation": "relu"},  # inside the sum, where a ReLU follows
    "ahead": {"form": "paper", "fit": "ahead"},
    "gated": {"form": "gated"},
}
RESNET_50 = "resnet-50"
LIBRARIES = ("torchvision:resnet50", "timm:resnet50")  # the first that is there; both have the same names
NO_RELU_IN_RESNET_50 = ("layer*.bn3", "layer*.downsample.1")  # norms whose output is added first
RATE = 1e-3  # low, because one batch is repeated a few thousand times


def num_classes(model: str) -> int:
    return {RESNET_50: 1000, "digits-cnn": 10}.get(model, 100)


def build(model: str, shape: tuple[int, ...]) -> nn.Module:
    """A new model with batch norms, for images of this shape (C, H, W), with the same weights every time."""
    torch.manual_seed(0)
    if model != RESNET_50:
        return models.build(model, num_classes(model), shape)
    for name in LIBRARIES:
        try:
            return models.build(name, num_classes(model), shape)
        except ValueError:  # the package is not there, or is for another PyTorch
            continue
    raise ValueError(f"{RESNET_50} is skipped, because neither torchvision nor timm is here: pip install torchvision")


def with_mixture_norms(model: nn.Module, name: str, form: str, **options: Any) -> nn.Module:
    """Replaces all batch norms by mixture norms of one of ``FORMS``, in place; ``name`` is the model's."""
    from mixnorm import MixtureNorm2d, convert

    convert(model, "*", **FORMS[form], **options)
    sums = NO_RELU_IN_RESNET_50 if name == RESNET_50 else models.without_relu(name)
    for place, norm in model.named_modules():
        if isinstance(norm, MixtureNorm2d) and any(fnmatchcase(place, glob) for glob in sums):
            norm.activation = None
    return model


def with_norm(model: nn.Module, norm: str) -> nn.Module:
    """Replaces all batch norms by a norm to compare with, such as "ghost-32", in place."""
    from mixnorm_lab.norms import replace_norms

    return replace_norms(model, norm)


def autocast(images: Tensor, bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast(images.device.type, torch.bfloat16) if bf16 else nullcontext()


def training(
    model: nn.Module, images: Tensor, labels: Tensor, *, bf16: bool = False, torch_compile: bool = False, rate: float = RATE
) -> Callable[[], None]:
    """A step as in the paper and the trainer: Nesterov momentum of 0.9, weight decay of 1e-4; the weights are fp32."""
    model.to(images.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=1e-4)
    forward = torch.compile(model) if torch_compile else model

    def step() -> None:
        with autocast(images, bf16):
            logits = forward(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        # At the end, not at the start: a capture then begins, and ends, without gradients.
        optimizer.zero_grad(set_to_none=True)

    return step


def evaluation(model: nn.Module, images: Tensor, *, history: int, bf16: bool = False) -> Callable[[], None]:
    """A forward pass in evaluation, after as many batches as the history of a mixture norm holds."""
    model.to(images.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]

    def forward() -> None:
        with torch.no_grad(), autocast(images, bf16):
            model(images)

    for _ in range(history):
        forward()
    model.eval()
    return forward

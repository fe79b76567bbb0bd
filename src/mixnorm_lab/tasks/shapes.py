"""How outputs and labels fit together: classes, pixels, probabilities, numbers, or not at all."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a label that counts for nothing, as PyTorch's cross-entropy has it
Kind = Literal["classes", "masks", "binary", "either", "values"]


def kind_of(logits: Tensor, labels: Tensor) -> Kind:
    """What labels say of outputs.

    "classes" are whole numbers, one for each row or token, or rows of probabilities; "masks" are a class for each pixel;
    "binary" are 0 and 1 for a single output; "either" are floats that could be such as well; "values" are other floats.

    Raises:
        ValueError: they do not fit; says what the labels are, what the model gave, and what to do.
    """
    if labels.is_floating_point():
        if is_probabilities(logits, labels):
            return "classes"
        if not same_size(logits, labels):
            raise ValueError(_unfit(logits, labels, "return as many numbers as there are labels"))
        return "either" if bool(((labels == 0) | (labels == 1)).all()) else "values"
    whole = squeezed(logits, labels)
    if same_size(logits, labels):
        if bool(((labels == 0) | (labels == 1)).all()):
            return "binary"
        raise ValueError(
            _unfit(
                logits, labels, "return one output for each class, or make the labels floats if they are numbers to predict"
            )
        )
    dimension = class_dimension(logits, whole)
    if dimension is None:
        raise ValueError(_unfit(logits, labels, "return one output for each class, (N, classes) or (N, classes, H, W)"))
    _check_range(whole, logits.shape[dimension])
    return "masks" if whole.dim() == 3 else "classes"


def is_probabilities(logits: Tensor, labels: Tensor) -> bool:
    """Whether labels are probabilities of classes, such as one-hot rows."""
    if not labels.is_floating_point() or logits.dim() != 2 or labels.shape != logits.shape or labels.shape[1] < 2:
        return False
    return bool((labels >= 0).all()) and bool(((labels.sum(1) - 1).abs() < 1e-3).all())


def class_dimension(logits: Tensor, labels: Tensor) -> int | None:
    """Which dimension of the output the classes are in: the second as in PyTorch, or the last as of tokens."""
    if logits.dim() == labels.dim() + 1 and logits.shape[0] == labels.shape[0]:
        if logits.shape[2:] == labels.shape[1:]:
            return 1
        if logits.shape[:-1] == labels.shape:
            return logits.dim() - 1
    return None


def squeezed(logits: Tensor, labels: Tensor) -> Tensor:
    """Whole labels (N, 1, ...) as (N, ...) where the output has classes in their place."""
    if labels.dim() == logits.dim() and labels.dim() >= 2 and labels.shape[1] == 1 and logits.shape[1] > 1:
        return labels.squeeze(1)
    return labels


def with_classes_second(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Output (N, C, ...) and labels (N, ...) in int64, or probabilities, as PyTorch's cross-entropy takes them."""
    if labels.is_floating_point():
        return logits, labels
    labels = squeezed(logits, labels).long()
    if logits.dim() > 2 and class_dimension(logits, labels) == logits.dim() - 1 != 1:
        logits = logits.movedim(-1, 1)
    return logits, labels


def like(logits: Tensor, labels: Tensor) -> Tensor:
    """An output in the shape of its labels: (N, 1) against (N,) would else be compared as (N, N)."""
    if not same_size(logits, labels):
        raise ValueError(_unfit(logits, labels, "return as many numbers as there are labels"))
    return logits.reshape(labels.shape)


def at_size(logits: Tensor, labels: Tensor) -> Tensor:
    """Outputs for pixels at the size of the masks, which models with a loss of their own may leave smaller."""
    if logits.dim() == 4 and labels.dim() == 3 and logits.shape[2:] != labels.shape[1:]:
        return F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)
    return logits


def same_size(logits: Tensor, labels: Tensor) -> bool:
    return logits.numel() == labels.numel() and logits.shape[:1] == labels.shape[:1]


def _check_range(labels: Tensor, classes: int) -> None:
    known = labels[labels != IGNORED]
    low, high = (int(known.min()), int(known.max())) if known.numel() else (0, 0)
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        remedy = "number the classes from 0"
        if wrong == 255:
            remedy = f"give the model more of them, or mark pixels to leave out with {IGNORED}"
        elif low >= 0:
            remedy = f"give the model at least {high + 1}, or number the classes from 0"
        raise ValueError(
            f"the labels hold {wrong}, but the model has {classes} outputs, for classes 0 to {classes - 1}: {remedy}"
        )


def _unfit(logits: Tensor, labels: Tensor, remedy: str) -> str:
    what = "floats" if labels.is_floating_point() else "whole numbers"
    return (
        f"the labels are {what} of the shape {tuple(labels.shape)}, but the model's output has the shape "
        f"{tuple(logits.shape)}: {remedy}, or choose a --loss or --step of your own"
    )

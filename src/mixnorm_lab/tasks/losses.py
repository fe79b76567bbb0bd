"""Losses by name, of outputs and labels of any shapes that fit together."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mixnorm_lab.config.losses import ABSOLUTE, BINARY, CROSS_ENTROPY, SQUARED
from mixnorm_lab.tasks.shapes import like, with_classes_second


def loss_of(name: str, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean loss of a batch."""
    if name == CROSS_ENTROPY:
        logits, labels = with_classes_second(logits, labels)
        return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    logits, labels = like(logits, labels), labels.float()
    if name == SQUARED:
        return F.mse_loss(logits, labels)
    if name == ABSOLUTE:
        return F.l1_loss(logits, labels)
    if name == BINARY:
        return F.binary_cross_entropy_with_logits(logits, labels)
    raise ValueError(f"there is no loss {name!r} here: choose another --loss")

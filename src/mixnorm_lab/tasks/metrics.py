"""Metrics over all batches of an evaluation: each adds up what it needs on the device, and gives a number in the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixnorm_lab.config.metrics import ACCURACY
from mixnorm_lab.tasks.shapes import IGNORED, class_dimension, is_probabilities, like, with_classes_second

Add = Callable[[Tensor], Tensor]  # a sum over the processes that evaluate together


class Total(ABC):
    """A metric of the batches so far."""

    @abstractmethod
    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, count: int) -> None:
        """One more batch, of ``count`` samples with this mean loss."""

    @abstractmethod
    def value(self, everywhere: Add) -> float: ...


class Mean(Total):
    """The mean of something over all samples, or over all numbers that they have."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def note(self, total: Tensor, count: Tensor | float) -> None:
        new = torch.stack((total.detach().double(), torch.as_tensor(count, dtype=torch.float64, device=total.device)))
        self.sums = new if self.sums is None else self.sums + new

    def value(self, everywhere: Add) -> float:
        if self.sums is None:
            return float("nan")
        total, count = everywhere(self.sums).tolist()
        return total / count if count else float("nan")


class MeanLoss(Mean):
    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, count: int) -> None:
        self.note(loss * count, count)


class Error(Mean):
    """The share of wrong answers."""

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, count: int) -> None:
        wrong, known = wrong_answers(logits, labels)
        self.note(wrong.sum(), known.sum())

    def value(self, everywhere: Add) -> float:
        return torch.tensor(super().value(everywhere), dtype=torch.float32).item()  # the digits that records have had


class SquaredError(Mean):
    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, count: int) -> None:
        errors = (like(logits, labels) - labels.float()).square()
        self.note(errors.double().sum(), errors.numel())


class MeanIoU(Total):
    """The mean over the classes of intersection over union, of all pixels taken together. Classes that are neither there nor
    predicted do not count."""

    def __init__(self) -> None:
        self.confusion: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, count: int) -> None:
        if logits.numel() == labels.numel():  # one output: background and object
            classes, found, truth = 2, (like(logits, labels) > 0).long(), (labels > 0.5).long()
        else:
            logits, truth = with_classes_second(logits, labels)
            classes, found = logits.shape[1], logits.argmax(1)
        known = (truth >= 0) & (truth < classes)
        pairs = torch.bincount((truth[known] * classes + found[known]).flatten(), minlength=classes * classes)
        new = pairs.view(classes, classes).double()
        self.confusion = new if self.confusion is None else self.confusion + new

    def value(self, everywhere: Add) -> float:
        if self.confusion is None:
            return float("nan")
        pairs = everywhere(self.confusion)
        both = pairs.diagonal()
        either = pairs.sum(0) + pairs.sum(1) - both
        return (both[either > 0] / either[either > 0]).mean().item()


class Function(Mean):
    """A function of the user's own, (output, labels) to a number; the mean over the batches, by their samples."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, count: int) -> None:
        found = torch.as_tensor(self.function(logits, labels), device=logits.device)
        if found.numel() != 1:
            raise ValueError(f"the metric returns a tensor of the shape {tuple(found.shape)}: it must return one number")
        self.note(found.reshape(()) * count, count)


class Accumulating(Total):
    """An object of the user's own that adds up batches by ``reset``, ``update`` and ``compute``, as torchmetrics' do."""

    def __init__(self, own: Any) -> None:
        self.own = own
        own.reset()

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, count: int) -> None:
        if callable(getattr(self.own, "to", None)):
            self.own = self.own.to(logits.device)
        self.own.update(logits, labels)

    def value(self, everywhere: Add) -> float:
        return float(self.own.compute())


BY_NAME: dict[str, Callable[[], Total]] = {
    ACCURACY.name: Error,
    "mean squared error": SquaredError,
    "mean IoU": MeanIoU,
    "loss": MeanLoss,
}


def total_of(name: str, function: Callable[..., Any] | None) -> Total:
    """A metric before its first batch. That of accuracy is the share of wrong answers."""
    if function is None:
        return BY_NAME[name]()
    if all(callable(getattr(function, part, None)) for part in ("reset", "update", "compute")):
        return Accumulating(function)
    return Function(function)


def wrong_answers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """For each label whether the answer is wrong, and whether the label counts. What is not a number is wrong."""
    if is_probabilities(logits, labels):
        labels = labels.argmax(1)
    if logits.numel() == labels.numel():  # one output, of which 0 is the border
        logits = like(logits, labels)
        return ((logits > 0) != (labels > 0.5)) | logits.isnan(), torch.ones_like(labels, dtype=torch.bool)
    logits, labels = with_classes_second(logits, labels)
    if class_dimension(logits, labels) is None:
        raise ValueError(
            f"labels of the shape {tuple(labels.shape)} and an output of the shape {tuple(logits.shape)} have no accuracy: "
            "choose another --metric"
        )
    known = labels != IGNORED
    return ((logits.argmax(1) != labels) | logits.isnan().any(1)) & known, known

"""What one run does with a batch: its loss in training, and its loss and metric in an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm_lab.config.losses import CROSS_ENTROPY, OF_MODEL
from mixnorm_lab.config.metrics import ACCURACY
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data import batches
from mixnorm_lab.own import functions
from mixnorm_lab.tasks import losses, metrics
from mixnorm_lab.tasks.forward import Fed, call, each_alone, logits_of, own_loss
from mixnorm_lab.tasks.shapes import at_size, like, same_size

Run = AbstractContextManager[Any]


@dataclass(frozen=True)
class Passed:
    """A batch that went through the model: the mean loss, and what a metric is of, if anything."""

    loss: Tensor
    logits: Tensor | None
    labels: Any


class Task:
    """The loss and the metric of a run.

    Args:
        loss, metric, step, metric_function: as ``RunConfig`` has them.

    Attributes:
        plain: whether they are those of a classifier that this package knows, of images and labels as tensors: then a step
            holds nothing of the user's, and can be captured.
    """

    def __init__(
        self,
        loss: str = CROSS_ENTROPY,
        metric: str = ACCURACY.name,
        *,
        step: str = "",
        metric_function: str = "",
        label_smoothing: float = 0.0,
    ) -> None:
        self.loss = loss
        self.metric = metric
        self.label_smoothing = label_smoothing
        self.step = functions.find(step) if step else None
        self._own_loss = _made(functions.find(loss)) if ":" in loss else None
        self._own_metric = _made(functions.find(metric_function)) if metric_function else None
        self.plain = loss == CROSS_ENTROPY and metric == ACCURACY.name and self.step is None
        self.judges_by_accuracy = metric == ACCURACY.name
        self._looks_at_outputs = self.step is None or metric != "loss"

    @classmethod
    def of(cls, config: RunConfig) -> Task:
        return cls(
            config.loss,
            config.metric,
            step=config.step,
            metric_function=config.metric_function,
            label_smoothing=config.label_smoothing,
        )

    def train(self, model: nn.Module, batch: Any, autocast: Run, through: Callable[..., Any] | None = None) -> Passed:
        """The forward pass of a training step. ``through`` is called in place of the model, if it is compiled."""
        if self.step is not None:
            with autocast:
                loss = self.step(model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = f"a tensor of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else functions.kind(loss)
                raise ValueError(f"--step must return the loss, a tensor of one number, but returned {what}")
            return Passed(loss.float().reshape(()), None, None)
        inputs, labels = batch
        with autocast:
            output = call(model, inputs, labels, through)
        return self._passed(output, labels, self.label_smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Any, autocast: Run) -> Passed:
        """The forward pass of an evaluation."""
        if self.step is None:
            inputs, labels = batch
            with autocast:
                output = call(model, inputs, labels)
            return self._passed(output, labels)
        passed = self.train(model, batch, autocast)
        if not self._looks_at_outputs:
            return passed
        inputs, labels = batches.split(batch)
        with autocast:
            output = call(model, inputs, labels)
        return Passed(passed.loss, logits_of(output), labels)

    def error(self, passed: Passed) -> Tensor:
        """The share of wrong answers of a training batch; 0 where nothing is right or wrong."""
        if not self.judges_by_accuracy or passed.logits is None:
            return torch.zeros_like(passed.loss.detach())
        if passed.logits.dim() == 2 and passed.labels.dim() == 1 and passed.logits.shape[1] > 1:
            return (passed.logits.argmax(1) != passed.labels).float().mean()
        wrong, known = metrics.wrong_answers(passed.logits.detach(), passed.labels)
        return wrong.sum() / known.sum().clamp_min(1)

    def total(self) -> metrics.Total:
        """The metric before the first batch of an evaluation."""
        return metrics.total_of(self.metric, self._own_metric)

    def sum_of_losses(self, passed: Passed, count: int) -> Tensor:
        """The loss of a batch in an evaluation, summed over its samples."""
        if self.plain and passed.logits is not None and passed.logits.dim() == 2 and passed.labels.dim() == 1:
            return F.cross_entropy(passed.logits, passed.labels.long(), reduction="sum")
        return passed.loss * count

    def feed(self, model: nn.Module, inputs: Any) -> Any:
        """A forward pass for its own sake: to refill statistics, or to look at activations."""
        return self.step(model, inputs) if self.step is not None else call(model, inputs)

    def as_arguments(self, model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
        """A model and batches of inputs as ``mixnorm.recalibrate`` takes them."""
        return Fed(model, self.feed), each_alone(inputs)

    def _passed(self, output: Any, labels: Any, label_smoothing: float = 0.0) -> Passed:
        if self.loss == OF_MODEL:
            loss = own_loss(output)
            if loss is None:
                raise ValueError("the model computes no loss of its own any more: choose a --loss")
            return Passed(loss.float(), at_size(logits_of(output), labels), labels)
        logits = logits_of(output)
        if self._own_loss is None:
            return Passed(losses.loss_of(self.loss, logits, labels, label_smoothing), logits, labels)
        if isinstance(self._own_loss, nn.Module):  # which may have weights of classes
            self._own_loss.to(logits.device)
        given = logits
        if type(self._own_loss).__module__.startswith("torch.") and labels.is_floating_point() and same_size(logits, labels):
            given = like(logits, labels)  # (N, 1) against (N,) would be compared as (N, N)
        loss = self._own_loss(given, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else functions.kind(loss)
            raise ValueError(f"{self.loss} must return one number as a tensor, but returned {what}: take its mean")
        return Passed(loss.float().reshape(()), logits, labels)


def _made(function: Callable[..., Any]) -> Callable[..., Any]:
    """An object of a class, such as ``torch.nn.SmoothL1Loss``; any other function itself."""
    return function() if isinstance(function, type) else function

"""The training of a model on labels: its step, its evaluation, and its epochs, each of which is followed by one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm import recalibrate
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data import batches as batches_of
from mixnorm_lab.data.disk.rows import RowSource
from mixnorm_lab.data.resident import Resident
from mixnorm_lab.data.sources import Source
from mixnorm_lab.tasks.metrics import Total
from mixnorm_lab.tasks.task import Task
from mixnorm_lab.training.loop import TrainingLoop, load_statistics
from mixnorm_lab.training.mixtures import mixture_norms
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.step import Step, autocast
from mixnorm_lab.training.team import ALONE, Team

TRAINING_IMAGES = 10_000  # at most, of those that are evaluated in the end
GPU_EVALUATION_BATCH, CPU_EVALUATION_BATCH = 2000, 256  # images at a time


class ClassifierStep(Step):
    """The step of a model with labels: a batch, both passes, the optimizer's step. Its numbers: the loss and the error."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        source: Source,
        *,
        device: torch.device,
        bf16: bool,
        team: Team = ALONE,
        torch_compile: bool = False,
        task: Task | None = None,
    ) -> None:
        task = Task() if task is None else task
        super().__init__(source, source.steps_per_epoch, device=device, bf16=bf16, team=team, capture=task.plain)
        if torch_compile and team.size > 1:
            raise ValueError("several processes that train together are not compiled: leave --compile out")
        self.model = model
        self.optimizer = optimizer
        self.task = task
        if torch_compile:
            self._torch_compiled = torch.compile(model)

    def update(self) -> None:
        batch = self.source.batch(self.number)
        passed = self.task.train(self.model, batch, self.autocast, self._forward)
        passed.loss.backward()
        numbers = passed.loss.detach(), self.task.error(passed)
        gradients = (parameter.grad for parameter in self.model.parameters())
        self.team.average([*numbers, *(gradient for gradient in gradients if gradient is not None)])
        self.optimizer.step()
        # At the end, not at the start: a capture then begins, and ends, without gradients.
        self.optimizer.zero_grad(set_to_none=True)
        self.note(*numbers)

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        if self._torch_compiled is None:
            return self.model(*inputs, **named)
        from torch._dynamo.exc import TorchDynamoException  # takes a second, which who does not compile should not wait

        try:
            return self._torch_compiled(*inputs, **named)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"torch.compile does not take this model ({reason}): leave --compile out") from error


class ClassifierLoop(TrainingLoop):
    """Epochs of a classifier, each followed by an evaluation on the test images."""

    def __init__(
        self, config: RunConfig, model: nn.Module, source: Source, device: torch.device, team: Team = ALONE
    ) -> None:
        super().__init__(config, {"model": model}, "model", source, device, team)
        self.task = Task.of(config)
        self.step = ClassifierStep(
            model,
            self.optimizers["model"],
            source,
            device=device,
            bf16=self.bf16,
            team=team,
            torch_compile=config.compile,
            task=self.task,
        )

    def numbers(self, means: tuple[float, float]) -> dict[str, Any]:
        load_statistics(self.evaluated, self.watched)
        trained = self._evaluate_training_images() if self.epoch == self.config.epochs and self.config.train_eval else {}
        test, fresh = self._evaluate()
        row = {
            "train_loss": means[0],
            "train_error": means[1] if self.task.judges_by_accuracy else None,
            "test_loss": test.loss,
            "test_error": test.error,
            "recalibrated_loss": None if fresh is None else fresh.loss,
            "recalibrated_error": None if fresh is None else fresh.error,
            **trained,
        }
        if not self.task.judges_by_accuracy:
            row |= {"test_metric": test.metric, "recalibrated_metric": None if fresh is None else fresh.metric}
        return row

    def _evaluate_training_images(self) -> dict[str, float]:
        """The loss and the error of training images as of test images: without crops, flips, smoothed labels and the noise
        of the batches."""
        assert isinstance(self.source, (Resident, RowSource))
        batches = self.source.plain_train_batches(self._batch, TRAINING_IMAGES)
        found = evaluate(self.evaluated, batches, **self._where)
        return {"train_eval_loss": found.loss} | ({} if found.error is None else {"train_eval_error": found.error})

    @property
    def _batch(self) -> int:
        """How many images are evaluated at a time."""
        return GPU_EVALUATION_BATCH if self.device.type == "cuda" else CPU_EVALUATION_BATCH

    @property
    def _where(self) -> dict[str, Any]:
        return {"device": self.device, "bf16": self.bf16, "team": self.team, "task": self.task}

    def _evaluate(self) -> tuple[Evaluation, Evaluation | None]:
        """What the test data say, with the running statistics, and if asked for with fresh ones."""
        model, batch = self.evaluated, self._batch
        test = evaluate(model, self.source.test_batches(batch), **self._where)
        if not math.isfinite(test.loss) and not all(map(batches_of.is_finite, self.source.test_batches(batch))):
            raise NotFinite("the test data is not finite: remove what is infinite or not a number from it")
        if not self.config.recalibrate:
            return test, None
        if not has_statistics(model):  # nothing to refill, so that it is evaluated in one way
            return test, test
        inputs = self.source.train_batches(self.config.recalibrate, seed=self.config.seed + self.epoch)
        with autocast(self.device, self.bf16):
            if isinstance(self.source, Resident):
                recalibrate(model, inputs)
            else:
                recalibrate(*self.task.as_arguments(model, inputs))
        return test, evaluate(model, self.source.test_batches(batch), **self._where)


def has_statistics(model: nn.Module) -> bool:
    """Whether a model has norms whose statistics can be refilled."""
    return bool(mixture_norms(model)) or any(isinstance(module, _BatchNorm) for module in model.modules())


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: the mean loss, and the share of errors or else the metric."""

    loss: float
    error: float | None = None
    metric: float | None = None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device,
    bf16: bool,
    team: Team = ALONE,
    task: Task | None = None,
) -> Evaluation:
    """The loss and the metric over all samples, those of all ranks."""
    task = Task() if task is None else task
    losses = torch.zeros((), device=device)
    metric: Total = task.total()
    count = 0
    run = autocast(device, bf16)
    for batch in batches:
        size = batches_of.size(batch)
        passed = task.evaluate(model, batch, run)
        losses += task.sum_of_losses(passed, size)
        logits = passed.loss if passed.logits is None else passed.logits  # which a loss alone does not have
        metric.add(logits, passed.labels, passed.loss, size)
        count += size

    def everywhere(value: Tensor) -> Tensor:
        return team.add(value) if team.size > 1 else value

    if team.size > 1:
        losses, count = team.add(losses), int(team.add(torch.tensor(count, device=device)))
    if count == 0:
        raise ValueError("the test data has no samples: pass at least one batch of them")
    loss, value = (losses / count).item(), metric.value(everywhere)
    return Evaluation(loss, error=value) if task.judges_by_accuracy else Evaluation(loss, metric=value)

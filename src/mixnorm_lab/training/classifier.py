"""The training of a classifier: its step, its evaluation, and its epochs, each of which is followed by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm import recalibrate
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.disk.rows import RowSource
from mixnorm_lab.data.resident import Resident
from mixnorm_lab.data.sources import Source
from mixnorm_lab.training.loop import TrainingLoop, load_statistics
from mixnorm_lab.training.mixtures import mixture_norms
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.step import Step, autocast
from mixnorm_lab.training.team import ALONE, Team

TRAINING_IMAGES = 10_000  # at most, of those that are evaluated in the end
GPU_EVALUATION_BATCH, CPU_EVALUATION_BATCH = 2000, 256  # images at a time


class ClassifierStep(Step):
    """The step of a classifier: a batch, both passes, and the optimizer's step. Its numbers: the loss and the error."""

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
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(source, source.steps_per_epoch, device=device, bf16=bf16, team=team)
        if torch_compile and team.size > 1:
            raise ValueError("several processes that train together are not compiled: leave --compile out")
        self.model = model
        self.optimizer = optimizer
        self.label_smoothing = label_smoothing
        if torch_compile:
            self._torch_compiled = torch.compile(model)

    def update(self) -> None:
        images, labels = self.source.batch(self.number)
        with self.autocast:
            logits = self._forward(images)
        logits = logits.float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        loss.backward()
        numbers = loss.detach(), (logits.argmax(1) != labels).float().mean()
        gradients = (parameter.grad for parameter in self.model.parameters())
        self.team.average([*numbers, *(gradient for gradient in gradients if gradient is not None)])
        self.optimizer.step()
        # At the end, not at the start: a capture then begins, and ends, without gradients.
        self.optimizer.zero_grad(set_to_none=True)
        self.note(*numbers)

    def _forward(self, images: Tensor) -> Tensor:
        if self._torch_compiled is None:
            return self.model(images)
        from torch._dynamo.exc import TorchDynamoException  # takes a second, which who does not compile should not wait

        try:
            return self._torch_compiled(images)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"torch.compile does not take this model ({reason}): leave --compile out") from error


class ClassifierLoop(TrainingLoop):
    """Epochs of a classifier, each followed by an evaluation on the test images."""

    def __init__(
        self, config: RunConfig, model: nn.Module, source: Source, device: torch.device, team: Team = ALONE
    ) -> None:
        super().__init__(config, {"model": model}, "model", source, device, team)
        self.step = ClassifierStep(
            model,
            self.optimizers["model"],
            source,
            device=device,
            bf16=self.bf16,
            team=team,
            torch_compile=config.compile,
            label_smoothing=config.label_smoothing,
        )

    def numbers(self, means: tuple[float, float]) -> dict[str, Any]:
        load_statistics(self.evaluated, self.watched)
        trained = self._evaluate_training_images() if self.epoch == self.config.epochs and self.config.train_eval else {}
        test, fresh = self._evaluate()
        return {
            "train_loss": means[0],
            "train_error": means[1],
            "test_loss": test[0],
            "test_error": test[1],
            "recalibrated_loss": fresh[0],
            "recalibrated_error": fresh[1],
            **trained,
        }

    def _evaluate_training_images(self) -> dict[str, float]:
        """The loss and the error of training images as of test images: without crops, flips, smoothed labels and the noise
        of the batches."""
        assert isinstance(self.source, (Resident, RowSource))
        batches = self.source.plain_train_batches(self._batch, TRAINING_IMAGES)
        found = evaluate(self.evaluated, batches, device=self.device, bf16=self.bf16, team=self.team).tolist()
        return {"train_eval_loss": found[0], "train_eval_error": found[1]}

    @property
    def _batch(self) -> int:
        """How many images are evaluated at a time."""
        return GPU_EVALUATION_BATCH if self.device.type == "cuda" else CPU_EVALUATION_BATCH

    def _evaluate(self) -> tuple[list[float], list[float | None]]:
        """The test images' loss and error, with the running statistics, and if asked for with fresh ones."""
        model, batch = self.evaluated, self._batch
        where: dict[str, Any] = {"device": self.device, "bf16": self.bf16, "team": self.team}
        test = evaluate(model, self.source.test_batches(batch), **where)
        if not test[0].isfinite() and any(not images.isfinite().all() for images, _ in self.source.test_batches(batch)):
            raise NotFinite("the images to test on are not finite: remove what is infinite or not a number from the data")
        if not self.config.recalibrate:
            return test.tolist(), [None, None]
        if not has_statistics(model):  # nothing to refill, so that it is evaluated in one way
            return test.tolist(), test.tolist()
        with autocast(self.device, self.bf16):
            recalibrate(model, self.source.train_batches(self.config.recalibrate, seed=self.config.seed + self.epoch))
        fresh = evaluate(model, self.source.test_batches(batch), **where)
        return test.tolist(), fresh.tolist()


def has_statistics(model: nn.Module) -> bool:
    """Whether a model has norms whose statistics can be refilled."""
    return bool(mixture_norms(model)) or any(isinstance(module, _BatchNorm) for module in model.modules())


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device,
    bf16: bool,
    team: Team = ALONE,
) -> Tensor:
    """The mean loss and the share of errors over all images, those of all ranks, (2,), on the device."""
    total = torch.zeros(2, device=device)
    count = 0
    for images, labels in batches:
        with autocast(device, bf16):
            logits = model(images)
        logits = logits.float()
        wrong = ((logits.argmax(1) != labels) | logits.isnan().any(1)).sum()  # argmax would take NaN for the first class
        total += torch.stack((F.cross_entropy(logits, labels, reduction="sum"), wrong.float()))
        count += len(labels)
    if team.size > 1:
        total, count = team.add(total), int(team.add(torch.tensor(count, device=device)))
    if count == 0:
        raise ValueError("the test data has no images: pass at least one batch of them")
    return total / count

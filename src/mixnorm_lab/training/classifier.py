"""The training of a classifier: each epoch is followed by an evaluation on the test images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mixnorm import recalibrate
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.sources import Source
from mixnorm_lab.training.loop import Training, load_statistics
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.step import TrainingStep, autocast, evaluate
from mixnorm_lab.training.team import ALONE, Team

GPU_EVALUATION_BATCH, CPU_EVALUATION_BATCH = 2000, 256  # images at a time


class ClassifierTraining(Training):
    def __init__(
        self, config: RunConfig, model: nn.Module, source: Source, device: torch.device, team: Team = ALONE
    ) -> None:
        super().__init__(config, {"model": model}, "model", source, device, team)
        self.step = TrainingStep(
            model, self.optimizers["model"], source, device=device, bf16=self.bf16, team=team, compiled=config.compile
        )

    def figures(self, means: tuple[float, float]) -> dict[str, Any]:
        test, fresh = self._evaluate()
        return {
            "train_loss": means[0],
            "train_error": means[1],
            "test_loss": test[0],
            "test_error": test[1],
            "recalibrated_loss": fresh[0],
            "recalibrated_error": fresh[1],
        }

    def _evaluate(self) -> tuple[list[float], list[float | None]]:
        """The test images' loss and error, with the running statistics, and if asked for with fresh ones."""
        model, batch = self.evaluated, GPU_EVALUATION_BATCH if self.device.type == "cuda" else CPU_EVALUATION_BATCH
        load_statistics(model, self.watched)
        where: dict[str, Any] = {"device": self.device, "bf16": self.bf16, "team": self.team}
        test = evaluate(model, self.source.test_batches(batch), **where)
        if not test[0].isfinite() and any(not images.isfinite().all() for images, _ in self.source.test_batches(batch)):
            raise NotFinite("the images to test on are not finite: remove what is infinite or not a number from the data")
        if not self.config.recalibrate:
            return test.tolist(), [None, None]
        with autocast(self.device, self.bf16):
            recalibrate(model, self.source.train_batches(self.config.recalibrate, seed=self.config.seed + self.epoch))
        fresh = evaluate(model, self.source.test_batches(batch), **where)
        return test.tolist(), fresh.tolist()

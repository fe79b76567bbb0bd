"""A training under way: its epochs, each with an evaluation, and its state between them, to keep and to go back to."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import torch
from torch import nn

from mixnorm import recalibrate
from mixnorm.experiments.config import RunConfig
from mixnorm.experiments.mixtures import components_in_use, snapshot, snapshot_epochs
from mixnorm.experiments.progress import Progress
from mixnorm.experiments.schedule import build_optimizer, set_rate
from mixnorm.experiments.source import Source, seed_everything
from mixnorm.experiments.step import TrainingStep, autocast, evaluate
from mixnorm.experiments.watch import IMAGES, NotFinite, find_origin

GPU_EVALUATION_BATCH, CPU_EVALUATION_BATCH = 2000, 256  # images at a time


class Training:
    """Every epoch is a function of the state before it and of (seed, epoch): random numbers are seeded at its start.

    Attributes:
        epoch, steps: how many are done.
        train_seconds, seconds: in the steps alone, and in all.
        latest: the state at the start of the epoch that runs, or ran last.
    """

    def __init__(self, config: RunConfig, model: nn.Module, source: Source, device: torch.device) -> None:
        self.config = config
        self.source = source
        self.device = device
        memory_format = torch.channels_last if config.channels_last else torch.preserve_format
        self.model = model.to(device=device, memory_format=memory_format).train()  # type: ignore[call-overload]
        self.optimizer = build_optimizer(model.parameters(), config.optimizer, device)
        self.bf16 = config.precision == "bf16"
        self.step = TrainingStep(model, self.optimizer, source, device=device, bf16=self.bf16)
        # For evaluation: the same parameters, but statistics of its own. To refill those does not disturb the training.
        self.evaluated = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()
        self.epoch = self.steps = 0
        self.train_seconds = 0.0
        self.latest: dict[str, Any] | None = None
        self._seconds_before, self._started = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def state(self) -> dict[str, Any]:
        """A copy of everything that the rest of the training depends on."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "model": _copy(self.model.state_dict()),
            "optimizer": _copy(self.optimizer.state_dict()["state"]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.steps, self.train_seconds = state["epoch"], state["steps"], state["train_seconds"]
        self._seconds_before, self._started = state["seconds"], time.perf_counter()
        self.model.load_state_dict(state["model"])
        # The settings are those of the configuration, and on a GPU a step reads the learning rate from where it is.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})

    def run_epoch(self, progress: Progress) -> dict[str, Any]:
        """Trains for one epoch, evaluates, and returns the epoch's row of the record."""
        self.latest = self.state()
        rate = self._start_epoch()
        for done in self.step.run_epoch():
            # A GPU would have to wait for this: there, all losses are looked at after the epoch.
            if self.device.type == "cpu" and not math.isfinite(self.step.curve[done - 1, 0].item()):
                break
            progress.step(done)
        losses, errors = self.step.curve.double().T.tolist()
        for number, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise NotFinite(self._explanation(number, self.latest))
        self.epoch += 1
        self.steps += len(losses)
        self.train_seconds += self.step.seconds
        test, fresh = self._evaluate()
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "train_loss": sum(losses) / len(losses),
            "train_error": sum(errors) / len(errors),
            "test_loss": test[0],
            "test_error": test[1],
            "recalibrated_loss": fresh[0],
            "recalibrated_error": fresh[1],
            "learning_rate": rate,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "components": components_in_use(self.model),
            "mixtures": snapshot(self.model) if self.epoch in snapshot_epochs(self.config.epochs) else None,
        }

    def _start_epoch(self) -> float:
        """Puts everything that does not belong to the state to where an epoch begins; returns the learning rate."""
        config = self.config
        rate = config.schedule.rate(config.optimizer.lr, self.epoch, config.epochs)
        set_rate(self.optimizer, rate)
        seed_everything(config.seed, self.epoch)
        self.source.start_epoch(config.seed, self.epoch)
        self.step.start_epoch()
        return rate

    def _evaluate(self) -> tuple[list[float], list[float | None]]:
        """The test images' loss and error, with the running statistics, and if asked for with fresh ones."""
        model, batch = self.evaluated, GPU_EVALUATION_BATCH if self.device.type == "cuda" else CPU_EVALUATION_BATCH
        statistics = self.model.state_dict()
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            statistics.pop(name, None)
        # Loading, and not copying, because a mixture norm then forgets what it made of its last statistics.
        model.load_state_dict(statistics, strict=False)
        test = evaluate(model, self.source.test_batches(batch), device=self.device, bf16=self.bf16)
        if not self.config.recalibrate:
            return test.tolist(), [None, None]
        with autocast(self.device, self.bf16):
            recalibrate(model, self.source.train_batches(self.config.recalibrate, seed=self.config.seed + self.epoch))
        fresh = evaluate(model, self.source.test_batches(batch), device=self.device, bf16=self.bf16)
        return test.tolist(), fresh.tolist()

    def _explanation(self, number: int, before: dict[str, Any]) -> str:
        """Why the loss of a step (from 0) is not finite: the epoch runs again up to it, and every layer is watched."""
        rate = self.config.schedule.rate(self.config.optimizer.lr, before["epoch"], self.config.epochs)
        self.restore(before)
        self._start_epoch()
        origin = find_origin(self.model, self.optimizer, self.step.update, number + 1)
        what = f"the loss of step {number + 1} of epoch {before['epoch'] + 1} is not finite"
        if origin is None:
            where = "but a second pass over the epoch stayed finite, so that no layer can be named"
        else:
            where = f"which began at step {origin[0] + 1} with {origin[1]}"
        if origin is not None and origin[1] == IMAGES:
            return f"{what}, {where}: remove what is infinite or not a number from the data"
        return f"{what}, {where}: use a learning rate smaller than {rate:g}"


def _copy(value: Any) -> Any:
    """A copy of nested dictionaries of tensors: ``copy.deepcopy`` takes as long as a training step."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = type(value)((key, _copy(inner)) for key, inner in value.items())
        if hasattr(value, "_metadata"):  # the versions of a state dict's modules
            copied._metadata = value._metadata  # type: ignore[attr-defined]
        return copied
    return copy.deepcopy(value)

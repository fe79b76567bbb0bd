"""A training under way: its epochs and its state between them, to keep and to go back to. What it trains, subclasses say."""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm_lab.config.parts.optimizer import PER_STEP
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.sources import Source, seed_everything
from mixnorm_lab.storage.busy import Watch
from mixnorm_lab.storage.snapshots import snapshot_epochs
from mixnorm_lab.training.mixtures import components_in_use, snapshot
from mixnorm_lab.training.not_finite import BACKWARD, DATA, LOSS, NotFinite, find_origin
from mixnorm_lab.training.optimizers import build_optimizer, follow_rates, set_rate
from mixnorm_lab.training.progress import RunProgress
from mixnorm_lab.training.shared_norms import share_norms
from mixnorm_lab.training.step import Step
from mixnorm_lab.training.team import ALONE, Team


class TrainingLoop(ABC):
    """A training under way, whatever it trains: its epochs, and its state between them.

    Every epoch is a function of the state before it and of (seed, epoch): random numbers are seeded at its start. A
    subclass sets ``step``, and says in :meth:`numbers` what an epoch's row holds beside what all rows do.

    Args:
        networks: by their names in a checkpoint, in training mode. They are moved to the device.
        watched: the network whose mixture norms the rows tell of, and which is evaluated.
        team: of the processes that train together. All of them go through the same calls, and return the same rows.

    Attributes:
        optimizers: for each network, by its name.
        epoch, steps: how many are done.
        train_seconds, seconds: in the steps alone, and in all.
        watch: says whether the machine is busy with something else.
        latest: the state at the start of the epoch that runs, or ran last.
    """

    step: Step
    _rates: torch.Tensor | None = None

    def __init__(
        self,
        config: RunConfig,
        networks: Mapping[str, nn.Module],
        watched: str,
        source: Source,
        device: torch.device,
        team: Team = ALONE,
    ) -> None:
        self.config = config
        self.team = team
        self.source = source
        self.device = device
        self.bf16 = config.precision == "bf16"
        memory_format = torch.channels_last if config.channels_last else torch.preserve_format
        self.networks = networks
        for network in networks.values():
            network.to(device=device, memory_format=memory_format).train()  # type: ignore[call-overload]
            if team.size > 1:
                share_norms(network)
        self.optimizers = {
            name: build_optimizer(network.parameters(), config.optimizer, device, _of_mixture_norms(network))
            for name, network in networks.items()
        }
        self.watched = networks[watched]
        self.evaluated = evaluation_copy(self.watched, own_weights=config.average > 0)
        self.watch = Watch(device)
        self.epoch = self.steps = 0
        self.train_seconds = 0.0
        self.latest: dict[str, Any] | None = None
        self._seconds_before, self._started = 0.0, time.perf_counter()

    @abstractmethod
    def numbers(self, means: tuple[float, float]) -> dict[str, Any]:
        """The part of an epoch's row that is of this kind of training; evaluates the networks.

        ``means`` are of the step's two numbers.
        """

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def state(self) -> dict[str, Any]:
        """A copy of everything that the rest of the training depends on."""
        networks = {name: _copy(network.state_dict()) for name, network in self.networks.items()}
        optimizers = {_key(name): _copy(one.state_dict()["state"]) for name, one in self.optimizers.items()}
        if self.config.average:
            networks["average"] = _copy(dict(self.evaluated.named_parameters()))
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            **networks,
            **optimizers,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.steps, self.train_seconds = state["epoch"], state["steps"], state["train_seconds"]
        self._seconds_before, self._started = state["seconds"], time.perf_counter()
        for name, network in self.networks.items():
            network.load_state_dict(state[name])
            # The settings are those of the configuration, and on a GPU a step reads the learning rate from where it is.
            groups = self.optimizers[name].state_dict()["param_groups"]
            self.optimizers[name].load_state_dict({"state": state[_key(name)], "param_groups": groups})
        if self.config.average:
            for name, average in self.evaluated.named_parameters():
                average.copy_(state["average"][name])

    def run_epoch(self, progress: RunProgress) -> dict[str, Any]:
        """Trains for one epoch, evaluates, and returns the epoch's row of the record."""
        self.latest = self.state()
        if self.config.average:
            self.step.then = self._average
        rate = self._start_epoch()
        self.watch.start()
        for done in self.step.run_epoch():
            # A GPU would have to wait for this: there, all losses are looked at after the epoch.
            if self.device.type == "cpu" and not all(map(math.isfinite, self.step.curve[done - 1].tolist())):
                break
            progress.step(done)
        curve = self.step.curve.double().tolist()
        for number, values in enumerate(curve):
            if not all(map(math.isfinite, values)):
                raise NotFinite(self._explanation(number, self.latest))
        self.epoch += 1
        self.steps += len(curve)
        self.train_seconds += self.step.seconds
        busy = self.watch.busy()
        first, second = (sum(values) / len(values) for values in zip(*curve, strict=True))
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            **self.numbers((first, second)),
            "learning_rate": rate,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "busy": busy,
            "components": components_in_use(self.watched),
            "mixtures": snapshot(self.watched) if self.epoch in snapshot_epochs(self.config.epochs) else None,
        }

    @torch.no_grad()
    def _average(self) -> None:
        """Moves the evaluated weights towards the trained ones, by as much as a momentum of 1 − decay moves statistics."""
        averages, weights = ([*network.parameters()] for network in (self.evaluated, self.watched))
        torch._foreach_lerp_(averages, weights, 1 - self.config.average)  # type: ignore[arg-type]

    def _start_epoch(self) -> float:
        """Puts everything that does not belong to the state to where an epoch begins; returns the learning rate."""
        config = self.config
        rate = config.schedule.rate(config.optimizer.lr, self.epoch, config.epochs)
        for optimizer in self.optimizers.values():
            set_rate(optimizer, rate)
        if config.schedule.name in PER_STEP:
            self._set_rates(config.schedule.rates(config.optimizer.lr, self.epoch, config.epochs, self.step.steps))
        seed_everything(config.seed, self.epoch, self.team.rank)
        self.source.start_epoch(config.seed, self.epoch)
        self.step.start_epoch()
        return rate

    def _set_rates(self, rates: list[float]) -> None:
        """Puts the rates of the steps of an epoch to where the optimizers read them: always the same place, because a CUDA
        graph goes on reading from it. In fp64 on a CPU, whose optimizers take a number."""
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        new = torch.tensor(rates, dtype=dtype)
        if self._rates is None:
            self._rates = new.to(self.device)
            for optimizer in self.optimizers.values():
                follow_rates(optimizer, self._rates, self.step.number)
        else:
            self._rates.copy_(new)

    def _explanation(self, number: int, before: dict[str, Any]) -> str:
        """Why the loss of a step (from 0) is not finite: the epoch runs again up to it, and every layer is watched."""
        rate = self.config.schedule.rate(self.config.optimizer.lr, before["epoch"], self.config.epochs)
        self.restore(before)
        self._start_epoch()
        self.step.plain()
        one = len(self.networks) == 1
        networks = {"" if one else name: (network, self.optimizers[name]) for name, network in self.networks.items()}
        origin = find_origin(networks, self.step, number + 1, self.team)
        what = f"the loss of step {number + 1} of epoch {before['epoch'] + 1} is not finite"
        smaller = f"use a learning rate smaller than {rate:g}"
        if origin is None:
            return f"{what}, but a second pass over the epoch stayed finite, so that no layer can be named: {smaller}"
        began = f"which began at step {origin.step + 1} with {origin.place}"
        if origin.part == DATA:
            return f"{what}, {began}: remove what is infinite or not a number from the data"
        if before["steps"] == origin.step == 0:  # no update came before, so that the rate has no part in it
            first = "the loss of the first batch, before any update, is not finite"
            if origin.part == LOSS:
                own = self.config.step or self.config.loss
                where = own if ":" in own else "the loss"
                return f"{first}, though the model's output is: look at {where} and at the labels"
            if number == 0:
                return f"{first}, which began with {origin.place}: look at the weights that the model starts with"
            if origin.part == BACKWARD:
                return f"{what}, {began}, before any update: look at the slope of that layer and of the loss"
        return f"{what}, {began}: {smaller}"


def evaluation_copy(model: nn.Module, *, own_weights: bool = False) -> nn.Module:
    """A model with the same parameters, or a copy of them, and statistics of its own: to refill those does not disturb the
    training."""
    shared = {} if own_weights else {id(parameter): parameter for parameter in model.parameters()}
    copied = copy.deepcopy(model, shared).eval()
    return copied.requires_grad_(False) if own_weights else copied


def load_statistics(evaluated: nn.Module, model: nn.Module) -> None:
    """Gives an evaluation copy the statistics of its model."""
    statistics = model.state_dict()
    for name, _ in model.named_parameters(remove_duplicate=False):
        statistics.pop(name, None)
    # Loading, and not copying, because a mixture norm then forgets what it made of its last statistics.
    evaluated.load_state_dict(statistics, strict=False)


def _key(name: str) -> str:
    """Where a checkpoint has the optimizer of a network."""
    return "optimizer" if name == "model" else f"{name}_optimizer"


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


def _of_mixture_norms(network: nn.Module) -> list[nn.Parameter]:
    """The parameters of mixture norms, which may have one row for each component."""
    layers = (MixtureNorm1d, MixtureNorm2d, MixtureNorm3d)
    return [p for module in network.modules() if isinstance(module, layers) for p in module.parameters(recurse=False)]

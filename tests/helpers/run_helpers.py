"""Small training runs on real digits, for the tests of the trainer. As a script: a run that another process can kill."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from torch import nn

import mixnorm
from mixnorm_lab import data
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.resident import Resident
from mixnorm_lab.storage import records
from mixnorm_lab.training.classifier import ClassifierLoop
from mixnorm_lab.training.progress import Silent
from mixnorm_lab.training.run import train
from mixnorm_lab.training.team import ALONE

# The first 256 digits: a step takes about a millisecond.
DIGITS = data.load("digits")
DIGITS = dataclasses.replace(DIGITS, train=data.Images(DIGITS.train.images[:256], DIGITS.train.labels[:256]))
MIXTURE = Mixture(("1",), {"num_components": 2, "backend": "reference"})  # the compiled loops would be compiled first


def config(**changes):
    """Four epochs of four steps; the middle norm is a mixture norm."""
    settings = {
        "name": "test",
        "model": "tiny",
        "data": "digits",
        "epochs": 4,
        "batch_size": 64,
        "optimizer": Optimizer("rmsprop", lr=0.005, weight_decay=2e-5),
        "schedule": Schedule("exponential", factor=0.9, every=1),
        "mixture": MIXTURE,
    }
    return RunConfig(**settings | changes)


def build(run, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
    return model if run.mixture is None else mixnorm.convert(model, run.mixture.layers, **run.mixture.options)


def run(config, folder, *, model=None, source=None, device="cpu", **options):
    """A run of the trainer; its record and the model."""
    model = build(config, config.seed) if model is None else model
    source = Resident(DIGITS, config.batch_size, device=device, augment=True, pad=1) if source is None else source
    device, team = torch.device(device), options.get("team", ALONE)
    return train(
        config, folder, lambda: ClassifierLoop(config, model, source, device, team), device=device, **options
    ), model


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def numbers(record):
    """What a run measured, without the time that it took, and whether others were busy meanwhile."""
    return [
        {name: value for name, value in row.items() if "seconds" not in name and name != "busy"} for row in record.epochs
    ]


def lines(folder):
    return [json.loads(line) for line in (folder / records.NAME).read_text().splitlines()]


class Interrupt(Silent):
    """Raises at a step, or after an epoch, counted over the whole run."""

    def __init__(self, step=None, epoch=None):
        self.steps, self.at_step, self.at_epoch = 0, step, epoch

    def step(self, done):
        self.steps += 1
        if self.steps == self.at_step:
            raise KeyboardInterrupt

    def epoch(self, row):
        if row["epoch"] == self.at_epoch:
            raise KeyboardInterrupt


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(config(epochs=int(sys.argv[2])), Path(sys.argv[1]), checkpoint_seconds=0)

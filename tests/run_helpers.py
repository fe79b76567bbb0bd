"""Small training runs on real digits, for the tests of the trainer. As a script: a run that another process can kill."""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn

import mixnorm
from mixnorm import data
from mixnorm.data.resident import Resident
from mixnorm.experiments.config import Mixture, Optimizer, RunConfig, Schedule
from mixnorm.experiments.train import train

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
    return train(config, folder, model=model, source=source, device=device, **options), model


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(config(epochs=int(sys.argv[2])), Path(sys.argv[1]), checkpoint_seconds=0)

"""Recipes by name: an optimizer, a schedule and what else belongs to a way of training, for any model and data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.run_config import RunConfig


@dataclass(frozen=True)
class Recipe:
    """A way of training. ``augment``: crops and flips; None is what suits the data."""

    epochs: int
    batch_size: int
    optimizer: Optimizer
    schedule: Schedule
    label_smoothing: float = 0.0
    augment: bool | None = None


RECIPES = {
    # For residual networks on CIFAR: short, and near what longer trainings reach.
    "one-cycle": Recipe(
        epochs=30,
        batch_size=256,
        optimizer=Optimizer("nesterov", lr=0.2, weight_decay=5e-4, momentum=0.9, decayed="weights"),
        schedule=Schedule("one-cycle", warmup=0.3),
        label_smoothing=0.1,
    ),
    "adamw-cosine": Recipe(
        epochs=30,
        batch_size=256,
        optimizer=Optimizer("adamw", lr=0.002, weight_decay=0.05, decayed="weights"),
        schedule=Schedule("cosine", warmup=0.1),
        label_smoothing=0.1,
    ),
    # The paper's for the CIFAR CNN, with the smaller of its learning rates and weight decays, as BN-2 and MN-2.
    "paper-cnn": Recipe(
        epochs=100,
        batch_size=256,
        optimizer=Optimizer("rmsprop", lr=0.01, weight_decay=2e-5, smoothing=0.9),
        schedule=Schedule("exponential", factor=0.93, every=2),
    ),
    # The one of DenseNet's authors, which the paper follows there.
    "paper-densenet": Recipe(
        epochs=200,
        batch_size=64,
        optimizer=Optimizer("nesterov", lr=0.1, weight_decay=1e-4, momentum=0.9),
        schedule=Schedule("step", factor=0.1, at=(0.5, 0.75)),
    ),
}


def with_recipe(config: RunConfig, name: str) -> RunConfig:
    """A configuration that is trained by the recipe of this name."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES) or RECIPES
        raise ValueError(f"there is no recipe {name!r}: use {' or '.join(near)}")
    return replace(config, **vars(RECIPES[name]))

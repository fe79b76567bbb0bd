"""The learning rate and the weight decay that suit each optimizer, where nobody says others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mixnorm_lab.config.run_config import RunConfig

# For a batch of about 128: PyTorch's own defaults where these are widely used.
RATES = {"nesterov": 0.05, "sgd": 0.05, "adam": 0.001, "adamw": 0.001, "rmsprop": 0.001}
WEIGHT_DECAYS = {"nesterov": 5e-4, "sgd": 5e-4, "adam": 0.0, "adamw": 0.01, "rmsprop": 0.0}
WITH_MOMENTUM = ("nesterov", "sgd")  # for which the same rates are right


def with_optimizer(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """A configuration with the optimizer that options ask for, and with the rate and the weight decay that suit it.

    Args:
        given: the values of all options; a rate or a weight decay among them is kept.
    """
    before, name = config.optimizer, given.get("optimizer", config.optimizer.name)
    if name not in RATES:
        return config  # which options then refuse
    if "momentum" in given and name not in WITH_MOMENTUM:
        raise ValueError(f"{name} has no momentum to set: leave --momentum out, or add --optimizer sgd")
    if name == before.name or {name, before.name} <= set(WITH_MOMENTUM):
        return replace(config, optimizer=replace(before, name=name))
    changed = replace(before, name=name, lr=RATES[name], weight_decay=WEIGHT_DECAYS[name])
    return replace(config, optimizer=changed)

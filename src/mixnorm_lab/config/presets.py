"""What a comparison trains unless it is told otherwise: for each data set a model, and settings that suit both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mixnorm_lab import data, models
from mixnorm_lab.config import catalog
from mixnorm_lab.config.run_config import Mixture, Optimizer, RunConfig, Schedule, is_own


@dataclass(frozen=True)
class Preset:
    """Everything that batch norm and mixture norm share in a comparison, and the mixture norm.

    Args:
        layers: which batch norms are replaced, as in :class:`Mixture`; all of them for a model of the user's own.
        options: of the mixture norms.
    """

    model: str
    data: str
    layers: tuple[str, ...]
    epochs: int
    batch_size: int
    optimizer: Optimizer
    schedule: Schedule
    options: dict[str, Any] = field(default_factory=lambda: {"num_components": 3, "em_iters": 2})
    precision: str = "fp32"
    channels_last: bool = False
    recalibrate: int = 0
    validation: float = 0.0
    norm_momentum: float | None = None
    average: float = 0.0
    compile: bool = False

    def run(self, name: str, seed: int, *, mixture: bool) -> RunConfig:
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("layers", "options")}
        return RunConfig(name=name, seed=seed, mixture=Mixture(self.layers, self.options) if mixture else None, **shared)

    def pair(self, seeds: int) -> list[RunConfig]:
        """Batch norm and mixture norm in turns, so that both have runs early on."""
        names = (("batch-norm", False), ("mixture-norm", True))
        return [self.run(name, seed, mixture=mixture) for seed in range(seeds) for name, mixture in names]


DIGITS = Preset(
    model="digits-cnn",
    data="digits",
    layers=("conv2",),
    epochs=20,
    batch_size=64,
    optimizer=Optimizer("rmsprop", lr=0.003, weight_decay=2e-5),
    schedule=Schedule("exponential", factor=0.93, every=1),
    options={"num_components": 3, "em_iters": 2, "activation": "relu"},
)
OWN = Preset(  # a model or data of the user's
    model="",
    data="",
    layers=("*",),
    epochs=20,
    batch_size=128,
    optimizer=Optimizer("nesterov", lr=0.05, weight_decay=5e-4),
    schedule=Schedule("step", factor=0.1, at=(0.5, 0.75)),
)
# Models of the paper are compared as there: with the settings of this experiment, on any data.
PAPER = {
    "cifar-cnn": "cifar-cnn/cifar10/mn-2",
    "inception-v3": "inception-v3/cifar100/mn-4",
    "densenet": "densenet-40/cifar100/mn",
}


def defaults(data_name: str, model: str | None) -> Preset:
    """The preset for a data set and, unless it is chosen by the data, a model."""
    if is_own(data_name) or (model is not None and is_own(model)):
        if model is None:
            raise ValueError(f"--data {data_name} needs a model of yours as well: --model my_module:build")
        return dataclasses.replace(OWN, model=model, data=data_name)
    if data_name not in data.NAMES:
        data.load(data_name)  # says which names there are
    if model is None:
        model = "digits-cnn" if data_name == "digits" else "cifar-cnn"
    models.input_shape(model)  # says which names there are
    experiment = next((name for start, name in PAPER.items() if model.startswith(start)), None)
    if experiment is None:
        return DIGITS
    return _of(catalog.get(experiment).config, model=model, data=data_name)


def _of(config: RunConfig, **changes: str) -> Preset:
    assert config.mixture is not None
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(Preset) if hasattr(config, f.name)}
    return Preset(**{**shared, "layers": config.mixture.layers, "options": config.mixture.options, **changes})

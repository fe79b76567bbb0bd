"""The options that commands which train share, and what they make of a setting or an experiment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from mixnorm_lab.cli.common import choice, typer
from mixnorm_lab.config.presets import Preset, defaults
from mixnorm_lab.config.run_config import OPTIMIZERS, PRECISIONS, RunConfig, is_own
from mixnorm_lab.data import NAMES, cifar

Data = Annotated[
    str,
    typer.Option("--data", help="digits, cifar10, cifar100, a folder with CIFAR's official files, or my_module:loaders."),
]
Model = Annotated[
    str | None, typer.Option("--model", help="cifar-cnn, densenet-40-12, inception-v3, digits-cnn or my_module:build.")
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", help="The batch norms to replace: the paper's layer names, or globs of modules; with commas."),
]
Components = Annotated[int | None, typer.Option("--components", "-k", min=1, help="K, the components of a mixture.")]
EmIters = Annotated[int | None, typer.Option("--em-iters", min=0, help="The paper's EM iter.")]
Option = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="Any other option of MixtureNorm2d, such as inference=mixture.")
]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1, help="Passes over the training images.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1)]
OptimizerName = Annotated[str | None, typer.Option("--optimizer", help="rmsprop, nesterov or adam.")]
Rate = Annotated[float | None, typer.Option("--lr", help="The initial learning rate.")]
WeightDecay = Annotated[float | None, typer.Option("--weight-decay")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Runs of each, with seeds 0, 1, …")]
Recalibrate = Annotated[
    int,
    typer.Option("--recalibrate", min=0, help="Evaluate a second time with statistics refilled from N training batches."),
]
Precision = Annotated[str, typer.Option("--precision", help="fp32 or bf16 (autocast).")]
Validation = Annotated[
    float,
    typer.Option("--validation", min=0, max=0.9, help="Test on this share of the training images, to choose settings."),
]
NormMomentum = Annotated[
    float | None, typer.Option("--norm-momentum", help="Of every norm's running statistics; 1 is the last batch alone.")
]
Average = Annotated[
    float,
    typer.Option(
        "--average", min=0, max=0.9999, help="Test weights averaged over the last updates with this decay: 0.9 suits norms."
    ),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Train with torch.compile: compiled once a run, then fewer operations a step.")
]
Features = Annotated[
    str | None,
    typer.Option("--features", help="For generators: the folder of a classifier's run, the file of the Inception, or fid."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at once.")]
EngineName = Annotated[str, typer.Option("--engine", help="local, or ray: over the machines of a cluster.")]
Address = Annotated[
    str | None, typer.Option("--address", help="Of the Ray cluster, such as auto; this machine alone, unless given.")
]


@dataclass(frozen=True)
class Asked:
    """What every run of a command has in common, whatever it trains: fields of :class:`RunConfig`."""

    recalibrate: int
    precision: str
    validation: float = 0.0
    norm_momentum: float | None = None
    average: float = 0.0
    compile: bool = False

    def __post_init__(self) -> None:
        choice("--precision", self.precision, PRECISIONS)


def preset_of(
    data: str, model: str | None, layers: str | None, components: int | None, em_iters: int | None, option: list[str] | None,
    epochs: int | None, batch_size: int | None, optimizer: str | None, lr: float | None, weight_decay: float | None,
    asked: Asked, device: torch.device,
) -> tuple[Preset, Path | None]:  # fmt: skip
    """The preset as the options change it, and the folder of the data."""
    folder = None
    if not (data in NAMES or is_own(data)) and (Path(data).is_dir() or len(Path(data).parts) > 1):
        if not Path(data).is_dir():
            raise ValueError(f"there is no folder {data}: name one with CIFAR's official files, or a data set")
        folder, data = Path(data), cifar.name_of(Path(data))
    if is_own(data):
        refuse(data, batch_size=batch_size, validation=asked.validation or None)
    preset = defaults(data, model)
    choice("--optimizer", optimizer or preset.optimizer.name, OPTIMIZERS)
    chosen = {"name": optimizer, "lr": lr, "weight_decay": weight_decay}
    mixture = {"num_components": components, "em_iters": em_iters} | dict(map(_assignment, option or ()))
    changes = {
        "epochs": epochs,
        "batch_size": batch_size,
        "layers": None if layers is None else tuple(layer.strip() for layer in layers.split(",")),
        "optimizer": dataclasses.replace(preset.optimizer, **_given(chosen)),
        "options": preset.options | _given(mixture),
        **vars(asked),
        "channels_last": device.type == "cuda",  # which convolutions are fastest in
    }
    return dataclasses.replace(preset, **_given(changes)), folder


def refuse(name: str, remedy: str = "", **settings: Any) -> None:
    """Preset that an experiment of the paper, or a user's data, has of its own."""
    given = [f"--{setting.replace('_', '-')}" for setting in _given(settings)]
    if given:
        raise ValueError(f"{name} comes with its own {', '.join(given)}: leave that out{remedy}")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _assignment(text: str) -> tuple[str, Any]:
    """ "inference=mixture" as a name and a value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option {text} says no value: write it as name=value, such as inference=mixture")
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, words.get(value.lower(), value)


def as_asked(config: RunConfig, seed: int, epochs: int | None, asked: Asked, device: torch.device) -> RunConfig:
    """An experiment as it was asked for; the report says where it is not quite the paper's."""
    changes = {"seed": seed, "epochs": epochs, **vars(asked), "channels_last": device.type == "cuda"}
    return dataclasses.replace(config, **_given(changes))

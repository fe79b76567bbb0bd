"""The options that commands which train share, and what they make of a preset or an experiment.

Those of a run's configuration are stated beside its fields; a command names the groups of them that it takes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch

from mixnorm_lab.cli.common import typer
from mixnorm_lab.config.fields import Option
from mixnorm_lab.config.presets import defaults, on_disk
from mixnorm_lab.config.recipes import RECIPES, with_recipe
from mixnorm_lab.config.run_config import OPTIONS, RunConfig, is_own
from mixnorm_lab.data import NAMES, cifar
from mixnorm_lab.data.disk import recognize
from mixnorm_lab.models import libraries

Data = Annotated[
    str,
    typer.Option("--data", help="digits, cifar10, cifar100, a folder of images, a table, or my_module:loaders."),
]
Recipe = Annotated[
    str | None, typer.Option("--recipe", help=f"How to train: {', '.join(RECIPES)}; other options change it.")
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many runs of each, with seeds 0, 1, …")]
Features = Annotated[
    str | None,
    typer.Option("--features", help="For generators: the folder of a classifier's run, the file of the Inception, or fid."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="How many runs to train at once.")]
EngineName = Annotated[str, typer.Option("--engine", help="local, or ray to use the machines of a cluster.")]
Address = Annotated[
    str | None,
    typer.Option("--address", help="The address of the Ray cluster, such as auto; by default, this machine alone."),
]

Given = dict[str, Any]  # the values of options that are not at their defaults, by their names
DECIDED = tuple(option for option in OPTIONS.values() if not option.shared)  # by a preset or an experiment, unless given
SHARED = tuple(option for option in OPTIONS.values() if option.shared)  # of every run, whatever it trains


def helped(options: Iterable[Option], **texts: str) -> tuple[Option, ...]:
    """Options with another help for some of them, by their names."""
    return tuple(dataclasses.replace(one, help=texts.get(one.name, one.help)) for one in options)


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with options in place of each parameter ``Annotated[Given, options]``, which gets their values."""
    hints, groups = get_type_hints(command, include_extras=True), {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind, *stated = get_args(hints[parameter.name]) or (None,)
        if kind == Given:
            groups[parameter.name] = stated[0]
            parameters += map(_parameter, stated[0])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @functools.wraps(command)
    def called(**values: Any) -> None:
        for name, options in groups.items():
            asked = {option: values.pop(option.name) for option in options}
            values[name] = {option.name: value for option, value in asked.items() if value != option.default}
        command(**values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameter(option: Option) -> inspect.Parameter:
    """An option as the parameter of a function, which typer reads."""
    stated = typer.Option(*option.flags.split(), min=option.minimum, max=option.maximum, help=option.help)
    kind = option.kind | None if option.default is None else option.kind
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=Annotated[kind, stated]
    )


def preset_of(data: str, given: Given, device: torch.device, recipe: str | None) -> tuple[RunConfig, Path | None]:
    """The preset as the recipe and the options change it, and the folder of the data."""
    if "model" in given:
        given = {**given, "model": libraries.canonical(given["model"])}
    folder = official = None
    if not (data in NAMES or is_own(data)) and recognize.is_path(data):
        folder = Path(data)
        official = cifar.found_in(folder)
        data = official or data
    if is_own(data):
        refuse(data, [name for name in ("batch_size", "validation") if name in given])
    if folder is not None and official is None:
        preset = on_disk(folder, given.get("model"), given.get("image_size"), given.get("target"))
        for note in recognize.notes(preset.data, folder, given.get("image_size"), given.get("target")):
            typer.echo(note, err=True)
    else:
        preset = defaults(data, given.get("model"))
    if recipe is not None:
        preset = with_recipe(preset, recipe)
    return as_given(preset, given, device), folder


def as_given(config: RunConfig, given: Given, device: torch.device) -> RunConfig:
    """A preset or an experiment with what the options say; a report tells where it is not quite the paper's."""
    # Convolutions are fastest with the channels last on a GPU.
    return dataclasses.replace(config.with_options(given), channels_last=device.type == "cuda")


def refuse(owner: str, options: Sequence[str], remedy: str = "") -> None:
    """Raises where options were given that an experiment of the paper, or a user's data, decides on its own."""
    if options:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ValueError(f"{owner} comes with its own {flags}: leave that out{remedy}")

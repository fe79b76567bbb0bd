"""The options that commands which train share, and what they make of a preset or an experiment.

Those of a run's configuration are stated beside its fields; a command names the groups of them that it takes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args, get_type_hints

from mixnorm_lab.cli.common import typer
from mixnorm_lab.config.fields import Option
from mixnorm_lab.config.losses import LOSSES
from mixnorm_lab.config.metrics import METRICS
from mixnorm_lab.config.recipes import RECIPES
from mixnorm_lab.config.run_config import OPTIONS

Data = Annotated[
    str,
    typer.Option("--data", help="digits, cifar10, cifar100, a folder of images, a table, or my_module:loaders."),
]
Recipe = Annotated[
    str | None, typer.Option("--recipe", help=f"How to train: {', '.join(RECIPES)}; other options change it.")
]
Loss = Annotated[
    str | None,
    typer.Option("--loss", help=f"{', '.join(LOSSES[:-1])}, or my_module:loss, called with (output, labels)."),
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", help=f"{', '.join(METRICS)}, or my_module:metric, and :higher or :lower behind it."),
]
StepName = Annotated[
    str | None,
    typer.Option("--step", help="my_module:step, called with (model, batch), returns the loss: for batches like no others."),
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

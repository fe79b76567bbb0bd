"""The plan of a comparison: its runs, and their folder, from what a user asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mixnorm_lab.comparison import earlier
from mixnorm_lab.config import presets
from mixnorm_lab.config.losses import CROSS_ENTROPY, SQUARED, loss_name, metric_names
from mixnorm_lab.config.metrics import ACCURACY
from mixnorm_lab.config.norm_names import BATCH, MIXTURE
from mixnorm_lab.config.parts.mixture import ALL_LAYERS
from mixnorm_lab.config.rates import with_optimizer
from mixnorm_lab.config.recipes import with_recipe
from mixnorm_lab.config.run_config import RunConfig, is_own
from mixnorm_lab.data import NAMES, cifar
from mixnorm_lab.data.disk import recognize
from mixnorm_lab.models import libraries
from mixnorm_lab.own import functions, sources
from mixnorm_lab.tasks.first_look import task_of
from mixnorm_lab.training import build

Given = Mapping[str, Any]  # the values of options that are not at their defaults, by their names
RUNS = Path("runs")


@dataclass(frozen=True)
class Own:
    """A user's loss, metric and step, as the command line names them; None is what suits the labels."""

    loss: str | None = None
    metric: str | None = None
    step: str | None = None


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Args:
        root: the folder below which each has its own.
        files: the folder with the files of a data set, if it is not the cache.
        notes: sentences that a user should know of before.
    """

    configs: Sequence[RunConfig]
    root: Path
    title: str
    files: Path | None
    notes: tuple[str, ...] = ()


def comparison(
    data: str,
    given: Given,
    device: torch.device,
    *,
    own: Own,
    recipe: str | None = None,
    norms: str | None = None,
    seeds: int = 5,
    out: Path | None = None,
    here: torch.device | None = None,
) -> Plan:
    """The plan of ``mixnorm compare``.

    Args:
        device: that the runs are for; ``here`` is that of this process, which takes a first look at a user's project.
    """
    preset, files = preset_of(data, given, device, recipe, own, here)
    name = "-".join(part.translate(str.maketrans(":/", "..", "<>")) for part in (preset.data, preset.model))

    def planned(preset: RunConfig) -> tuple[list[RunConfig], Path, str]:
        if norms is None:
            configs = presets.pair(preset, seeds)
            folder, title = f"{name}-{configs[1].identity()[:8]}", "Batch norm and mixture norm"
        else:
            layers = layers_of(preset, given)
            configs = presets.side_by_side(preset, norms.split(","), seeds, layers)
            folder, title = f"{name}-norms-{presets.digest(preset, layers)}", "Norms side by side"
        return configs, out or RUNS / folder, f"{title}: {preset.model} on {preset.data}"

    configs, root, title = planned(preset)
    notes = notes_of(preset, files)
    for older in earlier.older_settings(preset):
        older_configs, older_root, _ = planned(older)
        if told := earlier.note(older_configs, older_root):
            return Plan(older_configs, older_root, title, files, (*notes, told))
    if norms is not None and (names := unused(norms.split(","), given)):
        notes += (f"--norms {norms} makes no use of {flags_of(names)}.",)
    if preset.sources and (told := earlier.change(configs, root, RUNS, name)):
        notes += (told,)
    return Plan(configs, root, title, files, notes)


def preset_of(
    data: str, given: Given, device: torch.device, recipe: str | None, own: Own, here: torch.device | None = None
) -> tuple[RunConfig, Path | None]:
    """The preset as the recipe, the options and the user's functions change it, and the folder of the data."""
    folder = official = None
    if "model" in given:
        given = {**given, "model": libraries.canonical(given["model"])}
    if not (data in NAMES or is_own(data)) and recognize.is_path(data):
        folder = Path(data)
        official = cifar.found_in(folder)
        data = official or data
    if is_own(data):
        refuse(data, [name for name in ("batch_size",) if name in given])
    _check_is_function("--model", given.get("model"), "build")
    if folder is not None and official is None:
        preset = presets.on_disk(folder, given.get("model"), given.get("image_size"), given.get("target"))
    else:
        _check_is_function("--data", data, "loaders")
        preset = presets.defaults(data, given.get("model"))
    if recipe is not None:
        preset = with_recipe(preset, recipe)
    config = as_given(preset, given, device)
    config = with_functions(config, own, here or device, folder, given)
    if config.metric != ACCURACY.name and is_own(config.data) and recipe is None:
        kept = {"optimizer": presets.NUMBERS.optimizer, "schedule": presets.NUMBERS.schedule}
        config = as_given(replace(config, **kept), given, device)  # type: ignore[arg-type]
    return config, folder


def notes_of(config: RunConfig, files: Path | None) -> tuple[str, ...]:
    """What a user should know of data on disk before a training."""
    return tuple(recognize.notes(config.data, files, config.image_size, config.target))


def _check_is_function(option: str, name: str | None, function: str) -> None:
    """Raises where a module is named, and not a function in it."""
    module = (name or "").removesuffix(".py").replace("/", ".")
    if name is None or Path(name).is_dir() or not all(part.isidentifier() for part in module.split(".")):
        return
    path = Path(*module.split("."))
    if name.endswith(".py") or path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
        raise ValueError(f"{option} {name} is a module: name the function in it as well, such as {module}:{function}")


def with_functions(
    config: RunConfig, own: Own, device: torch.device, files: Path | None = None, given: Given = MappingProxyType({})
) -> RunConfig:
    """A configuration with the user's loss, metric and step, those that suit the labels where they are not said, and the
    sources of all functions of the user's."""
    loss = None if own.loss is None else loss_name(own.loss)
    metric, function = (None, "") if own.metric is None else metric_names(own.metric)
    if own.step is not None and own.loss is not None:
        raise ValueError("--step returns the loss itself: leave --loss out")
    if own.step is not None and ":" not in own.step:
        raise ValueError(f"--step {own.step} names no function of yours: write it as my_module:function")
    # A recipe's smoothing is for labels that are classes; what is asked for and makes no sense is an error.
    smoothing, kept = config.label_smoothing, "label_smoothing" in given
    config = replace(config, step=own.step or "", metric_function=function, label_smoothing=smoothing if kept else 0.0)
    for name in filter(is_own, (config.model, config.data, loss or "", config.step, function)):
        functions.find(name)
    if is_own(config.data):
        if not is_own(config.model):
            raise ValueError(f"with --data {config.data} the model must be yours, too: --model my_module:build")
        loss, metric = task_of(build.look(config, device, files), loss, metric, config.step)
    elif config.step:
        raise ValueError("--step is for batches of loaders of yours: add --data my_module:loaders, or give a --loss")
    if loss is None and (metric or config.metric) == SQUARED and config.loss == CROSS_ENTROPY:
        loss = SQUARED  # a named data set whose labels are numbers
    config = replace(config, loss=loss or config.loss, metric=metric or config.metric)
    if config.loss == CROSS_ENTROPY and not config.step:
        config = replace(config, label_smoothing=smoothing)
    return replace(config, sources=sources.told(config.own_functions))


def as_given(config: RunConfig, given: Given, device: torch.device) -> RunConfig:
    """A preset or an experiment with what the options say; a report tells where it is not quite the paper's."""
    # Convolutions are fastest with the channels last on a GPU.
    channels_last = device.type == "cuda"
    return dataclasses.replace(with_optimizer(config, given).with_options(given), channels_last=channels_last)


def layers_of(preset: RunConfig, given: Given) -> tuple[str, ...]:
    """The batch norms that a norm beside mixture norm replaces: those that were asked for, else all."""
    return preset.mixture.layers if "layers" in given and preset.mixture is not None else ALL_LAYERS


def refuse(owner: str, options: Sequence[str], remedy: str = "", why: str = "comes with its own") -> None:
    """Raises where options were given that an experiment of the paper, or a user's data, decides on its own."""
    if options:
        raise ValueError(f"{owner} {why} {flags_of(options)}: leave that out{remedy}")


def flags_of(options: Sequence[str]) -> str:
    """Options by their names, as the command line has them."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in options)


def unused(norms: Sequence[str], given: Given) -> list[str]:
    """The options given that none of the norms has: those of mixtures, or the layers where there is batch norm alone."""
    kinds = {norm.partition(":")[0].strip() for norm in norms}
    names = [] if MIXTURE in kinds else ["components", "em_iters", "option"]
    return [name for name in (["layers", *names] if kinds == {BATCH} else names) if name in given]

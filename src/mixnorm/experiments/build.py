"""From a configuration to what the trainer needs: the model, its norms converted, and its data on the device."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mixnorm import convert, data, models
from mixnorm.data import DataSet, Resident
from mixnorm.experiments.config import Mixture, RunConfig
from mixnorm.experiments.source import Loaders, Source


def prepare(config: RunConfig, device: torch.device, folder: Path | None = None) -> tuple[nn.Module, Source]:
    """The model with the weights that the seed gives, batch norm's and mixture norm's alike, and the source of its batches.

    ``folder`` has the files of the data set; the cache, unless given.
    """
    source = make_source(config, device, folder)
    torch.manual_seed(config.seed)
    model = make_model(config, getattr(source, "num_classes", None))
    if isinstance(source, Resident) and not is_own(config.model):
        wanted = models.input_shape(config.model)
        if wanted != source.shape:
            wants, has = (" × ".join(map(str, shape)) for shape in (wanted, source.shape))
            raise ValueError(
                f"{config.model} is for images of {wants}, but {config.data} has {has}: choose another model or other data"
            )
    if config.mixture is not None:
        convert(model, norms(config.model, config.mixture), **config.mixture.options)
    return model, source


def make_source(config: RunConfig, device: torch.device, folder: Path | None = None) -> Source:
    if is_own(config.data):
        loaders = own(config.data)()
        if not isinstance(loaders, (tuple, list)) or len(loaders) != 2:
            raise ValueError(f"{config.data} must return two loaders, (train, test), but returned {type(loaders).__name__}")
        return Loaders(*loaders, device=device, channels_last=config.channels_last)
    dataset = _dataset(config.data, folder)
    if config.validation:
        dataset = data.validation_split(dataset, config.validation)
    return Resident(
        dataset, config.batch_size, device=device, channels_last=config.channels_last, augment=config.augment
    )  # fmt: skip


def make_model(config: RunConfig, num_classes: int | None) -> nn.Module:
    if not is_own(config.model):
        if num_classes is None:
            raise ValueError(f"with --data {config.data} the model must be yours, too: --model my_module:build")
        return models.build(config.model, num_classes)
    build = own(config.model)
    takes_classes = "num_classes" in inspect.signature(build).parameters
    model = build(num_classes=num_classes) if takes_classes and num_classes is not None else build()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{config.model} must return a torch.nn.Module, but returned {type(model).__name__}")
    return model


def norms(model: str, mixture: Mixture) -> list[str]:
    """The modules to convert: the paper's layer names of a known model stand for their last norms, all else for itself."""
    found = []
    for layer in mixture.layers:
        try:
            found += models.last_norms(model, layer)
        except ValueError:
            found.append(layer)
    return found


def is_own(name: str) -> bool:
    """Whether a model or data set is the user's: "my_module:function"."""
    return ":" in name


def own(name: str) -> Callable[..., Any]:
    """The function that "my_module:function" names; modules of the current folder count, as with ``python -m``."""
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise ValueError(f"{module_name} needs the module {error.name}: install it") from error
        raise ValueError(
            f"there is no module {module_name!r}: run the command in the folder of {module_name.split('.')[0]}.py"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        has = f"it has {', '.join(known)}" if known else "it has no function"
        raise ValueError(f"{module_name} has no function {function_name!r}: {has}")
    return function


@functools.lru_cache(maxsize=2)
def _dataset(name: str, folder: Path | None) -> DataSet:
    return data.prepare(name, folder)

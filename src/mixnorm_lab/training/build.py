"""From a configuration to what the trainer needs: the model, its norms converted, and its data on the device."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d, convert
from mixnorm_lab import data, models, norms
from mixnorm_lab.config.run_config import RECOMMENDED_LAYERS, Mixture, RunConfig, is_own
from mixnorm_lab.data import DataSet, Resident
from mixnorm_lab.data.disk.rows import RowSource
from mixnorm_lab.data.download import DownloadProgress
from mixnorm_lab.data.sources import Loaders, Source, told
from mixnorm_lab.internals import left_out
from mixnorm_lab.training.mixtures import mixture_norms
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.team import ALONE, Team


def prepare(
    config: RunConfig, device: torch.device, folder: Path | None = None, team: Team = ALONE
) -> tuple[nn.Module, Source]:
    """The model with the weights that the seed gives, batch norm's and mixture norm's alike, and the source of its batches.

    ``folder`` has the files of the data set; the cache, unless given. The batches are this rank's share of the team's.
    """
    source = make_source(config, device, folder, team)
    torch.manual_seed(config.seed)
    if isinstance(source, (Resident, RowSource)):
        return make_model(config, source.num_classes, source.shape), source
    return make_model(config), source


def check(configs: Sequence[RunConfig], folder: Path | None = None, progress: DownloadProgress | None = None) -> None:
    """Raises where a model or data cannot be made. Downloads what the cache lacks, and tells ``progress``."""
    sizes: dict[str, tuple[Any, ...]] = {}
    checked = []
    for config in configs:
        if config.data not in sizes and is_own(config.data):
            make_source(config, torch.device("cpu"))
            sizes[config.data] = ()
        elif config.data not in sizes:
            dataset = _dataset(config, folder, progress)
            sizes[config.data] = (dataset.num_classes, dataset.shape)
        different = (config.model, config.data, config.mixture, config.norm, config.norm_layers)
        if different not in checked:
            make_model(config, *sizes[config.data])
            checked.append(different)


def check_shared(config: RunConfig, team: Team) -> None:
    """Raises where several processes cannot train a run together."""
    if team.size == 1:
        return
    if config.gan is not None:
        raise ValueError(f"{config.name} trains a generator, which runs in one process: leave torchrun out")
    if config.norm is not None:
        raise ValueError(f"{config.norm} takes its statistics in one process: leave torchrun out")
    if is_own(config.data):
        raise ValueError(
            f"{config.data} is read in one process: leave torchrun out, or use a data set that mixnorm reads itself"
        )
    if config.batch_size % team.size:
        raise ValueError(
            f"a batch of {config.batch_size} images cannot be shared evenly by {team.size} processes: use a --batch-size or "
            "an --nproc-per-node that fits"
        )


def make_source(config: RunConfig, device: torch.device, folder: Path | None = None, team: Team = ALONE) -> Source:
    if is_own(config.data):
        loaders = _called(config.data)
        if not isinstance(loaders, (tuple, list)) or len(loaders) != 2:
            raise ValueError(f"{config.data} must return two loaders, (train, test), but returned {_kind(loaders)}")
        return Loaders(*loaders, device=device, channels_last=config.channels_last)
    dataset = _dataset(config, folder)
    if config.validation:
        dataset = data.validation_split(dataset, config.validation)
    if dataset.has_rows:
        return RowSource(dataset, config.batch_size, device=device, share=(team.rank, team.size))
    return Resident(
        dataset, config.batch_size, device=device, channels_last=config.channels_last, augment=config.augment,
        share=(team.rank, team.size),
    )  # fmt: skip


def make_model(
    config: RunConfig, num_classes: int | None = None, shape: tuple[int, ...] | None = None
) -> nn.Module:  # fmt: skip
    """The model, its norms converted. ``num_classes`` and ``shape`` (C, H, W) are known unless the data is the user's."""
    if is_own(config.model):
        model = _called(config.model, num_classes=num_classes, input_shape=shape)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{config.model} must return a torch.nn.Module, but returned {_kind(model)}")
    else:
        wanted = models.input_shape(config.model)
        if num_classes is None or shape is None:
            raise ValueError(f"with --data {config.data} the model must be yours, too: --model my_module:build")
        if wanted is not None and wanted != shape:
            wants, has = (" × ".join(map(str, sizes)) for sizes in (wanted, shape))
            raise ValueError(
                f"{config.model} is for images of {wants}, but {config.data} has {has}: choose another model or other data"
            )
        model = models.build(config.model, num_classes, shape)
    if config.mixture is not None:
        model = _converted(model, config.model, config.mixture)
        _activate_where_a_relu_follows(model, config.model)
    if config.norm is not None:
        norms.replace_norms(model, config.norm, modules_of(config.model, config.norm_layers))
    if config.norm_momentum is not None:
        for norm in model.modules():
            if isinstance(norm, (_BatchNorm, MixtureNorm1d, MixtureNorm2d, MixtureNorm3d)):
                norm.momentum = config.norm_momentum
    return model


def _converted(model: nn.Module, name: str, mixture: Mixture) -> nn.Module:
    """The model with mixture norms. An option that names layers, as "deviation@relu" does, is for these alone."""
    everywhere = {option: value for option, value in mixture.for_convert.items() if "@" not in option}
    if len(everywhere) == len(mixture.for_convert) and mixture.layers != RECOMMENDED_LAYERS:
        return convert(model, modules_of(name, mixture.layers), **everywhere)
    options = {place: dict(everywhere) for place in _places(model, name, mixture.layers)}
    for text, value in mixture.options.items():
        option, _, layers = text.partition("@")
        for place in norms.batch_norms(model, modules_of(name, layers.split("+"))) if layers else ():
            if place in options:
                options[place][option] = value
    for place, own in options.items():
        convert(model, place, **own)
    return model


def _places(model: nn.Module, name: str, layers: tuple[str, ...]) -> list[str]:
    """The batch norms that layers mean, by their names in the model."""
    if layers != RECOMMENDED_LAYERS:
        return list(norms.batch_norms(model, modules_of(name, layers)))
    found = norms.batch_norms(model)
    stay = left_out(model, found)
    return [place for place in found if place not in stay]


def modules_of(model: str, layers: Sequence[str]) -> list[str]:
    """The norms that layers mean: the layer names of a known model stand for some of its norms, all else for itself."""
    found = []
    for layer in layers:
        try:
            found += models.last_norms(model, layer)
        except ValueError:
            found.append(layer)
    return found


def _activate_where_a_relu_follows(model: nn.Module, name: str) -> None:
    """Takes the activation out of mixture norms whose output a known model adds to something before its ReLU."""
    sums = [] if is_own(name) else models.without_relu(name)
    for place, norm in mixture_norms(model).items():
        if any(fnmatchcase(place, glob) for glob in sums):
            norm.activation = None


def own(name: str) -> Callable[..., Any]:
    """The function that "my_module:function" names; modules of the current folder count, as with ``python -m``."""
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module_name.endswith(".py") or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"{module_name!r} is no module: write {name} as Python imports it, such as my_module:build")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{module_name} needs the module {error.name}: install it") from error
        raise ValueError(
            f"there is no module {error.name!r}: run the command in the folder of {error.name.split('.')[0]}.py"
        ) from error
    except Exception as error:
        raise ValueError(f"{module_name} cannot be imported ({told(error)}): mend it, --debug shows where") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        has = f"it has {', '.join(known)}" if known else "it has no function at all"
        raise ValueError(f"{module_name} has no function {function_name!r}: {has}")
    return function


def _called(name: str, **wanted: Any) -> Any:
    """The result of a user's function, which gets those of the arguments that it asks for, and that there are."""
    function = own(name)
    try:
        known = inspect.signature(function).parameters
        return function(**{key: value for key, value in wanted.items() if key in known and value is not None})
    except Exception as error:
        raise ValueError(f"{name} raised {told(error)}: mend it, --debug shows where") from error


@contextmanager
def explained(config: RunConfig) -> Iterator[None]:
    """Makes a sentence of what a user's model or data raises while it is trained, and of memory that is full."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError("the memory of the GPU is full: use a smaller batch, or run fewer --jobs at once") from error
    except ValueError as error:
        if str(error).startswith("Expected more than 1 value per channel"):  # PyTorch's batch norm, which knows no remedy
            raise ValueError(f"{error}: use larger batches, or drop_last=True in your loader") from error
        raise
    except (OSError, NotFinite):
        raise
    except Exception as error:
        yours = [name for name in (config.model, config.data) if is_own(name)]
        if not yours:
            raise
        raise ValueError(f"to train {' with '.join(yours)} raised {told(error)}: mend it, --debug shows where") from error


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"an object of the type {type(value).__name__}"


_datasets: dict[tuple[Any, ...], DataSet] = {}  # one run after the other reads the same


def _dataset(config: RunConfig, folder: Path | None, progress: DownloadProgress | None = None) -> DataSet:
    key = config.data, folder, config.image_size, config.target
    if key not in _datasets:
        _datasets[key] = data.prepare(config.data, folder, progress, config.image_size, config.target)
    return _datasets[key]

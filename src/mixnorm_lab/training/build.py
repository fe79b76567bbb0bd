"""From a configuration to what the trainer needs: the model, its norms converted, and its data on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d, convert
from mixnorm_lab import data, models, norms
from mixnorm_lab.config.losses import BINARY, CROSS_ENTROPY
from mixnorm_lab.config.metrics import ACCURACY
from mixnorm_lab.config.parts.mixture import RECOMMENDED_LAYERS, Mixture
from mixnorm_lab.config.run_config import RunConfig, is_own
from mixnorm_lab.data import DataSet, Resident, split_loaders
from mixnorm_lab.data.disk.rows import RowSource
from mixnorm_lab.data.download import DownloadProgress
from mixnorm_lab.data.sources import Loaders, Source
from mixnorm_lab.internals import left_out
from mixnorm_lab.own import functions
from mixnorm_lab.own.functions import kind, told
from mixnorm_lab.tasks import first_look
from mixnorm_lab.tasks.first_look import Look
from mixnorm_lab.training.mixtures import mixture_norms
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.team import ALONE, Team

CPU = torch.device("cpu")
OF_CLASSES = (CROSS_ENTROPY, BINARY, ACCURACY.name, "mean IoU")  # losses and metrics


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


def check(
    configs: Sequence[RunConfig],
    folder: Path | None = None,
    progress: DownloadProgress | None = None,
    device: torch.device = CPU,
) -> list[str]:
    """Raises where a model or data cannot be made, or do not fit; returns what a user should know of mixtures.

    Downloads what the cache lacks, and tells ``progress``.
    """
    sizes: dict[str, tuple[Any, ...]] = {}
    checked: list[tuple[Any, ...]] = []
    notes: dict[str, None] = {}
    for config in configs:
        if config.data not in sizes and is_own(config.data):
            if not is_own(config.model):
                raise ValueError(f"with --data {config.data} the model must be yours, too: --model my_module:build")
            note = first_look.note_of_scale(look(config, device))
            notes |= {} if note is None else {note: None}
            sizes[config.data] = ()
        elif config.data not in sizes:
            dataset = _dataset(config, folder, progress)
            sizes[config.data] = (dataset.num_classes, dataset.shape)
            if dataset.predicts_numbers and (config.loss in OF_CLASSES or config.metric in OF_CLASSES):
                raise ValueError(
                    f"the {config.target} of {config.data} is a number, not a class: leave --loss and --metric out, or "
                    "choose those of numbers, such as --loss mae"
                )
        split = (config.data, config.validation, config.subset, config.batch_size)
        if split not in checked and not is_own(config.data):
            checked.append(split)
            _check_batch_size(config, _part(config, _dataset(config, folder)))
        different = (config.model, config.data, config.mixture, config.norm, config.norm_layers)
        if different not in checked:
            model = make_model(config, *sizes[config.data])
            checked.append(different)
            if config.mixture is not None and config.mixture.layers == RECOMMENDED_LAYERS:
                notes |= _notes_of_layers(make_model(replace(config, mixture=None), *sizes[config.data]))
            components = first_look.components_of(model, (MixtureNorm1d, MixtureNorm2d, MixtureNorm3d))
            many = any(count > first_look.USUAL for count, _ in components.values())
            if is_own(config.model) or many:
                found = look(config, device, folder)
                if found.unfit and config.loss == CROSS_ENTROPY:
                    raise ValueError(found.unfit)
                notes |= dict.fromkeys(first_look.check_components(found, components))
    return list(notes)


_looks: dict[Any, Look] = {}


def look(config: RunConfig, device: torch.device = CPU, folder: Path | None = None) -> Look:
    """What the model with its batch norms makes of a first batch of training data; a second time, it is known."""
    given = tuple(map(functions.find, filter(is_own, (config.model, config.data, config.step))))
    names = config.model, config.data, config.step
    known = (*names, *given, config.batch_size, config.validation, config.subset)
    if known in _looks:
        return _looks[known]
    plain = replace(config, mixture=None, norm=None, norm_momentum=None)
    with explained(config):
        if is_own(config.data):
            source = make_source(plain, device)
            source.start_epoch(config.seed, 0)
            batch, size = source.batch(torch.tensor(0, device=device)), None
            torch.manual_seed(config.seed)
            model = make_model(plain).to(device)
        else:
            dataset = _dataset(config, folder)
            classes, shape, size = dataset.num_classes, dataset.shape, config.batch_size
            torch.manual_seed(config.seed)
            labels = dataset.train.labels[:2].to(device) if dataset.predicts_numbers else torch.tensor([0, classes - 1])
            batch = torch.randn(2, *shape, device=device), labels.to(device)
            model = make_model(plain, classes, shape).to(device)
        step = functions.find(config.step) if config.step else None
        _looks[known] = first_look.look(model, batch, step, size)
    return _looks[known]


def check_shared(config: RunConfig, team: Team) -> None:
    """Raises where several processes cannot train a run together."""
    if team.size == 1:
        return
    if config.gan is not None:
        raise ValueError(f"{config.name} trains a generator, which runs in one process: leave torchrun out")
    if config.norm is not None:
        raise ValueError(f"{config.norm} takes its statistics in one process: leave torchrun out")
    if config.step or config.metric_function:
        raise ValueError(f"{config.step or config.metric_function} runs in one process: leave torchrun out")
    if is_own(config.data):
        raise ValueError(
            f"{config.data} is read in one process: leave torchrun out, or use a data set that mixnorm reads itself"
        )
    if config.batch_size % team.size:
        raise ValueError(
            f"a batch of {config.batch_size} cannot be shared evenly by {team.size} processes: use a --batch-size or "
            "an --nproc-per-node that fits"
        )


def make_source(config: RunConfig, device: torch.device, folder: Path | None = None, team: Team = ALONE) -> Source:
    if is_own(config.data):
        loaders = functions.call(config.data)
        if not isinstance(loaders, (tuple, list)) or len(loaders) != 2:
            raise ValueError(f"{config.data} must return two loaders, (train, test), but returned {kind(loaders)}")
        train, test = loaders
        if config.validation:
            train, test = split_loaders.held_out(train, config.validation)
        if config.subset:
            train, test = split_loaders.subset(train, test, config.subset)
        return Loaders(train, test, device=device, channels_last=config.channels_last, whole=bool(config.step))
    dataset = _part(config, _dataset(config, folder))
    if dataset.has_rows:
        return RowSource(dataset, config.batch_size, device=device, share=(team.rank, team.size))
    return Resident(
        dataset, config.batch_size, device=device, channels_last=config.channels_last, augment=config.augment,
        share=(team.rank, team.size),
    )  # fmt: skip


def _part(config: RunConfig, dataset: DataSet) -> DataSet:
    """The part of a data set that a run trains on and tests on."""
    if config.validation:
        dataset = data.validation_split(dataset, config.validation)
    return data.subset(dataset, config.subset) if config.subset else dataset


def _check_batch_size(config: RunConfig, dataset: DataSet) -> None:
    """Raises where the training data makes no batch."""
    count = len(dataset.train)
    if count < config.batch_size:
        more = ", or a larger --subset" if config.subset else ""
        raise ValueError(
            f"{count:,} training {dataset.samples} make no batch of {config.batch_size:,}: use a --batch-size of {count:,} "
            f"at most{more}"
        )


def make_model(
    config: RunConfig, num_classes: int | None = None, shape: tuple[int, ...] | None = None
) -> nn.Module:  # fmt: skip
    """The model, its norms converted. ``num_classes`` and ``shape`` (C, H, W) are known unless the data is the user's."""
    if is_own(config.model):
        model = functions.call(config.model, num_classes=num_classes, input_shape=shape)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{config.model} must return a torch.nn.Module, but returned {kind(model)}")
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
    if config.mixture is not None or config.norm is not None:
        _check_norms(model, config)
    if config.mixture is not None:
        try:
            model = _converted(model, config.model, config.mixture)
        except ValueError as error:  # of the library's call, whose argument is an option here
            raise ValueError(str(error).replace("select=", "--layers ")) from error
        _activate_where_a_relu_follows(model, config.model)
    if config.norm is not None:
        norms.replace_norms(model, config.norm, modules_of(config.model, config.norm_layers))
    if config.norm_momentum is not None:
        for norm in model.modules():
            if isinstance(norm, (_BatchNorm, MixtureNorm1d, MixtureNorm2d, MixtureNorm3d)):
                norm.momentum = config.norm_momentum
    return model


def _check_norms(model: nn.Module, config: RunConfig) -> None:
    """Raises where there is no batch norm to replace, in the words of the command line."""
    kinds = dict.fromkeys(type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__)
    if not any(isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        found = f"it has {', '.join(kinds)}" if kinds else "nor any other norm"
        raise ValueError(
            f"{config.model} has no batch norm to replace ({found}): choose a model with BatchNorm1d, BatchNorm2d or "
            "BatchNorm3d"
        )
    if config.mixture is not None and "select" in config.mixture.options:
        raise ValueError("select is no option of a mixture norm: say with --layers which batch norms to replace")


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


def _notes_of_layers(model: nn.Module) -> dict[str, None]:
    """A sentence about the batch norms that stay, if there are any, as the only key."""
    found = norms.batch_norms(model)
    stay = left_out(model, found)
    if not stay:
        return {}
    why = "; ".join(f"'{name}' stays, because {reason}" for name, reason in stay.items())
    return {
        f"Mixture norm replaces {len(found) - len(stay)} of {len(found)} batch norms: {why} (--layers '*' takes all).": None
    }


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


# What PyTorch says of a user's data, and what to do about it.
REMEDIES = {
    "must have the same dtype": "let the loader give inputs in fp32, with .float()",
    "Input type (double)": "let the loader give inputs in fp32, with .float()",
    "same dtype as": "let the loader give inputs in fp32, with .float()",
    "expected scalar type": "let the loader give inputs in fp32, with .float()",
    "shapes cannot be multiplied": "the inputs must have the size that the model's layers take",
    "channels, but got": "the inputs must have the channels that the model takes",
    "is out of bounds": "give the model an output for each class; labels count from 0",
}


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
        yours = config.own_functions
        if not yours:
            raise
        remedy = next((remedy for text, remedy in REMEDIES.items() if text in str(error)), "mend it, --debug shows where")
        what = " with ".join(part for part in (yours[0], " and ".join(yours[1:])) if part)
        raise ValueError(f"training {what} failed with {told(error).rstrip('.')}: {remedy}") from error


_datasets: dict[tuple[Any, ...], DataSet] = {}  # one run after the other reads the same


def _dataset(config: RunConfig, folder: Path | None, progress: DownloadProgress | None = None) -> DataSet:
    key = config.data, folder, config.image_size, config.target
    if key not in _datasets:
        _datasets[key] = data.prepare(config.data, folder, progress, config.image_size, config.target)
    return _datasets[key]

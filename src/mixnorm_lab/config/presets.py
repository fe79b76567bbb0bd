"""Presets, which a comparison trains unless it is told otherwise: for each data set a model, and settings that suit both.

A preset is the run of mixture norm; batch norm's is the same without its mixture.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mixnorm_lab import data, models
from mixnorm_lab.config import catalog
from mixnorm_lab.config.norm_names import BATCH, MIXTURE
from mixnorm_lab.config.parts.mixture import ALL_LAYERS, RECOMMENDED_LAYERS, Mixture, assignment
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.recipes import with_recipe
from mixnorm_lab.config.run_config import RunConfig, is_own
from mixnorm_lab.data import DataSet
from mixnorm_lab.data.disk import recognize

FORM = {"num_components": 3, "em_iters": 2, "activation": "relu"}
SAFE = {"form": "gated", "num_components": 3, "em_iters": 2}  # what mixnorm.convert makes by itself
DIGITS = RunConfig(
    name="mixture-norm",
    model="digits-cnn",
    data="digits",
    epochs=20,
    batch_size=64,
    optimizer=Optimizer("rmsprop", lr=0.003, weight_decay=2e-5),
    schedule=Schedule("exponential", factor=0.93, every=1),
    mixture=Mixture(("conv2",), FORM),
)
OWN = RunConfig(  # a model or data of the user's, and the form and norms that are safe to try
    name="mixture-norm",
    model="",
    data="",
    epochs=20,
    batch_size=128,
    optimizer=Optimizer("nesterov", lr=0.05, weight_decay=5e-4),
    schedule=Schedule("step", factor=0.1, at=(0.5, 0.75)),
    mixture=Mixture(RECOMMENDED_LAYERS, SAFE),
)
TABLE = RunConfig(  # rows of numbers, which are few and pass quickly
    name="mixture-norm",
    model="mlp",
    data="",
    epochs=40,
    batch_size=64,
    optimizer=Optimizer("adamw", lr=0.002, weight_decay=0.01, decayed="weights"),
    schedule=Schedule("cosine", warmup=0.1),
    mixture=Mixture(RECOMMENDED_LAYERS, SAFE),
)
# Data on disk may be little: an epoch has so many steps at least, unless a batch would have fewer samples than this.
FEWEST_STEPS, LEAST_IMAGES, LEAST_ROWS = 8, 16, 32
OF_NUMBERS = "mean squared error"  # the metric of a table whose target is a number
# The same for numbers and masks, whose losses may be of any size, which AdamW does not mind.
NUMBERS = replace(OWN, optimizer=Optimizer("adamw", lr=0.001, weight_decay=0.01), schedule=Schedule("cosine"))
RESIDUAL = with_recipe(replace(DIGITS, mixture=Mixture(("*",), FORM)), "one-cycle")  # all of their norms
# Models of the paper are compared as there: with the settings of this experiment, on any data.
KNOWN: dict[tuple[int, ...], str] = {
    (1, 8, 8): "digits-cnn",
    (3, 32, 32): "cifar-cnn",
}  # the models for images of these shapes
PAPER = {
    "cifar-cnn": "cifar-cnn/cifar10/mn-2",
    "inception-v3": "inception-v3/cifar100/mn-4",
    "densenet": "densenet-40/cifar100/mn",
}


def on_disk(path: Path, model: str | None, image_size: int | None, target: str | None) -> RunConfig:
    """The preset for data at a path, and a model if one was chosen; ``as_given`` adds ``image_size`` and ``target``."""
    name = recognize.name_of(path)
    found = data.load(name, path, image_size, target)
    if model is not None and (is_own(model) or models.is_library(model)):
        preset = replace(TABLE if found.has_rows else OWN, model=model, mixture=OWN.mixture)
    elif found.has_rows:
        preset = replace(TABLE, model=model or TABLE.model)
    elif model is None and found.shape not in KNOWN:
        shape = " × ".join(map(str, found.shape))
        raise ValueError(f"{name} has images of {shape}: choose a model for them, such as --model timm:resnet18")
    else:
        preset = defaults("cifar10", model or KNOWN[found.shape])
    preset = replace(preset, data=name, contents=recognize.digest(path), batch_size=_batch_for(found, preset.batch_size))
    return replace(preset, metric=OF_NUMBERS) if found.predicts_numbers else preset


def _batch_for(found: DataSet, batch_size: int) -> int:
    """A preset's batch size, or so much less that an epoch of few images or rows has some steps."""
    least = LEAST_ROWS if found.has_rows else LEAST_IMAGES
    while len(found.train) < FEWEST_STEPS * batch_size and batch_size > least:
        batch_size //= 2
    return batch_size


def defaults(data_name: str, model: str | None) -> RunConfig:
    """The preset for a data set with a name of its own and, unless it is chosen by the data, a model."""
    if is_own(data_name) or (model is not None and is_own(model)):
        if model is None:
            raise ValueError(f"--data {data_name} needs a model of yours as well: --model my_module:build")
        return replace(OWN, model=model, data=data_name)
    if data_name not in data.NAMES:
        data.load(data_name)  # says which names there are
    if model is not None and models.is_library(model):
        return replace(OWN, model=model, data=data_name)
    if model is None:
        model = "digits-cnn" if data_name == "digits" else "cifar-cnn"
    models.input_shape(model)  # says which names there are
    if model.startswith(("resnet", "wide-resnet")):
        return replace(RESIDUAL, model=model, data=data_name)
    experiment = next((name for start, name in PAPER.items() if model.startswith(start)), None)
    if experiment is None:
        return DIGITS
    return replace(catalog.get(experiment).config, name="mixture-norm", model=model, data=data_name)


def with_norm(preset: RunConfig, name: str, seed: int, *, mixture: bool) -> RunConfig:
    """A run of a preset: mixture norm's, or batch norm's."""
    return replace(preset, name=name, seed=seed, mixture=preset.mixture if mixture else None)


def pair(preset: RunConfig, seeds: int) -> list[RunConfig]:
    """The runs of a comparison: batch norm and mixture norm in turns, so that both have runs early on."""
    norms = (("batch-norm", False), ("mixture-norm", True))
    return [with_norm(preset, name, seed, mixture=mixture) for seed in range(seeds) for name, mixture in norms]


def side_by_side(preset: RunConfig, norms: Sequence[str], seeds: int, layers: Sequence[str] = ALL_LAYERS) -> list[RunConfig]:
    """The runs of a comparison of any norms, in turns, with batch norm as the first of them.

    Args:
        norms: as :func:`of_norm` takes them.
        layers: the batch norms that a norm replaces which is neither batch norm nor mixture norm.
    """
    wanted = [BATCH, *(norm for norm in norms if norm != BATCH)]
    configs = [of_norm(preset, norm, layers) for norm in wanted]
    name, times = Counter(config.name for config in configs).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{name} is there {times} times: name each norm once")
    return [replace(config, seed=seed) for seed in range(seeds) for config in configs]


def of_norm(preset: RunConfig, norm: str, layers: Sequence[str] = ALL_LAYERS) -> RunConfig:
    """A preset with the norm of a name, and called after it.

    Args:
        norm: "batch"; "mixture", with options that differ from the preset's behind it, such as
            "mixture:em_iters=0:inference=steady"; or a name of ``config.norm_names``. What ":layers=" says, with "+" between
            several, goes before ``layers``; "deviation@relu=learned" is an option for the layers behind the @ alone.
    """
    name, *texts = (part.strip() for part in norm.split(":"))
    options = dict(assignment(text, f"the norm {norm!r}:") for text in texts)
    told = options.pop("layers", None)
    wanted = None if told is None else tuple(str(told).split("+"))
    called = ",".join([f"{name}-norm" if name in (BATCH, MIXTURE) else name, *texts])
    called = re.sub(r"[^\w.,=+@-]", "-", called)  # it is the name of a folder, too
    if name == MIXTURE:
        assert preset.mixture is not None
        mixture = Mixture(wanted or preset.mixture.layers, preset.mixture.options | options)
        return replace(preset, name=called, mixture=mixture)
    if options or (told and name == BATCH):
        raise ValueError(
            f"{name} has no {next(iter([*options, 'layers']))} to set: options are of mixture, as mixture:em_iters=4"
        )
    if name == BATCH:
        return replace(preset, name=called, mixture=None)
    return replace(preset, name=called, mixture=None, norm=name, norm_layers=wanted or tuple(layers))


def digest(preset: RunConfig, layers: Sequence[str]) -> str:
    """The same for all comparisons of norms that have their runs in common, whichever norms those are."""
    return hashlib.sha256(f"{preset.identity()} {','.join(layers)}".encode()).hexdigest()[:8]

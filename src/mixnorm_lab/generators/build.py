"""From a configuration to what the trainer needs for a generator: both networks, the data on the device, the features."""

from __future__ import annotations

from pathlib import Path

import torch

from mixnorm import convert
from mixnorm_lab import data
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data import DataSet, Resident
from mixnorm_lab.generators import features as feature_networks
from mixnorm_lab.generators.features import Features
from mixnorm_lab.models import Discriminator, Generator

IMAGE = (3, 32, 32)


def load(config: RunConfig, device: torch.device, where: Path | None, folder: Path | None) -> tuple[DataSet, Features]:
    """The data set that a configuration names, downloaded if need be, and the features that its distance is of.

    Args:
        where: the folder of a classifier's run, or the file with the Inception's weights, as the configuration wants it.
        folder: has the files of the data set; the cache, unless given.
    """
    if config.gan is None:
        raise ValueError(f"{config.name} trains a classifier: give it to train")
    dataset = data.prepare(config.data, folder)
    return dataset, feature_networks.load(config.gan.features, where, dataset, device)


def prepare(
    config: RunConfig, device: torch.device, dataset: DataSet, features: Features
) -> tuple[Generator, Discriminator, Resident]:
    """The networks with the weights that the seed gives, batch norm's and mixture norm's alike, and the source of batches.

    Args:
        config: with ``gan``.
        dataset: of images of 3 × 32 × 32.
        features: what the distance is of; its name must be that of the configuration.
    """
    generator, discriminator = make_networks(config)
    shape, gan = tuple(dataset.train.images.shape[1:]), config.gan
    assert gan is not None
    if shape != IMAGE:
        has, wants = (" × ".join(map(str, s)) for s in (shape, IMAGE))
        raise ValueError(f"{config.model} makes images of {wants}, but {dataset.name} has {has}: choose other data")
    if config.validation:
        raise ValueError("a generator is compared with all training images, and none is held out: leave --validation out")
    if features.name != gan.features:
        raise ValueError(f"the run's distance is of {gan.features}, not of {features.name}: choose the features of the run")
    for count, what in ((gan.samples, "generated samples"), (len(dataset.train), "training images")):
        if count <= features.dimensions:  # now, and not after an hour
            raise ValueError(
                f"{count:,} {what} are too few for the covariance of the {features.dimensions:,} {features.name}: use at "
                f"least {features.dimensions + 1:,}"
            )
    augment = bool(config.augment)  # a generator would learn to make crops
    source = Resident(
        dataset, config.batch_size, device=device, channels_last=config.channels_last, augment=augment, signed=True
    )
    return generator, discriminator, source


def check(config: RunConfig, where: Path | None) -> None:
    """Raises where the networks cannot be made, or there are no features to measure with."""
    make_networks(config)
    if config.gan is not None:
        feature_networks.given(config.gan.features, where)


def make_networks(config: RunConfig) -> tuple[Generator, Discriminator]:
    """Both networks, with the norms of the generator converted."""
    if config.gan is None or config.model != "dcgan":
        raise ValueError(f"there is no generator {config.model!r}: use the model dcgan, and give the run's gan")
    torch.manual_seed(config.seed)
    generator = Generator(config.gan.latent, config.gan.channels)
    discriminator = Discriminator(config.gan.channels)
    if config.mixture is not None:
        convert(generator, list(config.mixture.layers), **config.mixture.for_convert)
    return generator, discriminator

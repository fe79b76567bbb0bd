"""Training a generator against a discriminator: the trainer's epochs, with a Fréchet distance and samples now and then.

As in the paper: Adam for both networks, one update of each a step, and the losses of Goodfellow et al. (2014) with the
generator's in its non-saturating form.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm import convert, recalibrate
from mixnorm_lab import data
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data import DataSet, Resident
from mixnorm_lab.data.sources import Source
from mixnorm_lab.generators import features as feature_networks
from mixnorm_lab.generators import samples
from mixnorm_lab.generators.features import Features
from mixnorm_lab.generators.frechet import Statistics, distance
from mixnorm_lab.generators.streams import Beside
from mixnorm_lab.models import Discriminator, Generator
from mixnorm_lab.storage.folders import samples_picture
from mixnorm_lab.storage.records import Record
from mixnorm_lab.training.loop import TrainingLoop, load_statistics
from mixnorm_lab.training.progress import RunProgress
from mixnorm_lab.training.run import CHECKPOINT_SECONDS, run_training
from mixnorm_lab.training.step import Step, autocast

IMAGE = (3, 32, 32)
GRID = 8  # images in a row, and rows
GPU_BATCH, CPU_BATCH = 1000, 100  # images of an evaluation at a time
EVALUATION, PICTURE, REFILL = 0, 1, 2  # what noise is for, so that no two share it


class GanStep(Step):
    """Noise, a batch, and one update of each network, both from the weights before it. Its numbers: the two losses."""

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
        source: Source,
        steps: int,
        latent: int,
        *,
        device: torch.device,
        bf16: bool = False,
    ) -> None:
        super().__init__(source, steps, device=device, bf16=bf16)
        self.generator, self.discriminator = generator, discriminator
        self.optimizers = optimizers
        self.latent = latent
        self._beside = Beside(device)
        self._weights = [[p for p in network.parameters() if p.requires_grad] for network in (generator, discriminator)]

    def update(self) -> None:
        generators, discriminators = self._weights
        real, _ = self.source.batch(self.number)
        noise = torch.rand(len(real), self.latent, device=self.device) * 2 - 1
        # The discriminator's work goes beside the generator's: neither waits for the other but for the made images forward,
        # and for their gradient backward.
        with self.autocast:
            with self._beside.having(real):
                scores = self.discriminator(real)
            images = self.generator(noise)
            with self._beside.having(images):
                made = self.discriminator(images)
        with self._beside:
            generator_loss = F.softplus(-made.float()).mean()
            discriminator_loss = F.softplus(-scores.float()).mean() + F.softplus(made.float()).mean()
        # The made images pass through the discriminator once: each loss has its gradient in its own network's weights alone.
        generator_loss.backward(inputs=generators, retain_graph=True)
        with self._beside:
            discriminator_loss.backward(inputs=discriminators)
            self._descend(1)
        self._descend(0)
        self._beside.join()
        self.note(generator_loss.detach(), discriminator_loss.detach())

    def _descend(self, network: int) -> None:
        self.optimizers[network].step()
        self.optimizers[network].zero_grad(set_to_none=True)


class GanLoop(TrainingLoop):
    """Epochs of a generator and its discriminator, some of them followed by a distance and samples.

    Args:
        images: the real ones that generated images are compared with, (N, 3, H, W) in uint8.
        folder: where the pictures of samples go.
    """

    def __init__(
        self,
        config: RunConfig,
        generator: nn.Module,
        discriminator: nn.Module,
        source: Source,
        device: torch.device,
        *,
        features: Features,
        images: Tensor,
        folder: Path,
    ) -> None:
        assert config.gan is not None
        self.gan = config.gan
        super().__init__(config, {"generator": generator, "discriminator": discriminator}, "generator", source, device)
        both = self.optimizers["generator"], self.optimizers["discriminator"]
        self.step = GanStep(
            generator, discriminator, both, source, self.gan.updates, self.gan.latent, device=device, bf16=self.bf16
        )
        self.features = features
        self.images = images
        self.folder = folder
        self.batch = GPU_BATCH if device.type == "cuda" else CPU_BATCH
        self._real: Statistics | None = None

    def numbers(self, means: tuple[float, float]) -> dict[str, Any]:
        row: dict[str, Any] = {"generator_loss": means[0], "discriminator_loss": means[1]}
        if self.epoch % self.gan.evaluate_every and self.epoch != self.config.epochs:
            return row
        load_statistics(self.evaluated, self.watched)
        picture = torch.cat(list(self.generate(GRID**2, PICTURE)))
        samples.write_png(samples_picture(self.folder, self.steps), samples.grid(picture, GRID))
        row |= {"distance": self.distance(), "features": self.features.label, "samples": self.gan.samples}
        if self.config.recalibrate:
            with autocast(self.device, self.bf16):
                recalibrate(self.evaluated, self._noise(self.config.recalibrate * self.config.batch_size, REFILL))
            row["recalibrated_distance"] = self.distance()
        return row

    def distance(self) -> float:
        """Of generated images from all real ones."""
        if self._real is None:
            self._real = self.features.statistics(self.images.split(self.batch))
        return distance(self._real, self.features.statistics(self.generate(self.gan.samples, EVALUATION)))

    @torch.no_grad()
    def generate(self, count: int, purpose: int) -> Iterator[Tensor]:
        """Images in uint8 of the generator in evaluation mode, in batches."""
        for noise in self._noise(count, purpose):
            with autocast(self.device, self.bf16):
                images = self.evaluated(noise)
            yield samples.to_pixels(images)

    def _noise(self, count: int, purpose: int) -> Iterator[Tensor]:
        """Batches of (N, latent), drawn on the CPU: the same on every device. That of pictures is the same all along."""
        epoch = 0 if purpose == PICTURE else self.epoch
        seed = np.random.SeedSequence((self.config.seed, epoch, purpose)).generate_state(1)
        drawn = torch.rand(count, self.gan.latent, generator=torch.Generator().manual_seed(int(seed[0])))
        size = self.config.batch_size if purpose == REFILL else self.batch
        return (noise.to(self.device) * 2 - 1 for noise in drawn.split(size))


def make_networks(config: RunConfig) -> tuple[Generator, Discriminator]:
    """Both networks with the weights that the seed gives, batch norm's and mixture norm's alike; the generator's norms are
    converted."""
    if config.gan is None or config.model != "dcgan":
        raise ValueError(f"there is no generator {config.model!r}: use the model dcgan, and give the run's gan")
    torch.manual_seed(config.seed)
    generator = Generator(config.gan.latent, config.gan.channels)
    discriminator = Discriminator(config.gan.channels)
    if config.mixture is not None:
        convert(generator, list(config.mixture.layers), **config.mixture.options)
    return generator, discriminator


def train_gan(
    config: RunConfig,
    folder: Path,
    *,
    dataset: DataSet,
    features: Features,
    device: torch.device | str,
    progress: RunProgress | None = None,
    resume: bool = True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Record:
    """:func:`mixnorm_lab.training.run.train` for a generator: the same records, checkpoints and resuming.

    Args:
        config: with ``gan``.
        dataset: of images of 3 × 32 × 32.
        features: what the distance is of; its name must be that of the configuration.
    """
    device, gan = torch.device(device), config.gan
    shape = tuple(dataset.train.images.shape[1:])
    generator, discriminator = make_networks(config)
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

    def begin() -> GanLoop:
        return GanLoop(
            config, generator, discriminator, source, device, features=features, images=dataset.train.images, folder=folder
        )

    return run_training(
        config, folder, begin, steps_per_epoch=gan.updates, device=device, progress=progress, resume=resume,
        checkpoint_seconds=checkpoint_seconds,
    )  # fmt: skip


def check(config: RunConfig, features: Path | None) -> None:
    """Raises where the networks cannot be made, or there are no features to measure with."""
    make_networks(config)
    if config.gan is not None:
        feature_networks.given(config.gan.features, features)


def train_prepared(
    config: RunConfig,
    folder: Path,
    *,
    device: torch.device,
    features: Path | None,
    data_folder: Path | None = None,
    progress: RunProgress | None = None,
) -> Record:
    """:func:`train_gan` with the data set that the configuration names, downloaded if need be.

    Args:
        features: the folder of a classifier's run, or the file with the Inception's weights, as the configuration wants it.
        data_folder: has the files of the data set; the cache, unless given.
    """
    if config.gan is None:
        raise ValueError(f"{config.name} trains a classifier: give it to train")
    dataset = data.prepare(config.data, data_folder)
    network = feature_networks.load(config.gan.features, features, dataset, device)
    return train_gan(config, folder, dataset=dataset, features=network, device=device, progress=progress)

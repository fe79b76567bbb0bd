"""The training of a generator against a discriminator: its step, its evaluation, and its epochs, some followed by one.

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

from mixnorm import recalibrate
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.sources import Source
from mixnorm_lab.generators import samples
from mixnorm_lab.generators.features import Features
from mixnorm_lab.generators.frechet import Statistics, distance
from mixnorm_lab.generators.streams import Beside
from mixnorm_lab.storage.folders import samples_picture
from mixnorm_lab.training.loop import TrainingLoop, load_statistics
from mixnorm_lab.training.step import Step, autocast

GRID = 8  # images in a row, and rows
GPU_BATCH, CPU_BATCH = 1000, 100  # images of an evaluation at a time
EVALUATION, PICTURE, REFILL = 0, 1, 2  # what noise is for, so that no two share it


class GanStep(Step):
    """The step of both networks: noise, a batch, and one update of each from the weights before. Its numbers: the losses."""

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
        losses = {"generator_loss": means[0], "discriminator_loss": means[1]}
        due = self.epoch % self.gan.evaluate_every == 0 or self.epoch == self.config.epochs
        return losses | self._evaluate() if due else losses

    def _evaluate(self) -> dict[str, Any]:
        """The distance with the running statistics, and if asked for with fresh ones. Leaves a picture of samples."""
        load_statistics(self.evaluated, self.watched)
        picture = torch.cat(list(self.generate(GRID**2, PICTURE)))
        samples.write_png(samples_picture(self.folder, self.steps), samples.grid(picture, GRID))
        row: dict[str, Any] = {"distance": self.distance(), "features": self.features.label, "samples": self.gan.samples}
        if self.config.recalibrate:
            with autocast(self.device, self.bf16):
                recalibrate(self.evaluated, self._noise(self.config.recalibrate * self.config.batch_size, REFILL))
            row["recalibrated_distance"] = self.distance()
        return row

    def distance(self) -> float:
        """The distance of generated images from all real ones."""
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

"""The settings of a run that trains a generator."""

from __future__ import annotations

from dataclasses import dataclass, field

from mixnorm_lab.config.fields import setting
from mixnorm_lab.config.parts.checks import check, one_of

# What the distance of each kind of features is called. FID is the name for those of the 2015 Inception alone.
FEATURES = {"cifar-features": "CIFAR-feature Fréchet distance", "inception-2015": "FID"}


@dataclass(frozen=True)
class Gan:
    """The settings of a generator and its discriminator, which a run trains in place of a classifier.

    Args:
        updates: of each network in an epoch, which is what a line of the record stands for.
        evaluate_every: epochs between two measurements of the distance; the last epoch always has one.
        samples: images that the generator makes for one. The other side is all training images.
        features: "cifar-features", of a classifier that this package trained, or "inception-2015", whose distance is FID.
        latent: the dimensions of the noise.
        channels: of the smallest map in both networks.
    """

    updates: int = field(default=1000, metadata=setting(label="updates an epoch", text=lambda gan: f"{gan.updates:,}"))
    evaluate_every: int = field(
        default=10,
        metadata=setting(
            label="measured",
            text=lambda gan: f"every {gan.evaluate_every} epochs, of {gan.samples:,} samples",
            row_before="latent",
        ),
    )
    samples: int = 50_000
    features: str = field(
        default="cifar-features", metadata=setting(label="distance", text=lambda gan: FEATURES[gan.features])
    )
    latent: int = field(
        default=128,
        metadata=setting(label="networks", text=lambda gan: f"{gan.latent} dimensions of noise, {gan.channels} channels"),
    )
    channels: int = 512

    def __post_init__(self) -> None:
        one_of("feature network", self.features, tuple(FEATURES))
        for name in ("updates", "evaluate_every", "samples", "latent"):
            check(getattr(self, name) >= 1, f"the GAN's {name}", getattr(self, name), "at least 1")
        check(self.channels >= 8 and self.channels % 8 == 0, "the GAN's channels", self.channels, "a multiple of 8")

"""A generator so small that a step takes a few milliseconds, and features of its images that need no network."""

import torch

from mixnorm_lab.config.parts.gan import Gan
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data import DataSet, Images
from mixnorm_lab.generators import build
from mixnorm_lab.generators.features import Features
from mixnorm_lab.generators.gan import GanLoop
from mixnorm_lab.training.run import train

CPU = torch.device("cpu")
MIXTURE = Mixture(("deconv1.norm", "deconv2.norm"), {"num_components": 2, "em_iters": 1, "backend": "reference"})
GAN = Gan(updates=3, evaluate_every=2, samples=20, latent=4, channels=8)


def config(**changes):
    """Four epochs of three updates; a distance after the second and the fourth."""
    settings = {
        "name": "gan",
        "model": "dcgan",
        "data": "cifar10",
        "epochs": 4,
        "batch_size": 8,
        "optimizer": Optimizer("adam", lr=0.002, betas=(0.0, 0.9)),
        "schedule": Schedule("constant"),
        "mixture": MIXTURE,
        "gan": GAN,
    }
    return RunConfig(**settings | changes)


def images(count=40, seed=0):
    """Smooth ones of 3 × 32 × 32."""
    small = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear") * 255).to(torch.uint8)


def dataset(count=40, name="cifar10"):
    labels = torch.arange(count) % 10
    return DataSet(name, Images(images(count), labels), Images(images(10, 1), labels[:10]), num_classes=10, augment=True)


def features(name="cifar-features"):
    """The means of the four quarters of the green channel, as fractions."""
    return Features(
        name, "0123456789abcdef", 4, lambda x: torch.nn.functional.avg_pool2d(x[:, 1].float() / 255, 16).flatten(1)
    )


def run(config, folder, **options):
    """A run of the trainer; its record."""
    images, measured = options.pop("dataset", None) or dataset(), options.pop("features", None) or features()
    device = torch.device(options.pop("device", CPU))
    networks = build.prepare(config, device, images, measured)

    def begin():
        return GanLoop(config, *networks, device, features=measured, images=images.train.images, folder=folder)

    return train(config, folder, begin, device=device, **options)

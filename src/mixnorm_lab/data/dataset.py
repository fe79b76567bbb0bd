"""Images with labels, in two sets: what every data set is here, and what can be said of one. Rows of a table are such."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """``images`` (N, C, H, W) in uint8 and their ``labels`` (N,) in int64, on the CPU.

    Of a table, ``images`` are its rows (N, D) in fp32, and labels that are numbers to predict are in fp32.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> Images:
        return Images(self.images[index], self.labels[index])


@dataclass(frozen=True)
class DataSet:
    """Numbers to predict are one class.

    Args:
        augment: whether random crops and flips of these images make sense.
        left_out: columns of a table that are not used.
    """

    name: str
    train: Images
    test: Images
    num_classes: int
    augment: bool
    left_out: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W), or (D,) of a table."""
        return tuple(self.train.images.shape[1:])

    @property
    def has_rows(self) -> bool:
        """Whether it is a table."""
        return len(self.shape) == 1

    @property
    def samples(self) -> str:
        """What it consists of."""
        return "rows" if self.has_rows else "images"

    @property
    def predicts_numbers(self) -> bool:
        return self.train.labels.is_floating_point()


def validation_split(dataset: DataSet, fraction: float = 0.1, seed: int = 0) -> DataSet:
    """The data set with a share of its training images in place of the test images, for choosing settings.

    Every class gives the same share; which images it gives depends on the seed alone.
    """
    train, held_out = stratified_split(dataset.train, fraction, seed)
    return replace(dataset, train=train, test=held_out)


def stratified_split(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    """Images without and with the given share of each class, both in their old order. Numbers to predict are one class."""
    labels = images.labels.numpy()
    if images.labels.is_floating_point():
        labels = np.zeros(len(labels))
    random = np.random.RandomState(seed)  # its numbers are promised never to change
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held_out[random.permutation(members)[: round(fraction * len(members))]] = True
    if not 0 < fraction < 1 or not held_out.any() or held_out.all():
        raise ValueError(
            f"a share of {fraction:g} of {len(labels):,} samples leaves one side empty: use another between 0 and 1, "
            "or more data"
        )
    mask = torch.from_numpy(held_out)
    return images[~mask], images[mask]


def subset(dataset: DataSet, wanted: float) -> DataSet:
    """A few of the training images, and at most as many test images; below 1, ``wanted`` is a share of both.

    Every class gives the same share, and always the same images.
    """
    found = []
    for images in (dataset.train, dataset.test):
        share = wanted if wanted < 1 else wanted / len(images)
        found.append(images if share >= 1 else stratified_split(images, share, seed=0)[1])
    return replace(dataset, train=found[0], test=found[1])


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of images (N, C, H, W) in uint8, both (C,) in fp64, in units of the pixels."""
    values = torch.arange(256, dtype=torch.float64)
    # How often each of the 256 values occurs says it exactly, and holds no second copy of the images as numbers.
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
    shares = counts / counts.sum(1, keepdim=True)
    means = (shares * values).sum(1)
    variances = (shares * (values - means[:, None]).square()).sum(1)
    return means, variances.sqrt()


def describe(dataset: DataSet) -> list[tuple[str, str]]:
    """What there is to know of a data set, as rows of a table."""
    if dataset.has_rows:
        numbers = "a number, in deviations from the mean"
        return [
            ("data set", dataset.name),
            ("training rows", f"{len(dataset.train):,}"),
            ("test rows", f"{len(dataset.test):,}"),
            ("numbers in a row", str(dataset.shape[0])),
            ("target", numbers if dataset.predicts_numbers else f"{dataset.num_classes} classes"),
            ("left out", ", ".join(dataset.left_out) or "no column"),
        ]
    means, deviations = channel_statistics(dataset.train.images)
    return [
        ("data set", dataset.name),
        ("training images", f"{len(dataset.train):,}"),
        ("test images", f"{len(dataset.test):,}"),
        ("image", " × ".join(map(str, dataset.train.images.shape[1:]))),
        ("classes", str(dataset.num_classes)),
        ("channel means", " ".join(f"{mean / 255:.4f}" for mean in means.tolist())),
        ("channel deviations", " ".join(f"{deviation / 255:.4f}" for deviation in deviations.tolist())),
        ("augmentation", "crops and flips" if dataset.augment else "none"),
    ]

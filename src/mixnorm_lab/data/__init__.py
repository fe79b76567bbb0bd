"""Data sets as tensors: scikit-learn's digits, CIFAR-10 and CIFAR-100, what is on disk, and batches made on the device."""

from __future__ import annotations

import difflib
from pathlib import Path

from mixnorm_lab.data import cifar, digits
from mixnorm_lab.data.dataset import DataSet, Images, describe, subset, validation_split
from mixnorm_lab.data.disk import recognize
from mixnorm_lab.data.download import DownloadProgress, cache_folder, fetch
from mixnorm_lab.data.resident import Resident

__all__ = [
    "NAMES", "DataSet", "Images", "Resident", "cache_folder", "describe", "fetch", "load", "prepare", "subset",
    "validation_split",
]  # fmt: skip

NAMES = ("digits", "cifar10", "cifar100")


def load(
    name: str, folder: Path | None = None, image_size: int | None = None, target: str | None = None
) -> DataSet:  # fmt: skip
    """A data set by its name: one of ``NAMES``, or the one that ``recognize.name_of`` gave to the path ``folder``.

    ``folder`` has the official files of CIFAR, their folder or the archive; the cache, unless given. Nothing is downloaded.
    ``image_size`` and ``target`` are for what is on disk: the height and width of images, and the column to predict.
    """
    if recognize.is_on_disk(name):
        return recognize.load(name, folder, image_size, target)
    _check(name, folder)
    for option, value in (("--image-size", image_size), ("--target", target)):
        if value is not None:
            raise ValueError(f"{option} is for data of your own, in a folder or a table: leave it out with {name}")
    if name == "digits":
        return digits.read()
    return cifar.read(name, Path(folder or cache_folder()))


def prepare(
    name: str,
    folder: Path | None = None,
    progress: DownloadProgress | None = None,
    image_size: int | None = None,
    target: str | None = None,
) -> DataSet:
    """:func:`load`, after a download where the files in the cache are missing or damaged. Given folders stay as they are."""
    if name not in cifar.OFFICIAL or folder is not None or image_size is not None or target is not None:
        return load(name, folder, image_size, target)
    try:
        return load(name)
    except (FileNotFoundError, ValueError):
        cifar.unpack(name, fetch(name, progress=progress))
        return load(name)


def _check(name: str, folder: Path | None) -> None:
    if name not in NAMES:
        if Path(name).is_file():
            raise ValueError(f"{name} is a file of no known kind: name a CSV or Parquet file, or a folder of images")
        nearest = difflib.get_close_matches(name, NAMES, cutoff=0.4)
        hint = f", but near {' and '.join(nearest)}" if nearest else ""
        raise ValueError(f"data set {name!r} is unknown{hint}: choose from {', '.join(NAMES)}")
    if name == "digits" and folder is not None:
        raise ValueError("The data set digits comes with scikit-learn and is read from no folder: leave --data out")

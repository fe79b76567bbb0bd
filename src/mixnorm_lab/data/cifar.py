"""CIFAR-10 and CIFAR-100 from a folder with the official files for Python, or with the archive that holds them."""

from __future__ import annotations

import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mixnorm_lab.data import pickled_arrays
from mixnorm_lab.data.dataset import DataSet, Images
from mixnorm_lab.data.download import ARCHIVES, checksum

SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Official:
    """The layout of a data set: its folder, its files with the number of images in each, the key of the labels."""

    title: str
    folder: str
    train: dict[str, int]
    test: dict[str, int]
    labels: str
    num_classes: int

    @property
    def files(self) -> dict[str, int]:
        return self.train | self.test


OFFICIAL = {
    "cifar10": Official(
        "CIFAR-10", "cifar-10-batches-py", {f"data_batch_{number}": 10_000 for number in range(1, 6)},
        {"test_batch": 10_000}, "labels", 10,
    ),
    "cifar100": Official("CIFAR-100", "cifar-100-python", {"train": 50_000}, {"test": 10_000}, "fine_labels", 100),
}  # fmt: skip


def read(name: str, folder: Path) -> DataSet:
    """The data set ("cifar10" or "cifar100") from ``folder``: it has the official files, their folder or the archive."""
    official = OFFICIAL[name]
    root = _root(name, folder)
    train, test = (_images(name, root, files) for files in (official.train, official.test))
    return DataSet(name, train, test, official.num_classes, augment=True)


def found_in(folder: Path) -> str | None:
    """Which of the two data sets a folder has, itself, in its official folder or as an archive; None if neither."""
    found = [
        name
        for name, official in OFFICIAL.items()
        if (folder / official.folder).is_dir()
        or any((folder / file).is_file() for file in (next(iter(official.train)), ARCHIVES[name].file))
    ]
    if len(found) > 1:
        raise ValueError(
            f"{folder} has both CIFAR-10 and CIFAR-100: choose the folder of one, {OFFICIAL[found[0]].folder} in it"
        )
    return found[0] if found else None


def unpack(name: str, archive: Path) -> None:
    """Puts the official files of an archive into their folder beside it; each appears when it is whole.

    Only these files are written, by their known names: no other member of an archive has a say in where something goes.
    """
    official, folder = OFFICIAL[name], archive.parent / OFFICIAL[name].folder
    if checksum(archive) != ARCHIVES[name].md5:
        raise ValueError(f"{archive} is damaged or cut off: {_remedy(name)}")
    missing = {f"{official.folder}/{file}": folder / file for file in official.files}
    try:
        folder.mkdir(exist_ok=True)
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                source = tar.extractfile(member) if member.isreg() and member.name in missing else None
                if source is not None:
                    _write(missing.pop(member.name), source)
    except OSError as error:
        raise OSError(
            f"{archive} cannot be unpacked into {folder} ({error.strerror}): make room there, or unpack it elsewhere "
            "and name that folder with --data DIR"
        ) from None
    if missing:
        raise ValueError(f"{archive} has no {next(iter(missing))}: {_remedy(name)}")


def _write(path: Path, source: Any) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may unpack at once
    try:
        with part.open("wb") as file:
            shutil.copyfileobj(source, file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _root(name: str, folder: Path) -> Path:
    """Where the official files are, from an archive if need be."""
    official = OFFICIAL[name]
    inner = folder / official.folder
    missing = {root: [file for file in official.files if not (root / file).is_file()] for root in (folder, inner)}
    for root, files in missing.items():
        if not files:
            return root
    archive = folder / ARCHIVES[name].file
    if archive.is_file():
        unpack(name, archive)
        return inner
    for root, files in missing.items():
        if len(files) < len(official.files):
            raise FileNotFoundError(f"{root / files[0]} is missing: {_remedy(name)}")
    raise FileNotFoundError(f"{inner} does not exist, nor does {archive.name} beside it: {_remedy(name)}")


def _images(name: str, root: Path, files: dict[str, int]) -> Images:
    parts = [_file(name, root / file, count) for file, count in files.items()]
    images = np.concatenate([images for images, _ in parts]).reshape(-1, *SHAPE)
    return Images(torch.from_numpy(images), torch.tensor([label for _, labels in parts for label in labels]))


def _file(name: str, path: Path, count: int) -> tuple[np.ndarray, list[int]]:
    """Rows (count, 3072) in uint8 and their labels."""
    official = OFFICIAL[name]
    try:
        with path.open("rb") as file:
            record = pickled_arrays.load(file)
        if not isinstance(record, dict):
            raise ValueError("it holds no dictionary")
        images, labels = (record.get(key.encode(), record.get(key)) for key in ("data", official.labels))
        shape = (count, int(np.prod(SHAPE)))
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != shape:
            raise ValueError(f"'data' is not an array of {shape[0]:,} × {shape[1]:,} bytes")
        if not isinstance(labels, list) or len(labels) != count:
            raise ValueError(f"{official.labels!r} is not a list of {count:,} numbers")
        if not all(type(label) is int and 0 <= label < official.num_classes for label in labels):
            raise ValueError(f"{official.labels!r} has a label that is not a number from 0 to {official.num_classes - 1}")
    except ValueError as error:
        raise ValueError(
            f"{path} is no official file of {official.title} or is damaged ({error}): {_remedy(name)}"
        ) from None
    return images, labels


def _remedy(name: str) -> str:
    return f"`mixnorm data {name}` downloads the official files, or name a folder that has them with --data DIR"

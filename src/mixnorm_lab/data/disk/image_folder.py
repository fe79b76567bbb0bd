"""A folder of images: train/CLASS/ and test/CLASS/ (or val, valid, validation), or CLASS/ alone."""

from __future__ import annotations

from pathlib import Path

import torch

from mixnorm_lab.data.dataset import DataSet, Images, stratified_split
from mixnorm_lab.data.disk import pictures

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
TRAIN = ("train", "training")
TEST = ("test", "testing", "val", "valid", "validation")  # the first one that there is
TEST_SHARE = 0.2  # of each class, where a folder has no test images


def read(name: str, folder: Path, image_size: int | None = None) -> DataSet:
    """The images of a folder, whose folders are the classes, in the order of their names.

    Without a folder for tests a fixed fifth of each class is held out.
    """
    train, test = _files(folder)
    if not train:
        raise ValueError(
            f"{folder} has no images ({', '.join(SUFFIXES[:3])}, …) in folders of their classes, and no official files of "
            "CIFAR: put images into train/CLASS/ and test/CLASS/, or into CLASS/"
        )
    classes = list(train)
    if len(classes) < 2:
        raise ValueError(f"{folder} has images of one class, {classes[0]}: put those of each class into a folder of its own")
    if test and set(test) != set(classes):
        only = [f"only in {where}: {', '.join(sorted(names))}" for where, names in (
            ("train", set(classes) - set(test)), ("test", set(test) - set(classes))
        ) if names]  # fmt: skip
        raise ValueError(
            f"the training and test images of {folder} have different classes ({'; '.join(only)}): name them alike"
        )
    shape = pictures.shape_for([_open(files[0]) for files in train.values()], image_size)
    first = _images(train, classes, shape, folder)
    if test:
        second = _images(test, classes, shape, folder)
    else:
        first, second = stratified_split(first, TEST_SHARE, seed=0)
    return DataSet(name, first, second, num_classes=len(classes), augment=shape[0] == 3)


def _files(folder: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """The files of each class to train and to test on."""
    found = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir()}
    train = next((found[name] for name in TRAIN if name in found), None)
    if train is None:
        return _by_class(folder), {}
    test = next((found[name] for name in TEST if name in found), None)
    return _by_class(train), {} if test is None else _by_class(test)


def _by_class(folder: Path) -> dict[str, list[Path]]:
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            if files:
                found[path.name] = files
    return found


def _images(files: dict[str, list[Path]], classes: list[str], shape: tuple[int, int, int], folder: Path) -> Images:
    names = [file for name in classes for file in files[name]]
    labels = [number for number, name in enumerate(classes) for _ in files[name]]
    return Images(pictures.decoded(names, _open, shape, str(folder)), torch.tensor(labels))


def _open(file: Path) -> object:
    image = pictures.load_pillow()
    try:
        return image.open(file)
    except OSError:
        raise ValueError(f"{file} is no image that Pillow can read: mend it, or remove it") from None

"""A data set that Hugging Face's datasets saved with ``save_to_disk``: images with labels, or columns of a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mixnorm_lab.data.dataset import DataSet, Images, stratified_split
from mixnorm_lab.data.disk import pictures, table

TEST = ("test", "validation", "valid", "val")  # the first one that there is
LABELS = ("label", "labels", "fine_label", "target", "class")


def is_one(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def read(name: str, folder: Path, image_size: int | None = None, target: str | None = None) -> DataSet:
    """The data set of a folder, with a fixed fifth to test on if it is not split.

    The labels are the column ``target``; without it that of the type ClassLabel, or one that is called "label". The inputs
    are the column of images, or all others.
    """
    train, test = _parts(folder)
    target = _target(folder, train, target)
    images = [column for column, kind in train.features.items() if type(kind).__name__ == "Image"]
    if not images:
        if image_size is not None:
            raise ValueError(f"{folder} has no column of images: leave --image-size out")
        columns = [_columns(part) for part in (train, test) if part is not None]
        known = type(train.features[target]).__name__ == "ClassLabel"
        return table.rows(name, str(folder), columns[0], columns[1] if test is not None else None, target, classes=known)
    if len(images) > 1:
        raise ValueError(f"{folder} has the images {', '.join(images)}: save it with one column of them alone")
    classes = _classes(train, test, target)
    if len(classes) < 2:
        raise ValueError(f"{folder} has one class alone in {target}: choose another --target")
    step = max(1, len(train) // 64)
    shape = pictures.shape_for([train[number][images[0]] for number in range(0, len(train), step)], image_size)
    first = _images(train, images[0], target, classes, shape, folder)
    if test is None:
        first, second = stratified_split(first, table.TEST_SHARE, seed=0)
    else:
        second = _images(test, images[0], target, classes, shape, folder)
    return DataSet(name, first, second, num_classes=len(classes), augment=shape[0] == 3)


def _parts(folder: Path) -> tuple[Any, Any]:
    """What there is to train and to test on; the latter may be None."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(f"{folder} is a saved data set, which needs datasets: pip install datasets") from None
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} cannot be read ({' '.join(str(error).split())}): save it again with save_to_disk"
        ) from None
    if not isinstance(found, dict):
        return found.with_format(None), None
    if "train" not in found:
        raise ValueError(f"{folder} has the splits {', '.join(found)}, but no train: save it with one")
    test = next((found[split].with_format(None) for split in TEST if split in found), None)
    return found["train"].with_format(None), test


def _target(folder: Path, train: Any, target: str | None) -> str:
    columns = list(train.features)
    if target is not None:
        if target not in columns:
            raise ValueError(f"{folder} has no column {target!r}: choose --target from {table.listed(columns)}")
        return target
    classes = [column for column, kind in train.features.items() if type(kind).__name__ == "ClassLabel"]
    found = classes if len(classes) == 1 else [column for column in LABELS if column in columns][:1]
    if not found:
        raise ValueError(f"which column of {folder} has the labels? Say --target with one of {table.listed(columns)}")
    return found[0]


def _columns(part: Any) -> dict[str, Sequence[Any]]:
    """The columns of a table. Those of the type ClassLabel are texts, and a label that is none is missing."""
    found = {}
    for column, kind in part.features.items():
        values = part[column][:]
        if type(kind).__name__ == "ClassLabel":
            values = [None if value is None or value < 0 else kind.int2str(value) for value in values]
        found[column] = values
    return found


def _classes(train: Any, test: Any, target: str) -> dict[Any, int]:
    """The values of the labels, and the number of each."""
    kind = train.features[target]
    if type(kind).__name__ == "ClassLabel":
        return {number: number for number in range(kind.num_classes)}
    values = set(train[target]) | (set() if test is None else set(test[target]))
    return {value: number for number, value in enumerate(sorted(values))}


def _images(
    part: Any, column: str, target: str, classes: dict[Any, int], shape: tuple[int, int, int], folder: Path
) -> Images:  # fmt: skip
    labels = part[target][:]
    unlabelled = sum(label not in classes for label in labels)
    if unlabelled:
        raise ValueError(
            f"{unlabelled:,} of {len(labels):,} images of {folder} have no label in {target}: remove those rows"
        )
    images = pictures.decoded(range(len(part)), lambda number: part[number][column], shape, str(folder))
    return Images(images, torch.tensor([classes[label] for label in labels]))

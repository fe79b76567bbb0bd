"""What a path holds, and what is there: the data set, its short name and a digest of its contents."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from mixnorm_lab.data.dataset import DataSet
from mixnorm_lab.data.disk import image_folder, saved_dataset, table

IMAGES, SAVED, TABLE = "images", "dataset", "table"
KINDS = (IMAGES, SAVED, TABLE)


def is_path(text: str) -> bool:
    """Whether what was given as data is a path of a file or a folder, and not a name."""
    path = Path(text)
    return path.is_dir() or len(path.parts) > 1 or path.suffix.lower() in table.SUFFIXES


def is_on_disk(name: str) -> bool:
    """Whether the name of a data set is one that :func:`name_of` made."""
    return name.partition(":")[0] in KINDS and ":" in name


def name_of(path: Path) -> str:
    """What a data set is called: "table:iris.csv", "images:flowers" or "dataset:flowers"."""
    if path.suffix.lower() in table.SUFFIXES and not path.is_dir():
        if not path.is_file():
            raise ValueError(f"there is no file {path}: name a CSV or Parquet file, a folder, or a data set")
        return f"{TABLE}:{path.name}"
    if not path.is_dir():
        raise ValueError(
            f"there is no folder {path}: name one with images or a saved data set, a table ({', '.join(table.SUFFIXES)}), "
            "or a data set"
        )
    return f"{SAVED if saved_dataset.is_one(path) else IMAGES}:{path.resolve().name}"


def load(name: str, path: Path | None, image_size: int | None = None, target: str | None = None) -> DataSet:
    """The data set of a path under the name that :func:`name_of` gave it. The last ones are kept in memory."""
    if path is None:
        kind = "file" if name.startswith(TABLE) else "folder"
        raise ValueError(f"{name} is read from its {kind}: name it with --data")
    if name != name_of(path):
        raise ValueError(f"{path} is {name_of(path)}, and not {name}: name the same data with --data")
    return _load(name, path.resolve(), image_size, target)


def notes(name: str, path: Path | None, image_size: int | None = None, target: str | None = None) -> list[str]:
    """What a user should know of the data before a training; of other data, nothing."""
    left_out = load(name, path, image_size, target).left_out if is_on_disk(name) else ()
    return [f"Columns with too many different texts are left out: {', '.join(left_out)}"] if left_out else []


@functools.lru_cache(maxsize=2)
def _load(name: str, path: Path, image_size: int | None, target: str | None) -> DataSet:
    kind = name.partition(":")[0]
    if target is not None and kind == IMAGES:
        raise ValueError(f"the classes of {path} are its folders: leave --target out")
    if image_size is not None and kind == TABLE:
        raise ValueError(f"{path} is a table, and has no images: leave --image-size out")
    if kind == IMAGES:
        return image_folder.read(name, path, image_size)
    if kind == SAVED:
        return saved_dataset.read(name, path, image_size, target)
    return table.read(name, path, target)


def digest(path: Path) -> str:
    """A digest that differs where the data does: of a file all of it, of a folder the names and sizes of its files."""
    if path.is_file():
        found = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                found.update(part)
        return found.hexdigest()[:12]
    files = sorted((file.relative_to(path).as_posix(), file.stat().st_size) for file in path.rglob("*") if file.is_file())
    return hashlib.sha256(repr(files).encode()).hexdigest()[:12]

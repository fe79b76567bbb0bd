"""A table with a column to predict: numbers stay numbers, texts become a column for each of their values.

Numbers to predict are those of the column less the mean of the training rows, in units of their deviation, so that a mean
squared error of 1 is what the mean itself has.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixnorm_lab.data.dataset import DataSet, Images, stratified_split

SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "inf", "+inf", "-inf"}  # in any case of letters
MOST_CLASSES = 20  # whole numbers: with more values than that they are numbers to predict
MOST_TEXTS = 100  # values of a column of texts; one with more is a name, and is left out
TEST_SHARE = 0.2
Columns = Mapping[str, Sequence[Any]]


def read(name: str, path: Path, target: str | None) -> DataSet:
    """A CSV file (or TSV, or Parquet) with a fixed fifth of its rows, of each class alike, to test on."""
    columns = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    return rows(name, str(path), columns, None, target)


def rows(
    called: str, where: str, train: Columns, test: Columns | None, target: str | None, *, classes: bool = False
) -> DataSet:
    """Columns as a data set. Without ``test`` a fifth of the rows is held out.

    Args:
        where: the columns are from, for sentences about them.
        classes: whether the target is known to be classes, whatever their names look like.
    """
    target = _target(where, train, target)
    _check_whole(where, train)
    count = len(train[target])
    if test is not None:
        _check_whole(where, test)
        if set(test) != set(train):
            raise ValueError(f"the training and test rows of {where} have different columns: give both the same")
        train = {name: [*train[name], *test[name]] for name in train}
    labels, num_classes = _labels(where, target, train[target], known=classes)
    order = torch.arange(len(labels))
    if test is None:
        parts = stratified_split(Images(order, labels), TEST_SHARE, seed=0)
        order, count = torch.cat([part.images for part in parts]), len(parts[0])
    labels = labels[order]
    if labels.is_floating_point():
        known = labels[:count]
        labels = ((labels - known.mean()) / (known.std(unbiased=False) or 1)).float()
    features, left_out = _features({name: values for name, values in train.items() if name != target}, order, count)
    if features.shape[1] == 0:
        raise ValueError(f"{where} has no column beside {target} to predict it from: add some")
    parts = Images(features[:count], labels[:count]), Images(features[count:], labels[count:])
    return DataSet(called, *parts, num_classes, augment=False, left_out=left_out)


def _csv(path: Path) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}): save it as UTF-8 with commas") from None
    lines = [line for line in lines if line]
    if len(lines) < 2:
        raise ValueError(f"{path} has no rows below its names of columns: is it the right file?")
    names, values = lines[0], lines[1:]
    separator = next((mark for mark in ";|\t" if mark in names[0]), None)
    if separator is not None and len(names) == 1:
        raise ValueError(f"{path} has {separator!r} between its columns: save it with commas")
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise ValueError(f"{path} has several columns {twice!r}: give each a name of its own")
    uneven = next((number for number, line in enumerate(values, 2) if len(line) != len(names)), None)
    if uneven is not None:
        raise ValueError(
            f"row {uneven} of {path} has {len(values[uneven - 2])} values, but there are {len(names)} columns: mend that row"
        )
    return {name: [line[number].strip() for line in values] for number, name in enumerate(names)}


def _parquet(path: Path) -> Columns:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow, or save the table as CSV") from None
    try:
        return pyarrow.parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:  # pyarrow's own are ValueErrors
        raise ValueError(f"{path} cannot be read as Parquet ({error}): is it the right file?") from None


def _target(where: str, columns: Columns, target: str | None) -> str:
    if target is None:
        raise ValueError(f"which column of {where} is to be predicted? Say --target with one of {listed(columns)}")
    if target not in columns:
        near = difflib.get_close_matches(target, columns)
        raise ValueError(f"{where} has no column {target!r}: choose --target from {', '.join(near) or listed(columns)}")
    return target


def listed(columns: Iterable[str]) -> str:
    """The names of columns; of many the first ones and the last, where the target often is."""
    names = list(columns)
    return ", ".join(names if len(names) <= 12 else [*names[:8], "…", *names[-3:]])


def _check_whole(where: str, columns: Columns) -> None:
    """Raises where values are missing, and says how many rows that are, and in which columns."""
    missing = {
        name: [number for number, value in enumerate(values) if _is_missing(value)] for name, values in columns.items()
    }
    missing = {name: found for name, found in missing.items() if found}
    if missing:
        count = len({number for found in missing.values() for number in found})
        total = len(next(iter(columns.values())))
        most = sorted(missing.items(), key=lambda item: -len(item[1]))
        told = ", ".join(f"{name}: {len(found):,}" for name, found in most[:5]) + (", …" if len(most) > 5 else "")
        raise ValueError(f"{count:,} of {total:,} rows of {where} miss values ({told}): fill them in, or remove those rows")


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in MISSING
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """Values as numbers in fp64, or None if one of them is none."""
    try:
        found = np.array([float(value) for value in values])
    except (TypeError, ValueError):
        return None
    return found if np.isfinite(found).all() else None


def _labels(where: str, target: str, values: Sequence[Any], known: bool) -> tuple[Tensor, int]:
    """Classes, which they may be known to be, and how many there are; or numbers and 1."""
    numbers = None if known or any(isinstance(value, bool) for value in values) else _numbers(values)
    if numbers is not None:
        distinct = np.unique(numbers)
        few = len(distinct) <= MOST_CLASSES and 2 * len(distinct) <= len(numbers)
        if not (few and np.array_equal(distinct, np.round(distinct))):
            return torch.from_numpy(numbers), 1
        classes: list[Any] = distinct.tolist()
        found = torch.from_numpy(np.searchsorted(distinct, numbers))
    else:
        texts = [str(value) for value in values]
        classes = sorted(set(texts))
        if not known and 2 * len(classes) > len(texts):
            raise ValueError(
                f"the column {target} of {where} has {len(classes):,} different texts in {len(texts):,} rows: choose a "
                "--target whose values repeat, or one of numbers"
            )
        places = {text: number for number, text in enumerate(classes)}
        found = torch.tensor([places[text] for text in texts])
    if len(classes) < 2:
        raise ValueError(f"the column {target} of {where} has one value alone, {classes[0]}: choose another --target")
    return found.long(), len(classes)


def _features(columns: Columns, order: Tensor, count: int) -> tuple[Tensor, tuple[str, ...]]:
    """Columns as numbers (N, D) in the given order, by what the first ``count`` rows of it say; and those left out.

    Numbers are standardized, but for columns of 0 and 1. A text becomes a 1 in the column of its value, if it is known.
    """
    found: list[np.ndarray] = []
    left_out = []
    for name, values in columns.items():
        parts = _flat(values)
        for part in parts:
            numbers = _numbers(part)
            if numbers is not None:
                found.append(numbers[order])
                continue
            texts = np.array([str(value) for value in part])[order]
            known = np.unique(texts[:count])
            if len(known) > MOST_TEXTS or 2 * len(known) > count:
                left_out.append(name)
            else:
                found += [(texts == value).astype(float) for value in known]
    features = np.stack(found, 1) if found else np.zeros((len(order), 0))
    train = features[:count]
    plain = ((train == 0) | (train == 1)).all(0)
    mean, deviation = train.mean(0), train.std(0)
    mean[plain], deviation[plain | (deviation == 0)] = 0, 1
    return torch.from_numpy((features - mean) / deviation).float(), tuple(dict.fromkeys(left_out))


def _flat(values: Sequence[Any]) -> list[Sequence[Any]]:
    """A column as columns of single values: one of lists, all as long, has as many as these are long."""
    if not isinstance(values[0], (list, tuple)):
        return [values]
    if any(not isinstance(value, (list, tuple)) or len(value) != len(values[0]) for value in values):
        return [[str(value) for value in values]]
    return [part for inner in zip(*values, strict=True) for part in _flat(inner)]

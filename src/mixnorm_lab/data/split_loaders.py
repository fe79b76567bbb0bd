"""A user's own loaders with a part of their data: some samples held out to test on, or only a few of them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

HELD_OUT, FEW = 0, 1  # what random numbers are for, so that the two do not share them


def held_out(train: Any, share: float) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """A training loader without a share of its samples, and one of these, to test on in place of the test data.

    Which samples these are depends on the share alone. They are read as the training's are, its random crops included.
    """
    count = _count(train, "--validation")
    number = round(share * count)
    if not 0 < number < count:
        raise ValueError(
            f"--validation {share:g} of {count:,} samples leaves one side empty: use a share between 0 and 1, such as 0.1"
        )
    order = _order(count, HELD_OUT)
    rest, out = sorted(order[number:]), sorted(order[:number])
    return _part(train, rest), _part(train, out, test=True)


def subset(train: Any, test: Any, wanted: float) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of a part of the training data, and of as large a part of the test data; see :func:`sizes`."""
    counts = _count(train, "--subset"), _count(test, "--subset")
    numbers = sizes(wanted, *counts)
    parts = [sorted(_order(count, FEW)[:number]) for count, number in zip(counts, numbers, strict=True)]
    return _part(train, parts[0]), _part(test, parts[1], test=True)


def sizes(wanted: float, train: int, test: int) -> tuple[int, int]:
    """How many samples to train and to test on: a number, and at most as many; or, below 1, that share of each."""
    if wanted >= 1:
        return min(round(wanted), train), min(round(wanted), test)
    return max(1, round(wanted * train)), max(1, round(wanted * test))


def _order(count: int, purpose: int) -> list[int]:
    return np.random.RandomState(purpose).permutation(count).tolist()  # its numbers are promised never to change


def _count(loader: Any, option: str) -> int:
    """The number of samples of a loader that can be split."""
    why = None
    if not isinstance(loader, DataLoader):
        why = f"the data is an object of the type {type(loader).__name__}, and no DataLoader"
    elif isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        why = "the data set of the loader has no length and no single samples"
    elif loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        why = f"the loader draws its batches with a {type(loader.batch_sampler).__name__} of its own"
    elif not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        why = f"the loader draws its samples with a {type(loader.sampler).__name__}"
    if why is not None:
        raise ValueError(f"{option} cannot split your data ({why}): split it in your function, and leave {option} out")
    return len(cast(Sized, loader.dataset))


def _part(loader: DataLoader[Any], indices: list[int], *, test: bool = False) -> DataLoader[Any]:
    """The loader with these samples alone; for a test, in order and to the last one."""
    return DataLoader(
        Subset(loader.dataset, indices),
        batch_size=loader.batch_size,
        shuffle=not test and isinstance(loader.sampler, RandomSampler),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last and not test,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )

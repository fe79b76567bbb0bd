"""Where the trainer's batches come from: a data set that is on the device as a whole, or a user's own loaders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_WORKER = "Original Traceback (most recent call last)"  # as PyTorch begins it


class Source(Protocol):
    """What the trainer asks of its data; ``data.Resident`` and :class:`Loaders` answer."""

    @property
    def steps_per_epoch(self) -> int: ...

    def start_epoch(self, seed: int, epoch: int) -> None:
        """Everything random about the epoch is a function of the two numbers."""

    def batch(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of a training step; steps are asked for in order. ``step``: () int64 on the device."""

    def test_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]: ...

    def train_batches(self, count: int, seed: int) -> Iterator[Tensor]:
        """Images alone, of up to ``count`` batches."""


class Loaders:
    """A user's own data: two iterables of (images, labels), such as ``torch.utils.data.DataLoader``.

    Each epoch reads ``train`` once, from its beginning. Before, the random numbers of torch, numpy and Python are seeded, so
    that a loader that shuffles, or draws crops, does the same after an interruption. The workers of a loader with
    ``persistent_workers=True`` are the exception: they go on with their own numbers.
    """

    def __init__(
        self,
        train: Iterable[Any],
        test: Iterable[Any],
        *,
        device: torch.device | str,
        channels_last: bool = False,
    ) -> None:
        for data, what in ((train, "training"), (test, "test")):
            if isinstance(data, Iterator):
                raise ValueError(
                    f"the {what} data can be read only once, but every epoch reads it: pass a DataLoader or a list, "
                    "not an iterator or a generator"
                )
        try:
            self.steps_per_epoch = len(train)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(
                "the training data does not say how many batches an epoch has: pass a DataLoader of a data set with a "
                "length, or give the object a __len__"
            ) from error
        if self.steps_per_epoch < 1:
            raise ValueError("the training data has no batch: use a smaller batch size, or more images")
        self.train = train
        self.test = test
        self.device = torch.device(device)
        self.channels_last = channels_last
        self._batches: Iterator[Any] = iter(())

    def start_epoch(self, seed: int, epoch: int) -> None:
        seed_everything(seed, epoch)
        with _reading():
            self._batches = iter(self.train)

    def batch(self, step: Tensor) -> tuple[Tensor, Tensor]:
        try:
            with _reading():
                batch = next(self._batches)
        except StopIteration:
            raise ValueError(
                f"the training data ended before its {self.steps_per_epoch} batches: its __len__ must be the number of "
                "batches that it yields"
            ) from None
        return self._placed(batch)

    def test_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """In the loader's own batches: ``batch_size`` is for data sets that are cut up here."""
        return map(self._placed, _read(self.test))

    def train_batches(self, count: int, seed: int) -> Iterator[Tensor]:
        seed_everything(seed, 0)
        return (self._placed(batch)[0] for batch in itertools.islice(_read(self.train), count))

    def _placed(self, batch: Any) -> tuple[Tensor, Tensor]:
        pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not pair or not all(isinstance(part, Tensor) for part in batch):
            raise ValueError(f"a batch of the data is {_kind(batch)}: each must be a pair of tensors, (images, labels)")
        if batch[0].shape[:1] != batch[1].shape[:1]:
            sizes = " and ".join(str(tuple(part.shape)) for part in batch)
            raise ValueError(f"images and labels of a batch have the shapes {sizes}: there must be a label for each image")
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        if self.channels_last and images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels


def seed_everything(seed: int, epoch: int, rank: int = 0) -> None:
    """Other numbers for each seed, epoch and rank, in every generator that a model or a loader may draw from."""
    sources = (seed, epoch, rank) if rank else (seed, epoch)  # the first rank has the numbers of a process that is alone
    number = int(np.random.SeedSequence(sources).generate_state(1, np.uint64)[0]) >> 1
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


@contextmanager
def _reading() -> Iterator[None]:
    """Tells a file that a loader cannot read from one that the trainer cannot write."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"the data cannot be read ({told(error)}): mend the loader, --debug shows where") from error


def _read(data: Iterable[Any]) -> Iterator[Any]:
    with _reading():
        yield from data


def told(error: Exception) -> str:
    """What a user's code raised, on one line. A worker of a loader sends its whole traceback; its last line says it."""
    text = str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}" if _WORKER not in text else text.strip().splitlines()[-1]


def _kind(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    return f"a {type(batch).__name__}"

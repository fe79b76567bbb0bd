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

from mixnorm_lab.data import batches
from mixnorm_lab.own.functions import told


class Source(Protocol):
    """What the trainer asks of its data; ``data.Resident`` and :class:`Loaders` answer."""

    @property
    def steps_per_epoch(self) -> int: ...

    def start_epoch(self, seed: int, epoch: int) -> None:
        """Everything random about the epoch is a function of the two numbers."""

    def batch(self, step: Tensor) -> Any:
        """Inputs and labels of a training step; steps are asked for in order. ``step``: () int64 on the device."""

    def test_batches(self, batch_size: int) -> Iterator[Any]: ...

    def train_batches(self, count: int, seed: int) -> Iterator[Any]:
        """Inputs alone, of up to ``count`` batches."""


class Loaders:
    """A user's own data: two iterables of batches, such as ``torch.utils.data.DataLoader``.

    A batch is a pair (inputs, labels), or a dictionary with labels; with ``whole`` it may be anything, and comes as it is.

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
        whole: bool = False,
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
            raise ValueError("the training data has no batch: use a smaller batch size, or more samples")
        self.train = train
        self.test = test
        self.device = torch.device(device)
        self.channels_last = channels_last
        self.whole = whole
        self._batches: Iterator[Any] = iter(())

    def start_epoch(self, seed: int, epoch: int) -> None:
        seed_everything(seed, epoch)
        with _reading():
            self._batches = iter(self.train)

    def batch(self, step: Tensor) -> Any:
        try:
            with _reading():
                batch = next(self._batches)
        except StopIteration:
            raise ValueError(
                f"the training data ended before its {self.steps_per_epoch} batches: its __len__ must be the number of "
                "batches that it yields"
            ) from None
        return self._placed(batch)

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        """In the loader's own batches: ``batch_size`` is for data sets that are cut up here."""
        return map(self._placed, _read(self.test))

    def train_batches(self, count: int, seed: int) -> Iterator[Any]:
        seed_everything(seed, 0)
        found = map(self._placed, itertools.islice(_read(self.train), count))
        return found if self.whole else (inputs for inputs, _ in found)

    def _placed(self, batch: Any) -> Any:
        if not self.whole:
            batch = batches.split(batch)
        return batches.placed(batch, self.device, self.channels_last)


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

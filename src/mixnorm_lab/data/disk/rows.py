"""Batches of the rows of a table, from memory on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mixnorm_lab.data.dataset import DataSet, Images
from mixnorm_lab.data.sources import Loaders


class RowSource(Loaders):
    """A source of (rows, labels). Each epoch has a new order, and drops what fills no batch.

    Args:
        share: (rank, ranks): of each batch, and of the test rows, only this part.
    """

    def __init__(self, dataset: DataSet, batch_size: int, *, device: torch.device, share: tuple[int, int] = (0, 1)) -> None:
        count = len(dataset.train)
        if not 2 <= batch_size <= count:
            raise ValueError(f"batch_size={batch_size} makes no batch of {count:,} training rows: use 2 to {count:,}")
        if batch_size % share[1]:
            raise ValueError(f"batch_size={batch_size} makes no {share[1]} equal shares: use a multiple of {share[1]}")
        parts = [Images(part.images.to(device), part.labels.to(device)) for part in (dataset.train, dataset.test)]
        super().__init__(_Shuffled(parts[0], batch_size, share), _InOrder(parts[1], batch_size, share), device=device)
        self.num_classes, self.shape = dataset.num_classes, dataset.shape
        self._train, self._share = parts[0], share

    def plain_train_batches(self, batch_size: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training rows and labels: up to ``most`` in all, evenly spaced, and always the same."""
        count = min(most, len(self._train))
        index = torch.arange(count, device=self.device) * len(self._train) // count
        yield from _InOrder(self._train[index], batch_size, self._share)


class _Shuffled:
    """Full batches in an order that torch's generator draws, which the source seeds for each epoch."""

    def __init__(self, rows: Images, batch_size: int, share: tuple[int, int]) -> None:
        self.rows, self.batch_size, self.share = rows, batch_size, share

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches(torch.randperm(len(self.rows)).to(self.rows.labels.device))  # drawn now, where it is seeded

    def _batches(self, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in order[: len(self) * self.batch_size].split(self.batch_size):
            index = batch.tensor_split(self.share[1])[self.share[0]]
            yield self.rows.images[index], self.rows.labels[index]


class _InOrder:
    """All rows, in batches of which the last may be smaller."""

    def __init__(self, rows: Images, batch_size: int, share: tuple[int, int]) -> None:
        rank, ranks = share
        self.parts = [part.tensor_split(ranks)[rank].split(batch_size) for part in (rows.images, rows.labels)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*self.parts, strict=True)

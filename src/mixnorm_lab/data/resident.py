"""A whole data set on a device, where its batches are made: gathered, cropped, flipped and standardized."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from mixnorm_lab.data.dataset import DataSet, channel_statistics

READY_PIXELS = 1 << 24
TRAINING, RECALIBRATION = 0, 1  # what random numbers are for, so that the two do not share them


class Resident:
    """Batches of a data set that lives on the device.

    A pixel x becomes (x/255 − mean)/std with the mean and deviation of its channel over the training images. Augmented
    images are crops of the standardized image with ``pad`` zeros around it, flipped with probability ½. The random numbers
    of an epoch are drawn on the CPU, so that every device has the same.

    Args:
        batch_size: of training batches. Each epoch draws a new order, and drops what fills no batch.
        device: where the data set lives.
        dtype: of the images that come out.
        channels_last: their memory format.
        augment: crop and flip training images; ``None`` asks the data set.
        pad: how many pixels a crop can be off.
        signed: pixels between −1 and 1, as generators make them, in place of standardized ones.
        share: (rank, ranks): of each batch, and of the test images, only this part, of as many as there are ranks. Put
            together in the order of their ranks, the parts of a batch are the batch.

    Example:
        >>> data = Resident(load("digits"), 64, device="cpu")
        >>> data.start_epoch(seed=0, epoch=0)
        >>> images, labels = data.batch(torch.tensor(0))
    """

    def __init__(
        self,
        dataset: DataSet,
        batch_size: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        augment: bool | None = None,
        pad: int = 4,
        signed: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        count = len(dataset.train)
        if not 1 <= batch_size <= count:
            raise ValueError(f"batch_size={batch_size} makes no batch of {count:,} training images: use 1 to {count:,}")
        if batch_size % share[1]:
            raise ValueError(f"batch_size={batch_size} makes no {share[1]} equal shares: use a multiple of {share[1]}")
        self.device, self.share = torch.device(device), share
        self.batch_size, self.dtype, self.pad = batch_size, dtype, pad
        self.augment = dataset.augment if augment is None else augment
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.num_classes = dataset.num_classes
        self.shape = tuple(dataset.train.images.shape[1:])
        self.steps_per_epoch = count // batch_size
        self.use_kernel = self.device.type == "cuda" and importlib.util.find_spec("triton") is not None

        means, deviations = channel_statistics(dataset.train.images)
        if signed:
            means, deviations = torch.full_like(means, 127.5), torch.full_like(deviations, 127.5)
        self._means = means.float().to(self.device)
        self._scales = deviations.clamp_min(1e-3).reciprocal().float().to(self.device)  # a channel may be constant
        self._images, self._labels = (t.contiguous().to(self.device) for t in (dataset.train.images, dataset.train.labels))
        self._test_images, self._test_labels = (
            t.tensor_split(share[1])[share[0]].to(self.device) for t in (dataset.test.images, dataset.test.labels)
        )
        self._rows, self._columns = (torch.arange(size, device=self.device) for size in self.shape[1:])
        self._plan = self._draw(0, 0, TRAINING).to(self.device)
        self._drawing = ThreadPoolExecutor(1) if self.device.type == "cuda" else None
        self._ahead: tuple[tuple[int, int] | None, Future[Tensor]] = None, Future()  # a seed and an epoch, and its plan
        # Small images are not worth the steps to make a batch of them: they are kept as they come out.
        self._ready: Tensor | None = None
        if not self.use_kernel and not self.augment and self._images.numel() <= READY_PIXELS:
            self._ready = self._finish(self._standardized(self._images))

    def start_epoch(self, seed: int, epoch: int) -> None:
        """Draws the order, the crops and the flips of an epoch, from the two numbers alone."""
        if self._drawing is None:
            self._plan.copy_(self._draw(seed, epoch, TRAINING))
            return
        # The plan of the next epoch is drawn while the GPU is busy with this one. It is copied from pinned memory, so that
        # the host does not wait.
        drawn_for, drawn = self._ahead
        plan = drawn.result() if drawn_for == (seed, epoch) else self._draw(seed, epoch, TRAINING)
        self._plan.copy_(plan.pin_memory(), non_blocking=True)
        self._ahead = (seed, epoch + 1), self._drawing.submit(self._draw, seed, epoch + 1, TRAINING)

    def batch(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,) of a step of this epoch.

        Nothing is read back from the device, and all inputs stay where they are in memory: a CUDA graph can hold this.

        Args:
            step: a number in int64 on the device, counted from 0. Past the end of the epoch it begins again.
        """
        return self._make(self._plan, step)

    def test_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All test images and labels in order, standardized alone. The last batch may be smaller."""
        batches = zip(self._test_images.split(batch_size), self._test_labels.split(batch_size), strict=True)
        for images, labels in batches:
            yield self._finish(self._standardized(images)), labels

    def plain_train_batches(self, batch_size: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training images and labels, standardized alone: up to ``most`` in all, evenly spaced, and always the same."""
        count = min(most, len(self._labels))
        index = torch.arange(count, device=self.device) * len(self._labels) // count
        for part in index.tensor_split(self.share[1])[self.share[0]].split(batch_size):
            yield self._finish(self._standardized(self._images[part])), self._labels[part]

    def train_batches(self, count: int, seed: int) -> Iterator[Tensor]:
        """Images of ``count`` training batches in an order of their own; this epoch's stays as it is."""
        steps = torch.arange(self.steps_per_epoch, device=self.device)
        for number in range(count):
            epoch, step = divmod(number, self.steps_per_epoch)
            if step == 0:
                plan = self._draw(seed, epoch, RECALIBRATION).to(self.device)
            yield self._make(plan, steps[step])[0]

    def _draw(self, seed: int, epoch: int, purpose: int) -> Tensor:
        """A plan (steps, 4, B) in int32: each image's index, the top and left of its crop, and whether it is flipped.

        That of all ranks is drawn, and of its batches this rank's share returned.
        """
        mixed = np.random.SeedSequence((seed, epoch, purpose)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        count = self.steps_per_epoch * self.batch_size
        plan = torch.empty(4, count, dtype=torch.int32)
        plan[0] = torch.randperm(len(self._labels), generator=generator)[:count]
        plan[1:3] = self.pad
        plan[3] = 0
        if self.augment:
            plan[1:3].random_(0, 2 * self.pad + 1, generator=generator)
            plan[3].random_(0, 2, generator=generator)
        rank, ranks = self.share
        return plan.view(4, self.steps_per_epoch, ranks, -1)[:, :, rank].transpose(0, 1).contiguous()

    def _make(self, plan: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        if self.use_kernel:
            from mixnorm_lab.data.resident_kernel import make_batch

            return make_batch(
                self._images, self._labels, plan, step, self._means, self._scales, self.pad, self.dtype, self.memory_format
            )
        index, top, left, flip = plan.index_select(0, step.remainder(len(plan)).view(1))[0]
        if self._ready is not None:
            return self._finish(self._ready[index]), self._labels[index]
        images = self._standardized(self._images[index])
        if self.augment:
            images = self._cropped(images, top, left, flip)
        return self._finish(images), self._labels[index]

    def _cropped(self, images: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
        """Windows of (B, C, H, W) at ``top``, ``left`` (B,) in the padded images, flipped or not."""
        padded = torch.nn.functional.pad(images, [self.pad] * 4)
        rows = top[:, None] + self._rows
        columns = left[:, None] + torch.where(flip[:, None] != 0, self._columns.flip(0), self._columns)
        positions = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
        positions = positions.flatten(1)[:, None].expand(-1, images.shape[1], -1)
        return padded.flatten(2).gather(2, positions).view(images.shape)

    def _standardized(self, images: Tensor) -> Tensor:
        return images.float().sub_(self._means[:, None, None]).mul_(self._scales[:, None, None])

    def _finish(self, images: Tensor) -> Tensor:
        return images.to(self.dtype, memory_format=self.memory_format)

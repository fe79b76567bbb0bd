"""The processes that train one run together: each has its share of every batch."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Team:
    """The processes that train a run together, as one of them sees them.

    Args:
        rank: this process, from 0. The first one alone writes into the folder of the run, and shows its progress.
        size: how many there are.
        device: where their messages are.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | str = "cpu"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def add(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by its sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its mean over the ranks, in one message."""
        if self.size == 1:
            return
        message = self.add(torch.cat([tensor.flatten() for tensor in tensors])) / self.size
        for tensor, mean in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def from_first(self, value: Any = None) -> Any:
        """What the first rank has, of tensors and plain containers, on every rank; those of others are on the CPU."""
        if self.size == 1:
            return value
        buffer = io.BytesIO()
        if self.is_first:
            torch.save(value, buffer)
        length = torch.tensor(buffer.tell(), device=self.device)
        dist.broadcast(length, 0)
        message = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if self.is_first:
            message.copy_(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
        dist.broadcast(message, 0)
        if self.is_first:
            return value
        return torch.load(io.BytesIO(message.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Makes a sentence of what a message raises when the rank at its other end is no more."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (type(error) is RuntimeError or isinstance(error, dist.DistError)):
                raise
            raise OSError(
                f"process {self.rank} of the {self.size} stopped ({' '.join(str(error).split())}): unless that says what to "
                "mend, another one was lost, and the same command goes on from the last checkpoint"
            ) from error


ALONE = Team()

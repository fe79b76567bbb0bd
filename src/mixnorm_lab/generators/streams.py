"""A second stream of a GPU: two pieces of small work that do not depend on each other take the time of the longer one."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor


class Beside:
    """``with beside:`` runs what is inside on a stream of its own; a backward pass goes where its forward pass went.

    The stream waits for nothing but what :meth:`having` names, and the stream that it is beside waits at :meth:`join`. A
    CUDA graph captures both. Without a GPU everything runs in the order that it is written.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._entered: list[torch.cuda.StreamContext] = []

    def having(self, tensor: Tensor) -> Beside:
        """To be entered: waits for the tensor, and keeps its memory until it has been used there."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(self.stream)
        return self

    def join(self) -> None:
        """What comes next waits for everything that went beside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def __enter__(self) -> None:
        if self.stream is not None:
            self._entered.append(torch.cuda.StreamContext(self.stream))
            self._entered[-1].__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._entered:
            self._entered.pop().__exit__(kind, error, trace)

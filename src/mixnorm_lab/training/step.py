"""One gradient update, and the epoch of them: the same function runs as it is, or from a CUDA graph."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mixnorm_lab.data.sources import Loaders, Source
from mixnorm_lab.training.team import ALONE, Team

WARMUP_STEPS = 3  # before a capture: compilation, handles and workspaces come into being
SETTLED = WARMUP_STEPS + 1  # steps until all of that is over, the capture included
STRETCH = 8  # steps between two marks in a GPU's queue
AHEAD = 2  # marks that may be outstanding: a GPU always has work, and the host knows how far it is


class Step(ABC):
    """The step that an epoch repeats, in a subclass's ``update``. Nothing is read back to the host.

    On a GPU, with data that is there, everything is captured in one CUDA graph, unless ``capture`` says that it holds what
    not be, such as a user's loss; but what several processes train together is
    not, because mixture norms ask the other ranks how many points they have. The steps before the capture are steps of
    the training as well, and a capture computes nothing, so that there is nothing to undo.

    Attributes:
        curve: (steps, 2), two numbers of each step of the epoch so far, of which the first at least must stay finite.
        number: () int64, the step that comes next; counted on the device.
        seconds: what the last epoch took. The first steps, which compile, count as much as the others.
        then: what follows every update, and is captured with it.
    """

    def __init__(
        self,
        source: Source,
        steps: int,
        *,
        device: torch.device,
        bf16: bool,
        team: Team = ALONE,
        capture: bool = True,
    ) -> None:
        self.source = source
        self.team = team
        self.steps = steps
        self.device = device
        self.autocast = autocast(device, bf16)
        self.curve = torch.zeros(steps, 2, device=device)
        self.number = torch.zeros((), dtype=torch.long, device=device)
        self.seconds = 0.0
        self.then: Callable[[], None] | None = None
        self._torch_compiled: Callable[..., Any] | None = None
        self._calls = 0
        resident = not isinstance(source, Loaders)
        self._captures = capture and device.type == "cuda" and resident and team.size == 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device) if self._captures else None

    def start_epoch(self) -> None:
        self.curve.zero_()
        self.number.zero_()

    def run_epoch(self) -> Iterator[int]:
        """Runs the steps of an epoch; yields now and then how many are done."""
        steps = timed = self.steps
        start = time.perf_counter()
        marks: deque[tuple[int, torch.cuda.Event]] = deque()
        for done in range(1, steps + 1):
            self()
            if self._calls == SETTLED and done < steps:
                self._wait()
                start, timed = time.perf_counter(), steps - done
            if self.device.type != "cuda":
                yield done
            elif done % STRETCH == 0:
                mark = torch.cuda.Event(blocking=True)
                mark.record()
                marks.append((done, mark))
                if len(marks) > AHEAD:
                    reached, mark = marks.popleft()
                    mark.synchronize()
                    yield reached
        self._wait()
        self.seconds = (time.perf_counter() - start) * steps / timed

    def __call__(self) -> None:
        self._calls += 1
        if self._graph is not None:
            self._graph.replay()
        elif self._stream is None:
            self._update()
        elif self._calls <= WARMUP_STEPS:
            # Not on the default stream, which a capture cannot use: autograd goes on with the stream that it met first.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._update()
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._update()
            self._graph = graph
            graph.replay()

    def _update(self) -> None:
        self.update()
        if self.then is not None:
            self.then()

    def plain(self) -> None:
        """Calls every layer by itself from now on, as one must be that is watched."""
        self._torch_compiled = None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @abstractmethod
    def update(self) -> None:
        """The step itself; ends with a call of :meth:`note`."""

    @torch.no_grad()
    def note(self, *numbers: Tensor) -> None:
        """Puts a step's two numbers into the curve, and counts the step."""
        self.curve.index_copy_(0, self.number.view(1), torch.stack(numbers).view(1, 2))
        self.number += 1


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()

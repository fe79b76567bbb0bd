"""The runs that wait for a process, whatever kind of processes there are, and what is heard of those that have one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.one_run import Failure
from mixnorm_lab.storage.folders import run_name

RETRIES = 3  # of a run whose process is lost; what kills it once more is likely the run itself


class RunQueue:
    """Runs in the order in which they are done.

    Attributes:
        failed: the runs that failed, and why.
    """

    def __init__(self, todo: Sequence[RunConfig], display: RunDisplay) -> None:
        self.display = display
        self.failed: dict[str, Failure] = {}
        self._waiting = deque(todo)
        self._lost: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def next(self) -> RunConfig | None:
        return self._waiting.popleft() if self._waiting else None

    def begins(self, config: RunConfig) -> None:
        """A process has it, which may take a while until it says so."""
        self.display.run(run_name(config))

    def heard(self, config: RunConfig, what: str, values: Any) -> None:
        """RunProgress; or "done", with a failure or None; "stop", with what concerns all runs; or "lost", with how.

        The run of a process that was lost is the next to be done, and goes on from its checkpoint.
        """
        name = run_name(config)
        progress = self.display.run(name)
        if what == "stop":
            raise OSError(values.sentence) from RuntimeError(values.trace)
        if what == "lost" and self._lost[name] < RETRIES:
            self._lost[name] += 1
            self._waiting.appendleft(config)
        elif what == "lost":
            self.failed[name] = Failure(f"{values}, as often as it was tried: run the command again to go on", "")
            progress.end("failed")
        elif what == "done":
            if values is not None:
                self.failed[name] = values
        else:
            getattr(progress, what)(*values)

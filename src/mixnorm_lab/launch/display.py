"""What a training shows while it runs: live bars in a terminal, a line every few seconds elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from mixnorm_lab.launch.shown_runs import ENDS, INTERRUPTED, NOT_STARTED, PREPARING, WAITING, ShownRun, ShownRuns
from mixnorm_lab.training.progress import RunProgress

LINE_SECONDS = 5.0


class RunDisplay:
    """The progress of one or more runs, one after the other or at once. Use it as a context.

    Args:
        names: the runs to come, which are shown as waiting.
        file: where to; bars if it is a terminal and rich is installed, else plain lines.

    Example:
        >>> with RunDisplay(["bn", "mn"]) as display:
        ...     train(config, folder, model=model, source=source, device="cpu", progress=display.run("bn"))
    """

    def __init__(self, names: Sequence[str] = (), file: IO[str] | None = None) -> None:
        self.file = sys.stdout if file is None else file
        self.next_line = 0.0
        self.runs = ShownRuns()
        for name in names:
            self._add(name)
        self.bars: Any = None
        if self.file.isatty():
            try:
                from mixnorm_lab.launch.run_bars import RunBars
            except ModuleNotFoundError:  # no rich
                return
            self.bars = RunBars(self.runs, self.file)

    def __enter__(self) -> RunDisplay:
        if self.bars:
            self.bars.start()
        elif names := [run.name for run in self.runs]:
            self.line(f"{len(names)} run{'s' * (len(names) > 1)}: {', '.join(names)}")
        return self

    def __exit__(self, *_: object) -> None:
        """What has begun and did not end was interrupted, for instance in another process."""
        for run in self.runs:
            if run.state == WAITING:
                run.state = NOT_STARTED
            elif run.state not in ENDS:
                run.end(INTERRUPTED)
        if self.bars:
            self.bars.stop()
        elif len(self.runs) > 1:
            self.line(f"{len(self.runs)} runs: {self.runs.counts()}")

    def run(self, name: str) -> RunProgress:
        """What to hand to the trainer of the run of that name, which begins."""
        run = self.runs.named(name) or self._add(name)
        if run.state == WAITING:
            run.state, run.started = PREPARING, time.monotonic()
        return run

    def line(self, text: str) -> None:
        print(text, file=self.file, flush=True)
        self.next_line = time.monotonic() + LINE_SECONDS

    def _add(self, name: str) -> ShownRun:
        return self.runs.add(ShownRun(name, self._tell))

    def _tell(self, text: str, *, now_and_then: bool) -> None:
        """A line where there are no bars: always, or where the last one is some time ago."""
        if not self.bars and (not now_and_then or time.monotonic() >= self.next_line):
            self.line(text)


class DownloadBar:
    """A bar on stderr while something is downloaded. Use it as a context."""

    def __enter__(self) -> DownloadBar:
        self.bar: Any = None
        return self

    def show(self, done: int, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        if self.bar is None:
            columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("download", total=total)
        self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

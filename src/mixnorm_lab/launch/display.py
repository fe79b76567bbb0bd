"""What a training shows while it runs: live bars in a terminal, a line every few seconds elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from mixnorm_lab.training.progress import UPDATE_SECONDS, RunProgress

REFRESHES_PER_SECOND = 2.0
LINE_SECONDS = 5.0
BAR_WIDTH = 14
COLUMNS = {"epoch": 7, "accuracy": 6, "speed": 12, "left": 7}  # beside a bar, with their width; the name takes what is left
NOTHING = dict.fromkeys(COLUMNS, "")


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
        self.names = list(names)
        self.started = time.monotonic()
        self.next_line = 0.0
        self.bars: Any = _make_bars(self.file)
        self.runs: dict[str, _Run] = {}

    def __enter__(self) -> RunDisplay:
        if self.bars:
            self.bars.start()
            if len(self.names) > 1:
                self.total = self.bars.add_task("all runs", total=len(self.names), **NOTHING)
        elif self.names:
            self.line(f"{len(self.names)} run{'s' * (len(self.names) > 1)}: {', '.join(self.names)}")
        for name in self.names:
            self.run(name)
        self.arrange()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def run(self, name: str) -> RunProgress:
        """What to hand to the trainer of the run of that name."""
        if name not in self.runs:
            self.runs[name] = _Run(self, name)
        return self.runs[name]

    def show_total(self) -> None:
        """All runs count alike: the time that is left is a guess while some have not begun."""
        if self.bars and len(self.names) > 1:
            done, before = (sum(run.share(part) for run in self.runs.values()) for part in ("done", "done_before"))
            seconds = time.monotonic() - self.started
            left = _duration((len(self.runs) - done) * seconds / (done - before)) if done > before else ""
            finished = sum(run.ended for run in self.runs.values())
            if finished == len(self.runs):
                left = _duration(seconds)  # as beside a run that has ended
            self.bars.update(
                self.total, completed=done, total=len(self.runs), epoch=f"{finished}/{len(self.runs)}", left=left
            )

    def arrange(self) -> None:
        """Of more runs than a terminal has lines: those that run, a few that come next, and the last that ended."""
        room = self.bars.console.height - 2 if self.bars else 0  # without the line of all runs, and that of the cursor
        if 0 < room < len(self.runs):
            ended, rest = ([run for run in self.runs.values() if run.ended is which] for which in (True, False))
            running = [run for run in rest if run.epochs]
            coming = [run for run in rest if not run.epochs][: max(1, room // 4)]
            last = max(0, room - len(running) - len(coming))
            shown = [*ended[len(ended) - min(last, len(ended)) :], *running, *coming]
            for run in self.runs.values():
                self.bars.update(run.bar, visible=run in shown)

    def line(self, text: str) -> None:
        print(text, file=self.file, flush=True)
        self.next_line = time.monotonic() + LINE_SECONDS


class _Run:
    def __init__(self, display: RunDisplay, name: str) -> None:
        self.display, self.name = display, name
        self.epochs = self.steps = self.done_epochs = self.done = self.done_before = 0
        self.measure, self.accuracy = "accuracy", ""  # of a generator, its last distance
        self.ended = False
        self.next_update = self.started = time.monotonic()
        self.timed_from: tuple[int, float] | None = None  # the first update, after what is compiled in the first step
        if display.bars:
            self.bar = display.bars.add_task(name, total=1, start=False, **NOTHING | {"epoch": "waiting"})

    def share(self, part: str) -> float:
        """Which share of the run is done, or was when it started."""
        return getattr(self, part) / (self.epochs * self.steps) if self.epochs else 0.0

    def start(self, name: str, epochs: int, steps: int, done: int) -> None:
        self.epochs, self.steps, self.done_epochs = epochs, steps, done
        self.done = self.done_before = done * steps
        self.started = time.monotonic()
        if self.display.bars:
            self.display.bars.start_task(self.bar)
            self.display.arrange()
            self._show()
        else:
            rest = f", {done} of them done" if done else ""
            self.display.line(f"{self.name}: {epochs} epochs of {steps} steps{rest}")

    def step(self, done: int) -> None:
        now = time.monotonic()
        if now >= self.next_update:
            self.next_update = now + UPDATE_SECONDS
            self.done = self.done_epochs * self.steps + done
            if self.timed_from is None:
                self.timed_from = self.done, now
            self._show()

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.done_epochs = row["epoch"]
        self.done = self.done_epochs * self.steps
        if row.get("test_error") is not None:
            self.accuracy = f"{100 * (1 - row['test_error']):.1f}%"
        elif row.get("distance") is not None:
            self.measure, self.accuracy = "distance", f"{row['distance']:.1f}"
        self._show()

    def end(self, reason: str) -> None:
        self.ended = True
        text = _duration(time.monotonic() - self.started)
        if self.display.bars:
            self.display.bars.update(self.bar, speed=reason, left=text)
            self.display.bars.stop_task(self.bar)
            self.display.arrange()
            self.display.show_total()
        else:
            accuracy = f", {self.measure} {self.accuracy}" if self.accuracy else ""
            self.display.line(f"{self.name}: {reason} after {text}{accuracy}")

    def _show(self) -> None:
        epoch = f"{self.done_epochs}/{self.epochs}"
        speed, left = self._speed()
        if self.display.bars:
            self.display.bars.update(
                self.bar,
                completed=self.done,
                total=self.epochs * self.steps,
                **{"epoch": epoch, "accuracy": self.accuracy, "speed": speed, "left": left},
            )
            self.display.show_total()
        elif time.monotonic() >= self.display.next_line:
            parts = [f"epoch {epoch}", self.accuracy and f"{self.measure} {self.accuracy}", speed, left and f"{left} left"]
            self.display.line(f"{self.name}: " + ", ".join(part for part in parts if part))

    def _speed(self) -> tuple[str, str]:
        """Steps a second and the time that is left, evaluations counted in; nothing before there is something to time."""
        done, since = self.timed_from or (0, 0.0)
        seconds, done = time.monotonic() - since, self.done - done
        if self.timed_from is None or not done or not seconds:
            return "preparing", ""
        return f"{done / seconds:.3g} steps/s", _duration((self.epochs * self.steps - self.done) * seconds / done)


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


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _make_bars(file: IO[str]) -> Any:
    """rich's progress bars; ``None`` where there is no terminal, or no rich."""
    if not file.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column
    except ModuleNotFoundError:
        return None
    name = Column(no_wrap=True, overflow="ellipsis")
    columns: list[Any] = [TextColumn("{task.description}", table_column=name), BarColumn(BAR_WIDTH)]
    columns += [
        TextColumn(f"{{task.fields[{name}]}}", table_column=Column(min_width=width, justify="right", no_wrap=True))
        for name, width in COLUMNS.items()
    ]
    return Progress(*columns, console=Console(file=file), refresh_per_second=REFRESHES_PER_SECOND)

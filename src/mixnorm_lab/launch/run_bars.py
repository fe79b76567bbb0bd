"""The live table of runs in a terminal: a bar for each that runs, a word for the others, and times with their names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from mixnorm_lab.launch.pace import duration
from mixnorm_lab.launch.shown_runs import (
    ENDS,
    FAILED,
    FINISHED,
    INTERRUPTED,
    NOT_FINITE,
    NOT_STARTED,
    RUNNING,
    WAITING,
    ShownRun,
    ShownRuns,
)

REFRESHES_PER_SECOND = 2.0
HEADING = 18  # characters of a metric's name, at most
BAR_WIDTH = 12  # at least: the longest word in its place
WIDTHS = (5, 8, 7, 7, 6)  # of the columns beside it, at least, so that they stay where they are
ALMOST_DONE = 0.999  # a bar that is not full
COLORS = {FINISHED: "green", INTERRUPTED: "yellow", FAILED: "red", NOT_FINITE: "red"}
LINES = 3  # that are not runs: the heading, all runs together, how many are in which state


class RunBars:
    """The table, drawn anew a few times a second by a thread of its own."""

    def __init__(self, runs: ShownRuns, file: IO[str]) -> None:
        self.runs = runs
        self.console = Console(file=file)
        self.live = Live(
            console=self.console,
            get_renderable=self.table,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )

    def start(self) -> None:
        self.live.start(refresh=True)

    def stop(self) -> None:
        self.live.stop()

    def table(self) -> RenderableType:
        """The runs that there is room for; of more than one, what they come to as well."""
        runs, now = list(self.runs), time.monotonic()
        room = self.console.height - 1 - LINES  # the cursor has a line of its own
        several = len(runs) > 1
        shown = these_of(runs, max(1, room)) if several else runs
        headings, rows = self._rows(shown, now)
        if several:
            elapsed = duration(now - self.runs.started)
            total = ["", "", "", elapsed, self.runs.left(now)]
            rows.insert(0, (f"all {len(runs)} runs", _bar(sum(run.share for run in runs) / len(runs)), total))
        table = self._fitted(headings, rows)
        return Group(table, Text(self.runs.counts())) if several else table

    def _rows(self, shown: Sequence[ShownRun], now: float) -> tuple[list[str], list[tuple[str, RenderableType, list[str]]]]:
        """The headings of the columns beside the bar, and of each run its name, its bar or state, and its cells."""
        measure = next((run.measure for run in shown if run.measured), "accuracy")
        measure = measure if len(measure) <= HEADING else f"{measure[: HEADING - 1]}…"
        rows: list[tuple[str, RenderableType, list[str]]] = []
        for run in shown:
            state: RenderableType = _bar(run.share)
            if run.state != RUNNING:
                when = " earlier" if run.was_finished else ""
                state = Text(run.state + when, COLORS.get(run.state, "dim"), no_wrap=True)
            left = run.seconds_left(now)
            epoch = f"{run.done_epochs}/{run.epochs}" if run.epochs else ""
            cells = [epoch, run.measured, run.speed(now), run.elapsed(now), "" if left is None else duration(left)]
            rows.append((run.name, state, cells))
        return ["epoch", measure, "steps/s", "elapsed", "left"], rows

    def _fitted(self, headings: list[str], rows: Sequence[tuple[str, RenderableType, list[str]]]) -> Table:
        """As a table as wide as the terminal. Where a bar would have no room, the speed goes, and then the end of names'
        beginnings: they differ at their ends."""
        width, gap = self.console.width, 2 if self.console.width >= 100 else 1
        texts = [[heading, *(cells[i] for *_, cells in rows)] for i, heading in enumerate(headings)]
        widths = [max(least, *map(len, column)) for least, column in zip(WIDTHS, texts, strict=True)]
        name = max(len(name) for name, *_ in rows)
        kept = [0, 1, 2, 3, 4]
        for dropped in (2, 1):
            if name + BAR_WIDTH + sum(widths[i] + gap for i in kept) + gap > width:
                kept.remove(dropped)
        name = max(8, min(name, width - BAR_WIDTH - sum(widths[i] + gap for i in kept) - gap))
        table = Table(
            Column("run", width=name, no_wrap=True),
            Column("", ratio=1, no_wrap=True),
            *(Column(headings[i], width=widths[i], justify="right", no_wrap=True) for i in kept),
            box=None, expand=True, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim",
        )  # fmt: skip
        for text, state, cells in rows:
            short = text if len(text) <= name else "…" + text[len(text) - name + 1 :]
            table.add_row(Text(short), state, *(cells[i] for i in kept))
        return table


def these_of(runs: Sequence[ShownRun], room: int) -> list[ShownRun]:
    """Of more runs than a terminal has lines: those that run, a few that come next, and the last that ended."""
    if len(runs) <= room:
        return list(runs)
    coming = [run for run in runs if run.state in (WAITING, NOT_STARTED)]
    ended = [run for run in runs if run.state in ENDS]
    running = [run for run in runs if all(run is not other for other in (*coming, *ended))][:room]
    coming = coming[: min(max(1, room // 4), room - len(running))]
    last = room - len(running) - len(coming)
    chosen = {id(run) for run in (*ended[len(ended) - min(last, len(ended)) :], *running, *coming)}
    return [run for run in runs if id(run) in chosen]


def _bar(share: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=share if share >= 1 else min(share, ALMOST_DONE))

"""What the terminal shows: progress while a benchmark runs, and at the end a table with the goal beside each number.

With rich where it is installed, in plain lines where it is not. Nothing moves while a case is timed: a refreshing display
would take its share of the processor from a variant that is bound by the host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from mixnorm_lab.bench import goals
from mixnorm_lab.bench.cases import Case
from mixnorm_lab.storage.measurements import Row, is_base

HEADINGS = ("case", "variant", "K", "time", "±", "vs base", "goal", "", "bandwidth", "peak MB", "error", "grad")
COST_HEADINGS = ("case", "variant", "K", "steps/s", "±", "vs base", "goal", "", "paper", "peak MB")
MARKS = {True: "✓", False: "✗", None: ""}


class BenchDisplay:
    """A :class:`mixnorm_lab.bench.run.Watcher`. Use it as a context."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file
        self.started = time.monotonic()
        self.progress: Any = None
        self.console: Any = None
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ModuleNotFoundError:
            return
        self.console = Console(highlight=False, file=file)
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        if self.console.is_terminal:
            self.progress = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
            self.task = self.progress.add_task("starting", total=None)

    def __enter__(self) -> BenchDisplay:
        if self.progress:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress:
            self.progress.stop()

    def begin(self, case: Case, number: int, total: int) -> None:
        self.case, self.place = str(case), f"{number + 1}/{total}"
        if self.progress:
            self.progress.update(self.task, completed=number, total=total)
        self.stage("inputs")

    def stage(self, text: str) -> None:
        if self.progress:
            self.progress.update(self.task, description=f"{getattr(self, 'case', '')}  [dim]{text}[/]", refresh=True)

    def finish(self, rows: Sequence[Row]) -> None:
        """One line a case: what its base takes, and how the others compare."""
        parts = []
        for row in rows:
            name = row["variant"] if is_base(row) else f"K={row['num_components']}"
            number = row["time_ms"] if row["time_ms"] else row["peak_memory_mb"]
            unit = "ms" if row["time_ms"] else "MB"
            if number is None:
                parts.append(f"{name} failed ({row['failure'].split(':')[0]})")
            elif row["ratio"] is None or is_base(row):
                parts.append(f"{name} {number:.4g} {unit}")
            else:
                parts.append(f"{name} {row['ratio']:.2f}×")
        elapsed = time.monotonic() - self.started
        self.note(f"{elapsed:5.0f}s {self.place:>6} {self.case}: {', '.join(parts)}")

    def note(self, text: str) -> None:
        if self.console:
            self.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self.file, flush=True)


def show(rows: Sequence[Row]) -> None:
    """The tables of all benchmarks in the rows, then the goals that several rows decide together, then what failed."""
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == device]
        for benchmark in dict.fromkeys(row["benchmark"] for row in here):
            headings = COST_HEADINGS if benchmark == "cost" else HEADINGS
            lines = [line(row, here) for row in here if row["benchmark"] == benchmark]
            _print_table(f"{benchmark} · {device}", headings, _name_each_case_once(lines))
        together = [
            (check.text, f"{check.measured:.3f}", "" if check.goal is None else f"≤ {check.goal:g}", MARKS[check.met])
            for check in goals.checks(here)
        ]
        if together:
            _print_table(f"together · {device}", ("what", "measured", "goal", ""), together)
    for row in rows:
        if row["failure"]:
            print(f"failed: {' '.join(_case(row))} {row['variant']} K={row['num_components'] or '-'}: {row['failure']}")


def line(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """The cells of a row under ``HEADINGS`` or ``COST_HEADINGS``."""
    limit = goals.goal(row, rows)
    met = None if limit is None or row["ratio"] is None else row["ratio"] <= limit
    k = str(row["num_components"] or "")
    spread = ""
    if row["time_ms"]:
        spread = f"{50 * (row['p80_ms'] - row['p20_ms']) / row['time_ms']:.0f}%"
    if row["benchmark"] == "cost":
        rate = "failed" if not row["time_ms"] else f"{1e3 / row['time_ms']:.1f}"
        ratio = "" if not row["ratio"] else f"{1 / row['ratio']:.3f}"
        paper = goals.paper_ratio(row)
        goal = "" if limit is None else f"≥ {1 / limit:.2f}"
        beside = "" if paper is None else f"{paper:.3f}"
        return " ".join(_case(row)), row["variant"], k, rate, spread, ratio, goal, MARKS[met], beside, _memory(row)
    duration = "failed" if row["failure"] and not row["time_ms"] else _milliseconds(row["time_ms"])
    return (
        " ".join(_case(row)),
        row["variant"],
        k,
        duration,
        spread,
        "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        "" if limit is None else f"≤ {limit:.2f}",
        MARKS[met],
        "" if row["bandwidth_share"] is None else f"{row['bandwidth_share']:.0%}",
        _memory(row),
        *("" if row[column] is None else f"{row[column]:.1e}" for column in ("error", "error_grad")),
    )


def _name_each_case_once(lines: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [("", *cells[1:]) if i and cells[0] == lines[i - 1][0] else cells for i, cells in enumerate(lines)]


def _case(row: Row) -> list[str]:
    parts = [row["series"] and f"{row['series']}:", row["case"], row["dtype"], row["mode"] if row["mode"] != "cpu" else ""]
    parts.append(row["layout"] if row["layout"] != "channels_last" else "")
    parts.append(row["data"] if row["data"] != "modes" else "")
    return [part for part in parts if part]


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f} ms" if value < 1 else f"{value:.3f} ms"


def _memory(row: Row) -> str:
    return "" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:,.1f}"


def _print_table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Columns without a single cell are left out."""
    kept = [i for i, _ in enumerate(headings) if any(cells[i] for cells in lines)]
    headings, lines = [headings[i] for i in kept], [[cells[i] for i in kept] for cells in lines]
    widths = [max(len(cells[i]) for cells in [headings, *lines]) for i in range(len(headings))]
    styles = {"✓": "\033[32m✓\033[0m", "✗": "\033[31m✗\033[0m"} if sys.stdout.isatty() else {}
    left = {"case", "variant", "what", ""}
    print(f"\n{title}")
    for cells in [headings, ["─" * width for width in widths], *lines]:
        padded = [
            cell.ljust(width) if heading in left else cell.rjust(width)
            for cell, width, heading in zip(cells, widths, headings, strict=True)
        ]
        text = "  ".join(padded)
        for mark, styled in styles.items():
            text = text.replace(mark, styled)
        print(text.rstrip())

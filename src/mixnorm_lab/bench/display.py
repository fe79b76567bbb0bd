"""What the terminal shows: progress while a benchmark runs, and at the end a table with the goal beside each number.

With rich where it is installed, in plain lines where it is not. Nothing moves while a case is timed: a refreshing display
would take its share of the processor from a variant that is bound by the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO, Any

from mixnorm_lab.bench import goals
from mixnorm_lab.bench.cases import MODES, TOY, Case
from mixnorm_lab.storage.measurements import Row, is_base
from mixnorm_lab.tables import Column, Table, Value, text_column

COLUMNS = (  # of all benchmarks; a table has those that have a cell
    text_column("case", "case"),
    text_column("variant", "variant"),
    Column("k", "K"),
    Column("time", "time"),
    Column("rate", "steps/s"),
    Column("spread", "±"),
    Column("ratio", "vs base"),
    Column("goal", "goal"),
    text_column("met", ""),
    Column("bandwidth", "bandwidth"),
    Column("paper", "paper"),
    Column("memory", "peak MB"),
    Column("error", "error"),
    Column("error_grad", "grad"),
)
CHECK_COLUMNS = (text_column("what", "what"), Column("measured", "measured"), Column("goal", "goal"), text_column("met", ""))
MARKS = {True: "✓", False: "✗", None: ""}
LINE = 1_000  # characters at most, where there is no terminal: no number is broken up
SPREAD = 0.3  # of a median: a machine that does nothing else stays below
FIRST_TO_GO = ("error_grad", "error", "bandwidth", "memory", "paper", "spread", "goal")  # in a narrow terminal


class BenchDisplay:
    """A :class:`mixnorm_lab.bench.run.Watcher`. Use it as a context."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file
        self.started = time.monotonic()
        self.total = self.done = 0
        self.case: Case | None = None
        self.progress: Any = None
        self.console: Any = None
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column
        except ModuleNotFoundError:
            return
        self.console = Console(highlight=False, file=file)
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(None, table_column=Column(min_width=8, ratio=1)),
            TextColumn("{task.completed} of {task.total} cases"),
            TextColumn("{task.fields[elapsed]} elapsed"),
        )
        if self.console.is_terminal:
            self.progress = Progress(*columns, console=self.console, auto_refresh=False, transient=True, expand=True)
            self.task = self.progress.add_task("starting", total=0, elapsed="0:00")

    def __enter__(self) -> BenchDisplay:
        if self.progress:
            self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.progress:
            self.progress.stop()
        if kind is KeyboardInterrupt:
            self.note(f"Interrupted: {self.done} of {self.total} cases are measured.")

    def begin(self, case: Case, number: int, total: int) -> None:
        self.case, self.done, self.total = case, number, total
        self.stage("inputs")

    def stage(self, text: str) -> None:
        if self.progress:
            case = "" if self.case is None else f"{self.case}: "
            self.progress.update(
                self.task,
                completed=self.done,
                total=self.total,
                description=f"{case}{text}",
                elapsed=self._elapsed(),
                refresh=True,
            )

    def finish(self, rows: Sequence[Row]) -> None:
        """One line a case: what its base takes, and how the others compare."""
        parts = []
        for row in rows:
            name = f"K={row['num_components']}"
            if is_base(row) or row["benchmark"] in ("models", "start"):
                name = row["variant"]
            if row["benchmark"] == "start":
                name = f"{row['series']} {name}"
            number = row["time_ms"] if row["time_ms"] else row["peak_memory_mb"]
            unit = "ms" if row["time_ms"] else "MB"
            if number is None:
                parts.append(f"{name} failed ({row['failure'].split(':')[0]})")
            elif row["ratio"] is None or is_base(row):
                parts.append(f"{name} {number:.4g} {unit}")
            else:
                parts.append(f"{name} {row['ratio']:.2f}×")
        self.done += 1
        elapsed = "" if self.progress else f" ({self._elapsed()} elapsed)"  # which stands beside the bar
        self.note(f"{self.done}/{self.total} {self.case}: {', '.join(parts)}{elapsed}")

    def note(self, text: str) -> None:
        if self.console:
            self.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self.file, flush=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        return f"{minutes}:{seconds:02}"


def show(rows: Sequence[Row]) -> None:
    """Prints the tables of all benchmarks in the rows, in Markdown where rich is not installed, then what failed."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        for table in tables(rows):
            print(f"\n{table.title}\n\n{table.markdown()}")
    else:
        console = Console(highlight=False)
        width = console.width if console.is_terminal else LINE
        console = Console(highlight=False, width=width)
        for table in tables(rows):
            console.print("", _fitted(table, console).rich(width), sep="\n")
    for row in rows:
        if row["failure"]:
            print(f"failed: {' '.join(_case(row))} {row['variant']} K={row['num_components'] or '-'}: {row['failure']}")


def _fitted(table: Table, console: Any) -> Table:
    """Without the columns that a narrow terminal has no room for, and a note of which they are."""
    from rich.measure import Measurement

    gone: list[str] = []
    fitted = table
    for key in (*FIRST_TO_GO, ""):
        bare = Table("", fitted.columns, fitted.rows).rich(LINE)
        if Measurement.get(console, console.options.update(width=LINE), bare).maximum <= console.width:
            break
        gone += [column.heading for column in fitted.columns if column.key == key]
        kept = [column for column in fitted.columns if column.key != key and (key != "goal" or column.key != "met")]
        note = f"Left out for want of room: {', '.join(gone)}. A wider terminal and --json show them."
        fitted = Table(table.title, kept, table.rows, (*table.notes, *([note] if gone else [])))
    return fitted


def tables(rows: Sequence[Row]) -> list[Table]:
    """The tables of rows: one for each benchmark on each device, and one for what several rows decide together."""
    found = []
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == device]
        for benchmark in dict.fromkeys(row["benchmark"] for row in here):
            part = [row for row in here if row["benchmark"] == benchmark]
            lines = _name_each_case_once([_cells(row, here) for row in part])
            found.append(Table(_title(benchmark, device, part), COLUMNS, lines, _notes(part)).used())
        together: list[dict[str, Value]] = [
            {
                "what": check.text,
                "measured": f"{check.measured:.3f}",
                "goal": "" if check.goal is None else f"≤ {check.goal:g}",
                "met": MARKS[check.met],
            }
            for check in goals.checks(here)
        ]
        if together:
            found.append(Table(f"together · {device}", CHECK_COLUMNS, together).used())
    return found


def _title(benchmark: str, device: str, rows: Sequence[Row]) -> str:
    """Of which benchmark, how steps were run where they all were the same way, and on what."""
    modes = {row["mode"] for row in rows}
    how = [MODES[mode] for mode in modes] if len(modes) == 1 else []
    return " · ".join([benchmark, *how, device])


def _notes(rows: Sequence[Row]) -> list[str]:
    """What must be known before one believes the numbers."""
    notes = []
    if any(row["mode"] == "cpu" for row in rows) and rows[0]["benchmark"] != "memory":
        how = "" if any(row["mode"] == "compiled" for row in rows) else ", in eager mode"
        notes.append(f"Measured on a CPU{how}: a GPU's figures are different.")
    if any(_is_toy(row) for row in rows):
        notes.append("(toy): a tensor so small that the calls themselves take the time; in training the ratio is another.")
    sampled = [row for row in rows if row["time_ms"] and row["p80_ms"] is not None]
    noisy = [row for row in sampled if row["p80_ms"] - row["p20_ms"] > 2 * SPREAD * row["time_ms"]]
    if noisy:
        varied = f"the times of {len(noisy)} of {len(rows)} rows varied from call to call"
        notes.append(f"± above {SPREAD:.0%}: {varied}. Measure again with nothing else running.")
    return notes


def _is_toy(row: Row) -> bool:
    """Whether a step is over before it has done anything; a series has small sizes beside large ones."""
    return bool(row["m"] and row["channels"]) and row["m"] * row["channels"] < TOY


def _cells(row: Row, rows: Sequence[Row]) -> dict[str, Value]:
    """The cells of a row by the keys of ``COLUMNS``, empty where there is no number."""
    limit, ratio, time_ms = goals.goal(row, rows), row["ratio"], row["time_ms"]
    cells: dict[str, Value] = dict.fromkeys((column.key for column in COLUMNS), "")
    cells |= {"case": " ".join(_case(row)), "variant": row["variant"], "k": str(row["num_components"] or "")}
    cells["met"] = MARKS[None if limit is None or ratio is None else ratio <= limit]
    if row["p80_ms"] is not None and time_ms:
        cells["spread"] = f"{50 * (row['p80_ms'] - row['p20_ms']) / time_ms:.0f}%"
    if row["peak_memory_mb"] is not None:
        cells["memory"] = f"{row['peak_memory_mb']:,.1f}"
    if row["benchmark"] == "cost":  # as the paper tells it: steps a second, and their share of batch norm's
        paper = goals.paper_ratio(row)
        cells["rate"] = f"{1e3 / time_ms:.1f}" if time_ms else "failed"
        cells["ratio"] = f"{1 / ratio:.3f}" if ratio else ""
        cells["goal"] = "" if limit is None else f"≥ {1 / limit:.2f}"
        cells["paper"] = "" if paper is None else f"{paper:.3f}"
        return cells
    cells["time"] = "failed" if row["failure"] and not time_ms else _milliseconds(time_ms)
    if row["benchmark"] == "start" and time_ms:
        cells["time"] = f"{time_ms / 1e3:.1f} s"
    cells["ratio"] = "" if ratio is None else f"{ratio:.2f}"
    cells["goal"] = "" if limit is None else f"≤ {limit:.2f}"
    seconds = goals.seconds_goal(row)
    if seconds is not None:
        cells["goal"] = f"≤ {seconds:g} s"
        cells["met"] = MARKS[None if time_ms is None else time_ms <= 1e3 * seconds]
    cells["bandwidth"] = "" if row["bandwidth_share"] is None else f"{row['bandwidth_share']:.0%}"
    return cells | {key: f"{row[key]:.1e}" for key in ("error", "error_grad") if row[key] is not None}


def _name_each_case_once(lines: Sequence[dict[str, Value]]) -> list[dict[str, Value]]:
    return [{**cells, "case": ""} if i and cells["case"] == lines[i - 1]["case"] else cells for i, cells in enumerate(lines)]


def _case(row: Row) -> list[str]:
    parts = [row["series"] and f"{row['series']}:", row["case"], row["dtype"], row["mode"] if row["mode"] != "cpu" else ""]
    parts.append(row["layout"] if row["layout"] != "channels_last" else "")
    parts.append(row["data"] if row["data"] != "modes" else "")
    parts.append("(toy)" if _is_toy(row) else "")
    return [part for part in parts if part]


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f} ms" if value < 1 else f"{value:.3f} ms"

"""Tables as data, and as Markdown, HTML, JSON or for a terminal: those of reports and of benchmarks."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NAME_WIDTH = 24  # characters of a name that a terminal shows in one piece
MARKS = {"✓": "green", "✗": "red"}  # of goals that are met or missed, and their colours in a terminal


@dataclass(frozen=True)
class Measured:
    """A number over several runs.

    Args:
        mean: None where no run has the number.
        deviation: the sample's standard deviation; None for fewer than two runs.
        n: the runs that have the number.
        of: all runs.
        paper: the paper's number, or what it says instead.
    """

    mean: float | None
    deviation: float | None = None
    n: int = 1
    of: int = 1
    paper: float | str | None = None

    @classmethod
    def over(cls, values: Iterable[float | None], paper: float | str | None = None) -> Measured:
        everything = list(values)
        there = [value for value in everything if value is not None]
        mean = float(np.mean(there)) if there else None
        deviation = float(np.std(there, ddof=1)) if len(there) > 1 else None
        return cls(mean, deviation, len(there), len(everything), paper)


@dataclass(frozen=True)
class Difference:
    """A difference of two means, with the 95% interval that it is in.

    Args:
        mean: None where not every run has the number.
        low, high: the interval; None where there are too few runs for one.
        p: how often chance alone would make a difference as large.
        sure: whether the difference stands when all that are beside it in a table are counted.
        n, base_n: the runs that have the number, and those that they are held against.
        of, base_of: all runs of either.
        paper: the paper's difference, or what it says instead.
    """

    mean: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    sure: bool = False
    n: int = 1
    base_n: int = 1
    of: int = 1
    base_of: int = 1
    paper: float | str | None = None


Value = str | int | float | Measured | Difference | None


@dataclass(frozen=True)
class Column:
    """A column of a table, and how its cells are written.

    Args:
        digits: after the decimal point.
        unit: follows each number, such as "%".
        missing: what stands where no run has the number.
        counted: whether each mean says of how many runs it is.
        floor: what is less is written as less than this, for it says no more.
    """

    key: str
    heading: str
    digits: int = 2
    unit: str = ""
    missing: str = "—"
    numeric: bool = True
    counted: bool = False
    floor: float | None = None

    def text(self, value: Value) -> str:
        """A cell without the paper's number."""
        if value is None:
            return "—"
        if isinstance(value, str):
            return value
        if isinstance(value, Difference):
            return self._difference(value)
        if not isinstance(value, Measured):
            return self._number(value)
        if value.mean is None:
            return self.missing
        spread = "" if value.deviation is None else f" ± {self._number(value.deviation, unit='')}"
        part = f", n {value.n}" * self.counted if value.n == value.of else f" in {value.n} of {value.of}"
        return f"{self._number(value.mean, unit='')}{spread}{self.unit}{part}"

    def _difference(self, value: Difference) -> str:
        """ "+1.30 [0.58, 2.03], n 3 and 5"."""
        if value.mean is None:
            short = (
                f"{value.n} of {value.of} runs" if value.n < value.of else f"{value.base_n} of {value.base_of} of batch norm"
            )
            return short if value.n else self.missing
        text = self._number(value.mean)
        text = text if text.startswith(("−", "<")) else f"+{text}"
        if value.low is not None and value.high is not None:
            text += f" [{self._number(value.low, unit='')}, {self._number(value.high, unit='')}]"
        return f"{text}, n {value.n}" + (f" and {value.base_n}" if value.base_n != value.n else "")

    def paper(self, value: Value) -> str:
        """The paper's number in a cell, if it has one."""
        if not isinstance(value, (Measured, Difference)) or value.paper is None:
            return ""
        return f"paper {value.paper if isinstance(value.paper, str) else self._number(value.paper)}"

    def beside(self, value: Value) -> str:
        """The paper's number, and how much ours differs from it, unless ours is of a part of the runs alone."""
        text = self.paper(value)
        if not isinstance(value, Measured) or value.mean is None or not isinstance(value.paper, (int, float)):
            return text  # a difference has its interval to be held against
        if value.n < value.of:
            return text
        difference = self._number(round(value.mean, self.digits) - round(value.paper, self.digits), unit="")
        return f"{text}, {difference if difference.startswith('−') else f'+{difference}'}"

    def _number(self, value: float, unit: str | None = None) -> str:
        if self.floor is not None and value < self.floor:
            return f"<{self._number(self.floor, unit)}"
        text = f"{value:,.{self.digits}f}"
        if not float(text.replace(",", "")):
            text = text.removeprefix("-")  # −0.00
        return text.replace("-", "−") + (self.unit if unit is None else unit)


def text_column(key: str, heading: str) -> Column:
    return Column(key, heading, numeric=False)


@dataclass(frozen=True)
class Table:
    """A table as data: rows of cells by the keys of their columns."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Value]]
    notes: Sequence[str] = field(default=())

    def used(self) -> Table:
        """Without the columns that have no cell."""
        kept = [column for column in self.columns if any(row.get(column.key) not in (None, "") for row in self.rows)]
        return Table(self.title, kept, self.rows, self.notes)

    def without(self, *keys: str) -> Table:
        kept = [column for column in self.columns if column.key not in keys]
        return Table(self.title, kept, self.rows, self.notes)

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cells)} |"

        lines = [line(escape_markdown(column.heading) for column in self.columns)]
        lines.append(line("---:" if column.numeric else "---" for column in self.columns))
        for row in self.rows:
            cells = []
            for column in self.columns:
                paper = column.beside(row.get(column.key))
                cells.append(escape_markdown(column.text(row.get(column.key)) + (f" ({paper})" if paper else "")))
            lines.append(line(cells))
        notes = [f"\n{escape_markdown(note)}" for note in self.notes]
        return "\n".join([*lines, *notes])

    def html(self) -> str:
        """A table in a box that scrolls, for a page that styles ``.box``, ``.num`` and ``.paper``."""

        def attributes(column: Column) -> str:
            return ' class="num"' if column.numeric else ""

        head = "".join(f'<th scope="col"{attributes(c)}>{html.escape(c.heading)}</th>' for c in self.columns)
        body = []
        for row in self.rows:
            cells = []
            for i, column in enumerate(self.columns):
                text, paper = html.escape(column.text(row.get(column.key))), html.escape(column.beside(row.get(column.key)))
                paper = f'<span class="paper">{paper}</span>' if paper else ""
                tag = 'th scope="row"' if i == 0 else "td"
                cells.append(f"<{tag}{attributes(column)}>{text}{paper}</{tag.split()[0]}>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        label = html.escape(self.title, quote=True)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in self.notes)
        return f'<div class="box" role="region" tabindex="0" aria-label="{label}">{table}</div>{notes}'

    def rich(self, width: int = 80) -> Any:
        """A ``rich.table.Table`` for a terminal of that width: numbers are written closely, and stay in one piece if they
        can. Where there is less room, their spread stands below them; nothing is ever cut off."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        made = RichTable(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, title_justify="left",
            caption_justify="left",
        )  # fmt: skip
        made.title, made.caption = Text(self.title + "\n", "bold"), Text("\n".join(["", *self.notes]) if self.notes else "")
        for spread in ("±", "\n±"):
            cells = [[_narrow(column, row.get(column.key), spread) for column in self.columns] for row in self.rows]
            widths = [_widths(column, [row[i] for row in cells]) for i, column in enumerate(self.columns)]
            # The name of a row stays in one piece, too, unless it would take the room of the numbers.
            whole = [column.numeric or (i == 0 and widths[0][0] <= NAME_WIDTH) for i, column in enumerate(self.columns)]
            fits = sum(widths[i][not whole[i]] for i in range(len(widths))) + 2 * (len(widths) - 1) <= width
            if fits:
                break
        for i, column in enumerate(self.columns):
            heading = column.heading
            if column.numeric:  # no wider than the numbers, unless a word is
                parts = heading.replace(", ", ",\n").splitlines()
                heading = "\n".join(line for part in parts for line in textwrap.wrap(part, widths[i][0]))
            side: Any = "right" if column.numeric else "left"
            made.add_column(Text(heading), justify=side, overflow="fold", no_wrap=whole[i] and fits)
        for row in cells:
            made.add_row(*(Text.assemble((text, MARKS.get(text, "")), (paper, "dim")) for text, paper in row))
        return made

    def json(self) -> dict[str, Any]:
        def value(cell: Value) -> Any:
            return dict(vars(cell)) if isinstance(cell, (Measured, Difference)) else cell

        return {
            "title": self.title,
            "columns": {column.key: column.heading for column in self.columns},
            "rows": [{column.key: value(row.get(column.key)) for column in self.columns} for row in self.rows],
            "notes": list(self.notes),
        }


def _narrow(column: Column, value: Value, spread: str) -> tuple[str, str]:
    """A cell for a terminal, and the paper's number on a line below it. ``spread``: what stands before it."""
    text, paper = column.text(value), column.paper(value)
    if column.numeric:
        text = text.replace(" ± ", spread).replace(" in ", "\nin ")
        text = text.replace(" [", "\n[").replace(", n ", "\nn ")
        if isinstance(value, Difference) and spread.startswith("\n"):
            text = text.replace(", ", ",\n")
        text = text.replace(" and ", "\u00a0and\u00a0")  # which is not parted
    return text, f"\n{paper}" if paper else ""


def _widths(column: Column, cells: Sequence[tuple[str, str]]) -> tuple[int, int]:
    """How wide a column is with its lines in one piece, and how wide it must be for its longest word."""
    lines = [line for cell in cells for part in cell for line in part.splitlines()]
    words = [*column.heading.split(), *(word for line in lines for word in line.split())]
    heading = max(map(len, column.heading.split()), default=0)
    return max([heading, *map(len, lines)]), max(map(len, words), default=0)


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))

"""Tables as data, and as Markdown, HTML, JSON or for a terminal: those of reports and of benchmarks."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ANY = 10_000
# What is tried for a terminal until there is room: what stands before the spread of a number, the characters of a name in
# one line, and those that other texts have in one line at least.
LAYOUTS = (("±", ANY, 10), ("±", 24, 10), ("\n±", 24, 20), ("\n±", 24, 0), ("\n±", 16, 0))
FEW_ROWS, MANY_COLUMNS = 6, 4  # of a table that a narrow page shows as cards
SHORT = 16  # characters that a page keeps on one line
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
        """A table in a box that scrolls, for a page that styles these classes: ``box``; ``few`` of a table whose rows a
        narrow page can show as cards, each cell with its heading (``data-label``); ``more``, a hint while there are columns
        to the right; ``num``, ``short`` and ``paper``."""

        def kind(*names: str) -> str:
            found = " ".join(name for name in names if name)
            return f' class="{found}"' if found else ""

        head = "".join(f'<th scope="col"{kind("num" * c.numeric)}>{html.escape(c.heading)}</th>' for c in self.columns)
        body = []
        for row in self.rows:
            cells = []
            for i, column in enumerate(self.columns):
                plain = column.text(row.get(column.key))
                text, paper = html.escape(plain), html.escape(column.beside(row.get(column.key)))
                paper = f'<span class="paper">{paper}</span>' if paper else ""
                classes = kind("num" * column.numeric, "short" * (len(plain) <= SHORT))
                label = f' data-label="{html.escape(column.heading, quote=True)}"'
                tag = f'th scope="row"{classes}' if i == 0 else f"td{classes}{label}"
                cells.append(f"<{tag}>{text}{paper}</{tag.split()[0]}>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        label = html.escape(self.title, quote=True)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in self.notes)
        few = "few" * (len(self.rows) <= FEW_ROWS and len(self.columns) >= MANY_COLUMNS)
        hint = '<p class="more" aria-hidden="true"><span>more columns →</span></p>'
        return f'<div{kind("box", few)} role="region" tabindex="0" aria-label="{label}">{hint}{table}</div>{notes}'

    def rich(self, width: int = 80) -> Any:
        """A table for a terminal of that width, between its title and its notes. Numbers are written closely, and stay whole
        if they can. Where there is less room, long names take several lines, and a number's spread stands below it;
        nothing is ever cut off."""
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        for spread, name_width, text_width in LAYOUTS:
            cells = [[_narrow(column, row.get(column.key), spread) for column in self.columns] for row in self.rows]
            if self.columns and not self.columns[0].numeric:
                cells = [[(wrapped(row[0][0], name_width), row[0][1]), *row[1:]] for row in cells]
            widths = [_widths(column, [row[i] for row in cells]) for i, column in enumerate(self.columns)]
            # The name of a row stays in one piece, too, unless it would take the room of the numbers.
            whole = [column.numeric or (i == 0 and widths[0][0] <= width // 2) for i, column in enumerate(self.columns)]
            room = [
                full if piece else max(word, min(full, text_width))
                for (full, word), piece in zip(widths, whole, strict=True)
            ]
            if fits := sum(room) + 2 * (len(widths) - 1) <= width:
                break
        made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for i, column in enumerate(self.columns):
            heading = column.heading
            if column.numeric:  # no wider than the numbers, unless a word is
                parts = heading.replace(", ", ",\n").splitlines()
                heading = "\n".join(line for part in parts for line in textwrap.wrap(part, widths[i][0]))
            side: Any = "right" if column.numeric else "left"
            made.add_column(Text(heading), justify=side, overflow="fold", no_wrap=whole[i] and fits)
        for row in cells:
            made.add_row(*(Text.assemble((text, MARKS.get(text, "")), (paper, "dim")) for text, paper in row))
        title = [Text(self.title + "\n", "bold")] if self.title else []
        return Group(*title, made, *(Text(note, "italic") for note in ("", *self.notes) if self.notes))

    def json(self) -> dict[str, Any]:
        def value(cell: Value) -> Any:
            return dict(vars(cell)) if isinstance(cell, (Measured, Difference)) else cell

        return {
            "title": self.title,
            "columns": {column.key: column.heading for column in self.columns},
            "rows": [{column.key: value(row.get(column.key)) for column in self.columns} for row in self.rows],
            "notes": list(self.notes),
        }


def wrapped(name: str, width: int) -> str:
    """A name in lines of at most this width, broken where a part of it ends: behind a space, or one of - / , _ =."""
    lines = [""]
    for part in re.findall(r"[^\s\-/,_=]*[\s\-/,_=]?", name):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


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

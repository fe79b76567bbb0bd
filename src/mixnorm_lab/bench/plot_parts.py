"""What the pictures of benchmarks are made of: a figure with its head, bars with numbers and goals, axes, legends."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mixnorm_lab.storage.measurements import Row, is_base

INK, FAINT, GREY, GOAL = "#222222", "#5d6570", "#8a8f98", "#cc3311"
BLUE, ORANGE, PALE = "#4477aa", "#ee7733", "#bbbbbb"
SHADES = ("#d3e3f3", "#a6cce3", "#6aaed6", "#3787c0", "#125ca4", "#08306b")
WIDTH, HEAD, FOOT = 10.5, 0.75, 0.4  # inches: narrow enough to be read on a page of 800 pixels
VALUE_ROOM = 40  # points below an axis, for the numbers of its bars
STYLE: Any = {
    "font.size": 11,
    "legend.fontsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
}


def new_figure(title: str, rows: list[Row], grid: tuple[int, int], height: float) -> tuple[Figure, list[Any]]:
    """A figure with axes, under two lines that say what was measured, where, and with what.

    Args:
        grid: of the axes, rows and columns.
        height: of a row in inches.
    """
    whole = HEAD + FOOT + height * grid[0]
    # What the layout may use: the head above and the legend below are placed by hand.
    layout = ConstrainedLayoutEngine(rect=(0.004, FOOT / whole, 0.992, 1 - (HEAD + FOOT) / whole), hspace=0.06)
    figure = Figure(figsize=(WIDTH, whole), layout=layout)
    backend = next(backend_of(row) for row in rows if row["num_components"] and not is_base(row))
    row = rows[-1]
    versions = f"torch {row['torch']}" + (f", triton {row['triton']}" if backend == "triton" else "")
    commit = f"commit {row['commit']}" if row["commit"] else ""
    where = [row["device"], f"backend {backend}", versions, commit, row["date"][:10]]
    figure.text(0.01, 1 - 0.1 / whole, title, va="top", fontsize=13, color=INK, weight="bold")
    place = " · ".join(part for part in where if part)
    figure.text(0.01, 1 - 0.4 / whole, place, va="top", fontsize=10, color=FAINT)
    axes = figure.subplots(*grid, squeeze=False)
    return figure, list(axes.flat)


def bar(axis: Any, x: float, number: str, width: float, color: str, goal: float | None, *, upright: bool = True) -> None:
    """A bar with its number below the axis, where no line crosses it, and its goal as a mark across it."""
    axis.bar(x, float(number), 0.92 * width, color=color)
    axis.annotate(
        number, (x, 0), (0, -4), xycoords=axis.get_xaxis_transform(), textcoords="offset points",
        rotation=90 if upright else 0, ha="center", va="top", fontsize=9.5, color=INK, annotation_clip=False,
    )  # fmt: skip
    if goal is not None:
        axis.hlines(goal, x - 0.5 * width, x + 0.5 * width, color=GOAL, lw=2.5, zorder=3)


def legend(figure: Figure, handles: list[Any]) -> None:
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)


def logarithmic(axis: Any, which: str) -> None:
    """A logarithmic axis that says so, with plain numbers."""
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}label")(f"{getattr(axis, f'get_{which}label')()} (log scale)")
    found = getattr(axis, f"{which}axis")
    low, high = getattr(axis, f"get_{which}lim")()
    found.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
    found.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    found.set_minor_formatter(NullFormatter())


def below(axis: Any, title: str | None = None) -> None:
    """The legend of an axis below it, where it hides nothing."""
    axis.legend(frameon=False, title=title, loc="upper center", bbox_to_anchor=(0.5, -0.24))


def shade(index: int, count: int) -> str:
    """From light to dark as K grows."""
    if count == 1:
        return BLUE
    shades = SHADES if count > 3 else SHADES[1:-1]
    return shades[round(index * (len(shades) - 1) / (count - 1))]


def backend_of(row: Row) -> str:
    """The first word of a variant, behind which models have the form."""
    return str(row["variant"]).partition(" ")[0]

"""How all pictures of a report look, what one is, and how it becomes files. Batch norm is blue, mixture norm orange, and
norms beside them have other colours."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = "#4477aa"
ORANGES = ("#ee7733", "#8a3a0e", "#f5b48a", "#c2570c", "#5c2405")
OTHERS = ("#228833", "#aa3377", "#66ccee", "#ccbb44", "#555555", "#bbbbbb", "#004488")  # norms beside the two
DASHES: Any = (
    "-",
    (0, (4, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
)  # one for each batch norm, and the mixture norms beside it
INK = "#333333"
LAYERS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "mixnorm",
}
SIZE = (4.8, 3.5)  # inches: text stays readable at the width of a phone
LEGEND_LETTERS, PIECE = 66, 9  # in a line of a legend, and those that a piece of line and the space around it take
FORMATS = ("png", "svg")


@dataclass(frozen=True)
class Picture:
    """Two files in a folder, ``name.png`` and ``name.svg``, and what to say about them.

    Args:
        wide: as wide as the page.
        narrow: there is another one for a page that is narrow, ``narrow-name.svg``.
    """

    name: str
    title: str
    caption: str
    wide: bool = False
    narrow: bool = False

    @property
    def narrow_file(self) -> str:
        return f"narrow-{self.name}.svg"


def save(made: Sequence[tuple[Picture, Figure]], folder: Path, formats: Sequence[str] = FORMATS) -> None:
    """Writes the files of each picture, the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture, figure in made:
        for kind in formats:
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(folder / f"{picture.name}.{kind}", dpi=200, facecolor="white", metadata=metadata)


def save_narrow(made: Sequence[tuple[Picture, Figure]], folder: Path) -> None:
    """Writes the pictures for a narrow page, which are there as SVG alone."""
    for picture, figure in made:
        save([(replace(picture, name=picture.narrow_file.removesuffix(".svg")), figure)], folder, ("svg",))


def new_figure(title: str, x: str, y: str) -> tuple[Figure, Any]:
    """An empty figure with one axis, and what stands on it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    axis = figure.add_subplot()
    axis.set_title(title.replace("$", r"\$"), color=INK, wrap=True)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if x == "epoch":
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axis


def legend_below(figure: Figure) -> None:
    """A legend below the axis, where it hides nothing; the figure grows by its height."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    labels = [textwrap.fill(label, LEGEND_LETTERS - PIECE) for label in labels]
    if not labels:
        return
    longest = PIECE + max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, min(len(labels), 4, LEGEND_LETTERS // longest))
    lines = [max(label.count("\n") + 1 for label in labels)] * -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.18 * sum(lines))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def slug(text: str) -> str:
    """Text as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
